"""Numbers that the processes of a server share."""

import os
import time

from hapi_middleware.shared_table import SharedTable, SlotEntry

BUCKETS = 64


def test_entries_are_found_and_replaced():
    table = SharedTable(BUCKETS)
    assert table.get("a") is None
    table.put("a", 10.0, 1.0)
    table.put("b", 11.0, 2.0)
    table.put("a", 12.0, 3.0)
    assert table.get("a") == SlotEntry(12.0, 3.0)
    assert table.get("b") == SlotEntry(11.0, 2.0)


def test_full_bucket_loses_the_entry_that_ends_first():
    table = SharedTable(1)
    for number in range(9):
        table.put(str(number), 100.0 - number)
    found = [table.get(str(number)) is not None for number in range(9)]
    assert found == [True] * 7 + [False, True]


def test_key_is_new_once_until_its_entry_ends():
    table = SharedTable(BUCKETS)
    assert table.put_new("a", 10.0, 0.0)
    assert not table.put_new("a", 10.0, 9.0)
    assert table.put_new("a", 20.0, 10.0)


def in_children(number, work):
    """Sum of what a function returns in that many processes."""
    readable, writable = os.pipe()
    pids = []
    for _ in range(number):
        pid = os.fork()
        if not pid:
            try:
                os.write(writable, bytes([work()]))
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        return sum(file.read())


def test_processes_share_a_table_and_one_of_them_is_first():
    """A captured request is refused by the other processes of a server."""
    table = SharedTable(BUCKETS)
    begin = time.monotonic() + 0.2

    def first_of_all():
        while time.monotonic() < begin:
            pass
        return sum(table.put_new(str(key), 1.0, 0.0) for key in range(50))

    assert in_children(4, first_of_all) == 50
    table.put("of the parent", 1.0, 7.0)
    assert in_children(1, lambda: int(table.get("of the parent").value)) == 7


def test_cost_does_not_grow_with_the_number_of_entries():
    """5,000 requests per second leave 300,000 signatures."""
    table = SharedTable(1 << 15)

    def cost(count):
        started = time.process_time()
        for _ in range(count):
            table.put_new(os.urandom(8).hex(), 60.0, 0.0)
        return (time.process_time() - started) / count

    first = min(cost(500) for _ in range(3))
    cost(100_000)
    assert min(cost(500) for _ in range(3)) < 5 * first
