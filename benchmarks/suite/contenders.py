"""Contenders of a comparison: HAPI's jobs and opponents, asked alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Protocol

from benchmarks.opponents.training import Place, Task
from benchmarks.testbed.network import INTERFACE
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed

CLIENT = "benchmarks.suite.client_process"
OPPONENT = "benchmarks.opponents.serve"
SECONDS = 1800.0

STREAM, AUTO, FREEZE = "stream", "auto", "freeze"
"""HAPI's jobs by their option ``cut``."""
TAR_STREAM = "tar-stream"
RESIZED = "tar-stream-resized"
EXTERNALS = (TAR_STREAM, "webdataset", "s3-tars", "s3-images", "mosaic")
"""Opponents that read the same bytes of the same photographs."""

LIBRARIES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "webdataset": ("webdataset",),
        "s3-tars": ("s3torchconnector",),
        "s3-images": ("s3torchconnector",),
        "mosaic": ("mosaicml-streaming", "boto3"),
    }
)
"""Distributions that an opponent needs."""
STORED_AS: Mapping[str, str] = MappingProxyType(
    {"s3-images": "images", "mosaic": "mds", RESIZED: "resized"}
)
"""Format of an opponent's data, if not tar shards; a function of
:mod:`benchmarks.opponents.convert`."""


def unavailable(names: Sequence[str]) -> dict[str, str]:
    """Opponents that cannot run on this machine, with the reason."""
    contenders = {}
    for name in names:
        lacking = [
            library
            for library in LIBRARIES.get(name, ())
            if not _is_installed(library)
        ]
        if lacking:
            contenders[name] = f"{', '.join(lacking)} is not installed"
    return contenders


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


class Contender(Protocol):
    """Trains on a testbed's client tier."""

    @property
    def name(self) -> str:
        """Name in records."""

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        """Trains whole epochs; returns ``samples`` and figures of each."""


@dataclass(frozen=True)
class Ours:
    """A job that is open in a client process."""

    bed: Testbed
    client: Remote
    name: str

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        epochs: list[dict[str, Any]] = ask(
            self.client,
            "epochs",
            name=self.name,
            first=first,
            count=count,
            **_meter(self.bed),
        )
        return epochs


class Opponent:
    """An opponent, in a process that :func:`start` has started."""

    def __init__(self, bed: Testbed, name: str, remote: Remote) -> None:
        self._bed = bed
        self._remote = remote
        self.name = name
        about = ask(remote, "about")
        self.versions: Mapping[str, str] = about["versions"]
        self.grid: Sequence[Mapping[str, Any]] = about["grid"]

    def forget(self) -> None:
        """Empties its caches."""
        ask(self._remote, "forget")

    def prepare(
        self, task: Task, place: Place, options: Mapping[str, Any]
    ) -> None:
        """Starts a task, with settings of the grid."""
        ask(
            self._remote,
            "prepare",
            task=asdict(task),
            place=asdict(place),
            options=dict(options),
        )

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        epochs: list[dict[str, Any]] = ask(
            self._remote,
            "epochs",
            first=first,
            count=count,
            **_meter(self._bed),
        )
        # Labels are for tests and would make records long.
        return [
            {key: value for key, value in epoch.items() if key != "labels"}
            for epoch in epochs
        ]


def start(bed: Testbed, name: str) -> Remote:
    """Starts an opponent's process, a context manager."""
    return bed.client.remote(OPPONENT, name)


def ask(remote: Remote, do: str, **arguments: Any) -> Any:
    """Asks a question that may take minutes."""
    return remote.ask(do, seconds=SECONDS, **arguments)


def _meter(bed: Testbed) -> dict[str, Any]:
    return {
        "interface": INTERFACE if bed.shaped else None,
        "storage_sessions": bed.storage_sessions(),
    }
