"""The order of an epoch: complete, deterministic, well mixed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_client.order import index_order, shuffled_order

SIZES = st.lists(st.integers(1, 70), min_size=0, max_size=30)
BATCH = st.integers(1, 50)


EXPECTED = [
    (0, 1), (1, 1), (0, 2), (2, 0), (2, 2), (1, 0), (0, 0), (2, 3), (2, 1)
]  # fmt: skip


def delivered(order):
    return [
        (order.spans[position], row)
        for batch in order.batches()
        for position, row in zip(
            batch.positions.tolist(), batch.rows.tolist(), strict=True
        )
    ]


def everything(sizes):
    return {(span, row) for span, n in enumerate(sizes) for row in range(n)}


@given(SIZES, BATCH, st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_each_sample_comes_exactly_once(sizes, batch, seed, epoch, buffer):
    order = shuffled_order(
        sizes, batch, seed=seed, epoch=epoch, buffer_spans=buffer
    )
    got = delivered(order)
    assert len(got) == sum(sizes)
    assert set(got) == everything(sizes)
    assert sorted(order.spans) == list(range(len(sizes)))


@given(SIZES, BATCH)
def test_index_order_is_the_order_of_the_index(sizes, batch):
    order = index_order(sizes, batch)
    assert delivered(order) == sorted(everything(sizes))


@given(SIZES, BATCH, st.integers(1, 6))
def test_no_more_samples_wait_than_the_buffer_holds(sizes, batch, buffer):
    order = shuffled_order(sizes, batch, seed=1, epoch=0, buffer_spans=buffer)
    fetched = 0
    opened = -1
    for num_delivered, position in enumerate(order.positions.tolist()):
        while opened < position:
            opened += 1
            fetched += sizes[order.spans[opened]]
        assert fetched - num_delivered <= buffer * max(sizes)


@pytest.mark.parametrize("change", ["seed", "epoch"])
def test_another_seed_or_epoch_gives_another_order(change):
    base = {"seed": 3, "epoch": 4}
    sizes = [20] * 10
    one = shuffled_order(sizes, 8, **base)
    other = shuffled_order(sizes, 8, **{**base, change: 9})
    assert delivered(one) != delivered(other)
    assert delivered(one) == delivered(shuffled_order(sizes, 8, **base))


def test_the_order_is_the_same_in_every_release():
    order = shuffled_order([3, 2, 4], 4, seed=7, epoch=2, buffer_spans=2)
    assert delivered(order) == EXPECTED


def test_a_batch_mixes_spans():
    order = shuffled_order([64] * 20, 32, seed=0, epoch=0)
    mixed = [len(set(b.positions.tolist())) for b in order.batches()]
    assert min(mixed) >= 4


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [4, 4, 2]), (True, [4, 4])]
)
def test_last_batch_is_short_or_dropped(drop_last, expected):
    orders = (
        index_order([7, 3], 4, drop_last=drop_last),
        shuffled_order([7, 3], 4, seed=0, epoch=0, drop_last=drop_last),
    )
    for order in orders:
        assert [len(batch) for batch in order.batches()] == expected
        assert order.num_batches == len(expected)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seed", {"seed": -1, "epoch": 0}),
        ("epoch", {"seed": 0, "epoch": -1}),
        ("buffer_spans", {"seed": 0, "epoch": 0, "buffer_spans": 0}),
    ],
)
def test_bad_arguments_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        shuffled_order([1], 1, **arguments)


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        index_order([1], 0)
