"""A well-behaved client that runs next to misbehaving ones."""

from __future__ import annotations

import threading
import time
from functools import lru_cache

import torch
from torch import nn

from hapi_protocol.job_messages import JobRequest
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import package_bytes
from local_rows import Rows
from networks import small_transform
from photos import shard
from worker_under_test import Exchange, job_for

NUM_SAMPLES = 24
JOB_SECONDS = 10.0
"""Limit for one of its jobs under load; alone it takes a tenth of a second."""


class ExactNetwork(nn.Module):
    """A network whose features have the same bits in every micro-batch.

    Each output of the convolution has one term that is not zero, so the
    order of additions, which depends on the size of a batch, does not
    matter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4, bias=False)
        self.act = nn.ReLU()
        self.fc = nn.Linear(8 * 16 * 16, 4)
        weight = torch.zeros_like(self.stem.weight)
        for channel in range(8):
            weight[channel, channel % 3, channel % 4, channel // 4] = 2.0
        self.stem.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.act(self.stem(x))
        result: torch.Tensor = self.fc(torch.flatten(features, 1))
        return result


@lru_cache(maxsize=1)
def exact_package() -> bytes:
    parts = split(ExactNetwork(), "act", transform=small_transform())
    return package_bytes(parts.frozen)


@lru_cache(maxsize=1)
def small_shard() -> bytes:
    return shard(NUM_SAMPLES, size=80)


def small_job(account: str) -> JobRequest:
    return job_for(small_shard(), exact_package(), charged_account=account)


class Neighbour:
    """Runs one small job after another until its block ends.

    The end of the block raises its failure: a refusal, a broken stream, a
    bit that differs, a slow job.

    Args:
        exchange: exchange with a worker that has the package.
        alone: the rows that it gets without other clients.
    """

    def __init__(self, exchange: Exchange, alone: Rows) -> None:
        self._exchange = exchange
        self._alone = alone
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.num_jobs = 0
        self.slowest_seconds = 0.0

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure
        assert self.num_jobs
        assert self.slowest_seconds < JOB_SECONDS

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._one_job()
        except BaseException as error:
            self._failure = error

    def _one_job(self) -> None:
        started = time.monotonic()
        job = small_job("AUTH_neighbour")
        reader = self._exchange.run(job, None, small_shard())
        seconds = time.monotonic() - started
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        Rows.of(reader.batches).assert_equal(self._alone)
        self.num_jobs += 1
