"""The limit of concurrent raw reads on simulated links."""

from contextlib import ExitStack

import pytest

from hapi_client.loading.read_concurrency import MAX_AGE_READS, ReadConcurrency

MAX_READS = 4
SPAN_BYTES = 1000


class World:
    """Reads over a link whose flows have a limit of their own.

    Args:
        link: bytes per second of all flows together.
        flow: maximum of one flow.
        between: seconds from the request of a span to its first byte.
    """

    def __init__(self, link, flow=1e9, between=0.0):
        self.link, self.flow, self.between = link, flow, between
        self.now = 0.0
        self.received = 0.0
        self.num_changes = 0
        self.limiter = ReadConcurrency(
            MAX_READS,
            lambda: int(self.received),
            self._changed,
            clock=lambda: self.now,
        )

    def _changed(self):
        self.num_changes += 1

    def read(self, max_reads=MAX_READS):
        """Reads as many spans at once as allowed; returns their number."""
        count = min(max_reads, self.limiter.limit)
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(self.limiter.reading(SPAN_BYTES))
            self.now += self.between
            rate = min(self.link, count * self.flow)
            self.now += count * SPAN_BYTES / rate
            self.received += count * SPAN_BYTES
        return count

    def read_in_turn(self, number):
        """Reads one span after the other.

        Each is requested during the last eighth of the one before it, which
        takes longer than ``between``.
        """
        before = ExitStack()
        for _ in range(number):
            read = ExitStack()
            ending = read.enter_context(self.limiter.reading(SPAN_BYTES))
            self._receive(SPAN_BYTES / 8)
            before.close()
            self._receive(SPAN_BYTES * 7 / 8)
            ending()
            before = read
        before.close()

    def read_all_at_once(self):
        """Reads spans that end shortly after one another."""
        rate = min(self.link, MAX_READS * self.flow)
        with ExitStack() as stack:
            ends = [
                stack.enter_context(self.limiter.reading(SPAN_BYTES))
                for _ in range(MAX_READS)
            ]
            self._receive(MAX_READS * SPAN_BYTES * 7 / 8, rate)
            for ending in ends:
                ending()
                self._receive(SPAN_BYTES / 8, rate)

    def _receive(self, num_bytes, rate=None):
        self.now += num_bytes / (rate or self.link)
        self.received += num_bytes

    def limits(self, number, max_reads=MAX_READS):
        return [self.read(max_reads) for _ in range(number)]


@pytest.mark.parametrize(
    ("link", "limits", "equivalent"),
    [
        ({"link": 500}, [1, 4, 1, 1, 1, 1], 4),
        ({"link": 3500}, [1, 1, 1, 1, 4, 1, 1, 1], 4),
        ({"link": 20_000}, [1, 4, 4, 4, 4], 1),
        ({"link": 2000, "flow": 500}, [1, 4, 2, 4, 4, 4, 4, 4, 4], 1),
        # Two hide the wait for the first byte.
        ({"link": 1000, "flow": 900, "between": 0.02}, [1, 4, *[2] * 5], 2),
    ],
    ids=[
        "one read saturates",
        "0.3 s a span",
        "short spans",
        "slow flows",
        "wait",
    ],
)
def test_limit_is_what_the_link_needs(link, limits, equivalent):
    world = World(**link)
    assert world.limits(len(limits)) == limits
    assert world.limiter.equivalent_reads == equivalent


def test_throughput_of_a_short_time_does_not_count():
    world = World(link=1500)
    assert world.limits(6) == [1, 1, 4, 1, 1, 1]


def test_two_reads_are_enough_to_find_that_one_suffices():
    """With few raw reads there are never more than two."""
    assert World(link=500).limits(5, max_reads=2) == [1, 2, 1, 1, 1]


def test_throughput_is_measured_again_after_some_reads():
    world = World(link=500)
    found = world.limits(MAX_AGE_READS + 10)
    assert found.count(4) == 2
    assert found[-1] == 1


@pytest.mark.parametrize(
    ("link", "change", "number", "last"),
    [
        (500, {"flow": 100}, 20, [4]),
        (500, {"link": 250}, 40, [1] * 10),
        (500, {"link": 100_000}, 25, [4] * 10),
        # A route of the network may be hundreds of times slower.
        (100_000, {"link": 500}, 50, [4, *[1] * 49]),
    ],
    ids=["slow flows", "slow link", "fast link", "much slower link"],
)
def test_limit_follows_a_link_that_changes(link, change, number, last):
    world = World(link)
    world.limits(10)
    vars(world).update(change)
    assert world.limits(number)[-len(last) :] == last


def test_decoding_does_not_delay_reads():
    world = World(link=500)
    world.limits(4)
    assert (world.limiter.limit, world.num_changes) == (1, 0)
    with world.limiter.decoding():
        assert (world.limiter.limit, world.num_changes) == (2, 1)
        with ExitStack() as stack:
            for _ in range(MAX_READS):
                stack.enter_context(world.limiter.decoding())
            assert world.limiter.limit == MAX_READS
    assert world.limiter.limit == 1


def test_nearly_complete_reads_do_not_delay_others():
    world = World(link=500)
    world.limits(4)
    with world.limiter.reading(SPAN_BYTES) as ending:
        assert (world.limiter.limit, world.num_changes) == (1, 0)
        ending()
        assert (world.limiter.limit, world.num_changes) == (2, 1)
        with world.limiter.reading(SPAN_BYTES):
            assert world.limiter.limit == 2
        assert world.limiter.limit == 2
    assert world.limiter.limit == 1


def test_ending_reads_count_as_concurrent():
    world = World(link=1000, flow=100)
    assert world.limits(4) == [1, 4, 2, 4]
    for _ in range(100):
        world.read_all_at_once()
    assert world.limiter.limit == MAX_READS


def test_limit_stays_after_one_fast_moment_of_many_reads():
    world = World(link=500)
    assert world.limits(3) == [1, 4, 1]
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(world.limiter.reading(SPAN_BYTES))
        world.now += 1.0
        world.received += 600
    assert world.limiter.limit == 1


def test_slow_first_read_does_not_decide():
    world = World(link=500, between=0.15)
    world.read()
    world.between = 0.0
    assert world.limits(100) == [4, *[1] * 99]


def test_wait_for_the_first_byte_is_hidden_by_an_early_request():
    world = World(link=500, between=0.15)
    assert world.limits(8) == [1, 4, 1, 1, 1, 2, 2, 2]
    world = World(link=500, between=0.15)
    world.read_in_turn(1)
    assert world.read() == MAX_READS
    world.read_in_turn(4)
    assert world.limiter.limit == 1


def test_failed_read_is_over():
    world = World(link=500)
    world.limits(4)
    with (
        pytest.raises(OSError, match="lost"),
        world.limiter.reading(SPAN_BYTES),
    ):
        raise OSError("lost")
    with pytest.raises(OSError, match="lost"):
        _lose_the_end(world.limiter)
    with pytest.raises(OSError, match="lost"), world.limiter.decoding():
        raise OSError("lost")
    assert world.limiter.limit == 1
    assert world.limits(2) == [1, 1]


def _lose_the_end(limiter):
    with limiter.reading(SPAN_BYTES) as ending:
        ending()
        raise OSError("lost")


def test_limit_is_one_with_one_thread():
    limiter = ReadConcurrency(1, lambda: 0)
    assert (limiter.limit, limiter.equivalent_reads) == (1, 1)
