"""Compares the lines of code of each subpackage with a committed table.

    python tools/count_lines.py [--update] [--json PATH]

Counts all lines of the Python files that git does not ignore.  Prints the
subpackages that grew or shrank, and sums; exits with 1 if one has more than
``tools/lines.json`` allows.  --update writes the present numbers there: the
commit that raises one says what the lines bring and what they remove.  --json
writes ``{subpackage: lines}``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tools" / "lines.json"
PACKAGES = ("client", "protocol", "splitter", "swift_middleware", "deploy")
"""Folders of the product, each with packages; others count as a whole."""


def subpackage(path: str) -> str:
    """Name of the subpackage of a file, relative to the root."""
    folder, *parts = path.split("/")
    if folder not in PACKAGES:
        return folder if parts else "root"
    return ".".join([parts[0], *parts[1:-1][:1]])


def count() -> dict[str, int]:
    """Lines by subpackage."""
    paths = subprocess.run(
        # New files count too, before they are added.
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    lines: Counter[str] = Counter()
    for path in paths:
        if (ROOT / path).exists():  # not deleted since the last commit
            lines[subpackage(path)] += (ROOT / path).read_text().count("\n")
    return dict(sorted(lines.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    lines = count()
    text = json.dumps(lines, indent=1) + "\n"
    if options.json:
        options.json.write_text(text)
    if options.update:
        TABLE.write_text(text)
    allowed: dict[str, int] = json.loads(TABLE.read_text())
    grown = 0
    for name in sorted({*lines, *allowed}):
        more = lines.get(name, 0) - allowed.get(name, 0)
        if more:
            print(f"{name:32}{lines.get(name, 0):7}{more:+6}")
        grown += more > 0
    product = sum(n for name, n in lines.items() if name.startswith("hapi_"))
    print(f"product {product}, tests {lines['tests']}")
    if grown:
        print(
            f"{grown} subpackages have more lines than tools/lines.json "
            "allows: remove what they make unnecessary, or run "
            "tools/count_lines.py --update and say in the commit why"
        )
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
