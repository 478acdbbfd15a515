"""Workers that are lost at the worst moments of a step."""

from __future__ import annotations

import os
import time
from collections import deque
from functools import partial

import pytest
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from forked_ranks import run_ranks, run_workers
from hapi_training import VirtualNodes
from hapi_training.membership import WorkerLostError
from hapi_training.store import RENDEZVOUS_VARIABLE
from hapi_training.virtual_nodes.exchange import Exchange
from node_training import batches, digest, network, optimizer_of
from waiting import until

JOIN_AT, LOSE_AT = 1, 3


class Ended(Exception):
    """The end of a worker."""


def losing(worker, *, ends=True, waits=True):
    """Trains; of three workers one ends in step 3, when the first has sums.

    The second has not: it loses the connection.
    """
    module = network()
    updates = optimizer_of(module, "adamw")
    nodes = VirtualNodes(module, 8, timeout_seconds=20)
    copied = Exchange.copy_from

    def copy_and_end(self, *arguments):
        result = copied(self, *arguments)
        if ends and nodes.step == LOSE_AT and self.num_ranks == 3:
            store = nodes._group._membership._store.torch
            rank = nodes._group.rank
            if rank.rank == 0:
                store.set("test", "has sums")
            store.wait(["test"])
            if rank.rank == 1:
                raise WorkerLostError("worker_lost", "a test")
            if rank.rank == 2:
                raise Ended
        return result

    # The last collective operation of the sums.
    Exchange.copy_from = copy_and_end
    if not waits:
        Exchange.wait_for_all = lambda self: None

    def num_workers():
        return nodes._group.rank.world_size + nodes._group.num_waiting()

    state = {"module": module, "optimizer": updates, "losses": []}
    for step in nodes.steps(batches(8), state):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
            if step.number == JOIN_AT and ends and nodes.is_first:
                until(lambda: num_workers() == 3)
        updates.step()
        updates.zero_grad()
        state["losses"].append(step.loss)
    return digest(module.state_dict(), updates.state_dict(), state["losses"])


@pytest.fixture(scope="module")
def alone():
    (alone,) = run_ranks(1, partial(losing, ends=False))
    return alone


def test_step_is_taken_again_if_one_worker_has_its_sums(alone):
    results = run_workers(3, losing)
    assert sorted(map(type, results), key=str) == [str, str, Ended]
    assert [r for r in results if isinstance(r, str)] == [alone] * 2


def test_control_without_the_barrier_the_others_differ(alone):
    results = run_workers(3, partial(losing, waits=False))
    assert sum(isinstance(r, AssertionError) for r in results) == 1


def seeing_a_loss(worker, timeout_seconds=100.0):
    """Four workers train until one of them ends; returns the longest step."""
    module = network()
    updates = optimizer_of(module, "sgd")
    nodes = VirtualNodes(module, 8, timeout_seconds=timeout_seconds)
    state = {"module": module, "optimizer": updates}
    pauses, num_together, num_after = [], 0, 0
    for step in nodes.steps(batches(1000), state):
        began = time.monotonic()
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
        updates.step()
        updates.zero_grad()
        pauses.append(time.monotonic() - began)
        if nodes._group.rank.world_size == 4:
            num_together += 1
            if num_together == 3 and nodes._group.rank.rank == 2:
                raise Ended
        elif num_together:
            num_after += 1
            if num_after == 3:
                return max(pauses)
        else:
            time.sleep(0.1)
    return None


def test_loss_is_seen_at_once_by_all_of_four_workers():
    """Those that the lost one sent nothing to have to see it, too."""
    results = run_workers(4, seeing_a_loss)
    pauses = [r for r in results if not isinstance(r, Ended)]
    assert len(pauses) == 3
    # Else they would wait for the time limit.
    assert max(pauses) < 50


def store_of_the_test():
    host, port = os.environ[RENDEZVOUS_VARIABLE].split(":")
    return dist.TCPStore(host, int(port), is_master=False)


def wait_to_join(worker):
    """The second worker starts when the first one lets it."""
    if worker:
        store_of_the_test().wait(["go"])


def let_join(nodes):
    """Lets the second worker start; returns when it waits to be admitted."""
    store_of_the_test().set("go", "")
    until(nodes._group.num_waiting)


def trained(nodes, module, updates, data, state=None, in_step=None):
    """Trains, and yields the number of each step behind its update."""
    for step in nodes.steps(data, state):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
            if in_step:
                in_step(step.number)
        updates.step()
        updates.zero_grad()
        yield step.number


def parts():
    module = network()
    updates = optimizer_of(module, "sgd")
    nodes = VirtualNodes(module, 8, timeout_seconds=20)
    return nodes, module, updates


def plain(worker):
    nodes, module, updates = parts()
    deque(trained(nodes, module, updates, batches(9)), maxlen=0)
    return digest(module.state_dict())


def with_other_data(worker):
    """The second worker that joins has other batches."""
    wait_to_join(worker)
    nodes, module, updates = parts()
    state = {"module": module, "optimizer": updates}
    data = batches(9, seed=7 + worker)
    for number in trained(nodes, module, updates, data, state):
        if not worker and number == 1:
            let_join(nodes)
    return digest(module.state_dict())


def test_newcomer_with_other_data_ends_alone():
    (alone,) = run_ranks(1, plain)
    results = run_workers(2, with_other_data)
    assert results[0] == alone
    assert "has other samples on some of the 2 workers" in str(results[1])


def leaving_early(worker, joins=True):
    """Leaves each pass after three steps; one joins in the third pass."""
    wait_to_join(worker)
    nodes, module, updates = parts()
    state = {"module": module, "optimizer": updates}
    for seed in range(5):
        data = batches(9, seed=seed)
        for number in trained(nodes, module, updates, data, state):
            if joins and not worker and number == 7:
                let_join(nodes)
            if number % 3 == 2:
                break
    return digest(module.state_dict()), nodes.step


def test_worker_joins_passes_that_are_left_early():
    (alone,) = run_ranks(1, partial(leaving_early, joins=False))
    assert alone[1] == 15
    assert run_workers(2, leaving_early) == [alone, alone]


def joining_at_the_end(worker):
    """One joins in the last step of the first of three passes."""
    wait_to_join(worker)
    nodes, module, updates = parts()
    state = {"module": module, "optimizer": updates}

    def in_step(number):
        if not worker and number == 2:
            let_join(nodes)

    for _ in range(3):
        data = batches(3)
        deque(trained(nodes, module, updates, data, state, in_step), maxlen=0)
    return digest(module.state_dict())


def test_worker_may_join_in_the_last_step_of_a_pass():
    results = run_workers(2, joining_at_the_end)
    assert results[0] == results[1]
    assert isinstance(results[0], str)
