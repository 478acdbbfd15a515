"""A user of a cluster who sends plain HTTP requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import requests

from hapi_cluster import Cluster
from hapi_protocol.unix_http import UnixConnection
from waiting import SECONDS

USERS = {
    "test:tester": "testing",
    "test:tester3": "testing3",
    "test2:tester2": "testing2",
    "admin:admin": "admin",
}


class Caller:
    """Sends requests with one user's token, or with none.

    Args:
        cluster: a running cluster.
        user: a key of :data:`USERS`; None for an anonymous caller.
        token: token to use instead of a user's.
        proxy_url: another proxy than the cluster's own.
    """

    def __init__(
        self,
        cluster: Cluster,
        user: str | None = "test:tester",
        *,
        token: str | None = None,
        proxy_url: str | None = None,
    ) -> None:
        self.proxy_url = proxy_url or cluster.proxy_url
        self._session = requests.Session()
        if token is not None:
            self._session.headers["X-Auth-Token"] = token
        elif user is not None:
            answer = requests.get(
                cluster.auth_url,
                headers={"X-Auth-User": user, "X-Auth-Key": USERS[user]},
                timeout=SECONDS,
            )
            answer.raise_for_status()
            token = answer.headers["X-Auth-Token"]
            self._session.headers["X-Auth-Token"] = token

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        data: bytes | Iterator[bytes] | None = None,
        *,
        stream: bool = False,
    ) -> requests.Response:
        """Sends a request.

        Args:
            method: HTTP method.
            path: ``/account/container/object``, quoted.
            headers: additional headers.
            data: body; chunked if it is an iterator.
            stream: leave the answer's body unread.
        """
        return self._session.request(
            method,
            f"{self.proxy_url}/v1{path}",
            headers=dict(headers or {}),
            data=data,
            timeout=SECONDS,
            stream=stream,
        )

    def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> requests.Response:
        return self.request("GET", path, headers)

    def stream(
        self, path: str, headers: Mapping[str, str]
    ) -> requests.Response:
        """Sends a GET whose body the caller must read and close."""
        return self.request("GET", path, headers, stream=True)

    def put(
        self,
        path: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.request("PUT", path, headers, data).raise_for_status()

    def close(self) -> None:
        self._session.close()


def metrics(cluster: Cluster) -> dict[str, float]:
    """Reads the worker's ``/metrics``: values by name with labels."""
    address = f"{cluster.worker_socket}.admin"
    connection = UnixConnection(address, SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    lines = [line for line in text.splitlines() if line[:1] not in ("#", "")]
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
    }
