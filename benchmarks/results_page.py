"""The results of benchmarks as a page of the documentation.

    python -m benchmarks.results_page --splits splits.json \\
        --replay replay.json --adaptation adaptation.json \\
        --rst docs/results.rst

Takes the JSON files of benchmarks.splits, benchmarks.replay and
benchmarks.adaptation, any of them left out, and writes nothing that they do
not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import EXIT_FAILURE
from benchmarks.regret import AUTO, STREAM
from benchmarks.rst import rst_table

Body = Mapping[str, Any]

_INTRODUCTION = """\
Results
=======

What :doc:`benchmarks` describes, as it came out on one machine; your own
figures will differ, so measure them.  What others use today is measured beside
it in :doc:`comparison`.  This page is written by

.. code-block:: console

   $ python -m benchmarks.results_page --splits splits.json \\
       --replay replay.json --adaptation adaptation.json --rst docs/results.rst
"""
_STEADY = """\
Samples per second of the training loop, medians of {rounds} rounds.  *Regret*
is by how much ``auto`` stays behind the best fixed choice; negative, it is
ahead.  *Noise* is the regret of one contender against itself, where that was
measured.  *Predicted* is what the plan expects of ``auto`` from profiles
alone, before a job has corrected them.
"""
_COLD = """\
Seconds of one whole run from the start with {epochs:g} epoch of the samples,
each with a new worker and no package in the store.  ``>`` says that sending
the package alone takes so long.  So few samples are what push-down is least
good for: jobs that are over in a minute stream.
"""
_REPLAY = """\
These are no measurements: spans with the measured stage times went through a
simulated link and two simulated cores, at other rates of the link.  Replayed
at their own link, measured cells came out {auto_median} off in the median for
``auto``, {auto_largest} at most, and {fixed_median} ({fixed_largest}) for the
fixed choices.  Each field is the regret, and what was best among the fixed
ones, also where only a planner at another link would have known of it.
"""
_TENANTS = """\
Four jobs on one worker, one link and one core of the client tier planned for
themselves and had {rate:.1f} samples/s together, mean of {rounds} rounds:
{ratio:.3f} ({interval}) of the optimum of a linear program for all four, in
the median of the rounds; the goal is {goal:.2f}.  By round: {ratios}.  The
program's costs are those of one job with one cut, in turn with the rounds, at
the speed that the cores had in each ({optimum:.1f} samples/s in the mean;
without regard to speed {alone:.1f}, of which the jobs had {alone_ratio:.3f}).
With the program's mix dealt to them, by somebody who knows all jobs and costs,
the jobs had {joint_rate:.1f} samples/s, {joint_ratio:.3f}
({joint_interval}) of the optimum; paired by round, planning for
themselves was {regret} slower in the median ({regret_interval}; below zero is
faster).  They changed their plans {changes} times a minute each, where the
pace of re-planning allows {most:.0f}.  Of all epochs, {lost} samples were lost
and {doubled} doubled.
"""
_USED = """\
Used is the part of the time in which the link or a tier's core was busy;
dearer is by what a sample took more of a core than alone, at equal speed.
"""


def write_page(
    splits: Body | None, replay: Body | None, adaptation: Body | None
) -> str:
    """The page as reStructuredText.

    Args:
        splits, replay, adaptation: contents of the files; None to leave out.
    """
    parts = [_INTRODUCTION]
    if splits is not None:
        parts += [*_machine(splits), *_steady(splits), *_cold(splits)]
    if replay is not None:
        parts += _replayed(replay)
    if adaptation is not None:
        parts += _adapted(adaptation)
    return "\n".join(parts)


def _title(text: str) -> str:
    return f"{text}\n{'-' * len(text)}\n"


def _machine(body: Body) -> Iterator[str]:
    machine, versions = body["machine"], body["versions"]
    gigabytes = machine["memory_bytes"] / 1e9
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "swift")
    )
    yield (
        f"The machine: {machine['processor']}, {machine['cores']} cores, "
        f"{gigabytes:.0f} GB, Linux {machine['kernel']}; {shown}.  Networks "
        "with random weights, one thread for each tier, float32 "
        f"(floor ``{body['settings']['floor']}``).\n"
    )


def _complete(body: Body) -> list[Body]:
    return [cell for cell in body["cells"] if cell["complete"]]


def _steady(body: Body) -> Iterator[str]:
    cells = _complete(body)
    missed = sum(cell["missed"] for cell in cells)
    above = sum(cell["above_best_static"] for cell in cells)
    yield _title("Plans against fixed cuts")
    yield _STEADY.format(rounds=body["settings"]["rounds"])
    yield (
        f"Of {len(cells)} cells {missed} are missed; in {above} the whole "
        "interval lies above the best fixed choice.\n"
    )
    header = (
        "Cell",
        "Link, MB/s",
        "auto",
        "Predicted",
        "stream",
        "Best fixed",
        "Regret",
        "95 % interval",
        "Noise",
        "Verdict",
    )
    yield rst_table(header, map(_steady_row, cells))


def _steady_row(cell: Body) -> Sequence[str]:
    rates, best = cell["samples_per_second"], cell["best_static"]
    verdict = "missed" if cell["missed"] else "not missed"
    return (
        f"``{cell['name']}``",
        f"{cell['link_bytes_per_second'] / 1e6:.2f}",
        f"{rates[AUTO]:.1f}",
        f"{cell['predicted'][AUTO]:.1f}",
        f"{rates[STREAM]:.1f}",
        f"{best} {rates[best]:.1f}",
        _percent(cell["regret"]),
        _interval(cell["interval"]),
        _percent(cell["noise"]["regret"]) if cell["noise"] else "-",
        "above" if cell["above_best_static"] else verdict,
    )


def _cold(body: Body) -> Iterator[str]:
    cells = [cell for cell in _complete(body) if cell.get("cold")]
    if not cells:
        return
    yield _title("Whole runs from cold")
    yield _COLD.format(epochs=body["settings"]["cold_epochs"])
    yield rst_table(
        ("Cell", "Samples", "auto", "stream", "Fixed cut"),
        map(_cold_row, cells),
    )


def _cold_row(cell: Body) -> Sequence[str]:
    def shown(name: str) -> str:
        run = cell["cold"][name]
        if run["seconds"] is None:
            return f"> {run['at_least_seconds']:.0f}"
        return f"{run['seconds']:.1f}"

    fixed = [name for name in cell["cold"] if name not in (AUTO, STREAM)]
    return (
        f"``{cell['name']}``",
        str(cell["samples"]),
        shown(AUTO),
        shown(STREAM),
        ", ".join(f"{name} {shown(name)}" for name in fixed) or "-",
    )


def _replayed(body: Body) -> Iterator[str]:
    yield _title("More links, by replay")
    errors = body["error"]
    yield _REPLAY.format(
        auto_median=_percent(errors[AUTO]["median"]),
        auto_largest=_percent(errors[AUTO]["largest"]),
        fixed_median=_percent(errors["fixed"]["median"]),
        fixed_largest=_percent(errors["fixed"]["largest"]),
    )
    links = body["settings"]["links"]
    by_workload: dict[str, dict[float, Body]] = {}
    for cell in body["cells"]:
        workload = f"{cell['model']}/{cell['freeze']}"
        by_workload.setdefault(workload, {})[cell["link"]] = cell
    yield rst_table(
        ("Replayed", *(f"link {link:g}" for link in links)),
        (
            (
                f"``{workload}``",
                *(
                    f"{_percent(cells[link]['regret'])} "
                    f"({cells[link]['best_static']})"
                    for link in links
                ),
            )
            for workload, cells in by_workload.items()
        ),
    )


def _adapted(body: Body) -> Iterator[str]:
    yield _title("Plans that follow what happens")
    settings = body["settings"]
    yield (
        f"``{settings['model']}``, frozen up to ``{settings['freeze']}``.  "
        "Samples per second are those of the last part of each phase.\n"
    )
    for found in (body[name] for name in ("link", "worker") if name in body):
        events = ["the start", *(each["what"] for each in found["events"])]
        yield rst_table(
            ("After", "Samples/s"),
            (
                (event, f"{phase['samples_per_second']:.1f}")
                for event, phase in zip(events, found["phases"], strict=True)
            ),
        )
        yield (
            f"Of all epochs, {found['lost']} samples were lost and "
            f"{found['doubled']} doubled.  The log of plans:\n"
        )
        for plan in found["jobs"][0]["plans"]:
            yield f"* {plan['time']:.0f} s: {plan['mix']}"
        yield ""
    if "tenants" in body:
        found = body["tenants"]
        joint, alone = found["joint"], found["alone"]
        yield _TENANTS.format(
            rate=found["samples_per_second"],
            rounds=len(found["rounds"]),
            ratio=found["ratio"],
            interval=_thousandths(found["interval"]),
            ratios=", ".join(f"{each:.2f}" for each in found["ratios"]),
            optimum=found["optimum"],
            alone_ratio=alone["ratio"],
            alone=alone["optimum"],
            goal=found["goal"],
            joint_rate=joint["samples_per_second"],
            joint_ratio=joint["ratio"],
            joint_interval=_thousandths(joint["interval"]),
            regret=_percent(joint["regret"]),
            regret_interval=_interval(joint["regret_interval"]),
            changes=", ".join(
                f"{each:.1f}" for each in found["plan_changes_per_minute"]
            ),
            most=found["most_changes_per_minute"],
            lost=found["lost"],
            doubled=found["doubled"],
        )
        yield rst_table(
            ("Resource", "planned by each", "dealt"),
            (
                (
                    f"{tier}, {what}",
                    *(form(who[key][tier]) for who in (found, joint)),
                )
                for key, what, form in (
                    ("used", "used", lambda part: f"{100 * part:.0f} %"),
                    ("dearer", "dearer than alone", "{:.2f}".format),
                )
                for tier in found[key]
            ),
        )
        yield _USED


def _thousandths(ends: Iterable[float]) -> str:
    return " … ".join(f"{end:.3f}" for end in ends)


def _percent(part: float) -> str:
    text = f"{100 * part:.1f} %"
    return "0.0 %" if text == "-0.0 %" else text


def _interval(ends: Iterable[float]) -> str:
    return " … ".join(_percent(end) for end in ends)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("splits", "replay", "adaptation"):
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="JSON",
            help=f"results of benchmarks.{name}",
        )
    parser.add_argument(
        "--rst", type=Path, required=True, metavar="PATH", help="page to write"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    try:
        page = write_page(
            *(
                json.loads(path.read_text()) if path else None
                for path in (
                    arguments.splits,
                    arguments.replay,
                    arguments.adaptation,
                )
            )
        )
        arguments.rst.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"benchmarks.results_page: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyError as error:
        print(
            f"benchmarks.results_page: a file has no {error}: give what the "
            "benchmark of that name has written",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
