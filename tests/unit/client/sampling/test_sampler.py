"""The order of an epoch: complete, deterministic, well mixed, shared."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_client.sampling.partition import EpochPartition, Reader, SpanSlice
from hapi_client.sampling.sampler import (
    SamplerConfig,
    index_order,
    shuffled_order,
)

SIZES = st.lists(st.integers(1, 70), min_size=0, max_size=30)
BATCH = st.integers(1, 50)
LANES = st.builds(EpochPartition, st.integers(1, 6), st.integers(1, 4))

EXPECTED = [
    (0, 1), (1, 1), (0, 2), (2, 0), (2, 2), (1, 0), (0, 0), (2, 3), (2, 1)
]  # fmt: skip
EXPECTED_OF_LANES = [
    [(0, 0), (2, 0), (0, 1), (2, 1)],
    [(0, 2), (2, 3), (1, 0), (2, 2), (1, 1)],
]


def rules(batch_size=8, parts=1, turns=1, **more):
    return SamplerConfig(batch_size, EpochPartition(parts, turns), **more)


def samples_of(reading):
    """Span and row of each sample, step by step."""
    return {
        batch.step: [
            (piece.span, piece.first + row)
            for piece, row in zip(
                (reading.pieces[p] for p in batch.positions.tolist()),
                batch.rows.tolist(),
                strict=True,
            )
        ]
        for batch in reading.batches
    }


def delivered(order):
    steps = samples_of(order.read_plan())
    assert list(steps) == list(range(order.num_steps))
    return [sample for samples in steps.values() for sample in samples]


def everything(sizes):
    return {(span, row) for span, n in enumerate(sizes) for row in range(n)}


def rows_read(reading):
    return Counter(
        (piece.span, row)
        for piece in reading.pieces
        for row in range(piece.first, piece.stop)
    )


@st.composite
def shared_epochs(draw):
    """An epoch, and numbers of ranks and workers that can share it."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    workers = draw(st.sampled_from([1, 2, 3]))
    lanes = EpochPartition(
        ranks * draw(st.integers(1, 3)), workers * draw(st.integers(1, 3))
    )
    batch = ranks * draw(st.integers(1, 9))
    made = SamplerConfig(
        batch, lanes, draw(st.integers(1, 9)), drop_last=draw(st.booleans())
    )
    order = shuffled_order(
        sizes,
        made,
        seed=draw(st.integers(0, 3)),
        epoch=draw(st.integers(0, 3)),
    )
    return sizes, order, ranks, workers


def all_readers(ranks, workers, first_step=0):
    return [
        Reader(rank, ranks, worker, workers, first_step)
        for rank in range(ranks)
        for worker in range(workers)
    ]


@given(SIZES, BATCH, LANES, st.integers(0, 5), st.integers(1, 9))
def test_each_sample_comes_exactly_once(sizes, batch, lanes, epoch, buffer):
    made = SamplerConfig(batch, lanes, buffer)
    order = shuffled_order(sizes, made, seed=1, epoch=epoch)
    got = delivered(order)
    assert len(got) == sum(sizes)
    assert set(got) == everything(sizes)


@given(SIZES, BATCH)
def test_index_order_is_the_order_of_the_index(sizes, batch):
    order = index_order(sizes, rules(batch))
    assert delivered(order) == sorted(everything(sizes))


@given(shared_epochs())
def test_set_of_a_step_does_not_depend_on_how_many_share_it(shared):
    sizes, order, ranks, workers = shared
    if order.num_steps and sum(sizes) < ranks:
        return
    alone = samples_of(order.read_plan())
    together = {step: [] for step in alone}
    for reader in all_readers(ranks, workers):
        for step, samples in samples_of(order.read_plan(reader)).items():
            together[step] += samples
    assert {s: sorted(each) for s, each in together.items()} == {
        s: sorted(each) for s, each in alone.items()
    }


@given(shared_epochs())
def test_readers_read_no_byte_twice_and_none_too_many(shared):
    sizes, order, ranks, workers = shared
    if order.num_steps and sum(sizes) < ranks:
        return
    read = Counter()
    for reader in all_readers(ranks, workers):
        read += rows_read(order.read_plan(reader))
    assert set(read.values()) <= {1}
    assert set(read) == set(delivered(order))


