"""Whether a forward pass takes the memory that is predicted for it.

    python -m benchmarks.memory --json memory.json
    python -m benchmarks.memory --soak 60 --data DIR --json soak.json

The first command compares, for models, cuts and batches, the working memory
by hapi_splitter.profiling.memory_model, by which a worker chooses its batches,
with the peak of a process that does one such pass
(benchmarks/memory_probe.py).  Batches are those whose peak is 64 MiB or more,
and four times that.  The second watches a worker that has hardly the memory it
needs (benchmarks/soak.py).

The JSON file: ``settings`` (``malloc``: variables of glibc's allocator; none
are its defaults), ``machine``, ``versions`` and ``cells``, a list of

  model, cut, name, batch    the cut's index and name, the samples
  predicted_bytes    working memory, input included, weights not
  measured_bytes     the largest of the repeats
  repeats            bytes of each
  ratio, met         predicted to measured; whether it is within ``goal``

or, of the second, ``soak``:

  memory_limit_bytes, limit_bytes    the worker's option; what its resident set
                must stay below, with ``parts``, of which it is the sum
  peak_bytes, second_fifth_bytes, last_fifth_bytes    the resident set: the
                most, and medians of fifths of the time
  growth        of the last fifth's median over the second's, as a part of it
  slope_bytes_per_hour, slope_interval    after the first fifth (Theil-Sen)
  refused, uploads, shards, samples, unfinished, longest_seconds    of all
                clients; unfinished shards, and the longest wait for one
  met, goal     below the limit, no more growth, nothing late or unfinished
  series        [[seconds, bytes]], thinned
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import (
    add_data,
    add_worker_options,
    check_worker_options,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.folders import new_folder, remove_folder, remove_stale
from benchmarks.memory_probe import validated
from benchmarks.results import machine, versions, write_json
from benchmarks.soak import Soak
from benchmarks.soak import report as soak_report
from benchmarks.worker_process import ROOT, package_model

from hapi_splitter.profiling.memory_model import needs_of

MODELS = {
    "resnet18": "avgpool",
    "resnet50": "avgpool",
    "mobilenet_v3_small": "avgpool",
    "vit_b_16": "encoder",
    "densenet121": "features",
    "convnext_tiny": "features",
    "swin_t": "features",
}
"""Names of torchvision's, and the module after which the region ends."""
MIN_BYTES = 64 << 20
MAX_RATIO = 1.5
LARGER = 4
"""By which the second batch of a cut is larger."""
FIRST_BYTES = 96 << 20
"""Predicted for the first batch that is tried."""
SPARE = 1.1
PROBE_SECONDS = 600.0
MIN_MINUTES = 0.25
"""In which there is something to compare."""
MALLOC = "MALLOC_"
QUICK = {"models": ["mobilenet_v3_small"], "repeats": 1, "quick": True}


@dataclass
class Cells:
    """Measures one model.

    Args:
        model: its name.
        folder: for the package.
        repeats: processes for each cell.
        malloc: variables of glibc's allocator.
        quick: only the last cut, and one batch.
    """

    model: str
    folder: Path
    repeats: int
    malloc: Mapping[str, str]
    quick: bool

    def run(self) -> Iterator[dict[str, Any]]:
        """The model's cells."""
        package, last = package_model(
            self.folder, self.model, MODELS[self.model]
        )
        frozen = validated(package)
        for cut in [last] if self.quick else cuts_of(last):
            needs = needs_of(frozen, cut)
            grows = needs.peak_bytes(2) - needs.peak_bytes(1)
            batch = self._least_batch(
                package, cut, math.ceil(FIRST_BYTES / grows)
            )
            for size in [batch] if self.quick else [batch, LARGER * batch]:
                found = [
                    self._probe(package, cut, size)
                    for _ in range(self.repeats)
                ]
                name = frozen.cuts[cut - 1].name
                predicted = needs.peak_bytes(size) - needs.parameter_bytes
                yield cell(self.model, cut, name, size, predicted, found)

    def _least_batch(self, package: Path, cut: int, batch: int) -> int:
        """That has enough activations to be compared."""
        while True:
            measured = self._probe(package, cut, batch)
            if measured >= MIN_BYTES:
                return batch
            lacks = SPARE * MIN_BYTES / max(measured, MIN_BYTES // 16)
            batch = max(batch + 1, math.ceil(batch * lacks))

    def _probe(self, package: Path, cut: int, batch: int) -> int:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory_probe"],
            input=json.dumps(
                {"package": str(package), "cut": cut, "batch": batch}
            ),
            stdout=subprocess.PIPE,
            text=True,
            timeout=PROBE_SECONDS,
            cwd=ROOT,
            env={**os.environ, **self.malloc},
        )
        if done.returncode:
            raise ValueError(
                f"{self.model}, cut {cut}, batch {batch}: the process ended"
                f" with status {done.returncode}; its error output stands"
                " above"
            )
        return int(json.loads(done.stdout)["measured_bytes"])


