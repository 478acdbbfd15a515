"""Reads jobs in the format of Tiresias' simulator (60_job.csv).

It has neither batches nor memory nor times of synchronisation.  Chosen are:

* 32 samples for each GPU, as the times of its steps suggest, in the 16 GiB of
  Tiresias' P100s.  A job holds 0.5 GiB of CUDA, the activations, and 12 bytes
  a parameter: weights, gradients and momentum;
* a ring that reduces gradients by 10 GB/s in a node (PCIe 3.0 x16) or 5 GB/s
  between nodes (two fifths of 100 Gb/s).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.scheduling.jobs import Job, fewest_nodes

BYTES_PER_SECOND = 10e9, 5e9
SAMPLES, GPU_MIB, CONTEXT_MIB = 32, 16384, 512
MODELS = MappingProxyType(
    {
        "alexnet": (61.1, 31.5),
        "googlenet": (13.0, 49.5),
        "inception3": (27.2, 95.1),
        "inception4": (42.7, 165.0),
        "resnet50": (25.6, 83.0),
        "resnet101": (44.5, 122.1),
        "resnet152": (60.2, 170.3),
        "vgg11": (132.9, 105.6),
        "vgg16": (138.4, 128.9),
        "vgg19": (143.7, 133.9),
    }
)
"""Million parameters, and MiB that autograd saves for a sample, of the models
of torchvision, and of timm (Inception 4)."""


@dataclass(frozen=True)
class TraceJob(Job):
    """A job that is known to last ``seconds`` on the GPUs it asks for."""

    seconds: float = 0.0

    def step_seconds(self, gpus: int, nodes: int = 0) -> float:
        fewest = fewest_nodes(gpus)
        more = self.sync_seconds(nodes or fewest) - self.sync_seconds(fewest)
        return self.seconds / self.steps + more

    def sync_seconds(self, nodes: int) -> float:
        size = 4e6 * MODELS[self.application][0]
        size *= 2 * (self.gpus - 1) / self.gpus
        return size / BYTES_PER_SECOND[nodes > 1]

    @property
    def memory(self) -> float:
        parameters, activations = MODELS[self.application]
        weights = 12e6 * parameters / 2**20
        return (CONTEXT_MIB + weights + SAMPLES * activations) / GPU_MIB


def read_trace(path: Path, num_gpus: int) -> list[Job]:
    """Jobs in the order of arrival.

    Raises:
        ValueError: naming the file, the line and a value that cannot be used.
    """
    jobs: list[Job] = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                jobs.append(_job(row, num_gpus))
            except ValueError as error:
                line = f"{path}, line {rows.line_num}"
                raise ValueError(f"{line}: {error}") from None
    if not jobs:
        raise ValueError(f"{path} has no jobs; it needs a header and rows")
    return sorted(jobs, key=lambda job: job.arrival)


def _job(row: dict[str, str | None], num_gpus: int) -> Job:
    def number(column: str, least: float, most: float = 1e9) -> float:
        try:
            value = float(row.get(column) or "")
        except ValueError:
            value = -1.0
        if least <= value <= most:
            return value
        allowed = f"a number from {least:g} to {most:g}"
        raise ValueError(f"{column} is {row.get(column)!r}; give {allowed}")

    model = row.get("model_name") or ""
    if model not in MODELS:
        raise ValueError(f"model_name is {model!r}; give one of {[*MODELS]}")
    gpus, steps = int(number("num_gpu", 1, num_gpus)), number("iterations", 1)
    work = (gpus, SAMPLES * gpus, int(steps), 1, number("duration", 0))
    arrival = number("submit_time", 0)
    job = TraceJob(f"job {row.get('job_id')}", arrival, model, *work)
    # The rest of a step is computation.
    number("duration", job.steps * job.sync_seconds(fewest_nodes(gpus)))
    return job
