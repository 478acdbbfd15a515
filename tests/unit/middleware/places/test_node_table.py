"""Faults and queues of object servers, as the proxies of a host know them."""

import pytest

from clock import Clock
from hapi_middleware.places.node_table import (
    TOLD_SECONDS,
    NodeTable,
)
from hapi_middleware.shared_table import SharedTable

NODE, OTHER = ("10.0.0.1", 6200), ("10.0.0.2", 6200)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return NodeTable(SharedTable(64), clock)


def test_faults_end_and_are_of_their_part_only(table, clock):
    table.leave_out(*NODE, "d1", seconds=60.0)
    assert table.is_left_out(*NODE, "d1")
    assert not table.is_left_out(*NODE, "d2")
    assert not table.is_left_out(*NODE)
    assert not table.is_left_out(*OTHER, "d1")
    clock.now += 60.0
    assert not table.is_left_out(*NODE, "d1")


def test_each_refusal_lasts_twice_as_long_until_it_is_forgiven(table, clock):
    waits = []
    for _ in range(9):
        waits.append(
            table.back_off(*NODE, "model", seconds=60.0, longest=3600.0)
        )
        clock.now += waits[-1]
        assert not table.is_left_out(*NODE, "model")
    assert waits[:3] == [60.0, 120.0, 240.0]
    assert waits[-1] == 3600.0
    table.forgive(*NODE, "model")
    again = table.back_off(*NODE, "model", seconds=60.0, longest=3600.0)
    assert again == 60.0


def test_processes_of_a_host_learn_together(clock):
    shared = SharedTable(64)
    one, other = NodeTable(shared, clock), NodeTable(shared, clock)
    one.leave_out(*NODE, seconds=1.0)
    one.told(OTHER, 3)
    assert other.is_left_out(*NODE)
    assert other.jobs(OTHER) == 3
    assert other.has_computed(OTHER)
    assert not other.has_computed(NODE)


def test_jobs_are_those_of_the_last_answer_and_at_least_our_own(table, clock):
    assert table.jobs(NODE) == 0
    table.told(NODE, 5)
    with table.running(NODE), table.running(NODE):
        assert table.jobs(NODE) == 5
        clock.now += TOLD_SECONDS
        assert table.jobs(NODE) == 2
    assert table.jobs(NODE) == 0
