"""Fixtures of the worker's tests."""

import pytest

from clock import Clock
from worker_under_test import running_worker, small_package


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def package():
    return small_package()


@pytest.fixture(scope="module")
def worker(request, tmp_path_factory):
    """A worker with the OPTIONS of the module."""
    options = getattr(request.module, "OPTIONS", {})
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(folder, **options) as worker:
        yield worker


@pytest.fixture
def own_worker(request, tmp_path):
    """The same, with counters and models of one test only."""
    options = getattr(request.module, "OPTIONS", {})
    with running_worker(tmp_path, **options) as worker:
        yield worker
