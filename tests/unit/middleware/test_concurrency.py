"""Green threads: results in order, and none left behind."""

from __future__ import annotations

import gc
import weakref

import eventlet
import pytest

from hapi_middleware.concurrency import map_ahead


def test_results_are_in_order_and_limited_in_number():
    held = max_held = 0

    def work(number):
        nonlocal held, max_held
        held += 1
        max_held = max(max_held, held)
        eventlet.sleep(0.003 * (3 - number % 3))
        return number

    results = []
    for number in map_ahead(work, range(10), 4):
        results.append(number)
        eventlet.sleep(0.02)
        held -= 1

    assert results == list(range(10))
    assert max_held == 4


def test_failure_of_one_item_ends_the_others():
    ended = []

    def work(number):
        try:
            if number == 0:
                raise ValueError("no")
            eventlet.sleep(30)
        finally:
            ended.append(number)
        return number

    with pytest.raises(ValueError, match="no"):
        list(map_ahead(work, range(10), 3))
    # A thread that has not started never runs.
    assert ended == [0] or sorted(ended) == [0, 1, 2]


def test_all_items_end_if_their_reader_is_killed_meanwhile():
    ended: list[int] = []

    def work(number):
        try:
            eventlet.sleep(30 if number else 0)
        finally:
            ended.append(number)
            if len(ended) == 2:
                reader.kill()
        return number

    def read():
        results = map_ahead(work, range(10), 4)
        assert next(results) == 0
        results.close()

    reader = eventlet.spawn(read)
    eventlet.sleep(0.05)

    assert reader.dead
    assert sorted(ended) == [0, 1, 2, 3]


def test_closed_iterator_keeps_no_item_in_memory():
    class Socket:
        pass

    held: list[weakref.ref[Socket]] = []

    def work(number):
        mine = Socket()
        held.append(weakref.ref(mine))
        eventlet.sleep(30 if number else 0)
        return number

    gc.collect()
    gc.disable()
    try:
        results = map_ahead(work, range(10), 4)
        assert next(results) == 0
        results.close()
        assert len(held) == 4
        assert not any(ref() for ref in held)
    finally:
        gc.enable()
