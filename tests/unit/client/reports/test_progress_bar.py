"""Progress bars, notes, logs and prints on one terminal."""

import io
import logging
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from hapi_client.progress import progress_wanted
from hapi_client.reports import terminal
from hapi_client.reports.progress_bar import (
    PlanStatus,
    TqdmProgressBar,
    start_progress_bar,
)
from hapi_client.reports.terminal import ConsoleReporter, TqdmLogHandler
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.errors import ClientError
from screen import Terminal, shown

PLAN = PlanStatus("cut 42 · float16", 120.0, ("link",), 1)


class Screen(Terminal):
    """A terminal for both streams, with the lines that it shows."""

    @property
    def lines(self):
        return [line for line in shown(self.getvalue()) if line]


@pytest.fixture
def use_screen(monkeypatch):
    """Replaces both streams at the call; until then pytest has its own."""

    def use():
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("COLUMNS", "110")
        monkeypatch.setenv("LINES", "24")
        return screen

    return use


class Bar(TqdmProgressBar):
    """A bar whose clock advances with its samples."""

    def __init__(self, samples=80, traffic=None):
        self.now = 100.0
        super().__init__(
            "epoch 3",
            samples,
            lambda: PLAN,
            traffic or Traffic(),
            clock=lambda: self.now,
        )

    def advance(self, samples=10, seconds=1.0):
        self.now += seconds
        self.add(samples)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, None), ("", None), ("0", False), ("1", True)],
)
def test_environment_decides_about_progress(value, wanted):
    environ = {} if value is None else {"HAPI_PROGRESS": value}
    assert progress_wanted(environ) is wanted


def test_other_value_of_the_variable_is_refused():
    with pytest.raises(ClientError, match="HAPI_PROGRESS is 'yes'"):
        progress_wanted({"HAPI_PROGRESS": "yes"})


def is_shown(wanted):
    bar = start_progress_bar(
        "epoch 0", 8, wanted=wanted, plan_status=PlanStatus, traffic=Traffic()
    )
    if bar is not None:
        bar.close()
    return bar is not None


def test_bar_is_shown_on_a_terminal_unless_configured(monkeypatch, use_screen):
    screen = use_screen()
    assert [is_shown(wanted) for wanted in (None, False)] == [True, False]
    screen.truncate(0)
    with monkeypatch.context() as worker:  # of a data loader
        worker.setattr("torch.utils.data.get_worker_info", lambda: object())
        assert not is_shown(True)
    assert screen.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert [is_shown(wanted) for wanted in (None, True)] == [False, True]


def test_bar_is_shown_in_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    kernel = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert is_shown(None)
    shell.config.clear()
    assert not is_shown(None)


