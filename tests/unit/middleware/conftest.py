"""Fixtures of the filter's tests: auth, filter, stub worker, fake Swift."""

import pytest

from filter_under_test import filter_and_worker


@pytest.fixture
def filter_options():
    """Options of ``[filter:hapi]``; modules override this fixture."""
    return {}


@pytest.fixture
def world(tmp_path, filter_options):
    with filter_and_worker(tmp_path, **filter_options) as world:
        yield world
        world.swift.assert_nothing_is_open()


@pytest.fixture
def open_world(world):
    """A filter with which callers without a project may compute."""
    world.configure(allow_unauthenticated_compute=True)
    return world
