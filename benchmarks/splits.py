"""How far ``cut="auto"`` stays behind the best fixed cut.

    python -m benchmarks.splits --quick --data DIR --json splits.json

Two tiers of one core each stand in for two machines, with a link of a chosen
rate between them (benchmarks/testbed.py).  A cell is a network, a freeze
point and a link; the link is a multiple of the byte rate at which streaming
the images saturates the client, measured for each cell without a limit.  In
a cell, every contender trains the same tail on the same samples, one pass
each in every round: ``auto``, ``stream``, fixed cuts (``cut-K``) and the
cuts that two published rules choose (``hapi-2022``, ``hapi-sc24``).

What is measured, and what is not:

* The rounds show the steady state.  Before them every contender has an
  unmeasured pass, and ``auto`` as many as its plan needs to stay (at most
  45 seconds of them, with ``--quick`` 10).
* Fixed cuts are those that no other one dominates in every resource (within
  0.05 of the best one's time per sample), each in its fastest encoding that
  the floor allows; among all cuts up to two are looked for that may be fast
  by themselves though no mix would use them (not with --quick).  Left out of
  the rounds: a cut whose bytes the link cannot carry as fast as some fixed
  cut already went (``ruled_out``), from the second round on a cut that went
  at less than 0.75 of the best, and from the third on streaming, if it went
  at less than half of it (``out_of_reach``).
* Contenders with the same cut and encoding are measured once and share the
  figures (``shared``).
* One contender has a second pass in each round: ``noise`` is its regret
  against itself, and no regret smaller than that says anything; null with
  --quick and for links below 1, where there is no such pass.
* ``cold`` holds whole runs from the start, each with a new worker and without
  the package in the store: tracing, upload, profile and loading included.

The JSON file: ``settings``, ``machine``, ``versions``, ``calibration`` (by
network and freeze point) and ``cells``, a list of

  name, model, freeze, freeze_module, link, link_bytes_per_second, samples
  samples_per_second   {contender: median over the rounds}, also best_static;
                       null for a rule whose cut was ruled out
  rounds               {contender: [samples per second]}
  regret, interval     1 - median of auto / best_static over the rounds, and
                       its 95 % interval (bootstrap)
  against_stream       the same against stream
  missed               interval above 0.05, or above 0.02 against stream
  above_best_static    interval below 0
  bytes_per_sample     {contender: bytes on the wire, last pass}
  stages               {contender: [by round, what one sample took:
                       link_bytes, and CPU seconds of each tier's processes,
                       storage_seconds and client_seconds]}
  problem, more_cuts   what the planner knew from profiles and samples; cuts
                       in it that were measured as fixed ones only
  predicted            {contender: samples per second, by the profiles}, also
                       best_static
  best_static          name of the fastest fixed cut, or stream
  noise, encodings, shared, ruled_out, out_of_reach, fallbacks
  cold, cold_regret    seconds of whole runs, and by how much of its time auto
                       took longer than each other one
  plan, settling       auto's plan at the end, and after each pass of its
                       warm-up
  complete             false while the cell is being measured

Root, iproute2 and util-linux are needed; --no-netns does without, and then
no link is shaped: the cells are those of the unshaped link.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cell_run import CellRun, Settings
from benchmarks.cells import QUICK, Cell, chosen_cells
from benchmarks.commands import (
    add_workload,
    clock,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.results import Results, cold_table, table
from benchmarks.shards import find_tars
from benchmarks.testbed import Testbed, two_tiers

QUICK_SCALE = 0.35
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 45.0, 10.0
COLD_UPLOAD_SECONDS = 30.0


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("splits", __doc__)
    add_workload(parser)
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="four cells, short passes; no runs from cold, no noise",
    )
    add(
        "--cells",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="such as resnet18/backbone/0.25 or 'vit_b_16/*'",
    )
    add("--rounds", type=int, default=5, help="at least 5 (default)")
    add(
        "--scale",
        type=float,
        help="of the number of samples of a pass (default 1, quick 0.35)",
    )
    add("--cold-epochs", type=int, help="0: no runs from cold (default 1)")
    add(
        "--cold-upload-seconds",
        type=float,
        default=COLD_UPLOAD_SECONDS,
        help="no run from cold whose package takes longer"
        f" (default {COLD_UPLOAD_SECONDS:g})",
    )
    add(
        "--resume",
        action="store_true",
        help="keep the complete cells of the JSON file",
    )
    add(
        "--no-netns",
        action="store_true",
        help="no namespaces, no root; no link is shaped",
    )
    found = parser.parse_args(argv)
    if found.rounds < 5:
        parser.error(f"--rounds is {found.rounds}; at least 5")
    if found.resume and found.json is None:
        parser.error("--resume needs --json")
    require_data(parser, found)
    if found.scale is None:
        found.scale = QUICK_SCALE if found.quick else 1.0
    if found.scale <= 0:
        parser.error(f"--scale is {found.scale}; above 0")
    if found.cold_epochs is None:
        found.cold_epochs = 0 if found.quick else 1
    if found.quick and not found.cells:
        found.cells = list(QUICK)
    return found


class Progress:
    """What is left, and whose lines are told.

    Args:
        num_cells: still to be measured.
        tell: a line.
    """

    def __init__(self, num_cells: int, tell: Callable[[str], None]) -> None:
        self._started = time.monotonic()
        self._num_cells = num_cells
        self._tell = tell
        self._done = 0
        self._cell = ""

    def begin(self, cell: Cell) -> None:
        self._cell = cell.name
        left = ""
        if self._done:
            each = (time.monotonic() - self._started) / self._done
            minutes = each * (self._num_cells - self._done) / 60
            left = f"; about {minutes:.0f} min left"
        self.note(f"cell {self._done + 1} of {self._num_cells}{left}")

    def end(self) -> None:
        self._done += 1

    def note(self, text: str) -> None:
        self._tell(f"{self._cell}: {text}")


def measure_cells(
    bed: Testbed,
    cells: Sequence[Cell],
    settings: Settings,
    tars: Sequence[Path],
    results: Results,
    tell: Callable[[str], None],
) -> None:
    """Measures all cells that the results do not have."""
    todo = [cell for cell in cells if not results.done(cell.name)]
    progress = Progress(len(todo), tell)
    for cell in todo:
        progress.begin(cell)
        run = CellRun(bed, cell, settings, tars, progress.note, results.put)
        results.put(run.run())
        print(table([run.entry]), flush=True)
        progress.end()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("splits", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    shaped = not arguments.no_netns
    tars = find_tars(arguments.data)
    cells = chosen_cells(arguments.cells, shaped=shaped)
    settings = Settings(
        rounds=arguments.rounds,
        floor=arguments.floor,
        scale=arguments.scale,
        cold_epochs=arguments.cold_epochs,
        cold_upload_seconds=arguments.cold_upload_seconds,
        most_settling_seconds=QUICK_SETTLING_SECONDS
        if arguments.quick
        else SETTLING_SECONDS,
        thorough=not arguments.quick,
        tars=[tar.name for tar in tars],
    )
    results = Results(
        arguments.json,
        {**dataclasses.asdict(settings), "shaped": shaped},
        resume=arguments.resume,
    )
    if not shaped:
        print("--no-netns: no link is shaped; one network for both tiers")
    with two_tiers(netns=shaped) as bed:
        for folder in bed.removed:
            print(f"removed what a killed run had left: {folder}")
        results.body["affinities"] = {
            **bed.affinities(),
            "client": list(bed.client.cores),
        }
        measure_cells(bed, cells, settings, tars, results, clock())
    results.save()
    print(table(results.cells))
    if cold := cold_table(results.cells):
        print(cold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
