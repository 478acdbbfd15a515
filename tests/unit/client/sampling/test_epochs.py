"""Epochs and their state: resumed runs lose and repeat no sample."""

import json
import random

import numpy as np
import pytest

from hapi_client.sampling.epochs import EpochOptions, Epochs
from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.resume_state import DataState
from hapi_protocol.errors import ClientError

SIZES = [7, 16, 3, 16, 11, 16, 9]
DATA = "d" * 64


def epochs(sizes=SIZES, data=DATA, **options):
    return Epochs(sizes, data, EpochOptions(**{"batch_size": 8, **options}))


def partitioned(*numbers):
    return epochs(partition=EpochPartition(*numbers))


def resumed_from(other):
    made = epochs()
    made.load_state_dict(other.state_dict())
    return made


def state_at(step):
    return epochs().state_at(0, step, Reader(), drop_last=False)


def share_of(made, epoch=0, reader=None, **options):
    options = {"drop_last": False, **options}
    return made.training(epoch, reader or Reader(), **options)


def samples_of(share):
    plan = share.read_plan
    return {
        batch.step: sorted(
            (plan.pieces[position].span, plan.pieces[position].first + row)
            for position, row in zip(
                batch.positions.tolist(), batch.rows.tolist(), strict=True
            )
        )
        for batch in plan.batches
    }


def train(made, epoch=0, num_steps=1000, ranks=1, workers=1):
    """Trains the next steps of an epoch; returns the samples of each."""
    shares = [
        share_of(made, epoch, Reader((rank,), ranks, worker, workers))
        for rank in range(ranks)
        for worker in range(workers)
    ]
    taken = {}
    for share in shares:
        for step, samples in samples_of(share).items():
            taken.setdefault(step, []).extend(samples)
    trained = {}
    for step in sorted(taken)[:num_steps]:
        trained[step] = sorted(taken[step])
        shares[0].delivered(step)
    return trained


def trained(num_steps, epoch=0, **options):
    made = epochs(**options)
    train(made, epoch, num_steps)
    return made


def test_state_is_small_and_survives_json():
    made = trained(3)
    text = json.dumps(made.state_dict())
    assert len(text) < 300
    other = epochs()
    other.load_state_dict(json.loads(text))
    assert other.state_dict() == made.state_dict()
    assert (other.epoch, other.step) == (0, 3)


def test_two_hundred_interruptions_lose_and_repeat_nothing():
    expected = [train(partitioned(4, 2), epoch) for epoch in range(2)]
    dice = random.Random(7)
    for _ in range(200):
        first = dice.randrange(len(expected[0]) + 1)
        ranks, workers = dice.choice([1, 2, 4]), dice.choice([1, 2])
        interrupted = partitioned(4, 2)
        before = train(interrupted, 0, first, ranks, workers)
        resumed = resumed_from(interrupted)
        ranks, workers = dice.choice([1, 2, 4]), dice.choice([1, 2])
        begin = resumed.epoch
        after = [
            train(resumed, epoch, ranks=ranks, workers=workers)
            for epoch in range(begin, 2)
        ]
        if begin == 0:
            assert not set(before) & set(after[0])
            after[0] |= before
        assert after == expected[begin:]


@pytest.mark.parametrize(
    ("epoch", "num_steps", "next_epoch"), [(4, 1000, 5), (0, 0, 0)]
)
def test_state_after_the_last_step_is_the_next_epoch(
    epoch, num_steps, next_epoch
):
    resumed = resumed_from(trained(num_steps, epoch))
    assert (resumed.epoch, resumed.step) == (next_epoch, 0)
    assert train(resumed, next_epoch) == train(epochs(), next_epoch)


def test_resume_applies_to_its_epoch_only_and_once():
    resumed = resumed_from(trained(2, epoch=1))
    assert train(resumed, 3) == train(epochs(), 3)
    resumed = resumed_from(trained(2))
    assert min(train(resumed)) == 2
    assert train(resumed) == train(epochs())


def test_steps_of_another_epoch_do_not_change_where_a_run_resumes():
    resumed = resumed_from(trained(4, epoch=2))
    train(resumed, 0, num_steps=1)
    assert min(train(resumed, 2)) == 4


@pytest.mark.parametrize("is_loaded", [False, True])
def test_workers_continue_an_epoch_with_its_partition(is_loaded):
    made = epochs(partition=EpochPartition(1, 2) if is_loaded else None)
    before = train(made, num_steps=3)
    if is_loaded:
        made = resumed_from(made)
    workers = 2 if is_loaded else 1
    after = train(made.for_workers(workers), workers=workers)
    assert before | after == train(partitioned(1, workers))
    assert len(before) == min(after) == 3


def test_workers_that_cannot_continue_an_epoch_can_train_the_next():
    workers = trained(3).for_workers(2)
    with pytest.raises(ClientError, match="finish it with those numbers, or"):
        train(workers, 0, workers=2)
    samples = train(workers, 1, workers=2)
    assert sum(map(len, samples.values())) == sum(SIZES)


def test_partition_that_workers_cannot_share_is_an_error_with_a_remedy():
    made = epochs(num_workers=3, partition=EpochPartition(1, 2))
    with pytest.raises(ClientError, match="1, 2; or give another partition"):
        share_of(made, reader=Reader((0,), 1, 0, 3))


