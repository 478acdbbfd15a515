"""Shares of the cache's memory."""

import pytest

from clock import Clock
from hapi_middleware.cache.buffer import (
    MIN_BYTES_PER_SECOND,
    SILENT_SECONDS,
    Buffer,
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def buffer(clock):
    return Buffer(100, clock)


def taken(buffer, account, num_bytes=10):
    """Reservations of an account until it gets no more."""
    found = []
    while (one := buffer.reservation(account)).grow(num_bytes):
        found.append(one)
    return found


def test_accounts_share_the_buffer(buffer):
    held = {name: taken(buffer, name) for name in "abcd"}
    assert [len(each) for each in held.values()] == [7, 2, 1, 0]
    for each in held["a"][1:]:
        each.free()
    assert buffer.used_bytes == 40
    assert len(taken(buffer, "e")) == 4


def test_single_entry_may_take_all_and_grow(buffer):
    one = buffer.reservation("a")
    assert all(one.grow(10) for _ in range(10))
    assert not one.grow(1)
    assert not buffer.reservation("b").grow(1)
    one.free()
    one.free()
    assert buffer.used_bytes == 0


def test_slow_reader_loses_its_memory_if_it_is_needed(buffer, clock):
    slow, quick, silent = (buffer.reservation(name) for name in "sqx")
    ended = []
    for each, size in ((slow, 30), (quick, 30), (silent, 30)):
        assert each.grow(size)

        def break_off(each=each):
            ended.append(each)
            each.free()

        each.begin_sending(break_off)
    silent.sent(100 * MIN_BYTES_PER_SECOND)
    for _ in range(10):
        clock.now += SILENT_SECONDS
        slow.sent(MIN_BYTES_PER_SECOND)
        quick.sent(int(SILENT_SECONDS) * MIN_BYTES_PER_SECOND)
    assert buffer.reservation("b").grow(10)
    assert ended == []
    assert buffer.reservation("b").grow(20)
    assert set(ended) == {slow, silent}
    assert not buffer.reservation("b").grow(100)
    assert quick.num_bytes == 30
