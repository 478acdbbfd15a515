"""Runs the demo's temporary Swift cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_protocol.errors import ClientError


@contextmanager
def demo_connection() -> Iterator[Connection]:
    """Starts Swift in a temporary directory and connects to it.

    Raises:
        ClientError: ``bad_configuration`` if it cannot be started.
    """
    try:
        from hapi_cluster import Cluster, ClusterError
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            "the demo runs Swift on this machine; install it by "
            "pip install '.[demo]' in a checkout of the project",
        ) from error
    try:
        with Cluster.temporary() as cluster:
            login = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
            with Connection(login) as connection:
                yield connection
    except ClusterError as error:
        raise ClientError("bad_configuration", str(error)) from error
