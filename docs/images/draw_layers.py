"""Draws ``layers.svg``, the packages and their layers, from the imports.

``python docs/images/draw_layers.py`` parses all modules.  A box is a
subpackage, or a module at the root of its package.  Its row is one above the
highest row that it imports from, so that imports run downwards only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from picture import CLIENT, OURS, PLAIN, SOFT, STORAGE, Picture

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "hapi_training": "client",
    "hapi_client": "client",
    "hapi_worker": "swift_middleware",
    "hapi_middleware": "swift_middleware",
    "hapi_splitter": "splitter",
    "hapi_protocol": "protocol",
    "hapi_cluster": "deploy",
}
COLOURS = {
    "hapi_training": CLIENT,
    "hapi_client": CLIENT,
    "hapi_worker": OURS,
    "hapi_middleware": OURS,
    "hapi_splitter": STORAGE,
}
FLAT = {
    "hapi_protocol": "headers, feature stream, index, errors, profiles",
    "hapi_cluster": "the embedded Swift",
}
"""Packages without subpackages, and what they contain."""
COMMANDS = ("hapi_client", "cli")
"""The commands may import every package; they do not count for the order."""
WIDTH, MARGIN, GAP, HEAD, BOX, PITCH = 960, 16, 16, 52, 26, 32
LETTER = 7.4


@dataclass
class Package:
    """Imports of one package.

    Attributes:
        boxes: imported boxes, by box.
        packages: other packages that are imported.
    """

    boxes: dict[str, set[str]] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


def read_package(name: str) -> Package:
    """Parses all modules of a package."""
    package = Package()
    folder = ROOT / FOLDERS[name] / name
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        if inside == ("__init__",):
            continue
        box = package.boxes.setdefault(inside[0], set())
        for node in ast.walk(ast.parse(path.read_text())):
            for parts in _imported(node):
                if parts[0] == name and len(parts) > 1:
                    box.add(parts[1])
                elif parts[0] in FOLDERS and (name, inside[0]) != COMMANDS:
                    package.packages.add(parts[0])
    for each, imports in package.boxes.items():
        imports &= set(package.boxes) - {each}
    package.packages.discard(name)
    return package


def _imported(node: ast.AST) -> Iterable[list[str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name.split(".")
    elif isinstance(node, ast.ImportFrom) and node.module:
        parts = node.module.split(".")
        if len(parts) == 1:
            for alias in node.names:
                yield [*parts, alias.name]
        else:
            yield parts


def rows_of(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Sorts names into rows, lowest first, each above what it imports.

    Raises:
        graphlib.CycleError: for imports in a circle.
    """
    level: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        below = [level[each] for each in imports.get(name, ())]
        level[name] = max(below, default=-1) + 1
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in sorted(level):
        rows[level[name]].append(name)
    return rows


def _lines(row: list[str], width: float) -> list[list[str]]:
    """Breaks a row of boxes into lines that fit a width."""
    lines: list[list[str]] = [[]]
    used = 0.0
    for name in row:
        need = LETTER * len(name) + 22
        if lines[-1] and used + need > width:
            lines.append([])
            used = 0.0
        lines[-1].append(name)
        used += need
    return lines


def _box_lines(name: str, package: Package, width: float) -> list[list[str]]:
    if name in FLAT:
        return []
    return [
        line
        for row in reversed(rows_of(package.boxes))
        for line in _lines(row, width)
    ]


def layers() -> Picture:
    """Draws all packages, importing ones above imported ones."""
    packages = {name: read_package(name) for name in FOLDERS}
    floors = list(
        reversed(rows_of({n: p.packages for n, p in packages.items()}))
    )
    inner = {
        name: (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor)
        for floor in floors
        for name in floor
    }
    lines = {
        name: _box_lines(name, package, inner[name] - 24)
        for name, package in packages.items()
    }
    heights = [
        max(HEAD + max(PITCH * len(lines[name]) + 8, 24) for name in floor)
        for floor in floors
    ]
    total = sum(heights) + GAP * (len(floors) - 1) + 2 * MARGIN + 24
    picture = Picture(WIDTH, round(total), "Packages and their layers")
    top = float(MARGIN)
    for floor, height in zip(floors, heights, strict=True):
        for number, name in enumerate(floor):
            left = MARGIN + number * (inner[name] + GAP)
            own = HEAD + 24 if name in FLAT else height
            _panel(picture, left, top, inner[name], own, name, packages)
            _boxes(picture, left, top, inner[name], name, lines[name])
        top += height + GAP
    picture.text(
        WIDTH / 2,
        total - 16,
        "Imports run downwards only.  The commands (cli) may also import "
        "hapi_training and hapi_cluster.",
        size=13,
        colour=SOFT,
    )
    return picture


def _panel(
    picture: Picture,
    left: float,
    top: float,
    width: float,
    height: float,
    name: str,
    packages: Mapping[str, Package],
) -> None:
    _, edge = COLOURS.get(name, PLAIN)
    picture.box(left, top, width, height, ("#fcfcfd", edge), dashed=True)
    picture.text(left + width / 2, top + 22, name, bold=True, size=15)
    imports = sorted(packages[name].packages)
    text = ", ".join(each.removeprefix("hapi_") for each in imports)
    picture.text(
        left + width / 2,
        top + 41,
        f"imports {text or 'none of the others'}",
        size=12,
        colour=SOFT,
    )
    if name in FLAT:
        picture.text(left + width / 2, top + 62, FLAT[name], size=12)


def _boxes(
    picture: Picture,
    left: float,
    top: float,
    width: float,
    package: str,
    lines: list[list[str]],
) -> None:
    for number, line in enumerate(lines):
        y = top + HEAD + PITCH * number
        sizes = [LETTER * len(name) + 16 for name in line]
        x = left + (width - sum(sizes) - 6 * (len(line) - 1)) / 2
        for name, size in zip(line, sizes, strict=True):
            folder = ROOT / FOLDERS[package] / package / name
            colours = COLOURS[package] if folder.is_dir() else PLAIN
            picture.box(x, y, size, BOX, colours)
            picture.text(x + size / 2, y + 17, name, size=12)
            x += size + 6


def main() -> None:
    """Writes the picture next to this file."""
    (Path(__file__).parent / "layers.svg").write_text(layers().svg())


if __name__ == "__main__":
    main()
