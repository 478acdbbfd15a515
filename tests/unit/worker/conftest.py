"""Fixtures of the worker's tests."""

from __future__ import annotations

import pytest

from worker_under_test import Clock, small_package


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def package() -> bytes:
    return small_package()
