"""Jobs of AdaptDL's workloads, and measured times of their steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "adaptdl"
GPUS_PER_NODE = 4
WEIGHTS = (1, 5, 10)


@dataclass(frozen=True)
class Job:
    """A job, with the number of GPUs that it asks for."""

    name: str
    arrival: float
    application: str
    gpus: int
    batch: int
    steps: int
    weight: int = 1
    """Its priority, and its part of fair shares."""

    @property
    def sizes(self) -> list[int]:
        """Divisors of its virtual nodes: the power of two >= ``gpus``."""
        return [2**power for power in range((self.gpus - 1).bit_length() + 1)]

    def step_seconds(self, gpus: int, nodes: int = 0) -> float:
        """Seconds of a step; by default on as few nodes as possible."""
        nodes = nodes or fewest_nodes(gpus)
        return step_seconds(self.application, self.batch, gpus, nodes)

    def sync_seconds(self, nodes: int) -> float:
        """Seconds of a step in which its GPUs, on so many nodes, wait."""
        placement = (self.application, self.batch, self.gpus, nodes)
        return step_times(*placement)[1]

    @property
    def memory(self) -> float:
        """Part of a GPU's memory: all for the most samples measured."""
        most = _read("step_times")
        most = most[most["application"] == self.application]["samples"].max()
        samples = -(-self.batch // self.gpus)
        return float(-(-samples // -(-samples // most)) / most)


def fewest_nodes(gpus: int) -> int:
    """Nodes that have so many GPUs."""
    return -(-gpus // GPUS_PER_NODE)


def step_seconds(application: str, batch: int, gpus: int, nodes: int) -> float:
    """Seconds of a step with its synchronisation."""
    return step_times(application, batch, gpus, nodes)[0]


@cache
def step_times(
    application: str, batch: int, gpus: int, nodes: int
) -> tuple[float, float]:
    """Seconds of a step and, of these, of its synchronisation.

    They are linear between measured samples and nodes.  Samples that do not
    fit into a GPU are computed in equal parts, after which the GPUs
    synchronise once.
    """
    table = _read("step_times")
    table = table[table["application"] == application]
    samples = -(-batch // gpus)
    parts = -(-samples // table["samples"].max())
    table = table[table["gpus"] == gpus]
    measured, seconds, waits = np.unique(table["nodes"]), [], []
    for rows in (table[table["nodes"] == count] for count in measured):
        step, synchronise = (
            np.interp(-(-samples // parts), rows["samples"], rows[column])
            for column in ("step_seconds", "sync_seconds")
        )
        seconds.append(step + (parts - 1) * (step - synchronise))
        waits.append(synchronise)
    step, synchronise = (
        float(np.interp(nodes, measured, y)) for y in (seconds, waits)
    )
    return step, synchronise


def read_workload(number: int, num_gpus: int, seed: int = 0) -> list[Job]:
    """Jobs of a workload, in the order of arrival, with random weights.

    A job that asks for more than ``num_gpus`` asks for all.
    """
    draw, table = random.Random(f"{seed} {number}"), _read("workloads")
    jobs = []
    for row in table[table["workload"] == number].tolist():
        _, name, arrival, application, gpus, batch, steps = row
        work = (min(gpus, num_gpus), batch, steps, draw.choice(WEIGHTS))
        jobs.append(Job(name, arrival, application, *work))
    return jobs


@cache
def _read(name: str) -> Any:
    return np.genfromtxt(DATA / f"{name}.csv", None, delimiter=",", names=True)
