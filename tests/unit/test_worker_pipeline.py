"""What a pipeline keeps in memory, and what it lets go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hapi_protocol.shards import Sample
from hapi_worker.forward import Computed
from hapi_worker.pipeline import Pipeline


class NoConnection:
    """The other end stays, and sends no more."""

    def is_gone(self) -> bool:
        return False

    def stop_reading(self) -> None:
        """Nothing is read here."""


class Body:
    waited_seconds = 0.0


class HeldPool:
    """Takes work and runs none of it, as a busy pool."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, account: str, work: Callable[[], None]) -> None:
        self.work.append(work)


class Compute:
    """Takes eight samples of one byte each."""

    input_bytes = 4

    def decoder(self, sample: Sample) -> torch.Tensor:
        return torch.zeros(1)

    def batch_limit(self) -> int:
        return 8

    def run(self, images: torch.Tensor) -> Computed:
        raise AssertionError("nothing runs here")


def pipeline(samples: Any, compute: Any, buffer_bytes: int, pool: Any) -> Any:
    return Pipeline(
        samples,
        Body(),  # type: ignore[arg-type]
        NoConnection(),  # type: ignore[arg-type]
        account="a",
        compute=compute,
        decode_pool=pool,
        device_pool=pool,
        buffer_bytes=buffer_bytes,
        step_seconds=10,
    )


def test_cancelled_job_lets_go_of_samples_that_wait_in_a_pool() -> None:
    sample = Sample(0, "k", 0, 1, {"jpg": bytes(1000)})
    alive = weakref.ref(sample)
    pool = HeldPool()
    job = pipeline(iter([sample]), Compute(), 10_000, pool)
    del sample
    job.start()
    while not pool.work:
        pass
    assert alive() is not None
    job.cancel()
    gc.collect()
    assert pool.work
    assert alive() is None


@pytest.mark.parametrize("compute", [None, Compute()])
def test_texts_of_rows_count_against_the_buffer(compute: Any) -> None:
    num_read = 0

    def samples() -> Any:
        nonlocal num_read
        for index in range(1000):
            num_read += 1
            yield Sample(index, "k", 0, 1, {"json": b"x" * 10_000})

    job = pipeline(samples(), compute, 200_000, HeldPool())
    job.start()
    job._reader.join(0.5)
    job.cancel()
    # Each holds its text, and up to four bytes a character as a row.
    assert num_read < 10
