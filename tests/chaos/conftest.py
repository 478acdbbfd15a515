"""A cluster for tests that break its worker."""

import pytest

from hapi_cluster import Cluster
from jobs import connected


@pytest.fixture(scope="module")
def fragile():
    """Swift, filter and worker that no other module uses."""
    with Cluster.temporary(worker_options={"device": "cpu"}) as cluster:
        yield cluster


@pytest.fixture
def connection(fragile):
    with connected(fragile) as opened:
        yield opened
