"""A cluster whose worker tests may end and start again."""

import pytest

from hapi_cluster import Cluster
from jobs import connected
from worker_process import WorkerProcess


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    process = WorkerProcess(
        tmp_path_factory.mktemp("worker"), {"device": "cpu"}
    )
    process.wait_until_ready()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def fragile(worker):
    """Swift and filter that no other module uses, with that worker."""
    options = {"worker_socket": worker.socket}
    with Cluster.temporary(worker=False, filter_options=options) as cluster:
        yield cluster


@pytest.fixture
def connection(fragile):
    with connected(fragile) as opened:
        yield opened
