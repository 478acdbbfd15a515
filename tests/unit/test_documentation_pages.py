"""The documentation is consistent, and agrees with the code."""

import ast
import re
import runpy

import pytest

import hapi_client
from documentation import ROOT
from hapi_client.cli.main import EXIT_FAILURE, EXIT_TERMINATED
from hapi_client.loading.circuit_breaker import can_fall_back
from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import (
    FETCH_STAGES,
    EpochReport,
    report_body,
)
from hapi_client.swift.retry import is_retryable
from hapi_middleware.config import FilterConfig
from hapi_protocol import errors
from hapi_protocol.errors import CODES, make_error
from hapi_protocol.feature_stream import CLOCK_STAGES
from hapi_worker import main as worker
from hapi_worker.config import option_defaults

ERRORS = "docs/reference/errors.rst"
CONFIGURATION = "docs/reference/configuration.rst"
MONITORING = "docs/reference/monitoring.rst"
REPORTS = "docs/howto/reports.rst"
API = "docs/reference/api.rst"


def text_of(page):
    return (ROOT / page).read_text()


def test_relative_links_of_the_readme_lead_somewhere():
    text = text_of("README.md")
    titles = [t.lower() for t in re.findall(r"^#+ (.+)$", text, re.M)]
    anchors = {re.sub(r"[^\w\- ]", "", t).replace(" ", "-") for t in titles}
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text)
    assert links
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        assert path or anchor in anchors, anchor


# --- errors and exit statuses ---


def entries():
    """Fields of each error code's entry."""
    found = {}
    text = text_of(ERRORS)
    parts = re.split(r"^\.\. _error-(\w+):\n", text, flags=re.M)[1:]
    for code, part in zip(parts[::2], parts[1::2], strict=True):
        assert part.startswith(f"\n``{code}``\n~~"), code
        fields = re.findall(
            r"^:(\w+): ((?:.+\n)(?:   .+\n)*)", part, flags=re.M
        )
        assert code not in found
        found[code] = {name: " ".join(v.split()) for name, v in fields}
    return found


def test_every_error_code_has_an_entry_and_every_entry_a_code():
    assert set(entries()) == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_entry_of_an_error_states_status_and_reaction_of_the_client(code):
    fields = entries()[code]
    assert {*fields} == {"status", "cause", "remedy", "client"}
    status = str(CODES[code] or "none")
    assert fields["status"].partition(",")[0] == status
    error = make_error(code, "a message")
    assert f"(code {code}" in str(error)
    if is_retryable(error) and code != "too_slow":  # has cost enough time
        expected = "retries, then streams"
    elif can_fall_back(error):
        expected = "streams"
    else:
        expected = "ends"
    assert fields["client"].partition(";")[0] == expected


def statuses_of(command):
    """Exit statuses in the table that follows a command's name."""
    _, _, text = text_of(ERRORS).partition(f"\n``{command}``:\n")
    table = text.split("======  ===")[2]
    return {int(n) for n in re.findall(r"^(\d+) ", table, re.M)}


def test_exit_statuses_are_those_of_the_commands():
    assert statuses_of("hapi-worker") == {
        0,
        worker.EXIT_CANNOT_START,
        worker.EXIT_USAGE,
        worker.EXIT_NO_DEVICE,
    }
    # Those of a wrong command line and of Ctrl-C are typer's.
    assert statuses_of("hapi") == {0, EXIT_FAILURE, 2, 130, EXIT_TERMINATED}


# --- pictures ---


def test_pictures_are_what_the_scripts_draw(monkeypatch):
    folder = ROOT / "docs" / "images"
    monkeypatch.syspath_prepend(str(folder))
    script = runpy.run_path(str(folder / "draw.py"))
    drawn = {name: draw().svg() for name, draw in script["PICTURES"].items()}
    script = runpy.run_path(str(folder / "draw_layers.py"))
    drawn["layers.svg"] = script["layers"]().svg()
    committed = {p.name: p.read_text() for p in folder.glob("*.svg")}
    assert committed == drawn, "run docs/images/draw.py and draw_layers.py"


