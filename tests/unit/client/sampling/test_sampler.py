"""Order of an epoch: complete, deterministic, well shuffled, shareable."""

import math
from collections import Counter
from itertools import chain, product, zip_longest

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.sampler import (
    SamplerConfig,
    index_order,
    shuffled_order,
)
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import ClientError

SIZES = st.lists(st.integers(1, 70), min_size=0, max_size=30)
BATCH = st.integers(1, 50)
PARTITIONS = st.builds(EpochPartition, st.integers(1, 6), st.integers(1, 4))


def config(batch_size=8, *numbers, **options):
    return SamplerConfig(batch_size, EpochPartition(*numbers), **options)


def samples_of(plan):
    """Maps each step to the span and row of its samples."""
    return {
        batch.step: [
            (piece.span, piece.first + row)
            for piece, row in zip(
                (plan.pieces[p] for p in batch.positions.tolist()),
                batch.rows.tolist(),
                strict=True,
            )
        ]
        for batch in plan.batches
    }


def delivered(order):
    steps = samples_of(order.read_plan())
    assert list(steps) == list(range(order.num_steps))
    return [sample for samples in steps.values() for sample in samples]


def everything(sizes):
    return {(span, row) for span, n in enumerate(sizes) for row in range(n)}


def rows_read(plan):
    return Counter(
        (piece.span, row)
        for piece in plan.pieces
        for row in range(piece.first, piece.stop)
    )


