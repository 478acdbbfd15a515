"""Fixtures of the worker's tests."""

import pytest

from worker_under_test import Clock, small_package


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def package():
    return small_package()
