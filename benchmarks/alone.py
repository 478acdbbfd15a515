"""Commands that measure one thing and need no testbed.

It imports nothing of HAPI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import machine, versions, write_json

EXIT_FAILURE = 1


def run(
    name: str,
    measured: Callable[[], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
    *,
    settings: Mapping[str, Any],
    path: Path | None,
) -> int:
    """Measures, prints and writes; the exit status.

    Args:
        name: of ``benchmarks.<name>``, and of its part of the file.
        measured: what was measured, JSON-able.
        table: of that.
        settings: for the file.
        path: of the file; None for none.
    """
    try:
        body: dict[str, Any] = {
            "benchmark": name,
            "settings": dict(settings),
            "machine": machine(),
            "versions": versions(),
        }
        body[name] = measured()
        print(table(body[name]))
        if path is not None:
            write_json(path, body)
    except (OSError, ValueError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def note(text: str) -> None:
    """Tells what is being measured."""
    print(f"… {text}", file=sys.stderr, flush=True)