@st.composite
def shared_epochs(draw):
    """Draws an epoch, and numbers of ranks and workers that can share it."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    workers = draw(st.sampled_from([1, 2, 3]))
    assume(sum(sizes) >= ranks)
    partition = EpochPartition(
        ranks * draw(st.integers(1, 3)), workers * draw(st.integers(1, 3))
    )
    batch = ranks * draw(st.integers(1, 9))
    settings = SamplerConfig(
        batch,
        partition,
        draw(st.integers(1, 9)),
        drop_last=draw(st.booleans()),
    )
    order = shuffled_order(
        sizes,
        settings,
        seed=draw(st.integers(0, 3)),
        epoch=draw(st.integers(0, 3)),
    )
    return order, ranks, workers


@given(SIZES, BATCH, PARTITIONS, st.integers(0, 5), st.integers(1, 9))
def test_epoch_is_complete_in_few_pieces_and_bounded_memory(
    sizes, batch, partition, epoch, buffer
):
    settings = SamplerConfig(batch, partition, buffer)
    order = shuffled_order(sizes, settings, seed=1, epoch=epoch)
    got = delivered(order)
    assert len(got) == sum(sizes)
    assert set(got) == everything(sizes)
    plan = order.read_plan()
    assert len(plan.pieces) <= len(sizes) + partition.num_partitions - 1
    width = max(1, buffer // partition.batch_partitions)
    max_waiting = width * partition.num_partitions * max(sizes, default=0)
    fetched = num_delivered = 0
    opened = -1
    for batch in plan.batches:
        for position in batch.positions.tolist():
            while opened < position:
                opened += 1
                fetched += len(plan.pieces[opened])
            assert fetched - num_delivered <= max_waiting
            num_delivered += 1


@given(SIZES, BATCH)
def test_index_order_is_that_of_the_index(sizes, batch):
    order = index_order(sizes, config(batch))
    assert delivered(order) == sorted(everything(sizes))


@given(shared_epochs())
def test_all_ranks_have_every_step_with_equal_batches(shared):
    order, ranks, _ = shared
    plans = [order.read_plan(Reader((rank,), ranks)) for rank in range(ranks)]
    size = order.config.batch_size // ranks
    for plan in plans:
        assert [b.step for b in plan.batches] == list(range(order.num_steps))
        sizes_of = [len(batch) for batch in plan.batches]
        assert all(count == size for count in sizes_of[:-1])
        assert all(0 < count < 2 * size + 1 for count in sizes_of[-1:])


@given(shared_epochs(), st.data())
def test_readers_share_the_samples_of_each_step_and_resume(shared, data):
    order, ranks, workers = shared
    first = data.draw(st.just(0) | st.integers(0, order.num_steps))
    read = Counter()
    together = {}
    for worker, rank in product(range(workers), range(ranks)):
        read += rows_read(
            order.read_plan(Reader((rank,), ranks, worker, workers))
        )
        plan = order.read_plan(Reader((rank,), ranks, worker, workers, first))
        for step, samples in samples_of(plan).items():
            together.setdefault(step, []).extend(samples)
    assert set(read.values()) <= {1}
    assert set(read) == set(delivered(order))
    alone = samples_of(order.read_plan())
    assert {step: sorted(samples) for step, samples in together.items()} == {
        step: sorted(samples)
        for step, samples in alone.items()
        if step >= first
    }


@given(shared_epochs(), st.data())
def test_reader_of_several_ranks_has_the_samples_of_each(shared, data):
    order, ranks, _ = shared
    mine = data.draw(st.permutations(range(ranks)))
    mine = tuple(mine[: data.draw(st.integers(1, ranks))])
    plan = order.read_plan(Reader(mine, ranks))
    alone = [order.read_plan(Reader((rank,), ranks)) for rank in mine]
    for number, batch in enumerate(plan.batches):
        parts = [share.batches[number] for share in alone]
        assert batch.sizes == tuple(len(part) for part in parts)
    single = [samples_of(share) for share in alone]
    for step, samples in samples_of(plan).items():
        assert samples == [s for of_rank in single for s in of_rank[step]]
    slices = [piece for share in alone for piece in share.pieces]
    assert Counter(plan.pieces) == Counter(slices)


@given(shared_epochs())
def test_workers_alternate_as_in_a_data_loader(shared):
    order, _, workers = shared
    for first in (0, 1, 5):
        readers = [Reader((0,), 1, n, workers, first) for n in range(workers)]
        steps = [
            [batch.step for batch in order.read_plan(reader).batches]
            for reader in readers
        ]
        turns = chain.from_iterable(zip_longest(*steps))
        alternating = [step for step in turns if step is not None]
        assert alternating == list(range(first, order.num_steps))


@pytest.mark.parametrize("change", ["seed", "epoch"])
@pytest.mark.parametrize("partition", [(1, 1), (4, 2)])
def test_another_seed_or_epoch_gives_another_order(change, partition):
    base = {"seed": 3, "epoch": 4}
    sizes, settings = [20] * 10, config(8, *partition)
    one = shuffled_order(sizes, settings, **base)
    other = shuffled_order(sizes, settings, **{**base, change: 9})
    assert delivered(one) != delivered(other)
    assert delivered(one) == delivered(shuffled_order(sizes, settings, **base))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ((1, 1), [[(0, 0), (0, 2), (0, 1), (1, 0)],
                  [(1, 1), (2, 0), (2, 3), (2, 2)],
                  [(2, 1)]]),
        ((2, 2), [[(0, 0), (2, 0), (0, 1), (2, 1)],
                  [(0, 2), (2, 3), (1, 0), (2, 2), (1, 1)]]),
    ],
)  # fmt: skip
def test_order_is_the_same_in_every_release(partition, expected):
    settings = config(4, *partition, buffer_spans=2)
    order = shuffled_order([3, 2, 4], settings, seed=7, epoch=2)
    assert list(samples_of(order.read_plan()).values()) == expected


@pytest.mark.parametrize("partition", [(1, 1), (8, 1), (8, 4)])
def test_order_is_well_shuffled(partition):
    order = shuffled_order([64] * 300, config(32, *partition), seed=0, epoch=0)
    mixed = [len(set(b.positions.tolist())) for b in order.read_plan().batches]
    # Once the buffer has grown.
    assert min(mixed[32:]) >= 4

    # The rank correlation of index and step of 100 spans is below three
    # deviations.
    sizes = [16] * 100
    order = shuffled_order(sizes, config(16, *partition), seed=5, epoch=0)
    places = [16 * span + row for span, row in delivered(order)]
    mean = (len(places) - 1) / 2
    covariance = sum(
        (when - mean) * (place - mean) for when, place in enumerate(places)
    )
    variance = sum((place - mean) ** 2 for place in places)
    assert abs(covariance / variance) < 3 / math.sqrt(100)


@pytest.mark.parametrize(
    ("num_samples", "batch_size"), [(100, 8), (250, 32), (500, 32), (2500, 64)]
)
def test_first_batch_waits_for_few_samples(num_samples, batch_size):
    rows = tuple(IndexRow(i, str(i), i, 1, 0) for i in range(num_samples))
    spans = DataIndex((ShardIndex("a.tar", "etag", rows),)).spans()
    sizes = [len(span.rows) for span in spans]
    order = shuffled_order(sizes, config(batch_size), seed=0, epoch=0)
    plan = order.read_plan()
    needed = plan.pieces[: plan.batches[0].last_position + 1]
    assert sum(map(len, needed)) <= 0.15 * num_samples


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [4, 4, 2]), (True, [4, 4])]
)
def test_last_batch_is_short_or_dropped(drop_last, expected):
    settings = config(4, drop_last=drop_last)
    orders = (
        index_order([7, 3], settings),
        shuffled_order([7, 3], settings, seed=0, epoch=0),
    )
    for order in orders:
        assert [len(b) for b in order.read_plan().batches] == expected
        assert order.num_steps == len(expected)


def test_remainder_too_small_for_all_ranks_joins_the_last_batch():
    for size, expected in ((17, [8, 9]), (20, [8, 8, 4])):
        plan = index_order([size], config(8, 4)).read_plan()
        assert [len(batch) for batch in plan.batches] == expected


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
def test_default_partition_suits_data_set_and_readers(
    num_spans, ranks, workers, expected
):
    assert EpochPartition.suited(num_spans, ranks, workers) == EpochPartition(
        *expected
    )


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_partition_of_nothing_is_refused(numbers):
    with pytest.raises(ClientError, match="_partitions is 0; give an integer"):
        EpochPartition(*numbers)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (
            Reader((0,), 3),
            "3 ranks cannot share 8 batch partitions; allowed: 1, 2, 4, 8",
        ),
        (
            Reader((0,), 1, 0, 3),
            "3 loader workers cannot share 4 step partitions; "
            "allowed: 1, 2, 4",
        ),
        (
            Reader((0,), 8),
            "a batch of 12 samples cannot be divided among 8 ranks; "
            "allowed: 1, 2, 3, 4, 6, 12",
        ),
        (
            Reader((0, 3), 16, unit="virtual nodes"),
            "16 virtual nodes cannot share 8 batch partitions",
        ),
        (Reader((2,), 2), "rank is 2; 0 to 1"),
        (Reader((0,), 1, -1, 2), "worker is -1; 0 to 1"),
        (Reader((0,), 0), "num_ranks is 0; give an integer, at least 1"),
        (
            Reader(first_step=-1),
            "first_step is -1; give an integer, at least 0",
        ),
    ],
)
def test_readers_that_cannot_share_are_refused_with_allowed_numbers(
    reader, message
):
    order = shuffled_order([50], config(12, 8, 4), seed=0, epoch=0)
    with pytest.raises(ClientError, match=f"^{message}"):
        order.read_plan(reader)


def test_too_few_samples_are_refused_by_every_rank():
    order = index_order([1, 2], config(4, 4))
    for rank in range(4):
        with pytest.raises(ClientError, match="3 samples are too few for 4"):
            order.read_plan(Reader((rank,), 4))
