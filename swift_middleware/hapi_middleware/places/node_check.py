"""Asks each object server of a cluster whether it computes.

``hapi doctor --nodes FILE`` runs this module on the host of a proxy, whose
configuration, rings and key it reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swift.common import storage_policy, utils
from swift.common.storage_policy import POLICIES
from swift.common.wsgi import loadcontext, loadwsgi

from hapi_middleware.concurrency import map_ahead
from hapi_middleware.config import PLACE_OBJECT, FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.node_client import NodeClient
from hapi_middleware.places.node_computer import NodeComputer
from hapi_middleware.places.node_faults import Node, NodeError
from hapi_protocol.errors import HapiError
from hapi_protocol.signatures import read_keys

CONCURRENCY = 32
"""At a silence of four seconds each, a thousand hosts take two minutes."""
COMPUTES = "computes"
FAILED = "failed"
_USE = "egg:swift-hapi#hapi"
_PATH = "/.hapi/nodes/status"
"""Probe path that no object can have: no account has this name."""


@dataclass
class NodeAnswer:
    """Answer of one object server.

    Attributes:
        node: its address.
        devices: names of its devices in the rings.
        policies: names of the storage policies that use them.
        state: ``computes``, or why not: a kind of :class:`NodeError`, a
            state of the worker, or ``failed``.
        detail: the worker's state, or the reason.
        worker: opaque name of its worker, as in ``X-Hapi-Worker``.
    """

    node: str
    devices: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    state: str = FAILED
    detail: str = ""
    worker: str = ""


def check_nodes(conf: str) -> Iterator[NodeAnswer]:
    """Asks all object servers in the rings of a proxy's configuration.

    Args:
        conf: path of ``proxy-server.conf``.

    Raises:
        ValueError: it cannot be used; says why.
    """
    config = _read_config(conf)
    utils.set_swift_dir(config.swift_dir)
    storage_policy.reload_storage_policies()
    keys = read_keys(Path(config.backend_key_file))
    logger = utils.get_logger({}, log_route="hapi")
    metrics = FilterMetrics(logger)
    client = NodeClient(config, keys, metrics, logger)
    ask = partial(_ask, client, metrics)
    yield from map_ahead(ask, _nodes(config).items(), CONCURRENCY)


def _read_config(conf: str) -> FilterConfig:
    try:
        sections = utils.readconf(conf)
        names = [
            name.partition(":")[2]
            for name, section in sections.items()
            if isinstance(section, Mapping)
            and name.startswith("filter:")
            and section.get("use") == _USE
        ]
    except (OSError, SystemExit) as error:
        raise ValueError(f"{conf} cannot be read: {error}") from error
    if not names:
        raise ValueError(
            f"{conf} has no filter with use = {_USE}; name the configuration "
            "of a proxy"
        )
    absolute = str(Path(conf).absolute())  # PasteDeploy takes no others
    context = loadcontext(loadwsgi.FILTER, absolute, name=names[0])
    config = FilterConfig.from_conf(context.global_conf, context.local_conf)
    if PLACE_OBJECT not in config.places:
        raise ValueError(
            f"{conf}: places = {', '.join(config.places)}: no object server "
            "is asked; add object"
        )
    return config


def _nodes(config: FilterConfig) -> dict[tuple[str, int], list[Any]]:
    """The devices of each object server: (device of a ring, policy)."""
    nodes: dict[tuple[str, int], list[Any]] = {}
    for policy in POLICIES:
        ring = POLICIES.get_object_ring(policy.idx, config.swift_dir)
        for device in filter(None, ring.devs):
            address = device["ip"], device["port"]
            nodes.setdefault(address, []).append((device, policy))
    return dict(sorted(nodes.items()))


def _ask(
    client: NodeClient,
    metrics: FilterMetrics,
    asked: tuple[tuple[str, int], list[Any]],
) -> NodeAnswer:
    _, devices = asked
    device, policy = devices[0]
    node = Node(device, 0, _PATH, policy.idx)
    answer = NodeAnswer(
        str(node),
        sorted({used["device"] for used, _ in devices}),
        sorted({used.name for _, used in devices}),
    )
    try:
        status = NodeComputer(client, node, None, metrics).get_status()
    except NodeError as error:
        answer.state, answer.detail = error.kind, error.reason
    except HapiError as error:
        answer.detail = error.message
    else:
        answer.state = COMPUTES if status.state == "ok" else status.state
        answer.worker = status.worker
        answer.detail = (
            f"release {status.release}, {', '.join(status.devices)}, "
            f"{status.jobs_running} jobs running, {status.jobs_waiting} "
            f"waiting, {status.state}"
            + (f": {status.problem}" if status.problem else "")
        )
    return answer


def main() -> None:
    """Prints one JSON object per object server."""
    if len(sys.argv) != 2:
        sys.exit("give the path of proxy-server.conf")
    try:
        for answer in check_nodes(sys.argv[1]):
            sys.stdout.write(json.dumps(asdict(answer)) + "\n")
            sys.stdout.flush()
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
