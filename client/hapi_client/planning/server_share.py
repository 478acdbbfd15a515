"""Estimates the share of the storage tier that a job gets.  No I/O.

The share is the input of a control loop: a plan pushes down as much as the
share allows, and the next window shows what came of it.  Several jobs have
such a loop around one worker.  So the share follows a full queue at once, and
idle capacity slowly, for the reason for which a TCP sender halves its window
and raises it in small steps (Chiu and Jain, 1989): users of one resource then
settle on fair shares.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapi_client.metrics.events import WindowMetrics
from hapi_client.planning.link_estimator import NEW_WEIGHT, RELAX_WEIGHT
from hapi_client.planning.modelled_costs import modelled_seconds, modelled_use
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.problem import (
    SERVER_CPU,
    SERVER_DEVICE,
    Problem,
)
from hapi_splitter.planner.resource_use import SERVING

# Chosen.  Not 0: a client whose threads are busy unpacking blocks a worker
# too.  Simulated jobs do as well with 0.15 and with 0.6.
BLOCKED_SHARE = 0.3
"""Share of their time for which workers cannot send if the link limits
them."""
# Below 1, because a queue is not full at the start and end of an epoch, nor
# between two spans.  With half of it, simulated jobs do a little worse on a
# link that became slow (86 % of the optimum meanwhile, not 90 %).
FULL_QUEUE = 0.75
"""Mean share of busy threads from which on a read queue counts as full."""
# Not 0, because the next window divides the capacity by the share.
MIN_SHARE = 0.01
"""Lower bound of the estimate."""


def updated_share(
    share: float, window: WindowMetrics, problem: Problem, max_reads: int
) -> float:
    """Returns the share after a window with push-down.

    While the job's requests queue, its share is what it uses; else it could
    use the idle capacity too.

    Args:
        share: the estimate before, 0 to 1.
        window: sums of the window, without cached samples.
        problem: the problem under the present conditions.
        max_reads: limit of concurrent feature reads.
    """
    load = window.load
    if load is None:
        return share
    used = modelled_use(window, problem)
    # The tier is as fast as the busier of its two resources: the other one is
    # idle in part whatever the share.
    resource = _busier_resource(problem, used)
    # The problem has the job's part of the capacity: undo the share.
    capacity = problem.capacity(resource) / share * window.seconds
    used_share = used.get(resource, 0.0) / capacity
    busy = load.cpu_busy if resource == SERVER_CPU else load.device_busy
    concurrent = window.pushed.seconds / window.seconds
    fair_share = _fair_share(load, concurrent, window.max_pushed)
    is_queued = (
        concurrent >= FULL_QUEUE * max_reads
        and window.blocked_share < BLOCKED_SHARE
    )
    if is_queued:
        # The worker is saturated: the job gets its fair share, or what it
        # uses if that is more.  If the worker is not busy all the time,
        # something else limits it, such as its disks, and the fair share is
        # one of what it does.
        observed = max(used_share, fair_share * max(used_share, busy))
        # It gets more than that if the queue was not always full, as at the
        # end of an epoch: use / full is the use while it was.  Swift's own
        # seconds for bytes and requests are no share of the worker.
        full = min(1.0, concurrent / max_reads)
        swift = 0.0
        if resource == SERVER_CPU:
            serving = modelled_seconds(window, problem).get(SERVING, 0.0)
            swift = share * serving / capacity
        observed = swift + max(0.0, observed - swift) / full
    else:
        # The worker has answered all: what is idle could be used too.
        observed = max(fair_share, used_share + 1.0 - busy)
    # Without a queue a higher share is a guess.  A lower one is not: other
    # jobs have taken the capacity.
    is_guess = not is_queued and observed >= share
    weight = RELAX_WEIGHT if is_guess else NEW_WEIGHT
    return share + weight * (min(max(observed, MIN_SHARE), 1.0) - share)


def _fair_share(load: WorkerLoad, concurrent: float, max_pushed: int) -> float:
    """Returns this job's part of the share of its account.

    Args:
        load: load that the worker has reported.
        concurrent: mean number of concurrent feature reads.
        max_pushed: their maximum.
    """
    # The worker counted streams at one moment, at which ours may have been
    # more than their mean.  With the mean alone, a job that had a worker to
    # itself took its own streams at the end of short epochs for those of
    # others, and drifted to raw reads from epoch to epoch.
    ours = max(concurrent, max_pushed)
    return load.share * min(1.0, ours / max(load.streams, 1))


def _busier_resource(problem: Problem, used: Mapping[str, float]) -> str:
    """Returns the resource of the storage tier with the higher usage."""
    return max(
        (SERVER_CPU, SERVER_DEVICE),
        key=lambda name: used.get(name, 0.0) / problem.capacity(name),
    )
