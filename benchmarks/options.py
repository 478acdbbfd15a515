"""Options that several commands have; imports nothing of HAPI."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DATA_VARIABLE = "HAPI_TEST_DATA"


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``python -m benchmarks.<name>``, with ``--json``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where the results go"
    )
    return parser


def add_data(
    parser: argparse.ArgumentParser,
    what: str = "",
    images: str = "photographs",
) -> None:
    """Option ``--data``; ``what`` it is for stands before its help."""
    parser.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="DIR|TAR",
        help=f"{what}WebDataset tars of {images}; else {DATA_VARIABLE}",
    )


def add_quick(parser: argparse.ArgumentParser, text: str) -> None:
    """Option ``--quick``."""
    parser.add_argument("--quick", action="store_true", help=text)


def require_data(
    parser: argparse.ArgumentParser, found: argparse.Namespace
) -> None:
    """Takes the environment's data, or ends with what to give."""
    if found.data is None:
        folder = os.environ.get(DATA_VARIABLE)
        if not folder:
            parser.error(f"give --data, or set {DATA_VARIABLE}")
        found.data = [Path(folder)]
