"""Where training stands, and how it goes on: nothing lost, nothing twice."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from hapi_client.sampling.epochs import EpochOptions, Epochs
from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.sampler_state import DataState
from hapi_protocol.errors import ClientError

SIZES = [7, 16, 3, 16, 11, 16, 9]
DATA = "d" * 64


def epochs(sizes=SIZES, data=DATA, **options):
    return Epochs(sizes, data, EpochOptions(**{"batch_size": 8, **options}))


def samples_of(share):
    return {
        batch.step: sorted(
            (piece.span, piece.first + row)
            for piece, row in zip(
                (share.read_plan.pieces[p] for p in batch.positions.tolist()),
                batch.rows.tolist(),
                strict=True,
            )
        )
        for batch in share.read_plan.batches
    }


def train(made, epoch, most=1000, ranks=1, workers=1, **options):
    """Trains up to ``most`` steps of an epoch; the samples of each."""
    options = {"drop_last": False, **options}
    shares = [
        made.training(epoch, Reader(rank, ranks, worker, workers), **options)
        for rank in range(ranks)
        for worker in range(workers)
    ]
    taken = {}
    for share in shares:
        for step, samples in samples_of(share).items():
            taken.setdefault(step, []).extend(samples)
    done = {}
    for step in sorted(taken)[:most]:
        done[step] = sorted(taken[step])
        shares[0].delivered(step)
    return done


def test_state_is_small_and_survives_json():
    made = epochs()
    train(made, 0, most=3)
    text = json.dumps(made.state_dict())
    assert len(text) < 300
    other = epochs()
    other.load_state_dict(json.loads(text))
    assert other.state_dict() == made.state_dict()
    assert (other.epoch, other.step) == (0, 3)


def test_two_hundred_kills_lose_and_double_nothing():
    whole = [
        train(epochs(partition=EpochPartition(4, 2)), epoch) for epoch in range(2)
    ]
    dice = random.Random(7)
    for _ in range(200):
        first = dice.randrange(len(whole[0]) + 1)
        ranks, workers = dice.choice([1, 2, 4]), dice.choice([1, 2])
        killed = epochs(partition=EpochPartition(4, 2))
        got = train(killed, 0, first, ranks, workers)
        resumed = epochs()
        resumed.load_state_dict(killed.state_dict())
        ranks, workers = dice.choice([1, 2, 4]), dice.choice([1, 2])
        begin = resumed.epoch
        rest = [
            train(resumed, epoch, ranks=ranks, workers=workers)
            for epoch in range(begin, 2)
        ]
        if begin == 0:
            assert not set(got) & set(rest[0])
            rest[0] |= got
        assert rest == whole[begin:]


def test_behind_the_last_step_it_is_the_next_epoch():
    made = epochs()
    train(made, 4)
    state = made.state_dict()
    assert (state["epoch"], state["step"]) == (5, 0)
    resumed = epochs()
    resumed.load_state_dict(state)
    assert resumed.epoch == 5
    assert train(resumed, 5) == train(epochs(), 5)


def test_before_the_first_step_it_is_the_beginning():
    state = epochs().state_dict()
    assert (state["epoch"], state["step"]) == (0, 0)
    resumed = epochs()
    resumed.load_state_dict(state)
    assert train(resumed, 0) == train(epochs(), 0)


def test_other_epochs_than_that_of_the_state_begin_at_their_beginning():
    made = epochs()
    train(made, 1, most=2)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    assert train(resumed, 3) == train(epochs(), 3)


def test_an_epoch_that_was_gone_on_with_can_be_trained_again_as_a_whole():
    made = epochs()
    train(made, 0, most=2)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    assert min(train(resumed, 0)) == 2
    assert train(resumed, 0) == train(epochs(), 0)


def test_look_at_another_epoch_forgets_nothing_that_was_loaded():
    made = epochs()
    train(made, 2, most=4)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    train(resumed, 0, most=1)
    assert min(train(resumed, 2)) == 4


@pytest.mark.parametrize("own", [True, False])
def test_workers_go_on_with_an_epoch_that_the_job_has_begun(own):
    """With its lanes, whether the job has trained or only loaded."""
    made = epochs(partition=None if own else EpochPartition(1, 2))
    got = train(made, 0, most=3)
    if not own:
        state = made.state_dict()
        made = epochs()
        made.load_state_dict(state)
    workers = 1 if own else 2
    rest = train(made.for_workers(workers), 0, workers=workers)
    assert got | rest == train(epochs(partition=EpochPartition(1, workers)), 0)
    assert len(got) == min(rest) == 3


def test_workers_that_cannot_go_on_with_an_epoch_are_told_what_can_be_done():
    made = epochs()
    train(made, 0, most=3)
    workers = made.for_workers(2)
    with pytest.raises(ClientError, match="end it with such numbers, or"):
        train(workers, 0, workers=2)
    got = train(workers, 1, workers=2)
    assert sum(map(len, got.values())) == sum(SIZES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"allowed: 1; use job\.dataset\(num_workers=3\)"),
        (
            {"num_workers": 3, "partition": EpochPartition(1, 2)},
            "1, 2; or give other lanes",
        ),
    ],
)
def test_workers_that_nobody_told_of_learn_the_remedy(options, words):
    with pytest.raises(ClientError, match=words):
        epochs(**options).training(0, Reader(0, 1, 0, 3), drop_last=False)


def test_state_at_a_step_has_the_lanes_of_the_pass_that_goes_on():
    made = epochs()
    train(made, 0, most=3)
    resumed = epochs().for_workers(2)
    resumed.load_state_dict(made.state_dict())
    share = resumed.training(0, Reader(), drop_last=False)
    share.delivered(3)
    at = resumed.state_at(0, 4, Reader(), drop_last=False)
    assert at == {**made.state_dict(), "step": 4} == resumed.state_dict()


def test_loader_from_before_another_state_was_loaded_does_not_undo_it():
    made = epochs()
    train(made, 0, most=3)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    old = resumed.training(0, Reader(), drop_last=False)
    later = {**made.state_dict(), "step": 7}
    resumed.load_state_dict(later)
    old.delivered(3)
    assert resumed.state_dict() == later
    assert min(train(resumed, 0)) == 7


def test_loader_that_nobody_used_leaves_the_state_alone():
    made = epochs()
    train(made, 0, most=2)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    for _ in range(2):
        resumed.training(0, Reader(), drop_last=False)
    assert resumed.state_dict() == made.state_dict()


def test_ranks_that_cannot_share_an_epoch_that_has_begun_are_told_who_can():
    made = epochs()
    train(made, 0, most=2)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    with pytest.raises(ClientError, match="2 ranks cannot share 1 parts"):
        resumed.training(0, Reader(0, 2), drop_last=False)


def test_other_ranks_may_share_the_next_epoch():
    made = epochs()
    train(made, 0)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    got = train(resumed, 1, ranks=2)
    assert sum(map(len, got.values())) == sum(SIZES)


def test_lanes_of_the_state_are_kept_while_they_can_be():
    made = epochs(partition=EpochPartition(4, 2))
    train(made, 0)
    resumed = epochs()
    resumed.load_state_dict(made.state_dict())
    assert train(resumed, 1) == train(epochs(partition=EpochPartition(4, 2)), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "e" * 64}, "another data set"),
        ({"seed": 1}, "its seed is 1, and this job's 0"),
        ({"batch_size": 16}, "its batch_size is 16, and this job's 8"),
        ({"version": 2}, "its version is 2; this release reads 1"),
        ({"version": None}, "its version is None"),
        ({"step": -1}, "its step is -1"),
        ({"step": True}, "its step is True"),
        ({"epoch": "0"}, "its epoch is '0'"),
        ({"data": None}, "its data is None"),
        ({"drop_last": 0}, "its drop_last is 0"),
        ({"parts": 0}, "its parts is 0"),
        ({"turns": 0}, "its turns is 0"),
        ({"turns": 10**13}, "too many lanes; at most 65536"),
        ({"buffer_spans": 0}, "its buffer_spans is 0"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(change, words):
    state = {**epochs().state_dict(), **change}
    with pytest.raises(ClientError, match=words) as caught:
        epochs().load_state_dict(state)
    assert caught.value.code == "bad_state"


def test_what_is_no_state_is_refused():
    with pytest.raises(ClientError, match="a list, not a mapping"):
        epochs().load_state_dict([])


def test_lanes_that_the_user_gave_have_to_be_those_of_the_state():
    made = epochs(partition=EpochPartition(2, 1))
    with pytest.raises(ClientError, match="its parts is 2, and this job's 4"):
        epochs(partition=EpochPartition(4, 1)).load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop_last": True}, "drop_last=True, and this loader has"),
        ({"step": 100}, "its step is 100, of an epoch of 10"),
    ],
)
def test_epoch_that_cannot_be_gone_on_with_is_an_error(change, words):
    resumed = epochs()
    state = {**resumed.state_dict(), "step": 2, **change}
    resumed.load_state_dict(state)
    with pytest.raises(ClientError, match=words) as caught:
        resumed.training(0, Reader(), drop_last=False)
    assert caught.value.code == "bad_state"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"buffer_spans": 0}, "buffer_spans is 0"),
        ({"batch_size": 8.0}, "batch_size is 8.0; a whole number"),
        ({"seed": "7"}, "seed is '7'; a whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(ClientError, match=words):
        epochs(**options)


def test_state_with_numpys_numbers_is_fit_for_json():
    made = epochs(seed=np.int64(3), batch_size=np.int32(8))
    share = made.training(np.int64(2), Reader(), drop_last=False)
    share.delivered(0)
    resumed = epochs(seed=3)
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert (resumed.epoch, resumed.step) == (2, 1)
    at = made.state_at(np.int64(2), np.int64(1), Reader(), drop_last=False)
    assert json.loads(json.dumps(at)) == made.state_dict()
    with pytest.raises(ClientError, match=r"epoch is 0\.5; a whole number"):
        made.training(0.5, Reader(), drop_last=False)


@pytest.mark.parametrize("step", [-1, 11])
def test_state_of_a_step_that_there_is_not_is_an_error(step):
    with pytest.raises(ClientError, match=f"step is {step}, of an epoch of"):
        epochs().state_at(0, step, Reader(), drop_last=False)


@pytest.mark.parametrize("sizes", [[], [3, 4]])
def test_epoch_without_a_step_is_an_error(sizes):
    with pytest.raises(ClientError, match=r"of . samples has no batch of 8"):
        epochs(sizes).training(0, Reader(), drop_last=True)


def test_negative_seed_is_refused():
    with pytest.raises(ClientError, match="seed is -1"):
        epochs(seed=-1).training(0, Reader(), drop_last=False)


def test_evaluation_is_shared_by_any_number_of_ranks():
    made = epochs()
    got = {}
    for rank in range(4):
        share = made.evaluation(SIZES, Reader(rank, 4), drop_last=False)
        for step, samples in samples_of(share).items():
            got.setdefault(step, []).extend(samples)
    everything = [s for samples in got.values() for s in samples]
    assert len(everything) == len(set(everything)) == sum(SIZES)


def test_state_knows_all_that_the_order_depends_on():
    """A field that were left out would be lost when training goes on."""
    assert set(epochs().state_dict()) == {
        "version", *DataState.__dataclass_fields__
    }  # fmt: skip
