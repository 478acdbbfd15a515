"""The line that shows how far a pass is, and when there is none."""

from __future__ import annotations

import io
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from hapi_client.reports.epoch_recorder import NoLine, PlanStatus
from hapi_client.reports.progress_bar import (
    ProgressLine,
    open_line,
    progress_wanted,
)
from hapi_client.reports.terminal import TqdmLogHandler
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.errors import ClientError
from screen import Terminal, shown

PLAN = PlanStatus("cut 42 · float16", 120.0, ("link",), 1)


@pytest.fixture
def sit_at(monkeypatch):
    """Makes a terminal of both streams; pytest has its own until the call."""
    return lambda: terminal_of(monkeypatch)


def terminal_of(monkeypatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("LINES", "24")
    return found


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_line(traffic=None, clock=None, samples=80) -> ProgressLine:
    return ProgressLine(
        "epoch 3",
        samples,
        lambda: PLAN,
        traffic or Traffic(),
        clock=clock or Clock(),
    )


@pytest.mark.parametrize(
    ("progress", "environ", "wanted"),
    [
        (None, {}, None),
        (None, {"HAPI_PROGRESS": ""}, None),
        (None, {"HAPI_PROGRESS": "0"}, False),
        (None, {"HAPI_PROGRESS": "1"}, True),
        (True, {"HAPI_PROGRESS": "0"}, True),
        (False, {"HAPI_PROGRESS": "1"}, False),
    ],
)
def test_program_then_environment_decide(progress, environ, wanted):
    assert progress_wanted(progress, environ) is wanted


def test_other_values_of_the_variable_are_refused_by_name():
    with pytest.raises(ClientError, match="HAPI_PROGRESS is 'yes'; 0 shows"):
        progress_wanted(None, {"HAPI_PROGRESS": "yes"})


def opened(wanted):
    line = open_line(
        "epoch 0", 8, wanted=wanted, in_force=PlanStatus, traffic=Traffic()
    )
    line.close()
    return line


def test_line_is_shown_on_a_terminal_only_unless_asked_for(
    monkeypatch, sit_at
):
    sit_at()
    assert isinstance(opened(None), ProgressLine)
    assert isinstance(opened(False), NoLine)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(opened(None), NoLine)
    assert isinstance(opened(True), ProgressLine)
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(opened(None), NoLine)


def test_line_is_shown_in_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    kernel = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert isinstance(opened(None), ProgressLine)
    shell.config.clear()
    assert isinstance(opened(None), NoLine)


def test_loader_worker_shows_nothing(monkeypatch, sit_at):
    terminal = sit_at()
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: object())
    assert isinstance(opened(True), NoLine)
    assert terminal.getvalue() == ""


def test_line_tells_samples_rates_limit_and_plan(sit_at):
    terminal = sit_at()
    clock, traffic = Clock(), Traffic()
    line = make_line(traffic, clock)
    for _ in range(4):
        clock.now += 1.0
        traffic.add(received_bytes=3_000_000, sent_bytes=400_000)
        line.add(10)
    (text,) = [each for each in shown(terminal.getvalue()) if each]
    assert text.startswith("epoch 3 |")
    assert "| 40/80, " in text
    assert " left, " in text
    assert text.endswith(" samples/s, 3.4 MB/s, limit link, cut 42 · float16")
    assert len(text) <= 110
    line.close()


def test_line_is_drawn_a_few_times_a_second(sit_at):
    terminal = sit_at()
    clock = Clock()
    line = make_line(clock=clock, samples=1000)
    before = terminal.getvalue().count("\r")
    for _ in range(1000):
        clock.now += 0.001
        line.add(1)
    assert terminal.getvalue().count("\r") - before <= 5
    line.close()


def test_line_vanishes_and_leaves_no_thread(sit_at):
    terminal = sit_at()
    stdout = sys.stdout
    before = set(threading.enumerate())
    line = make_line()
    assert set(threading.enumerate()) == before
    assert "".join(shown(terminal.getvalue()))
    line.close()
    line.close()
    assert "".join(shown(terminal.getvalue())) == ""
    assert sys.stdout is stdout


