"""Tables, JSON and plots of a plan."""

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from hapi_client.plan_report.plan_page import write_plot
from hapi_client.plan_report.plan_tables import (
    Report,
    cost_table,
    cut_table,
    plans_table,
    report_body,
    summary,
)
from hapi_splitter.planner.costs import CutFacts
from hapi_splitter.planner.plan import Option, Problem, Resource, solve, stream
from hapi_splitter.planner.problem import StartupCost
from hapi_splitter.units import bytes_text, percent_text

NUM_CUTS = 60
NAME = "backbone.encoder.<stages>.block.with.a.very.long.name"


@pytest.fixture(scope="module")
def report():
    cuts = tuple(
        CutFacts(
            index,
            f"{NAME}.{index}",
            "aten._native_batch_norm_legit_no_training.default",
            (64, 7, 7),
            800_000 // index,
            index * 10**7,
        )
        for index in range(1, NUM_CUTS + 1)
    )
    options = [
        Option(0, "raw", {"link": 115_000.0, "client device": 4e-3}, 0, 10**9)
    ]
    for cut in (10, 30, 60):
        for encoding, ratio in (("float32", 1.0), ("uint8", 0.25)):
            use = {
                "link": ratio * cuts[cut - 1].float32_bytes,
                "server device": 1e-4 * cut,
                "client device": 4e-3 - 6e-5 * cut,
            }
            server_bytes = 9 * 10**9 if cut == 10 else 10**9
            options.append(Option(cut, encoding, use, server_bytes, 0))
    problem = Problem(
        resources=(
            Resource("link", 12.5e6, "bytes/s"),
            Resource("server device", 1.0, "devices"),
            Resource("client device", 1.0, "devices"),
        ),
        options=tuple(options),
        num_samples=50_000,
        epochs=3.0,
        startup=StartupCost(load_seconds=4.0),
        server_limit_bytes=8 * 10**9,
        client_limit_bytes=8 * 10**9,
        last_cut=NUM_CUTS,
    )
    plans = {"auto": solve(problem), "stream": stream(problem)}
    return Report(cuts, problem, plans, model="a <model>")


def rows_of(table):
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_table_has_measured_cuts_or_all(report):
    few, every = cut_table(report), cut_table(report, every=True)
    assert [row[0] for row in few.rows] == ["0", "10", "30", "60"]
    cuts = [str(cut) for cut in range(NUM_CUTS + 1)]
    assert [row[0] for row in every.rows] == cuts
    for table in (few, every, cost_table(report), plans_table(report)):
        assert {len(row) for row in table.rows} == {len(table.header)}
        assert len(table.lines()) == len(table.rows) + 1
    for row in few.rows:
        share = report.share(int(row[0]))
        assert row[-1] == (percent_text(share) if share else "")
    shares = (report.share(cut) for cut in range(NUM_CUTS + 1))
    assert sum(shares) == pytest.approx(1)


def test_row_has_the_costs_of_a_cut(report):
    image, _, row, _ = rows_of(cut_table(report))
    assert row["module"].startswith("…")
    assert row["module"].endswith(".30")
    assert (row["operator"], row["shape"]) == ("batch_norm", "64x7x7")
    assert (row["float32"], row["uint8"]) == ("26.7 kB", "6.67 kB")
    assert image["module"] == "stream: the sample, 115 kB"

    rows = rows_of(cost_table(report))
    assert [row["cut"] for row in rows] == ["0", "10", "30", "60"]
    shown = report.shown(30)
    assert rows[2]["encoding"] == shown.encoding
    assert rows[2]["size"] == bytes_text(shown.use["link"])
    assert rows[2]["server device"] == "3"
    assert (rows[2]["server mem"], rows[2]["client mem"]) == ("1 GB", "-")
    assert rows[1]["server mem"] == "9 GB !"


def test_plans_are_compared_by_their_totals(report):
    auto, streaming = rows_of(plans_table(report))
    assert (auto["plan"], streaming["plan"]) == ("auto", "stream")
    assert auto["times auto"] == "1.00"
    assert float(streaming["times auto"]) == pytest.approx(
        report.plans["stream"].total_seconds / report.plan.total_seconds,
        abs=0.01,
    )
    assert summary(report)[0] == f"Plan: {report.plan.label}"


def test_json_keys_are_stable(report):
    body = json.loads(json.dumps(report_body(report), allow_nan=False))
    cuts = body["cuts"]
    for part, keys in (
        (
            body,
            "client_limit_bytes computed_epochs cuts epochs plan plans "
            "push_one_off_seconds resources samples server_limit_bytes",
        ),
        (
            body["plans"][body["plan"]],
            "binding mix one_off_seconds pays_from_samples reasons "
            "samples_per_second times_plan total_seconds utilisation",
        ),
        (cuts[0], "candidate cut float32_bytes name op options shape share"),
        (
            cuts[30]["options"][0],
            "bytes client_bytes encoding fits samples_per_second seconds "
            "server_bytes",
        ),
    ):
        assert " ".join(sorted(part)) == keys
    assert len(cuts) == NUM_CUTS + 1
    assert [c["cut"] for c in cuts if c["candidate"]] == [0, 10, 30, 60]
    assert [o["fits"] for o in cuts[10]["options"]] == [False, False]


def test_infinite_time_is_null_in_json(report):
    resources = tuple(
        replace(r, capacity=0.0) if r.name == "client device" else r
        for r in report.problem.resources
    )
    options = tuple(
        replace(o, use={**o.use, "client device": 0.0})
        if o.cut == NUM_CUTS
        else o
        for o in report.problem.options
    )
    problem = replace(report.problem, resources=resources, options=options)
    plans = {"auto": solve(problem), "stream": stream(problem)}
    body = report_body(Report(report.cuts, problem, plans))
    json.dumps(body, allow_nan=False)
    assert body["plans"]["stream"]["total_seconds"] is None
    assert body["plans"]["auto"]["total_seconds"] is not None


@pytest.mark.parametrize("chosen", ["auto", "stream"])
def test_png_is_written(report, tmp_path, chosen):
    path = tmp_path / "plan.PNG"
    write_plot(path, replace(report, chosen=chosen))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


def test_page_has_figure_and_tables_and_loads_nothing(report, tmp_path):
    write_plot(tmp_path / "a.html", report)
    write_plot(tmp_path / "b.html", report)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == page
    start, end = page.index("<svg"), page.index("</svg>") + len("</svg>")
    assert ElementTree.fromstring(page[start:end]).tag.endswith("svg")
    assert page.count("<svg") == 1
    assert page.count("<table>") == 3
    assert re.findall(r"<script|(?:src|href)=\"(?!#)", page) == []
    assert "Where to cut a &lt;model&gt;" in page
    assert "<stages>" not in page
    for reason in report.plan.reasons:
        assert html.escape(reason) in page


@pytest.mark.parametrize("name", ["plan.pdf", "plan", ".png"])
def test_other_suffix_is_refused(name, report, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png or \.html"):
        write_plot(tmp_path / name, report)
    assert not (tmp_path / name).exists()