@given(shared_epochs())
def test_ranks_have_as_many_steps_and_none_of_them_is_empty(shared):
    sizes, order, ranks, _ = shared
    if order.num_steps and sum(sizes) < ranks:
        return
    readings = [order.read_plan(Reader(rank, ranks)) for rank in range(ranks)]
    size = order.rules.batch_size // ranks
    for reading in readings:
        assert [b.step for b in reading.batches] == list(
            range(order.num_steps)
        )
        sizes_of = [len(batch) for batch in reading.batches]
        assert all(each == size for each in sizes_of[:-1])
        assert all(0 < each < 2 * size + 1 for each in sizes_of[-1:])


@given(shared_epochs(), st.data())
def test_what_follows_a_step_is_what_was_left(shared, data):
    """Also where other numbers of ranks and workers go on."""
    sizes, order, ranks, workers = shared
    if order.num_steps and sum(sizes) < ranks:
        return
    alone = samples_of(order.read_plan())
    first = data.draw(st.integers(0, order.num_steps))
    got = {}
    for reader in all_readers(ranks, workers, first):
        for step, samples in samples_of(order.read_plan(reader)).items():
            got.setdefault(step, []).extend(samples)
    assert {s: sorted(each) for s, each in got.items()} == {
        s: sorted(each) for s, each in alone.items() if s >= first
    }


@given(shared_epochs())
def test_workers_take_turns_as_a_data_loader_asks_them(shared):
    _, order, _, workers = shared
    for first in (0, 1, 5):
        steps = [
            [
                batch.step
                for batch in order.read_plan(
                    Reader(0, 1, worker, workers, first)
                ).batches
            ]
            for worker in range(workers)
        ]
        turns = [s for each in zip_longest(steps) for s in each]
        assert turns == list(range(first, order.num_steps))


def zip_longest(lists):
    longest = max(map(len, lists), default=0)
    return [
        [each[turn] for each in lists if turn < len(each)]
        for turn in range(longest)
    ]


@given(SIZES, BATCH, LANES, st.integers(1, 9))
def test_no_more_samples_wait_than_lanes_and_buffer_hold(
    sizes, batch, lanes, buffer
):
    made = SamplerConfig(batch, lanes, buffer)
    reading = shuffled_order(sizes, made, seed=1, epoch=0).read_plan()
    most = max(1, buffer // lanes.batch_partitions) * lanes.batch_partitions * lanes.step_partitions
    fetched = num_delivered = 0
    opened = -1
    for each in reading.batches:
        for position in each.positions.tolist():
            while opened < position:
                opened += 1
                fetched += len(reading.pieces[opened])
            assert fetched - num_delivered <= most * max(sizes)
            num_delivered += 1


@given(SIZES, BATCH, LANES)
def test_few_spans_are_read_in_pieces(sizes, batch, lanes):
    order = shuffled_order(sizes, SamplerConfig(batch, lanes), seed=2, epoch=1)
    pieces = order.read_plan().pieces
    assert len(pieces) <= len(sizes) + lanes.batch_partitions * lanes.step_partitions - 1


def test_lanes_of_their_own_leave_spans_whole():
    pieces = shuffled_order([64] * 9, rules(32), seed=0, epoch=0).read_plan()
    assert sorted(pieces.pieces, key=lambda each: each.span) == [
        SpanSlice(span, 0, 64) for span in range(9)
    ]


@pytest.mark.parametrize("change", ["seed", "epoch"])
@pytest.mark.parametrize("lanes", [(1, 1), (4, 2)])
def test_another_seed_or_epoch_gives_another_order(change, lanes):
    base = {"seed": 3, "epoch": 4}
    sizes, made = [20] * 10, rules(8, *lanes)
    one = shuffled_order(sizes, made, **base)
    other = shuffled_order(sizes, made, **{**base, change: 9})
    assert delivered(one) != delivered(other)
    assert delivered(one) == delivered(shuffled_order(sizes, made, **base))


def test_the_order_is_the_same_in_every_release():
    made = rules(4, buffer_spans=2)
    order = shuffled_order([3, 2, 4], made, seed=7, epoch=2)
    assert delivered(order) == EXPECTED


def test_the_order_of_lanes_is_the_same_in_every_release():
    made = rules(4, 2, 2, buffer_spans=2)
    order = shuffled_order([3, 2, 4], made, seed=7, epoch=2)
    assert list(samples_of(order.read_plan()).values()) == EXPECTED_OF_LANES


@pytest.mark.parametrize("lanes", [(1, 1), (8, 1), (8, 4)])
def test_a_batch_mixes_spans(lanes):
    order = shuffled_order([64] * 300, rules(32, *lanes), seed=0, epoch=0)
    mixed = [len(set(b.positions.tolist())) for b in order.read_plan().batches]
    assert min(mixed) >= 4


@pytest.mark.parametrize("lanes", [(1, 1), (8, 1), (8, 4)])
def test_place_in_the_index_says_nothing_of_the_step(lanes):
    """Rank correlation, of 100 spans; three standard deviations."""
    sizes = [16] * 100
    order = shuffled_order(sizes, rules(16, *lanes), seed=5, epoch=0)
    places = [16 * span + row for span, row in delivered(order)]
    mean = (len(places) - 1) / 2
    covariance = sum(
        (when - mean) * (place - mean) for when, place in enumerate(places)
    )
    variance = sum((place - mean) ** 2 for place in places)
    assert abs(covariance / variance) < 3 / math.sqrt(100)


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [4, 4, 2]), (True, [4, 4])]
)
def test_last_batch_is_short_or_dropped(drop_last, expected):
    made = rules(4, drop_last=drop_last)
    orders = (
        index_order([7, 3], made),
        shuffled_order([7, 3], made, seed=0, epoch=0),
    )
    for order in orders:
        assert [len(b) for b in order.read_plan().batches] == expected
        assert order.num_steps == len(expected)


