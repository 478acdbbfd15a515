"""Swift's ``read_only`` filter together with ours, and read-only accounts."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from hashlib import md5
from pathlib import Path

from caller import SECONDS, Caller
from hapi_cluster import Cluster
from hapi_cluster.configs import pipeline
from hapi_cluster.rings import PART_POWER
from hapi_cluster.settings import ClusterSettings


def with_read_only() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """``swift_options`` with ``read_only`` where the sample files put it."""
    names = pipeline(ClusterSettings())
    names.insert(names.index("hapi") + 1, "read_only")
    proxy = {
        "pipeline:main": {"pipeline": " ".join(names)},
        "filter:read_only": {"use": "egg:swift#read_only"},
    }
    return {"proxy-server.conf": proxy}


def make_read_only(cluster: Cluster, account: str, owner: Caller) -> None:
    """Makes an account read-only at its server, as an operator does.

    Args:
        cluster: cluster with the layout ``single``.
        account: name of the account.
        owner: a caller that may change the account.
    """
    directory = Path(cluster.directory)
    facts = json.loads((directory / "cluster.json").read_text())
    secrets = json.loads((directory / "etc" / "secrets.json").read_text())
    path = f"/{account}{secrets['hash_suffix']}"
    digest = md5(path.encode(), usedforsecurity=False).digest()
    partition = int.from_bytes(digest[:4], "big") >> (32 - PART_POWER)
    server = http.client.HTTPConnection(
        "127.0.0.1", facts["ports"]["account"], timeout=SECONDS
    )
    headers = {
        "X-Timestamp": f"{time.time():.5f}",
        "X-Account-Sysmeta-Read-Only": "true",
    }
    server.request("POST", f"/d1/{partition}/{account}", headers=headers)
    assert server.getresponse().status == 204
    server.close()
    # The proxy remembers accounts for a while, unless they are changed.
    owner.request("POST", f"/{account}")
