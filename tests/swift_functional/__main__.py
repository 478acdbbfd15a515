"""Command line of the comparison; see ``--help``."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from hapi_cluster import ClusterError
from swift_functional.clusters import Clusters
from swift_functional.comparison import (
    Comparison,
    remarks,
    succeeded,
    table,
    to_json,
)
from swift_functional.errors import NotRunError
from swift_functional.layouts import LAYOUTS
from swift_functional.sdist import (
    default_cache,
    installed_version,
    unpacked_sdist,
)

EXIT_DIFFERENT = 1
EXIT_NOT_RUN = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
FORMAT = 1

SUITES: Mapping[str, Sequence[str]] = {
    "swift": ("test/functional", "--ignore=test/functional/s3api"),
    "s3api": ("test/functional/s3api",),
    "s3-compat": ("test/s3api",),
}
# Without versions and symlinks, which take most of the time.
QUICK: Mapping[str, Sequence[str]] = {
    "swift": tuple(
        f"test/functional/test_{name}.py"
        for name in (
            *("access_control", "account", "container", "dlo", "object"),
            *("domain_remap", "protocol", "slo", "staticweb", "tempurl"),
        )
    ),
    "s3api": tuple(
        f"test/functional/s3api/test_{name}.py"
        for name in ("acl", "object", "presigned", "service", "versioning")
    ),
    "s3-compat": ("test/s3api/test_object_checksums.py",),
}
# Excludes repetitions of tests with other names and another signature.
NOT_QUICK = "not UTF8 and not SigV4"

DESCRIPTION = """\
Runs the functional tests of the installed Swift, which pip fetches as its
sdist, against two clusters: one without the hapi filter, one with it.  Prints
the number of tests by outcome, and every test whose outcome differs.  Those
are run again, alone, on both sides; the second outcome counts, and both are
printed.

Exit status: 0 if nothing differs and nothing fails; 1 otherwise; 2 if the
tests could not be run.
"""
EPILOG = """\
--json has these keys:
  format        version of this format: 1
  swift, hapi, python
                versions
  date          date of the end, UTC
  succeeded     true if nothing differs and nothing fails
  comparisons   for each layout and suite: "layout", "suite"; "seconds" and
                "counts" (tests by outcome) under "without" and "with" the
                filter; ids of tests that are "differing" finally, "failing" in
                both finally, "unsteady" (differed in the first run only);
                "tests" and "again" (the second run): id -> "without" and
                "with" -> "kind" of outcome and "reason"
"""


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m swift_functional",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--layout",
        action="append",
        choices=LAYOUTS,
        help="repeatable; default: all",
    )
    add(
        "--suite",
        action="append",
        choices=SUITES,
        help="repeatable; default: all",
    )
    add("--only", metavar="PATTERN", help="select tests with pytest -k")
    add(
        "--quick",
        action="store_true",
        help="run a selection of tests, in one or two minutes",
    )
    add("--json", type=Path, metavar="PATH", help="write the results to PATH")
    add(
        "--logs",
        type=Path,
        metavar="DIR",
        help="keep JUnit XML and the logs of pytest and the servers in DIR",
    )
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        default=default_cache(),
        help="folder of Swift's sdists (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.layout = arguments.layout or list(LAYOUTS)
    arguments.suite = arguments.suite or list(SUITES)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (NotRunError, ClusterError) as error:
        print(f"swift_functional: {error}", file=sys.stderr)
        return EXIT_NOT_RUN


def run(arguments: argparse.Namespace) -> int:
    """Runs and reports the comparisons; returns the exit status."""
    swift = installed_version()
    source = unpacked_sdist(arguments.cache, swift)
    with _folder(arguments.logs) as logs:
        comparisons = [
            comparison
            for layout in arguments.layout
            for comparison in _compare(arguments, layout, source, logs)
        ]
    if not any(each.pairs for each in comparisons):
        raise NotRunError(f"--only {arguments.only!r} selects no test")
    _report(swift, comparisons)
    if arguments.json is not None:
        _write(arguments.json, swift, comparisons)
    if succeeded(comparisons):
        return 0
    if arguments.logs is None:
        print("--logs DIR keeps the logs of pytest and the servers.")
    return EXIT_DIFFERENT


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield chosen.resolve()


def _compare(
    arguments: argparse.Namespace, layout: str, source: Path, logs: Path
) -> Iterator[Comparison]:
    suites = QUICK if arguments.quick else SUITES
    options = _selection(arguments)
    with Clusters(layout, source, logs) as clusters:
        for suite in arguments.suite:
            yield clusters.compare(suite, suites[suite], options)


def _selection(arguments: argparse.Namespace) -> Sequence[str]:
    """Options of pytest that select tests."""
    parts = [f"({arguments.only})"] if arguments.only else []
    parts += [NOT_QUICK] if arguments.quick else []
    return ("-k", " and ".join(parts)) if parts else ()


def _report(swift: str, comparisons: Sequence[Comparison]) -> None:
    print(f"Functional tests of Swift {swift}, without and with the filter:")
    print(table(comparisons))
    for line in remarks(comparisons):
        print(line)
    if not any(each.differing for each in comparisons):
        print("No difference.")


def _write(path: Path, swift: str, comparisons: Sequence[Comparison]) -> None:
    body = {
        "format": FORMAT,
        "swift": swift,
        "hapi": version("swift-hapi"),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "succeeded": succeeded(comparisons),
        "comparisons": [to_json(each) for each in comparisons],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
