"""HTTP probes of a cluster's servers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from hapi_cluster.configs import USERS
from hapi_protocol.unix_http import UnixConnection

REQUEST_SECONDS = 20.0
"""A deadline only: an idle machine answers at once."""


def create_accounts(proxy: tuple[str, int]) -> None:
    """Creates the account of each user with admin rights.

    An account without any write answers HEAD with 200 instead of 204, which
    tests that compare answers would notice.

    Raises:
        OSError, HTTPException: the proxy does not answer.
        ValueError: it answers with an unexpected status.
    """
    for user, (key, groups) in USERS.items():
        if ".admin" not in groups.split():
            continue
        headers = {"X-Auth-User": user, "X-Auth-Key": key}
        status, answer = ask(
            proxy, "GET", "/auth/v1.0", headers, REQUEST_SECONDS
        )
        if status != 200:
            raise ValueError(f"authentication of {user} got {status}")
        path = urlsplit(answer["x-storage-url"]).path
        token = {"X-Auth-Token": answer["x-auth-token"], "Content-Length": "0"}
        status, _ = ask(proxy, "POST", path, token, REQUEST_SECONDS)
        if status not in (201, 204):
            raise ValueError(f"POST {path} got {status}")


PROBE_SECONDS = 2.0
"""Longest answer to a probe, which is repeated until the start's deadline."""


def ask(
    address: tuple[str, int] | Path,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = PROBE_SECONDS,
) -> tuple[int, Mapping[str, str]]:
    """Sends one request to a TCP address or a unix socket.

    Returns:
        Status and headers of the answer.

    Raises:
        OSError, http.client.HTTPException: there is no answer.
    """
    connection: http.client.HTTPConnection
    if isinstance(address, Path):
        connection = UnixConnection(address, timeout_seconds)
    else:
        connection = http.client.HTTPConnection(
            *address, timeout=timeout_seconds
        )
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        answer.read()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


def answers(address: tuple[str, int] | Path, path: str) -> bool:
    """Returns True if a GET is answered with 200."""
    try:
        return ask(address, "GET", path)[0] == 200
    except (OSError, http.client.HTTPException):
        return False
