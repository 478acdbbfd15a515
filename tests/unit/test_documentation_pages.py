"""The documentation is consistent, and agrees with the code."""

from __future__ import annotations

import ast
import re
import runpy
from importlib import import_module

import pytest

import hapi_client
from documentation import PAGES, ROOT, Block, blocks_of, commands_of
from hapi_client.cli.main import EXIT_FAILURE, EXIT_TERMINATED
from hapi_client.loading.circuit_breaker import can_fall_back
from hapi_client.reports.epoch_report import (
    FETCH_STAGES,
    LOOP_STAGES,
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
RESTRUCTURED = [page for page in PAGES if page.endswith(".rst")]


def text_of(page):
    return (ROOT / page).read_text()


def prose_of(page):
    """The page without its code blocks."""
    text = text_of(page)
    for block in blocks_of(page):
        for line in block.text.splitlines():
            if line.strip():
                text = text.replace(line, "", 1)
    return text


# --- code blocks ---


def test_blocks_are_found_with_language_and_reason(tmp_path, monkeypatch):
    (tmp_path / "page.rst").write_text(
        "A literal block::\n\n    first\n\n"
        ".. not run: it takes an hour, and\n   a machine\n\n"
        ".. code-block:: sh\n   :caption: c\n\n   one\n\n   two\n\n"
        "* a list\n\n  .. code-block:: console\n\n"
        "     $ hapi ls \\\n         photos\n     a table\n\nEnd.\n"
    )
    (tmp_path / "page.md").write_text(
        "```\nplain\n```\n\n<!-- not run: no -->\n```python\nx = 1\n```\n"
    )
    monkeypatch.setattr("documentation.ROOT", tmp_path)
    literal, shell, listed = blocks_of("page.rst")
    assert (literal.language, literal.text) == ("", "first\n")
    assert (shell.language, shell.text) == ("sh", "one\n\ntwo\n")
    assert shell.not_run == "it takes an hour, and"
    assert commands_of(listed) == ["hapi ls photos"]
    assert blocks_of("page.md") == [
        Block("page.md", 1, "", "plain\n"),
        Block("page.md", 6, "python", "x = 1\n", "no"),
    ]


# --- links ---


def slug(title):
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [p for p in PAGES if p.endswith(".md")])
def test_relative_links_of_markdown_lead_somewhere(page):
    text = text_of(page)
    anchors = {slug(t) for t in re.findall(r"^#+ (.+)$", text, re.M)}
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    assert links
    for link in links:
        if re.match(r"\w+:", link):
            continue  # elsewhere: there may be no network
        path, _, anchor = link.partition("#")
        if path:
            assert (ROOT / page).parent.joinpath(path).exists(), link
        else:
            assert anchor in anchors, link


def labels():
    """Labels of all pages, normalised as ``:ref:`` does."""
    return {
        " ".join(label.lower().split())
        for page in RESTRUCTURED
        for label in re.findall(r"^\.\. _([^:]+):", text_of(page), re.M)
    }


@pytest.mark.parametrize("page", RESTRUCTURED)
def test_references_lead_somewhere(page):
    folder = (ROOT / page).parent
    text = prose_of(page)
    known = labels()
    for role, target in re.findall(
        r":(doc|ref):`(?:[^`<]*<)?([^`>]+)>?`", text
    ):
        if role == "ref":
            assert " ".join(target.lower().split()) in known, target
        else:
            base = ROOT / "docs" if target.startswith("/") else folder
            path = base / f"{target.lstrip('/')}.rst"
            assert path.exists(), target
    for path in re.findall(
        r"^ *\.\. (?:literalinclude|image|figure|include):: (\S+)", text, re.M
    ):
        assert (folder / path).exists(), path


def listed_in(index):
    """Pages in the tables of contents of a page."""
    folder = (ROOT / index).parent
    found: set[str] = set()
    for options, entries in re.findall(
        r"^\.\. toctree::\n((?:   :.+\n)*)\n((?:   \S+\n)+)",
        text_of(index),
        re.M,
    ):
        for entry in entries.split():
            paths = (
                folder.glob(f"{entry}.rst")
                if ":glob:" in options
                else [folder / f"{entry}.rst"]
            )
            found |= {str(path.relative_to(ROOT)) for path in paths}
    return found - {index}


def test_every_page_is_in_the_table_of_contents():
    pages = {page for page in RESTRUCTURED if page.startswith("docs/")}
    listed = listed_in("docs/index.rst") | listed_in(
        "docs/decisions/index.rst"
    )
    assert pages - listed == {"docs/index.rst"}
    assert listed <= pages


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
    for code, fields in entries().items():
        assert set(fields) == {
            "status",
            "from",
            "cause",
            "remedy",
            "client",
        }, code


