"""The replicas of an object on the devices of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hapi_cluster import Cluster


@dataclass(frozen=True)
class Replica:
    """A file of an object on a device.

    Attributes:
        path: the file.
        device: name of the device.
        partition: the object's partition.
        policy_index: of its storage policy.
        server: name of the object server that has the device.
        port: where that object server listens.
    """

    path: Path
    device: str
    partition: int
    policy_index: int
    server: str
    port: int


def replicas(cluster: Cluster, name: str) -> list[Replica]:
    """All replicas, or fragments, of ``/account/container/object``."""
    return sorted(
        (each for each in _all(cluster) if _name(each.path) == name),
        key=lambda each: each.device,
    )


def _all(cluster: Cluster) -> Iterator[Replica]:
    status = cluster.status()
    count = status["object_servers"]
    devices = cluster.directory / "srv"
    for path in devices.glob("d*/objects*/*/*/*/*.data"):
        device, folder, partition, *_ = path.relative_to(devices).parts
        number = (int(device[1:]) - 1) % count
        server = f"object-{number + 1}" if number else "object"
        yield Replica(
            path,
            device,
            int(partition),
            int(folder.partition("-")[2] or 0),
            server,
            status["ports"][server],
        )


def _name(path: Path) -> str:
    from swift.obj.diskfile import read_metadata

    with path.open("rb") as file:
        return str(read_metadata(file)["name"])
