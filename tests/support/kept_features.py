"""What an account keeps of features, as its owner sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import requests

from beside import ASKED
from caller import Caller
from hapi_cluster import Cluster

SECONDS = 20.0
KEEP = {**ASKED, "X-Hapi-Cache": "readwrite"}
READ = {**ASKED, "X-Hapi-Cache": "read"}


def until(is_so: Callable[[], object]) -> None:
    """What is kept is stored behind the answer's end."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.05)


def state(answer: requests.Response) -> str:
    """``store``, ``hit`` and so on, of an answer with features."""
    assert answer.status_code == 200, answer.text
    return str(answer.headers["X-Hapi-Cache"])


def sources(caller: Caller, account: str) -> list[str]:
    """Of all entries, in their order."""
    answer = caller.get(f"/{account}?hapi-cache")
    assert answer.status_code == 200, answer.text
    return [each["source"] for each in answer.json()["listed"]]


def keep(caller: Caller, account: str, path: str) -> None:
    """Have features of an object kept, and wait until they are.

    Args:
        path: as for :meth:`Caller.get`.
    """
    source = path.removeprefix(f"/{account}/")
    assert state(caller.get(path, KEEP)) == "store"
    until(lambda: source in sources(caller, account))


def files_of_entries(cluster: Cluster) -> set[Path]:
    """On the disks of a cluster without encryption."""
    return {
        path
        for path in Path(cluster.directory).rglob("*.data")
        if b"hapi-features 1\n" in path.read_bytes()[:64]
    }