@pytest.mark.parametrize("code", CODES)
def test_entry_of_an_error_states_its_status(code):
    status = entries()[code]["status"]
    assert status.partition(",")[0] == (
        str(CODES[code]) if CODES[code] else "none"
    )


@pytest.mark.parametrize("code", CODES)
def test_entry_of_an_error_states_the_reaction_of_the_client(
    code,
):
    error = make_error(code, "a message")
    if is_retryable(error) and code != "too_slow":  # has cost enough time
        expected = "retries, then streams"
    elif can_fall_back(error):
        expected = "streams"
    else:
        expected = "ends"
    assert entries()[code]["client"].partition(";")[0] == expected


@pytest.mark.parametrize("code", CODES)
def test_messages_of_errors_show_their_code(code):
    assert f"(code {code}" in str(make_error(code, "a message"))


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


def test_pictures_are_what_the_scripts_draw(
    monkeypatch,
):
    folder = ROOT / "docs" / "images"
    monkeypatch.syspath_prepend(str(folder))
    script = runpy.run_path(str(folder / "draw.py"))
    drawn = {name: draw().svg() for name, draw in script["PICTURES"].items()}
    script = runpy.run_path(str(folder / "draw_layers.py"))
    drawn["layers.svg"] = script["layers"]().svg()
    committed = {p.name: p.read_text() for p in folder.glob("*.svg")}
    assert committed == drawn, "run docs/images/draw.py and draw_layers.py"


def test_every_picture_is_shown_and_described():
    pages = "".join(map(text_of, PAGES))
    found = re.findall(
        r"\.\. image:: (?:\.\./)?images/(\S+)\n +:alt: \S", pages
    )
    found += re.findall(r"!\[.+\]\(docs/images/(\S+)\)", pages)
    folder = ROOT / "docs/images"
    pictures = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix in (".svg", ".png")
    }
    assert set(found) == pictures


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


def timeouts():
    """Owner, seconds, and what they should exceed, by option."""
    return {
        name.strip("`"): (owner, float(seconds), more)
        for name, owner, seconds, more in tables_in(CONFIGURATION, "Timeouts")[
            0
        ]
    }


def test_timeouts_of_the_guide_are_the_defaults():
    unit = (ROOT / "deploy" / "hapi-worker.service").read_text()
    defaults = option_defaults()
    for name, (owner, seconds, _) in timeouts().items():
        if owner == "the worker":
            assert float(defaults[name]) == seconds, name
        elif owner == "the filter":
            assert getattr(FilterConfig(), name) == seconds, name
        elif owner == "the unit":
            assert f"\n{name}={seconds:g}\n" in unit
        else:
            assert (name, owner) == ("client_timeout", "Swift's proxy")


def test_timeouts_exceed_the_documented_ones():
    found = timeouts()
    seconds = {name: each[1] for name, each in found.items()}
    for name, (_, own, more) in found.items():
        for text in filter(None, (t.strip() for t in more.split(","))):
            named = re.findall(r"``(\w+)``", text)
            factor = 2 if text.startswith("twice") else 1
            assert own > factor * sum(seconds[each] for each in named), name


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


def test_every_error_is_in_the_reference():
    text = text_of(API)
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HapiError)
    ]
    for name in kinds:
        assert re.search(rf"(errors|hapi_client)\.{name}\n", text), name


def documented_classes():
    """Those that have an entry of their own in the reference."""
    paths = re.findall(r"autoclass:: (\S+)", text_of(API))
    return [
        getattr(import_module(module), name)
        for module, _, name in (path.rpartition(".") for path in paths)
    ]


@pytest.mark.parametrize(
    "kind", documented_classes(), ids=lambda k: k.__name__
)
def test_reference_shows_whole_sentences(kind):
    assert (kind.__doc__ or "").strip()
    for name, found in vars(kind).items():
        if isinstance(found, property) and not name.startswith("_"):
            first = (found.__doc__ or "").partition("\n")[0]
            # Sphinx takes what is in front of a colon for the type.
            assert not re.search(r"^[^`]+: ", first), (name, first)


def test_figures_of_a_report_are_all_in_its_page():
    text = text_of(REPORTS)
    table = text.partition("The figures\n---")[2]
    documented = set(re.findall(r"^``(\w+)``  ", table, re.M))
    stages = {"loop_seconds", "fetch_seconds", "storage_seconds"}
    assert documented == set(report_body(EpochReport())) | stages
    for stage in (*LOOP_STAGES, *FETCH_STAGES, *CLOCK_STAGES):
        assert f" ``{stage}``  " in table