def test_state_at_a_step_keeps_the_partition_of_the_resumed_run():
    made = trained(3)
    resumed = epochs().for_workers(2)
    resumed.load_state_dict(made.state_dict())
    share_of(resumed).delivered(3)
    state = resumed.state_at(0, 4, Reader(), drop_last=False)
    assert state == {**made.state_dict(), "step": 4} == resumed.state_dict()


def test_unused_or_older_loaders_do_not_change_the_state():
    made = trained(3)
    resumed = resumed_from(made)
    old = share_of(resumed)
    share_of(resumed)
    assert resumed.state_dict() == made.state_dict()
    later = {**made.state_dict(), "step": 7}
    resumed.load_state_dict(later)
    old.delivered(3)
    assert resumed.state_dict() == later
    assert min(train(resumed)) == 7


def test_ranks_that_do_not_fit_can_share_the_next_epoch_only():
    resumed = resumed_from(trained(2))
    message = "2 ranks cannot share 1 batch partitions"
    with pytest.raises(ClientError, match=message):
        share_of(resumed, reader=Reader((0,), 2))
    samples = train(resumed, 1, ranks=2)
    assert sum(map(len, samples.values())) == sum(SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "e" * 64}, "another data set"),
        ({"seed": 1}, "its seed is 1, this job's is 0"),
        ({"batch_size": 16}, "its batch_size is 16, this job's is 8"),
        ({"version": 1}, "its version is 1; this release reads 2"),
        ({"version": None}, "its version is None"),
        ({"step": -1}, "its step is -1"),
        ({"step": True}, "its step is True"),
        ({"epoch": "0"}, "its epoch is '0'"),
        ({"data": None}, "its data is None"),
        ({"drop_last": 0}, "its drop_last is 0"),
        ({"batch_partitions": 0}, "its batch_partitions is 0"),
        ({"step_partitions": 0}, "its step_partitions is 0"),
        ({"step_partitions": 10**13}, "too many partitions; at most 65536"),
        ({"buffer_spans": 0}, "its buffer_spans is 0"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_field(change, message):
    state = {**epochs().state_dict(), **change}
    with pytest.raises(ClientError, match=message) as caught:
        epochs().load_state_dict(state)
    assert caught.value.code == "bad_state"


def test_state_must_be_a_mapping_with_the_given_partition():
    with pytest.raises(ClientError, match="a list, not a mapping"):
        epochs().load_state_dict([])
    state = partitioned(2, 1).state_dict()
    with pytest.raises(ClientError, match="partitions is 2, this job's is 4"):
        partitioned(4, 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop_last": True}, "drop_last=True, but this loader has"),
        ({"step": 100}, "its step is 100, but an epoch has 10"),
    ],
)
def test_epoch_that_cannot_be_resumed_is_refused(change, message):
    resumed = epochs()
    resumed.load_state_dict({**resumed.state_dict(), "step": 2, **change})
    with pytest.raises(ClientError, match=message) as caught:
        share_of(resumed)
    assert caught.value.code == "bad_state"


def test_numbers_of_numpy_are_accepted_and_saved_as_json():
    made = epochs(seed=np.int64(3), batch_size=np.int32(8))
    share_of(made, np.int64(2)).delivered(0)
    resumed = epochs(seed=3)
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert (resumed.epoch, resumed.step) == (2, 1)
    state = made.state_at(np.int64(2), np.int64(1), Reader(), drop_last=False)
    assert json.loads(json.dumps(state)) == made.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epochs(batch_size=0), "batch_size is 0"),
        (lambda: epochs(buffer_spans=0), "buffer_spans is 0"),
        (lambda: epochs(batch_size=8.0), "batch_size is 8.0; give an integer"),
        (lambda: epochs(seed="7"), "seed is '7'; give an integer"),
        (lambda: share_of(epochs(), 0.5), r"epoch is 0\.5; give an integer"),
        (lambda: share_of(epochs(seed=-1)), "seed is -1"),
        (lambda: share_of(epochs(), -1), "epoch is -1"),
        (lambda: share_of(epochs([]), drop_last=True), "has no batch of 8"),
        (lambda: share_of(epochs([3, 4]), drop_last=True), "7 samples has no"),
        (lambda: state_at(-1), "step is -1, but the epoch has 10"),
        (lambda: state_at(11), "step is 11, but the epoch has 10"),
    ],
)
def test_impossible_option_epoch_or_step_is_refused(call, message):
    with pytest.raises(ClientError, match=message):
        call()


def test_evaluation_is_shared_by_any_number_of_ranks():
    made = epochs()
    samples = [
        sample
        for rank in range(4)
        for step in samples_of(
            made.evaluation(SIZES, Reader((rank,), 4), drop_last=False)
        ).values()
        for sample in step
    ]
    assert len(samples) == len(set(samples)) == sum(SIZES)


def test_state_has_everything_that_the_order_depends_on():
    """A field left out would be lost when training resumes."""
    fields = {"version", *DataState.__dataclass_fields__}
    assert set(epochs().state_dict()) == fields
