"""accelerate's own functions on features.

Two ranks are in test_integrations.py.
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin

from equal_training import job_of, optimizer_of
from hapi_client.integrations.accelerate import FeatureDataLoader
from hapi_client.swift.swift_url import parse_location
from jobs import upload_shards
from photos import shards_of

DATA = {"train": "swift://steps/train", "val": "swift://steps/val"}
COUNTS = (20, 16, 23, 12)
"""Five steps of 16, of which the last has 7 samples."""
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def data(connection):
    for place in DATA.values():
        shards = shards_of(COUNTS, size=120)
        upload_shards(connection, parse_location(place), shards)


@pytest.fixture
def job(connection):
    with job_of(connection, "stream", data=DATA) as job:
        yield job


@pytest.fixture(params=[1, 2])
def accelerator(request):
    plugin = GradientAccumulationPlugin(num_steps=request.param)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def labels_of(batches):
    return [labels.tolist() for _, labels in batches]


def epochs_of(data, *epochs):
    batches = []
    for epoch in epochs:
        data.set_epoch(epoch)
        batches += labels_of(data)
    return batches


def test_skipped_batches_are_not_read(job, accelerator):
    expected = epochs_of(job.dataset(), 1, 2)
    loader = accelerator.prepare(FeatureDataLoader(job.dataset()))
    before = job.stats.samples
    loader.set_epoch(1)
    rest = skip_first_batches(loader, 3)
    assert len(rest) == STEPS - 3
    # After a whole epoch comes the next one, also without set_epoch.
    assert labels_of(rest) + labels_of(loader) == expected[3:]
    assert job.stats.samples - before == sum(map(len, expected[3:]))


@pytest.mark.parametrize("step", [1, 2, STEPS, STEPS + 1])
def test_loader_goes_on_from_a_saved_state(job, tmp_path, step):
    expected = epochs_of(job.dataset(), 0, 1)
    accelerator = Accelerator(cpu=True)
    data = job.dataset()
    loader = accelerator.prepare(FeatureDataLoader(data))
    accelerator.register_for_checkpointing(data)
    seen = []
    for batch in chain(loader, loader):
        seen.append(batch)
        if len(seen) == step:
            accelerator.save_state(str(tmp_path))
            break
    accelerator = Accelerator(cpu=True)
    data = job.dataset()
    loader = accelerator.prepare(FeatureDataLoader(data))
    accelerator.register_for_checkpointing(data)
    accelerator.load_state(str(tmp_path))
    assert data.first_step == step % STEPS
    while len(seen) < len(expected):
        for batch in loader:
            seen.append(batch)
            is_last = accelerator.gradient_state.end_of_dataloader
            assert is_last == (len(seen) % STEPS == 0)
    assert labels_of(seen) == expected


def test_gradients_accumulate_and_an_epoch_ends_with_a_step(job, accelerator):
    """Five batches: at two by two, the last one is alone."""
    tail, optimizer, loader = accelerator.prepare(
        job.tail,
        optimizer_of(job.tail),
        FeatureDataLoader(job.dataset()),
    )
    num_steps = accelerator.gradient_accumulation_steps
    before = [w.clone() for w in tail.parameters()]
    steps = []
    for number, (features, labels) in enumerate(loader):
        with accelerator.accumulate(tail):
            loss = torch.nn.functional.cross_entropy(tail(features), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                steps.append(number)
            optimizer.step()
            optimizer.zero_grad()
    assert steps == ([0, 1, 2, 3, 4] if num_steps == 1 else [1, 3, 4])
    after = [*tail.parameters()]
    assert not any(map(torch.equal, before, after))


def test_metrics_are_those_of_all_samples(job, accelerator):
    loader = accelerator.prepare(FeatureDataLoader(job.dataset("val")))
    seen = [
        accelerator.gather_for_metrics(labels).tolist() for _, labels in loader
    ]
    assert seen == labels_of(job.dataset("val"))
    assert sum(map(len, seen)) == sum(COUNTS)
    assert labels_of(skip_first_batches(loader, 2)) == seen[2:]


def test_left_loader_reads_no_more(job, accelerator):
    loader = accelerator.prepare(FeatureDataLoader(job.dataset()))
    for _ in loader:
        break
    assert labels_of(loader) == epochs_of(job.dataset(), 0)
