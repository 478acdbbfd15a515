"""Predicted over measured memory of forward passes.

    python -m benchmarks.memory --json memory.json

Compares the working memory predicted by hapi_splitter.profiling.memory_model,
from which a worker chooses its batches, with the peak of a process that runs
such passes (benchmarks/micro/memory_probe.py), for seven models, four cuts
and two batches: one with 64 MiB of activations or more, and four times that.
The goal is a ratio between 1 and 2.1: no pass takes more than predicted, which
is twice the bytes of its tensors.
The heap is that of a worker.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.command_line import (
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.micro.memory_probe import load_validated
from benchmarks.record import write_results
from benchmarks.testbed.two_tiers import ROOT
from benchmarks.testbed.worker_process import package_model, temporary_folder
from hapi_splitter.profiling.memory_model import memory_requirement

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "resnet18": "avgpool",
        "resnet50": "avgpool",
        "mobilenet_v3_small": "avgpool",
        "vit_b_16": "encoder",
        "densenet121": "features",
        "convnext_tiny": "features",
        "swin_t": "features",
    }
)
"""Torchvision models and the last module of their frozen region."""
QUICK_MODELS = ("mobilenet_v3_small",)
MIN_BYTES = 64 << 20
MAX_RATIO = 2.1
BATCH_FACTOR = 4
"""Second batch of a cut over the first one."""
FIRST_BYTES = 96 << 20
"""Predicted bytes of the first batch that is tried."""
REPEATS = 2
PROBE_SECONDS = 600.0


@dataclass
class Cells:
    """Measures one model.

    ``quick`` measures only the last cut, with one batch, once.
    """

    model: str
    folder: Path
    quick: bool

    def run(self) -> Iterator[dict[str, Any]]:
        """The model's cells."""
        package, last = package_model(
            self.folder, self.model, MODELS[self.model]
        )
        frozen = load_validated(package)
        for cut in [last] if self.quick else cuts_of(last):
            needs = memory_requirement(frozen, cut)
            growth = needs.peak_bytes(2) - needs.peak_bytes(1)
            batch = self._min_batch(
                package, cut, math.ceil(FIRST_BYTES / growth)
            )
            for size in (batch, BATCH_FACTOR * batch)[: 2 - self.quick]:
                probes = [
                    self._probe(package, cut, size)
                    for _ in range(1 if self.quick else REPEATS)
                ]
                predicted = needs.peak_bytes(size) - needs.parameter_bytes
                yield {
                    "model": self.model,
                    "cut": cut,
                    "name": frozen.cuts[cut - 1].name,
                    "batch": size,
                    **judge(predicted, probes),
                }

    def _min_batch(self, package: Path, cut: int, batch: int) -> int:
        """A batch with enough activations to compare."""
        while True:
            measured = self._probe(package, cut, batch)
            if measured >= MIN_BYTES:
                return batch
            batch *= 2

    def _probe(self, package: Path, cut: int, batch: int) -> int:
        question = {"package": str(package), "cut": cut, "batch": batch}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.micro.memory_probe"],
            input=json.dumps(question),
            stdout=subprocess.PIPE,
            text=True,
            timeout=PROBE_SECONDS,
            cwd=ROOT,
        )
        if done.returncode:
            raise ValueError(
                f"{self.model}, cut {cut}, batch {batch}: the process ended"
                f" with status {done.returncode}; see its error output above"
            )
        return int(json.loads(done.stdout)["measured_bytes"])


def cuts_of(last: int) -> list[int]:
    """The first cut, the last one, and two between."""
    return sorted({1, max(1, last // 4), max(1, last // 2), last})


def judge(predicted: int, repeats: Sequence[int]) -> dict[str, Any]:
    """Compares predicted bytes with the largest of the measured ones."""
    ratio = predicted / max(repeats)
    return {
        "predicted_bytes": predicted,
        "measured_bytes": max(repeats),
        "repeats": list(repeats),
        "ratio": ratio,
        "met": 1 <= ratio <= MAX_RATIO,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(parser_of("memory", __doc__), argv)
    return exit_status("memory", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    settings = {"quick": options.quick, "torch_threads": 1}
    cells: list[dict[str, Any]] = []
    with temporary_folder() as folder:
        for model in QUICK_MODELS if options.quick else MODELS:
            for cell in Cells(model, folder, options.quick).run():
                cells.append(cell)
                print(f"{model}, cut {cell['cut']}: {cell['ratio']:.2f}")
                write_results(
                    options.json, "memory", settings, {"cells": cells}
                )
    print_table(
        "Predicted over measured bytes",
        ("model", "cut", "batch", "predicted, MiB", "measured, MiB", "ratio"),
        [
            (
                cell["model"],
                f"{cell['cut']} {cell['name']}",
                str(cell["batch"]),
                f"{cell['predicted_bytes'] / 2**20:.0f}",
                f"{cell['measured_bytes'] / 2**20:.0f}",
                f"{cell['ratio']:.2f}",
            )
            for cell in cells
        ],
    )
    met = sum(cell["met"] for cell in cells)
    goal = f"{met} of {len(cells)} cells between 1 and {MAX_RATIO}"
    print_goals({goal: met == len(cells)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
