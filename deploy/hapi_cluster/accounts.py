"""The accounts of a fresh cluster.

An account that nobody wrote to yet answers HEAD with 200 instead of 204,
and tests that compare answers see the difference: each is made at start.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from hapi_cluster.configs import USERS
from hapi_cluster.probes import ask

REQUEST_SECONDS = 20.0


def create_accounts(proxy: tuple[str, int]) -> None:
    """Make the account of every user that may.

    Raises OSError, HTTPException or ValueError (an unexpected status).
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
