"""Results of a worker's benchmarks as a page of the documentation.

    python -m benchmarks.worker_page worker.json requests.json \\
        fairness.json memory.json soak.json --rst docs/results-worker.rst

Takes JSON files of benchmarks.worker, benchmarks.requests, benchmarks.fairness
and benchmarks.memory, some or all of them, and writes nothing that they do not
hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.commands import EXIT_FAILURE
from benchmarks.rst import rst_table

Body = Mapping[str, Any]

_INTRODUCTION = """\
Results of a worker
===================

What :doc:`benchmarks` describes of the worker alone, as it came out on one
machine.  This page is written by ``python -m benchmarks.worker_page`` from the
files of those benchmarks.
"""
_EFFICIENCY = """\
Samples per second through the worker's socket, over those of the tightest
loop around the eager model; medians of {rounds} rounds.  The goal is
{goal:.2f}.  More than 1 is possible: the worker folds batch norms into
convolutions, and does not compute pixels that the crop cuts away.
"""
_REQUESTS = """\
Milliseconds of a request besides the work on its samples, from {rounds} rounds
of {requests} requests; the goal is {goal:.0f} for the whole request, which was
{verdict}.
"""
_FAIRNESS = """\
*Of its share* is what an account had of its max-min fair share of the worker's
work, median of {rounds} rounds; the goal is {goal:.2f} for those with a star.
"""
_MEMORY = """\
The predicted peak of a forward pass over the measured one, for cuts and
batches with 64 MiB of activations and more; between {least:g} and {most:g} is
the goal.
"""
_SOAK = """\
Ten clients with six models for {minutes:g} minutes, at a limit of
{memory_limit:.0f} MiB: a quarter above what one sample of the largest model
needs.  {shards} shards were computed, {refused} requests refused for now and
repeated, {uploads} models uploaded; {unfinished} shards were left undone, and
the longest took {longest:.0f} s (goal {longest_goal:.0f}).  Resident were at
most {peak:.0f} MiB of {limit:.0f}, and in the last fifth of the time {growth}
more than in the second (goal at most {growth_goal}): {verdict}.
"""


def write_page(bodies: Sequence[Body]) -> str:
    """The page as reStructuredText.

    Args:
        bodies: contents of the files, in the order of the page.

    Raises:
        ValueError: a file is of another benchmark.
    """
    parts = [_INTRODUCTION]
    if bodies:
        parts.append(_machine(bodies[0]))
    for body in bodies:
        name = body["benchmark"]
        if name not in _SECTIONS:
            raise ValueError(
                f"a file is of the benchmark {name!r}; give those of "
                f"{', '.join(_SECTIONS)}"
            )
        parts += _SECTIONS[name](body)
    return "\n".join(parts)


def _machine(body: Body) -> str:
    machine, versions = body["machine"], body["versions"]
    return (
        f"The machine: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, Linux {machine['kernel']}; "
        f"python {versions['python']}, torch {versions['torch']}.\n"
    )


def _filled(text: str, **values: object) -> str:
    return textwrap.fill(text.format(**values), 79) + "\n"


def _title(text: str) -> str:
    return f"{text}\n{'-' * len(text)}\n"


def _efficiency(body: Body) -> Iterator[str]:
    settings = body["settings"]
    yield _title("Efficiency")
    yield _filled(
        _EFFICIENCY, rounds=settings["rounds"], goal=settings["goal"]
    )
    yield rst_table(
        (
            "Model",
            "Clients",
            "Worker",
            "Loop",
            "Efficiency",
            "Interval",
            "Goal",
        ),
        (
            (
                f"``{cell['model']}``",
                str(cell["clients"]),
                f"{cell['engine_samples_per_second']:.1f}",
                f"{cell['loop_samples_per_second']:.1f}",
                f"{cell['efficiency']:.3f}",
                _range(cell["interval"]),
                _verdict(cell["efficiency"] >= settings["goal"]),
            )
            for cell in body["cells"]
        ),
    )


def _requests(body: Body) -> Iterator[str]:
    yield _title("Requests")
    yield _filled(
        _REQUESTS,
        rounds=body["settings"]["rounds"],
        requests=body["settings"]["requests"],
        goal=1e3 * body["goal_seconds"],
        verdict=_verdict(body["met"]),
    )
    yield rst_table(
        ("Part", "Median", "Medians of the rounds", "95th percentile"),
        (
            (
                name,
                f"{1e3 * found['median']:.2f}",
                _range([1e3 * end for end in found["interval"]], digits=2),
                f"{1e3 * found['percentile_95']:.2f}",
            )
            for name, found in body["found"].items()
            if "percentile_95" in found
        ),
    )


def _fairness(body: Body) -> Iterator[str]:
    yield _title("Fairness")
    shared = [each for each in body["scenarios"] if "accounts" in each]
    if shared:
        yield _filled(
            _FAIRNESS,
            rounds=body["settings"]["rounds"],
            goal=shared[0]["goal"]["ratio"],
        )
        yield rst_table(
            (
                "Scenario",
                "Account",
                "Streams",
                "Weight",
                "Samples/s",
                "Of its share",
                "Interval",
            ),
            (_share_row(each, a) for each in shared for a in each["accounts"]),
        )
    for each in shared:
        yield (
            f"* ``{each['scenario']}``: Jain's index {each['jain']:.4f} (goal "
            f"{each['goal']['jain']:.2f}); {_verdict(each['met'])}"
        )
    for each in body["scenarios"]:
        if "makespan_seconds" in each:
            yield (
                f"* {len(each['tenants'])} tenants together took "
                f"{each['ratio']:.3f} ({_range(each['interval'])}) of the sum "
                f"of their times alone; {_verdict(each['met'])}"
            )
    yield ""


def _share_row(scenario: Body, account: Body) -> Sequence[str]:
    star = " \\*" if account["guarded"] else ""
    return (
        f"``{scenario['scenario']}``",
        f"``{account['account']}``{star}",
        str(account["streams"]),
        f"{account['weight']:g}",
        f"{account['samples_per_second']:.1f}",
        f"{account['ratio']:.3f}",
        _range(account["interval"]),
    )


def _memory(body: Body) -> Iterator[str]:
    if "soak" in body:
        yield from _soak(body)
        return
    least, most = body["settings"]["goal"]
    yield _title("Memory")
    yield _filled(_MEMORY, least=least, most=most)
    models: dict[str, list[Body]] = {}
    for cell in body["cells"]:
        models.setdefault(cell["model"], []).append(cell)
    yield rst_table(
        ("Model", "Cells", "Least", "Most", "Within"),
        (
            (
                f"``{model}``",
                str(len(cells)),
                f"{min(cell['ratio'] for cell in cells):.2f}",
                f"{max(cell['ratio'] for cell in cells):.2f}",
                str(sum(cell["met"] for cell in cells)),
            )
            for model, cells in models.items()
        ),
    )


def _soak(body: Body) -> Iterator[str]:
    found, goal = body["soak"], body["soak"]["goal"]
    yield _title("A long time with little memory")
    yield _filled(
        _SOAK,
        minutes=body["settings"]["soak_minutes"],
        memory_limit=found["memory_limit_bytes"] / 2**20,
        shards=found["shards"],
        refused=found["refused"],
        uploads=found["uploads"],
        unfinished=found["unfinished"],
        longest=found["longest_seconds"],
        longest_goal=goal["longest_seconds"],
        peak=found["peak_bytes"] / 2**20,
        limit=found["limit_bytes"] / 2**20,
        growth=f"{100 * found['growth']:.1f} %",
        growth_goal=f"{100 * goal['growth']:.0f} %",
        verdict=_verdict(found["met"]),
    )


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _range(ends: Sequence[float], digits: int = 3) -> str:
    return " … ".join(f"{end:.{digits}f}" for end in ends)


_SECTIONS: Mapping[str, Callable[[Body], Iterator[str]]] = MappingProxyType(
    {
        "worker": _efficiency,
        "requests": _requests,
        "fairness": _fairness,
        "memory": _memory,
    }
)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="results of the benchmarks",
    )
    parser.add_argument(
        "--rst", type=Path, required=True, metavar="PATH", help="page to write"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    try:
        bodies = [json.loads(path.read_text()) for path in arguments.files]
        arguments.rst.write_text(write_page(bodies), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"benchmarks.worker_page: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyError as error:
        print(
            f"benchmarks.worker_page: a file has no {error}: give what the "
            "benchmarks of a worker have written",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
