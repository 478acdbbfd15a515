"""A whole cluster, once per test session, for all functional tests.

With ``HAPI_TEST_PLACES=object``, its object server computes.
"""

import os
from functools import partial

import pytest

from caller import Caller
from commands import run_hapi
from hapi_cluster import Cluster
from hapi_splitter.freezing import split_store
from jobs import connected, store_package
from networks import small_parts
from second_swift import second_swift

WORKER_OPTIONS = {"device": "cpu"}
FILTER_OPTIONS = {"cache": "true"}
NUM_OBJECT_WORKERS = int(os.environ.get("HAPI_TEST_PLACES") == "object")


@pytest.fixture(autouse=True, scope="module")
def kept_splits():
    """Jobs keep their splits in memory, as those of a user do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_store, "MAX_MEMORY_ENTRIES", 4)
        yield
    split_store.memory_store.cache_clear()


@pytest.fixture
def new_split():
    """The first job of the test makes its split."""
    split_store.memory_store.cache_clear()


@pytest.fixture(scope="session")
def cluster():
    """Swift with the filter and the real worker; it ends with pytest."""
    pytest.importorskip("swift", reason="needs swift-hapi[cluster]")
    with Cluster.temporary(
        worker_options=WORKER_OPTIONS,
        filter_options=FILTER_OPTIONS,
        object_workers=NUM_OBJECT_WORKERS,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def open_cluster(cluster):
    """Another Swift of that worker, where all callers may compute."""
    options = {
        "filter:s3api": {"min_segment_size": "1"},
        "filter:slo": {"allow_async_delete": "false"},
        "app:proxy-server": {"cors_expose_headers": "X-Of-The-Operator"},
    }
    with second_swift(
        cluster, swift_options={"proxy-server.conf": options}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def connection(cluster):
    """Our client's, of the account that owns the data."""
    with connected(cluster) as made:
        yield made


@pytest.fixture
def hapi(cluster, monkeypatch, tmp_path):
    """Runs a command in an empty folder; returns its exit status."""
    for variable, value in cluster.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    return partial(run_hapi, monkeypatch)


@pytest.fixture(scope="module")
def owner(cluster):
    """Plain HTTP requests as that account's owner."""
    caller = Caller(cluster)
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def small_model(connection, tmp_path_factory):
    """Path of a package of the small network, and its graph."""
    frozen = small_parts().frozen
    folder = tmp_path_factory.mktemp("package")
    return store_package(connection, folder, frozen).quoted(), frozen