def cuts_of(last: int) -> list[int]:
    """The first, the last, and two between."""
    return sorted({1, max(1, last // 4), max(1, last // 2), last})


def cell(
    model: str,
    cut: int,
    name: str,
    batch: int,
    predicted: int,
    repeats: Sequence[int],
) -> dict[str, Any]:
    """Compares predicted bytes with the largest of the measured ones."""
    ratio = predicted / max(repeats)
    return {
        "model": model,
        "cut": cut,
        "name": name,
        "batch": batch,
        "predicted_bytes": predicted,
        "measured_bytes": max(repeats),
        "repeats": list(repeats),
        "ratio": ratio,
        "met": 1 <= ratio <= MAX_RATIO,
    }


def describe(each: Mapping[str, Any]) -> str:
    """One line of a cell."""
    return (
        f"{each['model']}, cut {each['cut']} ({each['name']}), batch"
        f" {each['batch']}: {each['predicted_bytes'] / 2**20:.0f} MiB"
        f" predicted, {each['measured_bytes'] / 2**20:.0f} measured:"
        f" {each['ratio']:.2f}; {'met' if each['met'] else 'missed'}"
    )


def report(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line of all."""
    ratios = [each["ratio"] for each in cells]
    return (
        f"{sum(each['met'] for each in cells)} of {len(cells)} cells within 1"
        f" to {MAX_RATIO}; ratios {min(ratios):.2f} to {max(ratios):.2f}"
    )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("memory", __doc__)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=sorted(MODELS),
        default=list(MODELS),
        help="default: all",
    )
    add(
        "--repeats",
        type=int,
        default=2,
        help="processes for each cell (default 2)",
    )
    add(
        "--malloc",
        nargs="+",
        default=[],
        metavar=f"{MALLOC}NAME=VALUE",
        help="variables for glibc's allocator; default: those of the"
        " environment",
    )
    add(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="watch a worker so long, instead of the cells",
    )
    add_data(parser, "for --soak: ")
    add_worker_options(
        parser, "for --soak: of the worker; default: none but memory_limit"
    )
    add(
        "--quick",
        action="store_true",
        help="try out: one model, cut and batch, once",
    )
    found = parser.parse_args(argv)
    if found.quick:
        vars(found).update(QUICK)
    _check(parser, found)
    return found


def _check(parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    if found.repeats < 1:
        parser.error(f"--repeats is {found.repeats}; 1 or more")
    check_worker_options(parser, found)
    for variable in found.malloc:
        if not variable.startswith(MALLOC) or "=" not in variable:
            parser.error(f"--malloc: {variable!r} is not {MALLOC}NAME=VALUE")
    if found.soak is not None:
        if found.soak < MIN_MINUTES:
            parser.error(
                f"--soak is {found.soak:g} minutes; {MIN_MINUTES:g} or more"
            )
        require_data(parser, found)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("memory", lambda: _run(arguments))


def _run(options: argparse.Namespace) -> int:
    malloc = {
        **{k: v for k, v in os.environ.items() if k.startswith(MALLOC)},
        **dict(each.split("=", 1) for each in options.malloc),
    }
    body: dict[str, Any] = {
        "benchmark": "memory",
        "settings": {
            "malloc": malloc,
            "goal": [1, MAX_RATIO],
            "least_bytes": MIN_BYTES,
            "repeats": options.repeats,
            "torch_threads": 1,
            "soak_minutes": options.soak,
            "options": options.options,
        },
        "machine": machine(),
        "versions": versions(),
    }
    remove_stale()
    folder = new_folder()
    try:
        if options.soak is not None:
            soak = Soak(
                folder, options.data, options.options, malloc, options.soak
            )
            body["soak"] = soak.run()
            print(soak_report(body["soak"]), flush=True)
            _write(options, body)
        else:
            _run_cells(options, malloc, folder, body)
    finally:
        remove_folder(folder)
    return 0


def _run_cells(
    options: argparse.Namespace,
    malloc: Mapping[str, str],
    folder: Path,
    body: dict[str, Any],
) -> None:
    cells: list[dict[str, Any]] = []
    body["cells"] = cells
    for model in options.models:
        bench = Cells(model, folder, options.repeats, malloc, options.quick)
        for found in bench.run():
            cells.append(found)
            print(describe(found), flush=True)
            _write(options, body)
    print(report(cells), flush=True)


def _write(options: argparse.Namespace, body: Mapping[str, Any]) -> None:
    if options.json is not None:
        write_json(options.json, dict(body))


if __name__ == "__main__":
    sys.exit(main())
