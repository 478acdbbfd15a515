"""Workers that are lost at the worst moments of a step."""

from __future__ import annotations

from functools import partial

import pytest
from torch.nn.functional import cross_entropy

from forked_ranks import run_ranks, run_workers
from hapi_training import VirtualNodes
from hapi_training.membership import WorkerLostError
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
            store, rank = nodes._group._membership._store, nodes._group.rank
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
                until(lambda: num_workers() == 3, 60)
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
