"""Reports of a run: JSON, tables and page; ``hapi report``."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from full_disk import no_file_beyond
from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import (
    EpochReport,
    report_body,
    report_from_body,
)
from hapi_client.reports.notebook import Reports
from hapi_client.reports.run_page import html_page, write_reports
from hapi_client.reports.run_report import (
    RunReport,
    check_report_path,
    read_reports,
    run_body,
)
from hapi_client.reports.run_tables import essentials, tables
from hapi_protocol.errors import ClientError
from hapi_protocol.feature_stream import CLOCK_STAGES

PUSHED = EpochReport(
    epoch=1,
    samples=320,
    expected_samples=320,
    seconds=8.0,
    received_bytes=12_000_000,
    sent_bytes=4_000,
    requests=20,
    storage_seconds=dict(
        zip(CLOCK_STAGES, (1.0, 2.0, 3.0, 9.5, 0.5, 0.25), strict=True)
    ),
    storage_cpu_seconds=11.0,
    fetch_seconds={"fetch": 22.0, "decode": 1.5},
    loop_seconds=dict(zip(LOOP_STAGES, (4.0, 1.0, 2.0, 0.0), strict=True)),
    samples_by_cut={0: 64, 42: 256},
    cached_samples=32,
    retries=1,
    fallbacks=2,
    skipped_samples=3,
    plan="80 % cut 42 · uint8 + 20 % stream",
    plan_changes=2,
    predicted_samples_per_second=50.0,
    measured_per_predicted=0.8,
    limited_by=("link", "server device"),
)
STREAMED = EpochReport(
    epoch=0,
    samples=100,
    expected_samples=320,
    is_finished=False,
    seconds=10.0,
    received_bytes=40_000_000,
    samples_by_cut={0: 128},
    fetch_seconds={"fetch": 30.0, "decode": 4.0},
    loop_seconds={"waiting": 9.0, "training": 0.5},
)
EVALUATED = replace(PUSHED, epoch=None, split="val")
RUN = RunReport("resnet18 <on> swift://p/train", (STREAMED, PUSHED, EVALUATED))


def test_json_keys_are_stable_and_read_back():
    assert " ".join(sorted(report_body(PUSHED))) == (
        "cached_samples epoch expected_samples fallbacks fetch_seconds "
        "is_finished limited_by local_hits loop_seconds "
        "measured_per_predicted name plan plan_changes "
        "predicted_samples_per_second received_bytes requests "
        "retries samples samples_by_cut samples_per_second saturated_features "
        "seconds sent_bytes skipped_samples split storage_cpu_seconds "
        "storage_seconds waiting_share"
    )
    assert set(run_body(RUN)) == {"version", "title", "reports", "curves"}
    for report in RUN.reports:
        text = json.dumps(report_body(report) | {"key of a later release": 1})
        assert report_from_body(json.loads(text)) == report


def test_text_of_a_report_has_its_figures():
    text = " ".join(str(PUSHED).split())
    for part in (
        "epoch 1: 320 samples in 8 s, 40 samples/s",
        "80 % of the 50",
        "80 % cut 42 · uint8 + 20 % stream, limited by link and server device",
        "12 MB received, 4 kB sent, 20 requests",
        "waiting 4 s, layers 1 s, training 2 s",
        "forward 9.5 s, encode 500 ms, send-blocked 250 ms",
        "64 streamed, 256 at cut 42, 32 cached samples, 3 skipped samples, "
        "1 retry, 2 fallbacks",
    ):
        assert part in text
    assert "100 samples of 320, unfinished" in str(STREAMED)


def test_tables_have_a_row_for_each_epoch():
    for table in (*tables(RUN.reports).values(), essentials(RUN.reports)):
        names = [row[0] for row in table.rows]
        assert names == ["epoch 0 *", "epoch 1", "val"]
        assert {len(row) for row in table.rows} == {len(table.header)}
    table = tables(RUN.reports)["Throughput"]
    row = dict(zip(table.header, table.rows[1], strict=True))
    assert (row["samples/s"], row["predicted"]) == ("40", "50")
    assert (row["reached"], row["waiting"]) == ("80 %", "50 %")


def test_page_has_figure_and_tables_and_loads_nothing():
    page = html_page(RUN)
    start, end = page.index("<svg"), page.index("</svg>") + len("</svg>")
    ElementTree.fromstring(page[start:end])
    assert page.count("<svg") == 1
    assert page.count("<table>") == 4
    assert "resnet18 &lt;on&gt; swift://p/train" in page
    rest = page[:start] + page[end:]
    assert "src=" not in rest
    assert "http" not in rest
    assert html_page(RUN) == page
    many = tuple(replace(PUSHED, epoch=number) for number in range(150))
    for reports in ((), (EpochReport(epoch=0, is_finished=False),), many):
        assert "</html>" in html_page(RunReport("a run", reports))


def test_format_is_chosen_by_the_suffix(tmp_path):
    write_reports(tmp_path / "run.json", RUN.reports, RUN.title)
    write_reports(tmp_path / "run.HTML", RUN.reports, RUN.title)
    assert read_reports(tmp_path / "run.json") == RUN
    assert (tmp_path / "run.HTML").read_text() == html_page(RUN)
    for name in ("run.pdf", "run"):
        with pytest.raises(ClientError, match=r"must end in \.json or \.html"):
            write_reports(tmp_path / name, RUN.reports)
        with pytest.raises(ClientError, match=name):
            check_report_path(name)
    with pytest.raises(ClientError, match="cannot be written"):
        write_reports(tmp_path / "nowhere" / "run.json", RUN.reports)


def damaged(**changes):
    bodies = [report_body(STREAMED), report_body(PUSHED) | changes]
    return json.dumps({"reports": bodies})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "key 'reports' is missing"),
        ('{"losses": []}', "key 'reports' is missing"),
        ('{"reports": {}}', "'reports' is not a list"),
        ('{"reports": [7]}', "report 0: 7 is not a JSON object"),
        ('{"reports": [{}]}', "report 0: field 'split' is None"),
        ('{"reports": [], "version": 2}', "version is 2; .* reads 1"),
        (damaged(samples=-1), "report 1: field 'samples' is -1"),
        (damaged(seconds="long"), "report 1: field 'seconds' is 'long'"),
        (damaged(samples_by_cut={"a": 1}), "'samples_by_cut' is {'a': 1}"),
        (damaged(loop_seconds=[1]), r"'loop_seconds' is \[1\]"),
    ],
)
def test_damaged_file_is_named_with_reason_and_remedy(tmp_path, text, reason):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ClientError, match=reason) as caught:
        read_reports(path)
    assert caught.value.code == "bad_configuration"
    assert str(path) in caught.value.message
    assert "hapi train --report" in caught.value.message


def test_command_prints_tables_and_writes_page_and_json(
    hapi, capsys, tmp_path
):
    source, copy = tmp_path / "train.json", tmp_path / "copy.json"
    source.write_text(json.dumps({"model": "x", **run_body(RUN)}))
    page = tmp_path / "run.html"
    assert hapi("report", source, "--html", page, "--json", copy) == 0
    out = capsys.readouterr().out
    for title, table in tables(RUN.reports).items():
        assert title in out
        assert all(line in out for line in table.lines())
    assert page.read_text() == html_page(RUN)
    assert read_reports(copy) == RUN

    assert hapi("report", tmp_path / "no.json") == 1
    assert "no.json cannot be read" in capsys.readouterr().err
    assert hapi("report", source, "--html", "run.pdf") == 1
    assert "must end in .html" in capsys.readouterr().err


def test_full_disk_keeps_the_previous_report(tmp_path):
    path = tmp_path / "run.json"
    write_reports(path, (), "before")
    before = path.read_text()
    with no_file_beyond(100), pytest.raises(ClientError, match="make room"):
        write_reports(path, RUN.reports, "after")
    assert path.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_reports_are_shown_as_a_table():
    reports = Reports(RUN.reports)
    header, *lines = repr(reports).splitlines()
    assert header.split()[:2] == ["epoch", "samples/s"]
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "val"]
    assert "<table>" in reports._repr_html_()
    assert repr(Reports()) == "no epoch has begun"
    assert repr(PUSHED).startswith("epoch 1: 320 samples in 8 s")


def test_page_has_a_plot_of_each_quantity_that_there_is():
    """Plots of nothing were drawn before."""
    none = html_page(RunReport("x", (STREAMED,)))
    assert "Storage side" not in none.partition("<h2>")[0]
    assert "Accuracy" not in none
    epochs = [{"loss": 0.5, "accuracy": 0.25, "val_accuracy": 0.5}] * 3
    curves = {"lr=0.1": epochs, "lr=1": [{"loss": 0.4, "accuracy": None}]}
    drawn = html_page(RunReport("x", (PUSHED,), curves)).partition("<h2>")[0]
    for title in ("Loss", "Accuracy", "lr=0.1 validation", "Storage side"):
        assert title in drawn
    assert "lr=1 validation" not in drawn
