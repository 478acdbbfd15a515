"""Features extracted once on the client, and trained from there.

The first epoch streams images as the tar stream does, trains on their
features and stores these; later epochs read them in a random order.
"""

from __future__ import annotations

import torch

from benchmarks.opponents.measurement import Steps
from benchmarks.opponents.tar_stream import TarStream


class LocalFeatures(TarStream):
    """Features of the first epoch, in memory."""

    _features: torch.Tensor | None = None
    _labels: torch.Tensor
    _filled = 0

    def steps(self, epoch: int) -> Steps:
        if self._filled == self.place.num_samples:
            return self._later_steps(epoch)
        return self._first_steps(epoch)

    def _first_steps(self, epoch: int) -> Steps:
        self.forget()
        for images, labels in self.batches(epoch):
            features = self.trainer.features(images)
            self._store(features, labels)
            self.trainer.step(features, labels)
            yield labels

    def _store(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        if self._features is None:
            shape = (self.place.num_samples, *features.shape[1:])
            self._features = torch.empty(shape)
            self._labels = torch.empty(self.place.num_samples, dtype=int)
        end = self._filled + len(labels)
        self._features[self._filled : end] = features
        self._labels[self._filled : end] = labels
        self._filled = end

    def _later_steps(self, epoch: int) -> Steps:
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

    def close(self) -> None:
        self.forget()
