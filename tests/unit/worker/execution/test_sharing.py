"""Rows are bit-equal whoever shares the worker."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
import torch
import torchvision

from hapi_protocol.errors import HapiError
from hapi_protocol.feature_reader import FeatureStreamReader
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import package_pieces
from networks import small_transform
from photos import shard
from worker_under_test import (
    job_for,
    running_worker,
    small_package,
)

NUM_SAMPLES = 19
CUTS = (3, 57)


@lru_cache(maxsize=1)
def package():
    """A network whose last features depend on the batch size."""
    torch.manual_seed(0)
    network = torchvision.models.mobilenet_v3_small(weights=None).eval()
    return b"".join(
        package_pieces(
            split(network, "classifier.1", transform=small_transform()).frozen
        )
    )


@pytest.fixture(scope="module")
def tar():
    return shard(NUM_SAMPLES, size=90)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with running_worker(tmp_path_factory.mktemp("worker")) as worker:
        worker.put(package())
        worker.put(small_package())
        yield worker


def features_of(worker, tar, cut, **changes):
    job = job_for(tar, package(), cut=cut, **changes)
    reader: FeatureStreamReader = worker.run(job, package(), tar)
    batches = reader.batches
    return np.concatenate([batch.features for batch in batches])


@contextlib.contextmanager
def flooded(worker, *accounts):
    """Other accounts' jobs, one after the other, on the same models."""
    tar = shard(33, size=100)
    ended = threading.Event()

    def flood(account, number):
        jobs = 0
        sent = package() if number % 2 else small_package()
        while not ended.is_set():
            job = job_for(tar, sent, charged_account=account)
            with contextlib.suppress(HapiError):
                worker.run(job, sent, tar)
            jobs += 1
        return jobs

    with ThreadPoolExecutor(len(accounts)) as pool:
        floods = [pool.submit(flood, a, n) for n, a in enumerate(accounts)]
        try:
            yield
        finally:
            ended.set()
        assert all(each.result(300) > 0 for each in floods)


@pytest.mark.parametrize("cut", CUTS)
def test_rows_are_bit_equal_with_streams_of_other_accounts(worker, tar, cut):
    alone = features_of(worker, tar, cut)
    with flooded(worker, "AUTH_b", "AUTH_b", "AUTH_c"):
        shared = [features_of(worker, tar, cut) for _ in range(4)]
    for found in shared:
        np.testing.assert_array_equal(found, alone)


def test_rows_are_bit_equal_with_other_streams_of_the_account(worker, tar):
    alone = features_of(worker, tar, CUTS[1])
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(features_of, worker, tar, CUTS[1]) for _ in range(8)
        ]
        for each in asked:
            np.testing.assert_array_equal(each.result(300), alone)
