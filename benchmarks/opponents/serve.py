"""The process of one opponent on the client tier.

``python -m benchmarks.opponents.serve NAME`` answers questions on its standard
input (:mod:`benchmarks.testbed.remote`) until that ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from benchmarks.opponents.measurement import Meter, between, follow
from benchmarks.opponents.opponent import Opponent
from benchmarks.opponents.training import Place, Task
from benchmarks.testbed.remote import serve

OPPONENTS: Mapping[str, str] = MappingProxyType(
    {
        "tar-stream": "tar_stream:TarStream",
        "tar-stream-resized": "tar_stream:ResizedTarStream",
        "webdataset": "web_dataset:WebDataset",
        "s3-tars": "s3_connector:S3Tars",
        "s3-images": "s3_connector:S3Images",
        "mosaic": "mosaic:Mosaic",
        "local-features": "local_features:LocalFeatures",
    }
)
"""Module and class of each opponent."""


class Server:
    """Answers questions about one of :data:`OPPONENTS`."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        module, _, function = OPPONENTS[name].partition(":")
        self._kind: type[Opponent] = getattr(
            importlib.import_module(f"benchmarks.opponents.{module}"), function
        )
        self._opponent: Opponent | None = None

    def about(self) -> dict[str, Any]:
        """Versions of its libraries, and settings to choose from."""
        return {
            "versions": {name: version(name) for name in self._kind.PACKAGES},
            "grid": list(self._kind.GRID),
        }

    def prepare(
        self,
        task: Mapping[str, Any],
        place: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Starts a task; an earlier one ends."""
        self.close()
        self._opponent = self._kind(Task(**task), Place(**place), options)

    def epochs(
        self,
        first: int,
        count: int,
        interface: str | None,
        storage_sessions: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Trains whole epochs, with the caches of earlier ones.

        Returns:
            Of each epoch the figures of
            :func:`benchmarks.opponents.measurement.between`, ``samples``,
            ``labels`` (sorted) and ``loss`` of the last batch.
        """
        opponent = self._prepared()
        meter = Meter(interface, storage_sessions)
        epochs = []
        for epoch in range(first, first + count):
            begin = meter.read()
            labels = torch.cat(list(opponent.steps(epoch))).sort().values
            epochs.append(
                {
                    "samples": len(labels),
                    "labels": labels.tolist(),
                    "loss": float(opponent.trainer.loss),
                    **between(begin, meter.read(), len(labels)),
                }
            )
        return epochs

    def follow(self, epoch: int, until: float) -> list[tuple[float, int]]:
        """Answers :func:`benchmarks.opponents.measurement.follow`."""
        return follow(self._prepared().steps, epoch, until)

    def forget(self) -> None:
        """Empties the caches."""
        self._prepared().forget()

    def close(self) -> None:
        if self._opponent is not None:
            self._opponent.close()
            self._opponent = None

    def _prepared(self) -> Opponent:
        if self._opponent is None:
            raise ValueError("ask prepare first")
        return self._opponent


def main() -> NoReturn:
    server = Server(sys.argv[1])
    questions = (
        server.about,
        server.prepare,
        server.epochs,
        server.follow,
        server.forget,
    )
    serve({question.__name__: question for question in questions})
    server.close()
    # Workers of a loader may be left after an error.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    # Freeing weights one by one takes seconds of the tier's core.
    os._exit(0)


if __name__ == "__main__":
    main()
