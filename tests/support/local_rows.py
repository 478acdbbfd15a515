"""The rows that a worker should answer with, computed in this process."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt
import torch

from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import FeatureBatch
from hapi_protocol.transforms import Training
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.numerics import batch_size, exact_numerics
from hapi_splitter.profiling.profiler import LARGEST_BATCH

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rows:
    """Index, key and label of an object's good rows, and their features."""

    facts: list[tuple[int, str, int | None]]
    features: npt.NDArray[np.float32]

    @classmethod
    def of(cls, batches: Sequence[FeatureBatch]) -> Rows:
        """Those of batches without errors."""
        rows = [row for batch in batches for row in batch.rows]
        assert all(row.error is None for row in rows)
        return cls(
            [(row.index, row.key, row.label) for row in rows],
            np.concatenate([b.features for b in batches if b.rows]),
        )

    def is_equal(self, other: Rows) -> bool:
        """Returns True if all bits are equal."""
        return self.facts == other.facts and np.array_equal(
            self.features, other.features
        )

    def assert_equal(self, other: Rows) -> None:
        """Asserts that all bits are equal."""
        assert self.facts == other.facts
        np.testing.assert_array_equal(self.features, other.features)


def received_rows(stream: bytes) -> Rows:
    """Reads a complete feature stream."""
    return Rows.of(list(read_features(io.BytesIO(stream))))


def local_rows(
    frozen: FrozenGraph,
    cut: int,
    source: bytes,
    name: str,
    wanted: range | None = None,
    training: Training | None = None,
) -> Rows:
    """Computes the prefix on the samples of an object.

    In micro-batches of the worker's size: torch chooses kernels by shape, and
    others may differ in the last bits.

    Args:
        frozen: graph of the frozen region.
        cut: number of the cut.
        source: a tar shard, or one image.
        name: name of the object.
        wanted: samples of a shard by index; None for all.
        training: seed and epoch of random changes; None for evaluation.
    """
    samples = _samples(source, name)
    wanted = wanted or range(len(samples))
    is_unknown = len(wanted) == len(samples) and not _is_image(source)
    size = batch_size(
        LARGEST_BATCH["cpu"], None if is_unknown else len(wanted)
    )
    transform = frozen.transform
    assert transform is not None
    images = [
        transform.sample(decode_image(image), key, training)
        for key, _, image in (samples[n] for n in wanted)
    ]
    images += [torch.zeros(frozen.input_shape)] * (-len(images) % size)
    prefix = frozen.to(CPU, fast=True).prefix(cut)
    with _one_thread(), torch.inference_mode(), exact_numerics(CPU):
        batches = torch.split(torch.stack(images), size)
        features = torch.cat([prefix(batch) for batch in batches])
    facts = [(number, *samples[number][:2]) for number in wanted]
    return Rows(facts, features[: len(wanted)].float().numpy())


def place_of(source: bytes, wanted: range) -> tuple[int, int]:
    """Returns first and last byte of a shard's consecutive samples."""
    starts = []
    with tarfile.open(fileobj=io.BytesIO(source)) as archive:
        keys = set()
        for member in archive:
            key = member.name.partition(".")[0]
            if key not in keys:
                starts.append(member.offset)
            keys.add(key)
        starts.append(archive.offset)
    return starts[wanted.start], starts[wanted.stop] - 1


def _samples(source: bytes, name: str) -> list[tuple[str, int | None, bytes]]:
    """Returns key, label and image of each sample."""
    if _is_image(source):
        return [(PurePosixPath(name).name.partition(".")[0], None, source)]
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(source)) as archive:
        for member in archive:
            key, _, extension = member.name.partition(".")
            file = archive.extractfile(member)
            assert file is not None
            found.setdefault(key, {})[extension] = file.read()
    return [(k, int(v["cls"]), v["jpg"]) for k, v in found.items()]


def _is_image(source: bytes) -> bool:
    return source.startswith(b"\xff\xd8")


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
