"""Plain reads at a time: few where they carry as much as many."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from hapi_client.loading.read_concurrency import MAX_AGE_READS, ReadConcurrency

MOST = 4
SPAN_BYTES = 1000


class World:
    """Reads over a link, each flow of which has a most of its own.

    Args:
        link: bytes per second of all flows together.
        flow: of one, at most.
        between: seconds from asking for a span to its first byte.
    """

    def __init__(
        self, link: float, flow: float = 1e9, between: float = 0.0
    ) -> None:
        self.link, self.flow, self.between = link, flow, between
        self.now = 0.0
        self.received = 0.0
        self.num_changes = 0
        self.limiter = ReadConcurrency(
            MOST, lambda: int(self.received), self._changed, clock=self._clock
        )

    def _clock(self) -> float:
        return self.now

    def _changed(self) -> None:
        self.num_changes += 1

    def read(self, most: int = MOST) -> int:
        """As many spans side by side as there may be; their number."""
        count = min(most, self.limiter.limit)
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(self.limiter.reading(SPAN_BYTES))
            self.now += self.between
            rate = min(self.link, count * self.flow)
            self.now += count * SPAN_BYTES / rate
            self.received += count * SPAN_BYTES
        return count

    def read_in_turn(self, number: int) -> None:
        """One span after the other, each asked for while the last eighth of
        another one comes, which takes longer than ``between``."""
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

    def read_all_at_once(self) -> None:
        """Spans that end one shortly after the other; none takes a place."""
        rate = min(self.link, MOST * self.flow)
        with ExitStack() as stack:
            ends = [
                stack.enter_context(self.limiter.reading(SPAN_BYTES))
                for _ in range(MOST)
            ]
            self._receive(MOST * SPAN_BYTES * 7 / 8, rate)
            for ending in ends:
                ending()
                self._receive(SPAN_BYTES / 8, rate)

    def _receive(self, num_bytes: float, rate: float | None = None) -> None:
        self.now += num_bytes / (rate or self.link)
        self.received += num_bytes

    def limits(self, number: int, most: int = MOST) -> list[int]:
        return [self.read(most) for _ in range(number)]


def test_one_read_at_a_time_is_enough_for_a_link_that_it_fills() -> None:
    world = World(link=500)
    assert world.limits(6) == [1, 4, 1, 1, 1, 1]
    assert world.limiter.equivalent_reads == 4


def test_a_link_that_carries_spans_fast_has_all_reads_it_may() -> None:
    world = World(link=5000)
    assert world.limits(5) == [1, 4, 4, 4, 4]
    assert world.limiter.equivalent_reads == 1


def test_flows_that_are_slow_by_themselves_go_side_by_side() -> None:
    world = World(link=2000, flow=500)
    assert world.limits(9) == [1, 4, 2, 4, 4, 4, 4, 4, 4]
    assert world.limiter.equivalent_reads == 1


def test_two_reads_hide_what_is_waited_for_before_the_first_byte() -> None:
    world = World(link=1000, flow=900, between=0.02)
    assert world.limits(7) == [1, 4, 2, 2, 2, 2, 2]
    assert world.limiter.equivalent_reads == 2


def test_a_rate_of_little_time_is_not_believed() -> None:
    world = World(link=1500)
    assert world.limits(6) == [1, 1, 4, 1, 1, 1]


def test_two_that_carry_as_much_as_one_tell_that_it_is_enough() -> None:
    """Where there are never more: a mix that streams little."""
    assert World(link=500).limits(5, most=2) == [1, 2, 1, 1, 1]


def test_what_was_found_is_looked_at_again_in_time() -> None:
    world = World(link=500)
    found = world.limits(MAX_AGE_READS + 10)
    assert found.count(4) == 2
    assert found[-1] == 1


def test_a_flow_that_has_become_slow_gets_others_beside_it() -> None:
    world = World(link=500)
    world.limits(10)
    world.flow = 100
    assert world.limits(20)[-1] == 4


def test_a_link_that_has_become_slow_still_has_one_read_at_a_time() -> None:
    world = World(link=500)
    world.limits(10)
    world.link = 250
    assert world.limits(40)[-10:] == [1] * 10


def test_a_link_that_was_fast_tells_nothing_of_a_slow_one() -> None:
    """As when a cable was pulled and another way is taken, which is slower
    by a factor of hundreds."""
    world = World(link=100_000)
    assert world.limits(50)[1:] == [MOST] * 49
    world.link = 500
    assert world.limits(50) == [4, *[1] * 49]


def test_a_link_that_has_become_fast_has_all_reads_again() -> None:
    world = World(link=500)
    world.limits(10)
    world.link = 100_000
    assert world.limits(20)[-10:] == [MOST] * 10


def test_spans_that_are_decoded_keep_no_read_waiting() -> None:
    world = World(link=500)
    world.limits(4)
    assert (world.limiter.limit, world.num_changes) == (1, 0)
    with world.limiter.decoding():
        assert (world.limiter.limit, world.num_changes) == (2, 1)
        with ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(world.limiter.decoding())
            assert world.limiter.limit == MOST
    assert world.limiter.limit == 1


def test_spans_that_have_nearly_been_read_keep_no_read_waiting() -> None:
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


def test_reads_that_are_ending_are_not_taken_for_fewer() -> None:
    world = World(link=1000, flow=100)
    assert world.limits(4) == [1, 4, 2, 4]
    for _ in range(100):
        world.read_all_at_once()
    assert world.limiter.limit == MOST


def test_a_lucky_moment_of_many_reads_is_no_reason_for_them() -> None:
    world = World(link=500)
    assert world.limits(3) == [1, 4, 1]
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(world.limiter.reading(SPAN_BYTES))
        world.now += 1.0
        world.received += 600
    assert world.limiter.limit == 1


def test_a_slow_first_read_is_not_all_that_is_known_of_one() -> None:
    world = World(link=500, between=0.15)
    world.read()
    world.between = 0.0
    assert world.limits(100) == [4, *[1] * 99]


def test_the_pause_before_a_first_byte_is_none_if_it_is_asked_for() -> None:
    """In time: one read at a time then carries as much as many do."""
    world = World(link=500, between=0.15)
    assert world.limits(8) == [1, 4, 1, 1, 1, 2, 2, 2]
    world = World(link=500, between=0.15)
    world.read_in_turn(1)
    assert world.read() == MOST
    world.read_in_turn(4)
    assert world.limiter.limit == 1


def test_a_read_that_fails_is_over() -> None:
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


def _lose_the_end(limiter: ReadConcurrency) -> None:
    with limiter.reading(SPAN_BYTES) as ending:
        ending()
        raise OSError("lost")


def test_one_thread_reads_one_at_a_time() -> None:
    limiter = ReadConcurrency(1, lambda: 0)
    assert (limiter.limit, limiter.equivalent_reads) == (1, 1)
