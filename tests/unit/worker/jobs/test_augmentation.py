"""A worker changes training images as this process does, to the bit."""

import threading
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from hapi_protocol.headers import SampleRange
from hapi_protocol.transforms import Training
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.package.writer import package_bytes
from local_rows import Rows, local_rows, received_rows
from networks import small_network, small_transform
from photos import shard
from worker_under_test import (
    in_two,
    job_for,
    running_worker,
)

NUM_SAMPLES = 21
CUT = 3
SEED = 11
AUGMENTATION = Augmentation(
    vertical_flip=0.3,
    brightness=(0.6, 1.4),
    contrast=(0.6, 1.4),
    saturation=(0.6, 1.4),
    hue=(-0.1, 0.1),
)


@lru_cache(maxsize=1)
def parts():
    torch.manual_seed(0)
    transform = replace(small_transform(), augmentation=AUGMENTATION)
    return split(small_network(), "body", transform=transform)


@lru_cache(maxsize=1)
def package():
    return package_bytes(parts().frozen)


@pytest.fixture(scope="module")
def tar():
    return shard(NUM_SAMPLES, size=120)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """Its decoding threads have two of torch's each."""
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(folder, torch_threads=2) as worker:
        worker.put(package())
        yield worker
    torch.set_num_threads(1)


def job_of(source, epoch, samples=None):
    training = Training(SEED, epoch)
    return job_for(
        source, package(), cut=CUT, transform=str(training), samples=samples
    )


def computed_here(source, epoch, wanted=None):
    return local_rows(
        parts().frozen,
        CUT,
        source,
        "data/shard-000.tar",
        wanted,
        Training(SEED, epoch),
    )


def test_part_of_a_shard_is_changed_as_the_whole_is(worker, tar):
    wanted = range(5, 12)
    job = job_of(tar, 4, SampleRange(wanted.start, wanted.stop - 1))
    rows = Rows.of(worker.run(job, package(), tar).batches)
    rows.assert_equal(computed_here(tar, 4, wanted))
    whole = computed_here(tar, 4).features[5:12]
    np.testing.assert_allclose(rows.features, whole, rtol=1e-4, atol=1e-4)


def test_jobs_of_two_epochs_at_once_are_each_their_own(worker, tar):
    others_done = threading.Event()
    body = in_two(tar, others_done)
    with worker.streaming(job_of(tar, 0), package(), body) as stream:
        answer = stream.answer()
        other = Rows.of(worker.run(job_of(tar, 1), package(), tar).batches)
        plain = replace(job_of(tar, 0), transform="eval")
        evaluated = Rows.of(worker.run(plain, package(), tar).batches)
        others_done.set()
        rows = received_rows(answer.read())
    rows.assert_equal(computed_here(tar, 0))
    other.assert_equal(computed_here(tar, 1))
    evaluated.assert_equal(
        local_rows(parts().frozen, CUT, tar, "data/shard-000.tar")
    )
