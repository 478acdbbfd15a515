"""The suite's pictures draw what the file holds."""

from __future__ import annotations

import pytest
from benchmarks.suite import many_tenants, run_sums, verdict
from benchmarks.suite.report.bound import bound_part
from benchmarks.suite.report.costs import Cores, costs_of, where
from benchmarks.suite.report.curves import curves
from benchmarks.suite.report.document import Part, Picture
from benchmarks.suite.report.looks import LOOKS, looks_of
from benchmarks.suite.report.ratios import ratios_picture
from benchmarks.suite.report.runs import runs_part
from benchmarks.suite.report.tenants import tenants_part
from matplotlib.axes import Axes

import suite_results

WORKLOAD = "resnet18/backbone"
CELLS = [suite_results.cell(WORKLOAD, 23.0, link) for link in (0.25, 2.0)]


def drawn(axes: Axes, name: str) -> list[float]:
    """Heights of the line of this name."""
    (line,) = [each for each in axes.lines if each.get_label() == name]
    return [float(y) for y in line.get_ydata()]


def picture_of(part: Part) -> Picture:
    return next(b for b in part.all_blocks() if isinstance(b, Picture))


def test_curves_hold_the_median_of_every_contender() -> None:
    left, right = curves(WORKLOAD, CELLS).figure.axes
    names = [name for name in suite_results.RATES if name != "again"]
    for name in names:
        assert drawn(left, name) == [
            pytest.approx(cell["samples_per_second"][name]) for cell in CELLS
        ]
    assert drawn(right, "auto") == [20.0, 20.0]
    assert len(drawn(left, "freeze-float16")) == 1
    assert len(left.lines) == len(names) + 1


def test_a_contender_has_the_same_colour_in_all_pictures() -> None:
    (left, _) = curves(WORKLOAD, CELLS).figure.axes
    (epochs, _) = picture_of(runs_part(suite_results.runs())).figure.axes
    (rates, _) = picture_of(tenants_part(suite_results.tenants())).figure.axes
    for axes in (left, epochs, rates):
        for name in ("auto", "tar-stream"):
            (line,) = [x for x in axes.lines if x.get_label() == name]
            assert line.get_color() == LOOKS[name].colour


def test_contenders_have_colours_of_their_own() -> None:
    colours = [look.colour for look in looks_of([*LOOKS, "new"]).values()]
    assert len({*colours}) == len(LOOKS) + 1


def test_bars_are_seconds_of_both_tiers_and_the_link() -> None:
    cell = CELLS[1]
    costs = costs_of(cell, "auto")
    assert costs.link == pytest.approx(20e3 / cell["link_bytes_per_second"])
    axes = where(WORKLOAD, [cell], Cores(storage=2, client=4)).figure.axes[0]
    widths = [bars[0].get_width() for bars in axes.containers]
    assert widths == pytest.approx(
        [1e3 * costs.client / 4, 1e3 * costs.storage / 2, 1e3 * costs.link]
    )
    (mark,) = axes.lines
    assert mark.get_xdata()[0] == pytest.approx(1e3 / 29.9)


def test_busy_is_told_of_all_cores_the_busiest_first() -> None:
    costs = costs_of(CELLS[1], "auto")
    busy = costs.busy(Cores(storage=1, client=4))
    assert list(busy) == [
        "the storage side's CPU",
        "the link",
        "the client's CPU",
    ]
    assert busy["the client's CPU"] == pytest.approx(0.93 / 4)


def test_runs_show_each_epoch_and_the_sums_with_one_offs() -> None:
    part = runs_part(suite_results.runs())
    left, right = picture_of(part).figure.axes
    assert drawn(left, "local-features") == [32.5, *([0.625] * 4)]
    assert drawn(right, "mosaic")[0] == pytest.approx(0.75 + 31.75 + 40.5)
    assert drawn(left, "auto-1") == [20.75]


def test_tenants_show_the_medians_of_rate_and_fairness() -> None:
    part = tenants_part(suite_results.tenants())
    left, right = picture_of(part).figure.axes
    assert drawn(left, "auto") == [133.5] * 3
    assert drawn(right, "auto") == pytest.approx([0.985, 0.975, 0.955])


def test_the_bound_is_drawn_with_and_without_what_was_measured() -> None:
    grid = {"cells": CELLS}
    places = [factor / suite_results.BESIDE for factor in (0.25, 2.0)]
    for section, measured in ((grid, [1.1, 1.1]), (None, None)):
        part = bound_part(suite_results.stages(), section, Cores(1, 1))
        backbone = picture_of(part).figure.axes[0]
        bound = drawn(backbone, "bound")
        assert bound[0] == pytest.approx(12.1945, abs=1e-4)
        assert bound[len(bound) // 2] == pytest.approx(2.0)
        assert max(bound[len(bound) // 2 :]) == pytest.approx(2.0)
        names = [line.get_label() for line in backbone.lines]
        name = "measured, auto over the best opponent"
        assert (name in names) == (measured is not None)
        if measured:
            assert drawn(backbone, name) == measured
            [line] = [x for x in backbone.lines if x.get_label() == name]
            assert list(line.get_xdata()) == pytest.approx(places)


def test_ratios_that_are_far_apart_are_logarithmic() -> None:
    for middle, scale in ((14.0, "log"), (1.1, "linear")):
        rows = [("a", suite_results.ratio(middle))]
        axes = ratios_picture("x", "x", "x", rows).figure.axes[0]
        assert axes.get_xscale() == scale
        assert axes.lines[0].get_xdata()[0] == middle


def shape(found: object) -> object:
    """Keys of all mappings, down to what is no mapping."""
    if isinstance(found, dict):
        return {key: shape(each) for key, each in found.items()}
    return None


def test_what_is_drawn_here_has_the_keys_of_what_is_measured() -> None:
    cell = suite_results.cell(WORKLOAD, 23.0, 2.0)
    judged_cell = {**cell}
    verdict.judge(judged_cell)
    assert shape(judged_cell) == shape(cell)

    (run, _) = suite_results.runs()["entries"]
    found = run_sums.judged(run["runs"], run["one_offs"])
    assert {*found} < {*run}
    for key in ("first_seconds", "later_seconds", "cumulative"):
        assert shape(found[key]) == shape(run[key])
    for key in ("speedup", "beside"):
        kept = {other: shape(each) for other, each in found[key].items()}
        assert shape(run[key]["auto-cache"]).items() <= (
            kept["auto-cache"].items()
        )
    assert shape(found["auto_over_stream"]) == shape(run["auto_over_stream"])

    tenants = suite_results.tenants()["entries"][0]
    summed = {**tenants}
    many_tenants.summarise(summed)
    assert shape(summed) == shape(tenants)

    part = suite_results.ratio(1.0)
    assert shape(verdict.ratio([1.0, 2.0], [1.0, 1.0])) == shape(part)
