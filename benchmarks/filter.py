"""What it costs a proxy to have the filter, and what features cost beside
plain GETs.

    python -m benchmarks.filter --json filter.json
    python -m benchmarks.filter --quick --parts cpu

Swift's servers are on one core, the client is on another.  The parts, of which
``--parts`` chooses, are measured in interleaved rounds, each part's contenders
in turn:

  call     CPU seconds of a call of the filter by a request that is not
           annotated, around an application that does nothing, beyond those of
           the application; the goal is 30 microseconds at most
  cpu      CPU seconds of a proxy for GETs and PUTs of 4 KiB on a kept
           connection, with the filter over without it; the goal is 1.02 at
           most.  Three proxies run side by side, each a process of its own in
           front of the same servers, and two of them are without the filter:
           ``noise`` is one of these over the other
  bytes    bytes of a shard per second that go to a worker which reads them and
           answers 1 KiB a sample, over those of the plain GET of the same
           object; the goal is 0.7 at least.  That worker shares the client's
           core.  ``noise`` is the plain GET over itself
  samples  photographs per second of a worker through Swift, over those
           straight through its socket; the goal is 0.9 at least.  The worker
           has a core for itself, the client shares that of Swift

The JSON file: ``settings``, ``machine``, ``versions``, and in ``parts`` for
each part ``goal``, ``met``, ``found`` and ``rounds``.  ``found`` has figures
by name, each {median, interval}: the median of the rounds, and 95 % of it by
bootstrap

  added_seconds             of ``call``
  get_ratio, put_ratio      of ``cpu``; get_noise, put_noise
  ratio, noise              of ``bytes``
  ratio                     of ``samples``

and what they are made of: CPU seconds of a call; CPU seconds of a proxy for
1,000 requests (get_with, get_without, get_again, ...); bytes per second
(plain, features, again); samples per second (straight, swift).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from benchmarks.commands import (
    add_data,
    add_worker_options,
    check_worker_options,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.filter_parts import (
    SHARD_BYTES,
    Round,
    Work,
    byte_rounds,
    call_rounds,
    cpu_rounds,
    sample_rounds,
)
from benchmarks.folders import remove_stale
from benchmarks.regret import interval_of
from benchmarks.results import machine, versions, write_json
from benchmarks.shards import find_tars, write_shards
from benchmarks.testbed import Testbed, two_tiers
from benchmarks.worker_process import package_model

MODEL = ("resnet18", "layer4")
SAMPLES = 96
QUICK_SAMPLES = 32
QUICK_SHARD_BYTES = 16 << 20
QUICK_ROUNDS = 2

Found = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One part, and what is expected of it.

    Attributes:
        goal: for the figures in ``judged``.
        at_most: whether the goal is the most or the least.
        judged: names of figures.
        ratios: name to numerator and denominator of each figure.
        unit: of the figures, and how many of it are one.
        rounds: unless told otherwise.
    """

    goal: float
    at_most: bool
    judged: Sequence[str]
    ratios: Mapping[str, tuple[str, str]]
    unit: tuple[str, float]
    rounds: int

    def met(self, found: Mapping[str, Mapping[str, Any]]) -> bool:
        values = [found[name]["median"] for name in self.judged]
        if self.at_most:
            return max(values) <= self.goal
        return min(values) >= self.goal


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "call": Part(
            goal=30e-6,
            at_most=True,
            judged=["added_seconds"],
            ratios={},
            unit=("µs", 1e6),
            rounds=50,
        ),
        "cpu": Part(
            goal=1.02,
            at_most=True,
            judged=["get_ratio", "put_ratio"],
            ratios={
                "get_ratio": ("get_with", "get_without"),
                "put_ratio": ("put_with", "put_without"),
                "get_noise": ("get_again", "get_without"),
                "put_noise": ("put_again", "put_without"),
            },
            unit=("s", 1.0),
            rounds=30,
        ),
        "bytes": Part(
            goal=0.7,
            at_most=False,
            judged=["ratio"],
            ratios={
                "ratio": ("features", "plain"),
                "noise": ("again", "plain"),
            },
            unit=("MB/s", 1e-6),
            rounds=15,
        ),
        "samples": Part(
            goal=0.9,
            at_most=False,
            judged=["ratio"],
            ratios={"ratio": ("swift", "straight")},
            unit=("samples/s", 1.0),
            rounds=7,
        ),
    }
)


