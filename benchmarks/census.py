"""Which models can be split, packaged and cut: a table of real runs.

Each model gets a process of its own with bounded memory and time: built with
random weights, split at its default freeze, its package written and loaded,
then cut at random places. What the two sides compute, with another batch
size on each, is compared with the model itself.

    python -m benchmarks.census --json census.json --rst docs/models.rst
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.census_models import Entry, entries
from benchmarks.census_table import write_rst
from torch import nn

from hapi_protocol.errors import FreezeError, HapiError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import (
    SplitModel,
    default_freeze,
    split,
)
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.writer import write_package

CUTS = 5
SAMPLES = 3
RTOL, ATOL = 1e-4, 1e-5
_LIMITS = PackageLimits(package_bytes=(4 << 30) - 1)
_MAX_REASON = 300
_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Row:
    """What became of one model.

    Args:
        key: source and name.
        parameters: of the whole model.
        pixels: height and width of its images.
        freeze: name that it was frozen up to, if it got that far.
        cuts: of the frozen region, 0 without one.
        checked: the cuts that were compared.
        reason: why it failed; empty where all cuts agree.
        seconds: of its process.
    """

    key: str
    parameters: int = 0
    pixels: int = 0
    freeze: str = ""
    cuts: int = 0
    checked: tuple[int, ...] = ()
    reason: str = ""
    seconds: float = 0.0


class CensusError(Exception):
    """The two sides do not compute what the model does."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=(),
        help="models, all if absent",
    )
    parser.add_argument("--json", type=Path, help="results, model by model")
    parser.add_argument("--rst", type=Path, help="write the tables there")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --json has"
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=16.0,
        help="of each model's process",
    )
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="for each model"
    )
    options = parser.parse_args(arguments)
    chosen = choose(options.only)
    _PROCESSES.set_forkserver_preload(
        [
            "benchmarks.census_models",
            "hapi_splitter.freezing.split_model",
            "timm",
            "transformers",
            "torch._dynamo",
        ]
    )
    rows = read_rows(options.json) if options.resume else {}
    for number, entry in enumerate(chosen, 1):
        if entry.key not in rows:
            rows[entry.key] = in_process(
                entry, options.memory_gib, options.seconds
            )
            if options.json:
                write_rows(options.json, rows)
        row = rows[entry.key]
        said = row.reason or f"{row.cuts} cuts, equal"
        print(f"[{number}/{len(chosen)}] {entry.key}: {said}", flush=True)
    if options.rst:
        options.rst.write_text(write_rst(in_order(rows)))


def in_order(rows: Mapping[str, Row]) -> list[Row]:
    return [rows[entry.key] for entry in entries() if entry.key in rows]


def choose(names: Sequence[str]) -> list[Entry]:
    """The models with these names or keys, in their order; all without any.

    Raises:
        SystemExit: naming those that the census does not have.
    """
    every = list(entries())
    found = [
        entry
        for name in names
        for entry in every
        if name in (entry.name, entry.key)
    ]
    known = {name for entry in found for name in (entry.name, entry.key)}
    unknown = set(names) - known
    if unknown:
        raise SystemExit(f"not in the census: {', '.join(sorted(unknown))}")
    return found if names else every


def in_process(entry: Entry, memory_gib: float, seconds: float) -> Row:
    """Examines one model in a process with bounded memory and time."""
    start = time.perf_counter()
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(
        target=_child, args=(entry, int(memory_gib * 2**30), sender)
    )
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
    taken = round(time.perf_counter() - start, 1)
    if row is None:
        row = Row(entry.key, pixels=entry.pixels, reason=reason)
    return replace(row, seconds=taken)


def _child(entry: Entry, memory_bytes: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        row = examine(entry)
    except Exception as error:  # another library's; the census goes on
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
        row = Row(entry.key, pixels=entry.pixels, reason=reason)
    sender.send(row)


def examine(entry: Entry) -> Row:
    """Splits, packages, loads and cuts one model, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = entry.build()
    disturb(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": count, "pixels": entry.pixels}
    shape = (3, entry.pixels, entry.pixels)
    try:
        found["freeze"] = default_freeze(model, sample_shape=shape)
        parts = split(model, found["freeze"], sample_shape=shape)
        found["cuts"] = parts.frozen.num_cuts
        loaded = written_and_loaded(parts.frozen)
        cuts = random_cuts(entry.key, loaded.num_cuts)
        compare(model, parts, loaded, cuts)
        found["checked"] = tuple(cuts)
    except FreezeError as error:
        operator = error.details.get("op")
        found["reason"] = f"operator {operator}" if operator else error.message
    except (HapiError, CensusError) as error:
        found["reason"] = getattr(error, "message", str(error))
    if "reason" in found:
        found["reason"] = " ".join(found["reason"].split())[:_MAX_REASON]
    return Row(entry.key, **found)


def disturb(model: nn.Module) -> None:
    """Makes initial zeros and ones unequal, as training would.

    Otherwise a head of zeros would agree with anything, and a batch norm
    could be left out.
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
    """The region from its package, as a worker would have it."""
    with tempfile.TemporaryDirectory(prefix="hapi-census-") as folder:
        info = write_package(frozen, Path(folder) / "model.hapi")
        return load_package(info.path, limits=_LIMITS, digest=info.digest)


def random_cuts(key: str, count: int) -> list[int]:
    """At most :data:`CUTS` of them, the same in every run."""
    drawn = random.Random(key).sample(range(1, count + 1), min(CUTS, count))
    return sorted(drawn)


def compare(
    model: nn.Module,
    parts: SplitModel,
    loaded: FrozenGraph,
    cuts: Sequence[int],
) -> None:
    """The loaded prefix in two batches, the suffix and the tail in one.

    Raises:
        CensusError: naming the cut that is not equal to the model.
    """
    samples = torch.randn(SAMPLES, *loaded.input_shape)
    parts.tail.eval()
    with torch.inference_mode():
        expected = logits_of(model(samples))
        if not expected.isfinite().all() or expected.std() == 0:
            raise CensusError("the model's own output tells nothing apart")
        atol = ATOL * expected.abs().max().item()
        for cut in cuts:
            prefix = loaded.prefix(cut)
            crossing = torch.cat([prefix(samples[:2]), prefix(samples[2:])])
            features = parts.frozen.suffix(cut)(crossing)
            found = logits_of(parts.tail(features))
            if not torch.allclose(found, expected, rtol=RTOL, atol=atol):
                worst = (found - expected).abs().max().item() * ATOL / atol
                raise CensusError(
                    f"cut {cut} is off by {worst:.1e} of the largest output"
                )


def logits_of(output: Any) -> torch.Tensor:
    """Of a model of Hugging Face's, or the output itself."""
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def read_rows(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    documents = json.loads(path.read_text())
    return {document["key"]: row_of(document) for document in documents}


def write_rows(path: Path, rows: dict[str, Row]) -> None:
    documents = [asdict(row) for row in rows.values()]
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(documents, indent=1) + "\n")
    fresh.replace(path)


def row_of(document: dict[str, Any]) -> Row:
    return Row(**{**document, "checked": tuple(document["checked"])})


if __name__ == "__main__":
    main()
