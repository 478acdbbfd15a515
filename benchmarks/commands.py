"""What the commands that run a testbed have in common."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable

from benchmarks.options import add_data as add_data
from benchmarks.options import parser_of as parser_of
from benchmarks.options import require_data as require_data
from benchmarks.remote import RemoteError
from benchmarks.testbed import TestbedError

from hapi_protocol.encodings import PRECISIONS

EXIT_FAILURE = 1
EXIT_TERMINATED = 128 + signal.SIGTERM


def add_worker_options(
    parser: argparse.ArgumentParser,
    text: str = "of the worker; default: none",
) -> None:
    """Option ``--options``, for :func:`check_worker_options`."""
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="KEY=VALUE", help=text
    )


def check_worker_options(
    parser: argparse.ArgumentParser, found: argparse.Namespace
) -> None:
    """Ends with what is wrong with an option of the worker."""
    for option in found.options:
        if "=" not in option:
            parser.error(f"--options: {option!r} is not KEY=VALUE")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Option ``--rounds``, for :func:`check_rounds`."""
    parser.add_argument(
        "--rounds", type=int, default=5, help="two or more (default 5)"
    )


def check_rounds(
    parser: argparse.ArgumentParser, found: argparse.Namespace
) -> None:
    """Ends where there are too few rounds for an interval."""
    if found.rounds < 2:
        parser.error(f"--rounds is {found.rounds}; two or more")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options ``--data`` and ``--min-precision``."""
    add_data(parser)
    parser.add_argument(
        "--min-precision",
        choices=PRECISIONS,
        default=PRECISIONS[0],
        help="what a plan may round",
    )


def clock(prefix: str = "") -> Callable[[str], None]:
    """Prints lines with the time since now; ``prefix`` stands before it."""
    started = time.monotonic()

    def note(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        print(f"{prefix}{minutes:3}:{seconds:02} {text}", flush=True)

    return note


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Runs a command so that its servers and folders go, however it ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (TestbedError, RemoteError, ValueError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return EXIT_FAILURE
