"""The rings of a cluster: ``python -m hapi_cluster.rings ETC``.

Made with Swift's own builder, so only server processes import this. A builder
is kept and reused: making a new one could place partitions on other devices
and lose sight of the data.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swift.common.ring import RingBuilder

from hapi_cluster.configs import BACKEND_HOST, BACKENDS, RINGS_NAME
from hapi_cluster.settings import LAYOUTS, Layout

PART_POWER = 6


def ensure_rings(etc: Path) -> None:
    """Make the three rings, or give their devices the present ports.

    Layout and ports are read from ``rings.json``.
    """
    request = json.loads((etc / RINGS_NAME).read_text())
    for server in BACKENDS:
        builder_path = etc / f"{server}.builder"
        if builder_path.exists():
            builder = RingBuilder.load(str(builder_path))
        else:
            builder = _new_builder(LAYOUTS[request["layout"]], server)
        for device in builder.devs:
            device["ip"] = device["replication_ip"] = BACKEND_HOST
            port = request["ports"][server]
            device["port"] = device["replication_port"] = port
        builder.save(str(builder_path))
        builder.get_ring().save(str(etc / f"{server}.ring.gz"))


def _new_builder(layout: Layout, server: str) -> RingBuilder:
    policy = layout.policy
    replicas = layout.replicas
    if server == "object" and policy.get("policy_type") == "erasure_coding":
        replicas = int(policy["ec_num_data_fragments"])
        replicas += int(policy["ec_num_parity_fragments"])
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
