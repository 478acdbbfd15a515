"""Reads a cluster's access log as operators do."""

from __future__ import annotations

import re
from urllib.parse import unquote

from hapi_cluster import Cluster
from waiting import until


def used(cluster: Cluster, trans_id: str) -> dict[str, str]:
    """Fields of the filter's entry in a request's line."""
    until(lambda: _line(cluster, trans_id))
    [word] = re.findall(r"hapi:\S+", _line(cluster, trans_id))
    entry = unquote(word).removeprefix("hapi:")
    return dict(field.split("=", 1) for field in entry.split(";"))


def _line(cluster: Cluster, trans_id: str) -> str:
    """The client's line; lines of sub-requests have a source."""
    for line in cluster.log("swift").read_text().splitlines():
        _, is_its_own, after = line.partition(f" {trans_id} ")
        if is_its_own and " HTTP/1." in line and after.split()[2] == "-":
            return line
    return ""
