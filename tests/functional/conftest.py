"""A whole cluster, once per test session, for all functional tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hapi_cluster import Cluster

WORKER_OPTIONS = {"device": "cpu"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Swift with the filter and the real worker; it ends with pytest."""
    pytest.importorskip("swift", reason="needs swift-hapi[cluster]")
    with Cluster.temporary(worker_options=WORKER_OPTIONS) as running:
        yield running
