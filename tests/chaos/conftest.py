"""A cluster for tests that break its worker."""

import pytest

from hapi_client import Connection, Credentials
from hapi_cluster import Cluster


@pytest.fixture(scope="module")
def fragile():
    """Swift, filter and worker that no other module uses."""
    with Cluster.temporary(worker_options={"device": "cpu"}) as cluster:
        yield cluster


@pytest.fixture
def connection(fragile):
    credentials = Credentials.v1(fragile.auth_url, fragile.user, fragile.key)
    with Connection(credentials) as opened:
        yield opened
