"""More Swift clusters that share the worker of the session's cluster.

A worker takes seconds to start and a Swift does not.  Models have the same
bytes in all clusters, so they are the same models to the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from caller import Caller
from hapi_cluster import Cluster
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.package.writer import package_pieces

MODEL = "/AUTH_test/public-models/net.hapi"
CUT = 1
ASKED: Mapping[str, str] = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": str(CUT)}
OPEN: Mapping[str, str] = {
    "allow_unauthenticated_compute": "true",
    "cache": "true",
}


def second_swift(
    cluster: Cluster,
    *,
    filter_options: Mapping[str, str] = OPEN,
    **settings: Any,
) -> AbstractContextManager[Cluster]:
    """A Swift; by default callers without a project may compute."""
    socket = str(cluster.worker_socket)
    options = {"worker_socket": socket, **filter_options}
    return Cluster.temporary(worker=False, filter_options=options, **settings)


def put_model(owner: Caller, frozen: FrozenGraph) -> None:
    """Uploads the package MODEL, readable by all because of TempURL."""
    container = MODEL.rpartition("/")[0]
    owner.put(container, headers={"X-Container-Read": ".r:*"})
    owner.put(MODEL, b"".join(package_pieces(frozen)))
