"""Cached features of an account, as its owner sees them."""

from __future__ import annotations

from pathlib import Path

import requests

from caller import Caller
from hapi_cluster import Cluster
from local_rows import received_rows
from second_swift import ASKED
from waiting import until

KEEP = {**ASKED, "X-Hapi-Cache": "readwrite"}
READ = {**ASKED, "X-Hapi-Cache": "read"}


def state(answer: requests.Response) -> str:
    """The ``X-Hapi-Cache`` of an answer with features."""
    assert answer.status_code == 200, answer.text
    return str(answer.headers["X-Hapi-Cache"])


def sources(caller: Caller, account: str) -> list[str]:
    """Names of the sources of all entries, in order."""
    answer = caller.get(f"/{account}?hapi-cache")
    assert answer.status_code == 200, answer.text
    return [each["source"] for each in answer.json()["listed"]]


def keep(caller: Caller, account: str, path: str) -> None:
    """Caches features of an object, and waits until they are stored.

    Args:
        caller: owner of the account.
        account: the object's account.
        path: ``/account/container/object``, quoted.
    """
    source = path.removeprefix(f"/{account}/")
    assert state(caller.get(path, KEEP)) == "store"
    until(lambda: source in sources(caller, account))


def check_features(owner: Caller, container: str, images: list[str]) -> None:
    """Requests features of 0.tar, two samples, and of many images."""
    answer = owner.get(f"{container}/0.tar", ASKED)
    assert len(received_rows(answer.content).facts) == 2
    names = "\n".join(images).encode()
    answer = owner.request("POST", f"{container}?hapi", dict(ASKED), names)
    keys = [key for _, key, _ in received_rows(answer.content).facts]
    assert keys == images


def files_of_entries(cluster: Cluster) -> set[Path]:
    """Files of all entries on the disks of a cluster without encryption."""
    return {
        path
        for path in Path(cluster.directory).rglob("*.data")
        if b"hapi-features 1\n" in path.read_bytes()[:64]
    }
