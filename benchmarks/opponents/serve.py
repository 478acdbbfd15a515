"""The process of one opponent on the client tier.

``python -m benchmarks.opponents.serve NAME`` answers questions on its standard
input (:mod:`benchmarks.remote`) until that ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import torch
from benchmarks.opponents.diary import follow
from benchmarks.opponents.opponent import Opponent
from benchmarks.opponents.training import Place, Task
from benchmarks.opponents.window import Meter, Throughput, between, measure
from benchmarks.remote import serve

OPPONENTS: Mapping[str, str] = {
    "tar-stream": "tar_stream:TarStream",
    "tar-stream-resized": "resized:ResizedTarStream",
    "webdataset": "web_dataset:WebDataset",
    "s3-tars": "s3_connector:S3Tars",
    "s3-images": "s3_connector:S3Images",
    "mosaic": "mosaic:Mosaic",
    "local-features": "local_features:LocalFeatures",
}
"""Class of each, by name."""


class Server:
    """Answers questions.

    Args:
        name: in :data:`OPPONENTS`.
    """

    def __init__(self, name: str) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        module, _, found = OPPONENTS[name].partition(":")
        self._kind: type[Opponent] = getattr(
            importlib.import_module(f"benchmarks.opponents.{module}"), found
        )
        self._opponent: Opponent | None = None

    def about(self) -> dict[str, Any]:
        """Versions of its libraries, and settings to choose from."""
        return {
            "versions": {name: version(name) for name in self._kind.PACKAGES},
            "grid": list(self._kind.GRID),
            "keeps": self._kind.KEEPS,
        }

    def prepare(
        self,
        task: Mapping[str, Any],
        place: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Takes a task; what came before ends."""
        self.close()
        self._opponent = self._kind(Task(**task), Place(**place), options)

    def window(
        self,
        epoch: int,
        pace: Mapping[str, Any],
        interface: str | None,
        storage_sessions: Sequence[int],
    ) -> dict[str, Any]:
        """A window of an epoch that keeps nothing of earlier ones."""
        opponent = self._require()
        opponent.forget()
        meter = Meter(interface, storage_sessions)
        return measure(opponent.steps(epoch), meter, Throughput(**pace))

    def epochs(
        self,
        first: int,
        count: int,
        interface: str | None,
        storage_sessions: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Whole epochs, what earlier ones kept included.

        Returns:
            Of each epoch what :func:`between` returns, ``samples``,
            ``labels``, the sorted labels of all samples, and ``loss``, that
            of the last batch.
        """
        opponent = self._require()
        meter = Meter(interface, storage_sessions)
        found = []
        for epoch in range(first, first + count):
            begin = meter.read()
            labels = torch.cat(list(opponent.steps(epoch))).sort().values
            found.append(
                {
                    "samples": len(labels),
                    "labels": labels.tolist(),
                    "loss": float(opponent.trainer.loss),
                    **between(begin, meter.read(), len(labels)),
                }
            )
        return found

    def diary(self, epoch: int, until: float) -> list[tuple[float, int]]:
        """See :func:`benchmarks.opponents.diary.follow`."""
        return follow(self._require().steps, epoch, until)

    def forget(self) -> None:
        """Removes what earlier epochs kept."""
        self._require().forget()

    def close(self) -> None:
        if self._opponent is not None:
            self._opponent.close()
            self._opponent = None

    def _require(self) -> Opponent:
        if self._opponent is None:
            raise ValueError("ask prepare first")
        return self._opponent


def main() -> NoReturn:
    server = Server(sys.argv[1])
    serve(
        {
            "about": server.about,
            "prepare": server.prepare,
            "window": server.window,
            "epochs": server.epochs,
            "diary": server.diary,
            "forget": server.forget,
        }
    )
    server.close()
    # After an error there may be some.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    # Freeing weights one by one takes torch seconds of the tier's core.
    os._exit(0)


if __name__ == "__main__":
    main()
