"""Fixtures of the filter's tests: auth, filter, stub worker, fake Swift."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from filter_under_test import FilterUnderTest, filter_and_worker


@pytest.fixture
def filter_options() -> dict[str, str]:
    """Options of ``[filter:hapi]``; modules override this fixture."""
    return {}


@pytest.fixture
def world(
    tmp_path: Path, filter_options: dict[str, str]
) -> Iterator[FilterUnderTest]:
    with filter_and_worker(tmp_path, **filter_options) as world:
        yield world
        world.swift.assert_nothing_is_open()


@pytest.fixture
def open_world(
    tmp_path: Path, filter_options: dict[str, str]
) -> Iterator[FilterUnderTest]:
    """A filter with which callers without a project may compute."""
    options = {**filter_options, "allow_unauthenticated_compute": "yes"}
    with filter_and_worker(tmp_path, **options) as world:
        yield world
        world.swift.assert_nothing_is_open()