# --- the operator's pages ---


def tables_in(page, title):
    """Rows of cells of each table in a section; lines that go on joined."""
    text = re.split(rf"^{title}\n-+\n", text_of(page), flags=re.M)[1]
    lines = re.split(r"^.+\n---+\n", text, flags=re.M)[0].splitlines()
    rules = [n for n, line in enumerate(lines) if re.match(r"==+  +==", line)]
    return [
        _rows(lines[begin], lines[head + 1 : end])
        for begin, head, end in zip(
            rules[::3], rules[1::3], rules[2::3], strict=True
        )
    ]


def _rows(rule, lines):
    begins = [found.start() for found in re.finditer("=+", rule)]
    rows: list[list[str]] = []
    for line in lines:
        cells = [
            line[a:b].strip()
            for a, b in zip(begins, [*begins[1:], None], strict=True)
        ]
        if cells[0]:
            rows.append(cells)
        else:
            before = rows.pop()
            joined = zip(before, cells, strict=True)
            rows.append([f"{a} {b}".strip() for a, b in joined])
    return rows


def test_timeouts_of_the_guide_are_the_defaults_and_exceed_one_another():
    unit = (ROOT / "deploy" / "hapi-worker.service").read_text()
    rows, *_ = tables_in(CONFIGURATION, "Timeouts")
    found = {row[0].strip("`"): float(row[2]) for row in rows}
    for name, owner, _, more in rows:
        name, seconds = name.strip("`"), found[name.strip("`")]
        if owner == "the worker":
            assert float(option_defaults()[name]) == seconds, name
        elif owner == "the filter":
            assert getattr(FilterConfig(), name) == seconds, name
        elif owner == "the unit":
            assert f"\n{name}={seconds:g}\n" in unit
        else:
            assert (name, owner) == ("client_timeout", "Swift's proxy")
        for text in filter(None, (t.strip() for t in more.split(","))):
            named = re.findall(r"``(\w+)``", text)
            factor = 2 if text.startswith("twice") else 1
            assert seconds > factor * sum(found[each] for each in named), name


def messages():
    """String literals of filter and worker, with placeholders for values."""
    found = []
    for folder in ("hapi_worker", "hapi_middleware"):
        for path in (ROOT / "swift_middleware" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(
                    node.value, str
                ):
                    found.append(re.sub(r"%[\w.]*[sdfg]", "\0", node.value))
    return found


def test_log_lines_of_the_guide_are_in_the_code():
    literals = messages()
    tables = tables_in(MONITORING, "Log lines")
    assert len(tables) == 2
    for line, _ in (row for table in tables for row in table):
        parts = [re.escape(part) for part in line.strip("`").split("…")]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(each) for each in literals), line


# --- the interface ---


def test_every_exported_name_is_in_the_reference():
    text = text_of(API)
    for name in hapi_client.__all__:
        is_class = isinstance(getattr(hapi_client, name), type)
        entry, role = ("class", "class") if is_class else ("function", "func")
        assert f".. auto{entry}:: hapi_client.{name}\n" in text
        assert f":{role}:`~hapi_client.{name}`" in text


def test_signatures_of_the_reference_are_those_of_the_code():
    script = runpy.run_path(str(ROOT / "tools" / "write_api.py"))
    text = text_of(API)
    assert text == script["written"](text), "run tools/write_api.py"
    assert text.count(script["HEAD"]) > 50


def test_every_error_is_in_the_reference():
    text = text_of(API)
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HapiError)
    ]
    for name in kinds:
        assert re.search(rf"(errors|hapi_client)\.{name}\n", text), name


def test_figures_of_a_report_are_all_in_its_page():
    text = text_of(REPORTS)
    table = text.partition("The figures\n---")[2]
    documented = set(re.findall(r"^``(\w+)``  ", table, re.M))
    stages = {"loop_seconds", "fetch_seconds", "storage_seconds"}
    assert documented == set(report_body(EpochReport())) | stages
    for stage in (*LOOP_STAGES, *FETCH_STAGES, *CLOCK_STAGES):
        assert f" ``{stage}``  " in table
