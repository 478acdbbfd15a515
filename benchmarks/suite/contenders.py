"""Those that are compared: ours and opponents, asked alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from benchmarks.network import INTERFACE
from benchmarks.opponents.training import Place, Task
from benchmarks.opponents.window import Throughput
from benchmarks.remote import Remote
from benchmarks.testbed import Testbed

OPPONENT = "benchmarks.opponents.serve"
SECONDS = 1800.0

TAR_STREAM = "tar-stream"
RESIZED = "tar-stream-resized"
EXTERNALS = (TAR_STREAM, "webdataset", "s3-tars", "s3-images", "mosaic")
"""Those that read the same bytes of the same photographs."""


LIBRARIES: Mapping[str, Sequence[str]] = {
    "webdataset": ("webdataset",),
    "s3-tars": ("s3torchconnector",),
    "s3-images": ("s3torchconnector",),
    "mosaic": ("mosaicml-streaming", "boto3"),
}
"""Distributions that an opponent needs, and HAPI does not."""
STORED_AS: Mapping[str, str] = {
    "s3-images": "images",
    "mosaic": "mds",
    RESIZED: "resized",
}
"""How the data has to be stored for an opponent, beside the tar shards; of
:data:`benchmarks.suite.data_sets.WAYS`."""


def absent(name: str) -> str | None:
    """Why an opponent cannot be measured here; None where it can."""
    missing = [
        library
        for library in LIBRARIES.get(name, ())
        if not is_installed(library)
    ]
    if not missing:
        return None
    return f"{', '.join(missing)} is not installed"


def is_installed(distribution: str) -> bool:
    """Whether a distribution is there; it is not imported."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


class Contender(Protocol):
    """Trains on a testbed's client tier, when it is asked to."""

    @property
    def name(self) -> str:
        """In results."""

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        """Whole epochs, a dictionary for each.

        Each has what :func:`benchmarks.opponents.window.between` returns,
        and ``samples``.
        """


@dataclass(frozen=True)
class Ours:
    """A job of a process of :mod:`benchmarks.client_tier`.

    Args:
        bed: the testbed.
        client: that process; ``open`` has made the job.
        name: of contender and job.
        storage: sessions of the storage tier that count, beside those of
            the testbed's own cluster.
    """

    bed: Testbed
    client: Remote
    name: str
    storage: Sequence[int] = ()

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _ask(
            self.client,
            "epochs",
            name=self.name,
            first=first,
            count=count,
            **_meter(self.bed, self.storage),
        )
        return found


class Opponent:
    """A process of an opponent.

    Args:
        bed: the testbed.
        name: of :data:`benchmarks.opponents.serve.OPPONENTS`.
        remote: its process, from :func:`start`.
    """

    def __init__(self, bed: Testbed, name: str, remote: Remote) -> None:
        self._bed = bed
        self._remote = remote
        self.name = name
        about = _ask(remote, "about")
        self.versions: Mapping[str, str] = about["versions"]
        self.grid: Sequence[Mapping[str, Any]] = about["grid"]

    def forget(self) -> None:
        """Removes what earlier epochs kept."""
        _ask(self._remote, "forget")

    def prepare(
        self, task: Task, place: Place, options: Mapping[str, Any]
    ) -> None:
        """Takes a task, with some settings of the grid."""
        _ask(
            self._remote,
            "prepare",
            task=asdict(task),
            place=asdict(place),
            options=dict(options),
        )

    def window(self, epoch: int, pace: Throughput) -> dict[str, Any]:
        """See :func:`benchmarks.opponents.window.measure`; for tuning."""
        return _ask(
            self._remote,
            "window",
            epoch=epoch,
            pace=asdict(pace),
            **_meter(self._bed),
        )

    def epochs(self, first: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _ask(
            self._remote,
            "epochs",
            first=first,
            count=count,
            **_meter(self._bed),
        )
        # The label of each sample is for tests; results would be long.
        return [
            {key: value for key, value in each.items() if key != "labels"}
            for each in found
        ]


def start(bed: Testbed, name: str) -> Remote:
    """Starts an opponent's process, a context manager."""
    return bed.client.remote(OPPONENT, name)


def _meter(bed: Testbed, storage: Sequence[int] = ()) -> dict[str, Any]:
    return {
        "interface": INTERFACE if bed.shaped else None,
        "storage_sessions": [*bed.storage_sessions(), *storage],
    }


def _ask(remote: Remote, do: str, **arguments: Any) -> Any:
    return remote.ask(do, seconds=SECONDS, **arguments)