def test_prints_stand_above_the_line(sit_at):
    terminal = sit_at()
    clock = Clock()
    line = make_line(clock=clock)
    for number in range(3):
        print("step", number, "loss", 0.5)
        clock.now += 1
        line.add(10)
    *above, last = [each for each in shown(terminal.getvalue()) if each]
    assert above == [f"step {number} loss 0.5" for number in range(3)]
    assert last.startswith("epoch 3 |")
    line.close()
    print("behind it")
    assert [each for each in shown(terminal.getvalue()) if each] == [
        *above,
        "behind it",
    ]


def test_part_of_a_line_is_not_drawn_over(sit_at):
    terminal = sit_at()
    clock = Clock()
    line = make_line(clock=clock)
    for _ in range(3):
        print(".", end="", flush=True)
        clock.now += 1
        line.add(10)
    assert shown(terminal.getvalue())[-1] == "..."
    print(" done")
    clock.now += 1
    line.add(10)
    first, last = [each for each in shown(terminal.getvalue()) if each]
    assert first == "... done"
    assert "| 40/80, " in last
    print("no end", end="")
    line.close()
    assert shown(terminal.getvalue())[1:] == ["no end"]


def test_prints_into_a_file_are_left_alone(monkeypatch, sit_at, tmp_path):
    sit_at()
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        line = make_line()
        assert sys.stdout is file
        line.close()


def test_bars_of_the_user_stand_beside_it(sit_at):
    terminal = sit_at()
    from tqdm import tqdm

    clock = Clock()
    with tqdm(total=5, desc="epochs") as outer:
        line = make_line(clock=clock)
        clock.now += 1
        line.add(10)
        texts = [each for each in shown(terminal.getvalue()) if each]
        assert [text.split()[0] for text in texts] == ["epochs:", "epoch"]
        line.close()
        outer.update()
    (left,) = [each for each in shown(terminal.getvalue()) if each]
    assert left.startswith("epochs:")


def test_prints_and_warnings_stand_above_all_bars(sit_at, monkeypatch):
    from tqdm import tqdm

    terminal = sit_at()
    # As in a program that has set up no log.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ours = logging.getLogger("hapi_client")
    clock = Clock()
    with tqdm(total=5, desc="epochs") as outer:
        line = make_line(clock=clock)
        print("a print")
        ours.warning("a warning")
        clock.now += 1
        line.add(10)
        found = [each for each in shown(terminal.getvalue()) if each]
        assert found[:2] == ["a print", "a warning"]
        assert [each.split()[0] for each in found[2:]] == ["epochs:", "epoch"]
        line.close()
        outer.update()
    assert ours.handlers == []


def test_log_of_a_program_is_left_to_it(sit_at):
    terminal = sit_at()
    before = list(logging.getLogger("hapi_client").handlers)
    line = make_line()
    # Pytest has handlers of its own.
    assert logging.getLogger("hapi_client").handlers == before
    logging.getLogger("hapi_client").warning("a warning")
    line.close()
    assert "a warning" not in terminal.getvalue()


def test_stream_that_somebody_kept_works_on(sit_at):
    terminal = sit_at()
    line = make_line()
    kept = sys.stdout
    line.close()
    kept.write("late\n")
    assert [each for each in shown(terminal.getvalue()) if each] == ["late"]


def test_lines_that_end_in_the_order_of_their_beginning_leave_no_trace(
    sit_at,
):
    terminal = sit_at()
    for _ in range(50):
        # As those of zip(a.loader(0), b.loader(0)) do.
        first, second = make_line(), make_line()
        first.add(8)
        second.add(8)
        first.close()
        second.close()
    assert sys.stdout is terminal


class Sink:
    """What programs put in the place of a stream, to log what comes."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["sink", "closed", "none"])
def test_streams_that_know_little_show_no_line(monkeypatch, kind):
    closed = io.StringIO()
    closed.close()
    stream = {"sink": Sink(), "closed": closed, "none": None}[kind]
    monkeypatch.setattr(sys, "stderr", stream)
    assert isinstance(opened(None), NoLine)


def test_log_is_written_while_another_thread_imports_bars(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    told = io.StringIO()
    handler = TqdmLogHandler(told)
    handler.emit(logging.makeLogRecord({"msg": "a line"}))
    assert told.getvalue() == "a line\n"