def test_replaced_stream_shows_no_bar(monkeypatch):
    closed = io.StringIO()
    closed.close()
    sink = SimpleNamespace(write=len, flush=lambda: None)
    for stream in (sink, closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not is_shown(None)


def test_bar_shows_samples_rates_limit_and_plan(use_screen):
    screen = use_screen()
    traffic = Traffic()
    bar = Bar(traffic=traffic)
    for _ in range(4):
        traffic.add(received_bytes=3_000_000, sent_bytes=400_000)
        bar.advance()
    (line,) = screen.lines
    assert line.startswith("epoch 3 |")
    assert "| 40/80, " in line
    assert " left, " in line
    assert line.endswith(" samples/s, 3.4 MB/s, limit link, cut 42 · float16")
    assert len(line) <= 110
    bar.close()


def test_bar_is_drawn_a_few_times_a_second(use_screen):
    screen = use_screen()
    bar = Bar(samples=1000)
    before = screen.getvalue().count("\r")
    for _ in range(1000):
        bar.advance(1, seconds=0.001)
    assert screen.getvalue().count("\r") - before <= 5
    bar.close()


def test_closed_bar_leaves_neither_line_nor_thread(use_screen):
    screen = use_screen()
    before = set(threading.enumerate())
    bar = Bar()
    assert set(threading.enumerate()) == before
    assert screen.lines
    kept = sys.stdout
    bar.close()
    bar.close()
    assert screen.lines == []
    assert sys.stdout is screen
    kept.write("late\n")
    assert screen.lines == ["late"]


def test_interleaved_bars_restore_the_stream(use_screen):
    screen = use_screen()
    for _ in range(50):
        # As in zip(first.loader(0), second.loader(0)).
        first, second = Bar(), Bar()
        first.add(8)
        second.add(8)
        first.close()
        second.close()
    assert sys.stdout is screen


def test_incomplete_line_hides_the_bar_until_it_ends(use_screen):
    screen = use_screen()
    bar = Bar()
    for _ in range(3):
        print(".", end="", flush=True)
        bar.advance()
    assert screen.lines == ["..."]
    print(" done")
    bar.advance()
    first, last = screen.lines
    assert first == "... done"
    assert "| 40/80, " in last
    print("no end", end="")
    bar.close()
    assert screen.lines[1:] == ["no end"]


def test_prints_into_a_file_and_logging_are_not_changed(
    monkeypatch, use_screen
):
    screen = use_screen()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    logger = logging.getLogger("hapi_client")
    before = list(logger.handlers)
    bar = Bar()
    assert sys.stdout is file
    assert logger.handlers == before  # pytest has configured the root
    logger.warning("a warning")
    bar.close()
    assert "a warning" not in screen.getvalue()


def test_prints_and_warnings_are_above_all_bars(use_screen, monkeypatch):
    screen = use_screen()
    # As in a program that has not configured logging.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = logging.getLogger("hapi_client")
    with tqdm(total=5, desc="epochs") as outer:
        bar = Bar()
        print("a print")
        logger.warning("a warning")
        bar.advance()
        assert screen.lines[:2] == ["a print", "a warning"]
        bars = [line.split()[0] for line in screen.lines[2:]]
        assert bars == ["epochs:", "epoch"]
        bar.close()
        outer.update()
        assert screen.lines[2].startswith("epochs:")
        assert len(screen.lines) == 3
    assert logger.handlers == []


def test_log_and_notes_of_a_command_are_above_a_bar(use_screen):
    screen = use_screen()
    handler, record = TqdmLogHandler(), logging.makeLogRecord({"msg": "a log"})
    handler.emit(record)
    with ConsoleReporter() as reporter:
        bar = Bar()
        handler.emit(record)
        reporter.note("a note")
        assert screen.lines[:-1] == ["a log", "a log", "a note"]
        assert screen.lines[-1].startswith("epoch 3 |")
        bar.close()
    assert screen.lines == ["a log", "a log", "a note"]


def test_log_is_written_while_another_thread_imports_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    output = io.StringIO()
    TqdmLogHandler(output).emit(logging.makeLogRecord({"msg": "a line"}))
    assert output.getvalue() == "a line\n"


def test_file_has_a_bar_until_the_next_note(use_screen, monkeypatch):
    screen = use_screen()
    monkeypatch.setattr(
        terminal, "make_bar", partial(terminal.make_bar, mininterval=0)
    )
    before = threading.active_count()
    with ConsoleReporter() as reporter:
        for name in ("a", "b"):
            file = reporter.reading(io.BytesIO(bytes(4000)), name, 4000)
            file.read(1000)
            (line,) = screen.lines
            assert line.startswith(f"{name}:  25%")
        file.seek(0)  # a repeated request
        assert len(file.read()) == 4000
        reporter.note("b is stored")
        assert screen.lines == ["b is stored"]
        reporter.reading(io.BytesIO(b"1234"), "c", 4).read()
    assert screen.lines == ["b is stored"]
    assert threading.active_count() == before


def test_without_a_terminal_only_notes_are_shown(capsys):
    file = io.BytesIO(b"1234")
    with ConsoleReporter() as reporter:
        assert reporter.reading(file, "a", 4) is file
        reporter.note("a note")
    assert capsys.readouterr().err == "a note\n"
