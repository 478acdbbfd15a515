"""Green threads: results in order, and none left behind."""

import eventlet
import pytest

from hapi_middleware.concurrency import map_ahead


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
