"""Models that can be split, packaged and cut: one real run for each.

    python -m benchmarks.census --json census.json --csv models.csv

Each row runs in a process with limited memory and time: a model is built with
random weights, split at its default freeze point or at a block, packaged,
loaded, and cut at five random positions.  The loaded prefix, with another
batch size, and the rest of the model must compute what the whole model
computes: relative 1e-4, and 1e-5 of the largest output.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.command_line import exit_status, parser_of, print_table
from benchmarks.micro.census_models import Entry, entries
from benchmarks.record import write_results
from hapi_protocol.errors import HapiError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import (
    SplitModel,
    default_freeze,
    split,
)
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.inputs.sample_format import InputTransform
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.writer import write_package

NUM_CUTS = 5
SAMPLES = 3
RTOL, ATOL = 1e-4, 1e-5
MEMORY_BYTES = 16 << 30
TIMEOUT = 900.0
"""Seconds for one row."""
QUICK_MODELS = ("torchvision/resnet18", "timm/vit_tiny_patch16_224")
CSV_COLUMNS = ("model", "parameters", "pixels", "freeze", "cuts", "result")
_LIMITS = PackageLimits(package_bytes=(4 << 30) - 1)
_MAX_REASON = 400
_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Row:
    """Result of one model at one freeze point.

    ``key`` has source and name, ``checked`` the compared cuts, ``reason`` that
    of a failure, or nothing.
    """

    key: str
    parameters: int = 0
    pixels: int = 0
    freeze: str = ""
    cuts: int = 0
    checked: Sequence[int] = ()
    reason: str = ""


class CensusError(Exception):
    """The two parts do not compute what the model computes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("census", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", default=[], help="these models")
    add("--processes", type=int, default=1, metavar="N", help="at a time")
    add("--csv", type=Path, metavar="PATH", help="write a table there")
    options = parser.parse_args(argv)
    return exit_status("census", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    names = options.only or (QUICK_MODELS if options.quick else ())
    chosen = choose(names)
    _PROCESSES.set_forkserver_preload(
        [
            "benchmarks.micro.census_models",
            "hapi_splitter.freezing.split_model",
        ]
    )
    entries = []
    with ThreadPoolExecutor(options.processes) as pool:
        for row in pool.map(partial(in_process, seconds=TIMEOUT), chosen):
            result = row.reason or f"{row.cuts} cuts, equal"
            print(f"{row.key} at {row.freeze or '?'}: {result}", flush=True)
            entries.append(row)
    rows = {"rows": [asdict(row) for row in entries]}
    write_results(options.json, "census", {"quick": options.quick}, rows)
    if options.csv is not None:
        write_csv(options.csv, entries)
    print_table("Models", ("source", "equal", "models"), totals(entries))
    return 0


def totals(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Number of models by source: split with equal results, and all."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.key.partition("/")[0], []).append(row)
    return [
        (source, str(sum(not row.reason for row in listed)), str(len(listed)))
        for source, listed in by_source.items()
    ]


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Writes a table, one line for each model."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for row in rows:
            result = row.reason or "equal"
            size = f"{row.parameters / 1e6:.1f} M"
            writer.writerow(
                (row.key, size, row.pixels, row.freeze, row.cuts, result)
            )


def choose(names: Sequence[str]) -> list[Entry]:
    """The models with these names or keys; all without names.

    Raises:
        ValueError: naming the unknown ones.
    """
    every = list(entries())
    if not names:
        return every
    matches = [e for n in names for e in every if n in (e.name, e.key)]
    known = {name for e in matches for name in (e.name, e.key)}
    if unknown := {*names} - known:
        raise ValueError(f"not in the census: {', '.join(sorted(unknown))}")
    return matches


def in_process(entry: Entry, seconds: float) -> Row:
    """Examines one model in a process with limited memory and time."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_child, args=(entry, sender))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(seconds) else None
        reason = f"took over {seconds:g} s"
    except EOFError:
        process.join()
        row, reason = None, f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    return row or _failed(entry, reason)


def _failed(entry: Entry, reason: str) -> Row:
    reason = " ".join(reason.split())[:_MAX_REASON]
    return Row(entry.key, 0, entry.pixels, entry.freeze or "", reason=reason)


def _child(entry: Entry, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        row = examine(entry)
    except Exception as error:  # of another library; becomes the row's reason
        row = _failed(entry, f"{type(error).__name__}: {error}")
    sender.send(row)


def examine(entry: Entry) -> Row:
    """Splits, packages, loads and cuts one model, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = entry.build()
    perturb(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    report: dict[str, Any] = {"parameters": count, "pixels": entry.pixels}
    report["freeze"] = entry.freeze or ""
    try:
        freeze = entry.freeze or default_freeze(model, **entry.input)
        report["freeze"] = freeze
        parts = split(model, freeze, cache_directory="", **entry.input)
        report["cuts"] = parts.frozen.num_cuts
        loaded = written_and_loaded(parts.frozen)
        cuts = random_cuts(entry.key, loaded.num_cuts)
        compare(model, parts, loaded, cuts)
        report["checked"] = tuple(cuts)
    except (HapiError, CensusError) as error:
        reason = getattr(error, "message", str(error))
        # Where in a library a model does that depends on the machine.
        reason = re.sub(r" \(in \S+, line \d+, in \w+\)", "", reason)
        report["reason"] = " ".join(reason.split())[:_MAX_REASON]
    return Row(entry.key, **report)


def perturb(model: nn.Module) -> None:
    """Makes initial zeros and ones unequal, as training would.

    Otherwise a head of zeros would agree with anything, and a batch norm could
    be omitted.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.min() == parameter.max():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.05)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.uniform_(-0.2, 0.2, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)


def written_and_loaded(frozen: FrozenGraph) -> FrozenGraph:
    """The region after it was written to a package and loaded."""
    with tempfile.TemporaryDirectory(prefix="hapi-census-") as folder:
        info = write_package(frozen, Path(folder) / "model.hapi")
        return load_package(info.path, limits=_LIMITS, digest=info.digest)


def random_cuts(key: str, count: int) -> list[int]:
    """At most :data:`NUM_CUTS` cuts, the same in every run."""
    number = min(NUM_CUTS, count)
    return sorted(random.Random(key).sample(range(1, count + 1), number))


def compare(
    model: nn.Module,
    parts: SplitModel,
    loaded: FrozenGraph,
    cuts: Sequence[int],
) -> None:
    """Compares prefix (in two batches), suffix and tail with the model.

    Raises:
        CensusError: naming the cut that differs.
    """
    samples = loaded.examples(SAMPLES)
    parts.tail.eval()
    with torch.inference_mode():
        expected = result_of(whole(model, loaded.transform, samples))
        if not expected.isfinite().all() or expected.std() == 0:
            raise CensusError("the model's own output is constant or infinite")
        atol = ATOL * expected.abs().max().item()
        for cut in cuts:
            prefix = loaded.prefix(cut)
            crossing = torch.cat([prefix(samples[:2]), prefix(samples[2:])])
            features = parts.frozen.suffix(cut)(crossing)
            result = result_of(parts.tail(features))
            if not torch.allclose(result, expected, rtol=RTOL, atol=atol):
                worst = (result - expected).abs().max().item() * ATOL / atol
                raise CensusError(
                    f"cut {cut} is off by {worst:.1e} of the largest output"
                )


def whole(
    model: nn.Module, transform: InputTransform | None, samples: torch.Tensor
) -> Any:
    """Calls a model with a batch of samples, named arrays by their names."""
    if isinstance(transform, NamedArrays):
        return model(**transform.separate(samples))
    return model(samples)


def result_of(output: Any) -> torch.Tensor:
    """The first tensor of a Hugging Face model's output, or the output."""
    if isinstance(output, torch.Tensor):
        return output
    first: torch.Tensor = output[0]
    return first


if __name__ == "__main__":
    sys.exit(main())
