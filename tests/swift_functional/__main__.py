"""Command line of the comparison; see ``--help``."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from hapi_cluster import ClusterError
from swift_functional import NotRunError
from swift_functional.clusters import compare_layout
from swift_functional.comparison import Comparison, succeeded, table
from swift_functional.layouts import LAYOUTS
from swift_functional.sdist import default_cache, unpacked_sdist

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


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m swift_functional",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, choices in ("--layout", LAYOUTS), ("--suite", SUITES):
        said = "repeatable; default: all"
        add(name, action="append", choices=choices, help=said)
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
    return parser.parse_args(argv)


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
    swift = version("swift")
    source = unpacked_sdist(arguments.cache, swift)
    tests = QUICK if arguments.quick else SUITES
    suites = {name: tests[name] for name in arguments.suite or SUITES}
    comparisons: list[Comparison] = []
    with ExitStack() as stack:
        logs = arguments.logs and arguments.logs.resolve()
        if logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for layout in arguments.layout or LAYOUTS:
            comparisons += compare_layout(
                layout, source, logs, suites, _selection(arguments)
            )
    if not any(each.first for each in comparisons):
        raise NotRunError(f"--only {arguments.only!r} selects no test")
    _report(swift, comparisons)
    if arguments.json is not None:
        _write(arguments.json, swift, comparisons)
    if succeeded(comparisons):
        return 0
    if arguments.logs is None:
        print("--logs DIR keeps the logs of pytest and the servers.")
    return EXIT_DIFFERENT


def _selection(arguments: argparse.Namespace) -> Sequence[str]:
    """Options of pytest that select tests."""
    parts = [f"({arguments.only})"] if arguments.only else []
    parts += [NOT_QUICK] if arguments.quick else []
    return ("-k", " and ".join(parts)) if parts else ()


def _report(swift: str, comparisons: Sequence[Comparison]) -> None:
    print(f"Functional tests of Swift {swift}, without and with the filter:")
    print(table(comparisons))
    for each in comparisons:
        print("".join(f"{line}\n" for line in each.remarks()), end="")
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
        "comparisons": [each.to_json() for each in comparisons],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