def test_what_is_dropped_is_not_read():
    made = rules(8, 2, 2, drop_last=True)
    reading = shuffled_order([5] * 5, made, seed=0, epoch=0).read_plan()
    assert sum(map(len, reading.pieces)) == 24


def test_rest_too_small_for_all_ranks_joins_the_last_batch():
    sizes = [17]
    assert [
        len(batch)
        for batch in index_order(sizes, rules(8, 4)).read_plan().batches
    ] == [8, 9]
    assert [
        len(batch)
        for batch in index_order([20], rules(8, 4)).read_plan().batches
    ] == [8, 8, 4]


@pytest.mark.parametrize(
    ("num_spans", "ranks", "workers", "expected"),
    [
        (3, 1, 1, (1, 1)),
        (63, 1, 1, (1, 1)),
        (64, 1, 1, (8, 1)),
        (64, 4, 1, (8, 1)),
        (64, 1, 2, (1, 2)),
        (128, 1, 2, (8, 2)),
        (10_000, 3, 1, (9, 1)),
        (10_000, 16, 4, (16, 4)),
        (5, 2, 3, (2, 3)),
    ],
)
def test_lanes_suit_data_set_and_readers(num_spans, ranks, workers, expected):
    assert EpochPartition.suited(num_spans, ranks, workers) == EpochPartition(
        *expected
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seed", {"seed": -1, "epoch": 0}),
        ("epoch", {"seed": 0, "epoch": -1}),
    ],
)
def test_bad_arguments_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        shuffled_order([1], rules(1), **arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rules(0), "batch_size is 0; at least 1"),
        (lambda: rules(1, buffer_spans=0), "buffer_spans is 0"),
        (lambda: EpochPartition(0, 1), "parts is 0"),
        (lambda: EpochPartition(1, 0), "turns is 0"),
    ],
)
def test_bad_rules_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (
            Reader(0, 3),
            "3 ranks cannot share 8 parts of a batch; allowed: 1, 2, 4, 8",
        ),
        (
            Reader(0, 1, 0, 3),
            "3 loader workers cannot share 4 turns; allowed: 1, 2, 4",
        ),
        (
            Reader(0, 8),
            "a batch of 12 samples cannot be shared equally by 8 ranks; "
            "allowed: 1, 2, 3, 4, 6, 12",
        ),
        (Reader(2, 2), "rank is 2; 0 to 1"),
        (Reader(0, 1, -1, 2), "worker is -1; 0 to 1"),
        (Reader(0, 0), "num_ranks is 0; at least 1"),
        (Reader(first_step=-1), "first_step is -1; at least 0"),
    ],
)
def test_readers_that_cannot_share_are_told_who_can(reader, words):
    order = shuffled_order([50], rules(12, 8, 4), seed=0, epoch=0)
    with pytest.raises(ValueError, match=f"^{words}$"):
        order.read_plan(reader)


def test_too_few_samples_for_the_ranks_are_an_error_of_every_rank():
    order = index_order([1, 2], rules(4, 4))
    for rank in range(4):
        with pytest.raises(ValueError, match="3 samples are too few for 4"):
            order.read_plan(Reader(rank, 4))