def judge(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds of a part say together."""
    part = PARTS[name]
    values = {key: [each[key] for each in rounds] for key in rounds[0]}
    if name == "call":
        values["added_seconds"] = [
            each["with"] - each["without"] for each in rounds
        ]
    for key, (over, under) in part.ratios.items():
        values[key] = [each[over] / each[under] for each in rounds]
    found: Found = {
        key: {
            "median": statistics.median(each),
            "interval": interval_of(each, np.median),
        }
        for key, each in values.items()
    }
    return {
        "goal": part.goal,
        "met": part.met(found),
        "found": found,
        "rounds": list(rounds),
    }


def report(name: str, verdict: Mapping[str, Any]) -> str:
    """A line for each figure."""
    part = PARTS[name]
    word, factor = part.unit
    lines = []
    for key, figure in verdict["found"].items():
        is_ratio = key in part.ratios
        scale, unit = (1.0, "") if is_ratio else (factor, f" {word}")
        low, high = (scale * each for each in figure["interval"])
        lines.append(
            f"{name:8} {key:14} {scale * figure['median']:10.3f}{unit}"
            f" ({low:.3f} to {high:.3f})"
        )
        if key in part.judged:
            bound = "at most" if part.at_most else "at least"
            lines[-1] += f", goal {bound} {scale * part.goal:g}"
    lines.append(f"{name:8} {'met' if verdict['met'] else 'missed'}")
    return "\n".join(lines)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("filter", __doc__)
    add = parser.add_argument
    add_data(parser, "for the part samples: ")
    add_worker_options(parser, "of the worker of the part samples")
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="only these",
    )
    add(
        "--rounds",
        type=int,
        help="of each part, two or more; else"
        + ",".join(
            f" {part.rounds} of {name}" for name, part in PARTS.items()
        ),
    )
    add("--quick", action="store_true", help="try out: two short rounds")
    found = parser.parse_args(argv)
    if found.quick and found.rounds is None:
        found.rounds = QUICK_ROUNDS
    if found.rounds is not None and found.rounds < 2:
        parser.error(f"--rounds is {found.rounds}; two or more")
    check_worker_options(parser, found)
    if "samples" in found.parts:
        require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("filter", lambda: _run(arguments))


def _run(options: argparse.Namespace) -> int:
    about = {"machine": machine(), "versions": versions()}
    remove_stale()
    verdicts: dict[str, Any] = {}
    for name in options.parts:
        rounds = []
        for each in _rounds(name, options):
            rounds.append(each)
            print(f"{name}: {_shown(name, each)}", flush=True)
        verdicts[name] = judge(name, rounds)
        print(report(name, verdicts[name]), flush=True)
        if options.json is not None:
            _write(options, about, verdicts)
    return 0


def _write(
    options: argparse.Namespace,
    about: Mapping[str, Any],
    verdicts: Mapping[str, Any],
) -> None:
    settings = {
        "options": options.options,
        "quick": options.quick,
        "model": MODEL,
        "samples": _samples(options),
        "shard_bytes": _shard_bytes(options),
    }
    body = {"benchmark": "filter", "settings": settings, **about}
    write_json(options.json, {**body, "parts": dict(verdicts)})


def _shown(name: str, found: Round) -> str:
    word, factor = PARTS[name].unit
    each = ", ".join(f"{key} {factor * found[key]:.3f}" for key in found)
    return f"{each} {word}"


def _samples(options: argparse.Namespace) -> int:
    return QUICK_SAMPLES if options.quick else SAMPLES


def _shard_bytes(options: argparse.Namespace) -> int:
    return QUICK_SHARD_BYTES if options.quick else SHARD_BYTES


def _rounds(name: str, options: argparse.Namespace) -> Iterator[Round]:
    rounds = options.rounds or PARTS[name].rounds
    if name == "call":
        yield from call_rounds(rounds)
        return
    measures: Mapping[str, Callable[[Testbed], Iterator[Round]]] = {
        "cpu": lambda bed: cpu_rounds(bed, rounds),
        "bytes": lambda bed: byte_rounds(bed, rounds, _shard_bytes(options)),
        "samples": lambda bed: sample_rounds(
            bed, rounds, _work(bed.folder, options), options.options
        ),
    }
    with two_tiers(netns=False, worker=False) as bed:
        yield from measures[name](bed)


def _work(folder: Path, options: argparse.Namespace) -> Work:
    package, cuts = package_model(folder, *MODEL)
    samples = _samples(options)
    [shard] = write_shards(find_tars(options.data), folder, samples, samples)
    return Work(package, cuts, shard, samples)


if __name__ == "__main__":
    sys.exit(main())
