"""Options, progress lines, tables and exit statuses of the commands."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.testbed.remote import RemoteError
from benchmarks.testbed.two_tiers import TestbedError

DATA_VARIABLE = "HAPI_TEST_DATA"
PHOTOGRAPHS = "WebDataset tars of photographs"
MIN_ROUNDS, QUICK_ROUNDS = 2, 2
TABLE_COLUMNS = 140
"""Width of tables if the output is not a terminal."""


def parser_of(
    name: str, description: str | None, *, data: str | None = None
) -> argparse.ArgumentParser:
    """A parser with ``--json`` and ``--quick``.

    ``data`` adds ``--data`` with this help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the results there")
    add(
        "--quick",
        action="store_true",
        help="smoke test: short, the figures prove nothing",
    )
    if data is not None:
        add(
            "--data",
            nargs="+",
            type=Path,
            metavar="DIR|TAR",
            help=f"{data} (default: ${DATA_VARIABLE})",
        )
    return parser


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Option ``--rounds`` of interleaved measurements."""
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"interleaved rounds, {MIN_ROUNDS} or more"
        f" (default {default}; quick {QUICK_ROUNDS})",
    )
    parser.set_defaults(default_rounds=default)


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parses and checks what the options of this module have in common."""
    options = parser.parse_args(argv)
    if "rounds" in options:
        if options.rounds is None:
            options.rounds = (
                QUICK_ROUNDS if options.quick else options.default_rounds
            )
        if options.rounds < MIN_ROUNDS:
            parser.error(
                f"--rounds is {options.rounds}; it must be {MIN_ROUNDS} or"
                " more"
            )
    if "data" in options and options.data is None:
        folder = os.environ.get(DATA_VARIABLE)
        if not folder:
            parser.error(f"give --data, or set {DATA_VARIABLE}")
        options.data = [Path(folder)]
    return options


def clock(prefix: str = "") -> Callable[[str], None]:
    """Prints lines with the minutes since now."""
    started = time.monotonic()

    def note(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        print(f"{prefix}{minutes:3}:{seconds:02} {text}", flush=True)

    return note


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Prints a table; all columns but the first are right-aligned."""
    table = Table(title=title, box=SIMPLE, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    console.print(table)


def print_goals(met: dict[str, bool | None]) -> None:
    """Prints a line for each goal."""
    words = {True: "met", False: "missed", None: "not measured"}
    for goal, is_met in met.items():
        print(f"{words[is_met]}: {goal}")


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Runs a command so that its servers end, however it ends itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (TestbedError, RemoteError, OSError, ValueError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 1
