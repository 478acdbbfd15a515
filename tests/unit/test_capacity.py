"""The formulas of the page on capacity reproduce recorded runs."""

import csv
import json
import re
from math import ceil

import pytest

from documentation import ROOT

PAGE = (ROOT / "docs" / "howto" / "capacity.rst").read_text()
RESULTS = ROOT / "benchmarks" / "results"
SPAN = 64


def table(header):
    """Rows of the table whose first column has this name."""
    pattern = rf':header: "{header}".*\n.*\n\n((?:   ".*\n)+)'
    [lines] = re.findall(pattern, PAGE)
    rows = csv.reader(lines.split("\n")[:-1], skipinitialspace=True)
    return [[cell.replace(",", "") for cell in row] for row in rows]


def per_sample(pattern, heads=None):
    """CPU seconds of a sample by a formula of the page."""
    [found] = re.findall(pattern, PAGE)
    request, *others = map(float, found)
    if heads is not None:
        request += others[0] * heads
    return (request / SPAN + others[-1]) / 1000


def proxy():
    return per_sample(r"places = object +([\d.]+) / n \+ ([\d.]+)")


def object_server(heads):
    formula = r"\(([\d.]+) \+ ([\d.]+) \* HEADs\) / n \+ ([\d.]+)"
    return per_sample(formula, heads)


def test_formulas_reproduce_the_simulation():
    record = json.loads((RESULTS / "simulation.json").read_text())
    for row in record["rows"]:
        demand = 1000 * row["nodes"]
        assert demand * proxy() == pytest.approx(row["proxy_cores"], rel=0.01)
        # At 1,000 nodes, HEADs of the package are many at three of them.
        if row["nodes"] < 1000:
            rate = 1000 * row["share_with_proxies"] / 4
            assert rate * object_server(1) == pytest.approx(
                row["nodes_busy"], rel=0.03
            )


def test_example_follows_from_the_formulas():
    _, _, _, rate, size = table("network")[1]
    for row in table("jobs at a time"):
        jobs, *found = map(float, row)
        demand = 50 * jobs
        wanted = [
            demand / float(rate),
            ceil(4 * jobs / 16),
            demand * object_server(2),
            demand * proxy(),
            demand * float(size) * 1.09 * 8 / 1e6,
            demand * 107e3 * 8 / 1e6,
            4 * jobs * 192 / 1024,
        ]
        assert found == pytest.approx(wanted, rel=0.06)
