"""Features extracted once on the client, and trained from there.

The first epoch streams images as the tar stream does, trains on their
features and keeps these; later ones take them in a random order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from benchmarks.opponents.opponent import Steps
from benchmarks.opponents.tar_stream import TarStream

FEATURES = "features.bin"


class LocalFeatures(TarStream):
    """See the module's text; ``keep`` is ``ram``, the default, or ``disk``."""

    KEEPS = True
    _features: torch.Tensor | None = None
    _labels: torch.Tensor
    _filled = 0

    def steps(self, epoch: int) -> Steps:
        if self._filled == self.place.num_samples:
            return self._kept_steps(epoch)
        return self._first_steps(epoch)

    def _first_steps(self, epoch: int) -> Steps:
        self.forget()
        for images, labels in self.batches(epoch):
            features = self.trainer.features(images)
            self._keep(features, labels)
            self.trainer.step(features, labels)
            yield labels

    def _keep(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        if self._features is None:
            self._features = self._room(features)
            self._labels = torch.empty(self.place.num_samples, dtype=int)
        end = self._filled + len(labels)
        self._features[self._filled : end] = features
        self._labels[self._filled : end] = labels
        self._filled = end

    def _room(self, features: torch.Tensor) -> torch.Tensor:
        shape = (self.place.num_samples, *features.shape[1:])
        if self.options.get("keep", "ram") == "ram":
            return torch.empty(shape)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        return torch.from_numpy(
            np.memmap(self._file, np.float32, "w+", shape=shape)
        )

    def _kept_steps(self, epoch: int) -> Steps:
        assert self._features is not None
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.place.num_samples, generator=generator)
        for numbers in order.split(self.task.batch_size):
            labels = self._labels[numbers]
            self.trainer.step(self._features[numbers], labels)
            yield labels

    def forget(self) -> None:
        self._features = None
        self._filled = 0
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        self.forget()

    @property
    def _file(self) -> Path:
        return Path(self.place.cache_folder, FEATURES)
