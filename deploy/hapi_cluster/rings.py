"""Builds the rings of a cluster: ``python -m hapi_cluster.rings ETC``.

It uses Swift's ring builder, so only server processes import this module.
Builders are kept and reused: a new one could place partitions on other
devices, where their data is not found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from swift.common.ring import RingBuilder

from hapi_cluster.configs import BACKEND_HOST, RINGS_NAME
from hapi_cluster.settings import LAYOUTS, Layout

PART_POWER = 6
"""64 partitions: enough for the six devices of the largest layout, and the
rings are built in a moment.  It cannot change: data would not be found."""


def ensure_rings(etc: Path) -> None:
    """Creates the rings, or updates the ports of their devices.

    Layout and ports are read from ``rings.json``.  The servers of a kind
    take turns in the order of the devices.
    """
    request = json.loads((etc / RINGS_NAME).read_text())
    layout = LAYOUTS[request["layout"]]
    for server in ("account", "container"):
        _ensure_ring(etc / server, layout, layout.replicas, request[server])
    for number, policy in enumerate(layout.policies):
        name = f"object-{number}" if number else "object"
        replicas = _replicas(policy, layout.replicas)
        _ensure_ring(etc / name, layout, replicas, request["object"])


def _ensure_ring(
    path: Path, layout: Layout, replicas: int, ports: Sequence[int]
) -> None:
    builder_path = path.with_suffix(".builder")
    if builder_path.exists():
        builder = RingBuilder.load(str(builder_path))
    else:
        builder = _new_builder(layout, replicas)
    for device in builder.devs:
        port = ports[device["id"] % len(ports)]
        device["ip"] = device["replication_ip"] = BACKEND_HOST
        device["port"] = device["replication_port"] = port
    builder.save(str(builder_path))
    builder.get_ring().save(str(path.with_suffix(".ring.gz")))


def _replicas(policy: Mapping[str, str], replicas: int) -> int:
    """Number of copies, or of fragments, of an object."""
    if policy.get("policy_type") != "erasure_coding":
        return replicas
    data, parity = "ec_num_data_fragments", "ec_num_parity_fragments"
    return int(policy[data]) + int(policy[parity])


def _new_builder(layout: Layout, replicas: int) -> RingBuilder:
    builder = RingBuilder(PART_POWER, replicas, 0)
    for number in range(layout.devices):
        builder.add_dev(
            {
                "id": number,
                "region": 1,
                "zone": number + 1,
                "ip": BACKEND_HOST,
                "port": 1,
                "device": f"d{number + 1}",
                "weight": 1.0,
            }
        )
    builder.rebalance(seed="hapi")
    return builder


if __name__ == "__main__":
    ensure_rings(Path(sys.argv[1]))
