"""The hapi command: readable errors, exit statuses, help."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from children import heed_interrupts
from hapi_client.cli import main as cli
from hapi_client.cli.demo.command import _bytes_sentence
from hapi_client.cli.demo.run import (
    DemoPlan,
    DemoResult,
    RunResult,
    check_plan,
    largest_difference,
)
from hapi_client.cli.train import idle_cache_text
from hapi_client.data.index import load_index
from hapi_client.metrics.counters import JobStats
from hapi_client.progress import ConsoleReporter
from hapi_client.reports.epoch_recorder import PlanStatus
from hapi_client.reports.progress_bar import ProgressLine
from hapi_client.reports.terminal import TqdmLogHandler
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.inputs.augmentation import Augmentation
from screen import Terminal, shown
from scripted_swift import Answer, scripted_swift

LOGIN = ("ST_AUTH", "ST_USER", "ST_KEY")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch):
    for variable in [v for v in os.environ if v.startswith(("ST_", "OS_"))]:
        monkeypatch.delenv(variable)


@pytest.fixture
def swift(monkeypatch):
    with scripted_swift() as server:
        values = (server.auth_url, "test:tester", "testing")
        for variable, value in zip(LOGIN, values, strict=True):
            monkeypatch.setenv(variable, value)
        yield server


def hapi(monkeypatch, *arguments):
    """The exit status of ``hapi arguments``."""
    monkeypatch.setattr(sys, "argv", ["hapi", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "fast"), "link is 'fast'"),
        (("--min-precision", "low"), "min_precision is 'low'"),
        (("--data", "http://x/y"), "'http://x/y'"),
    ],
)
def test_plan_judges_its_options_before_it_works(
    monkeypatch, capsys, arguments, message
):
    def works(*_):
        raise AssertionError("it has begun")

    monkeypatch.setattr("hapi_client.model.registry.load_region", works)
    assert hapi(monkeypatch, "plan", "resnet18", *arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "augment", "augment_period_epochs"),
    [
        ((), None, None),
        (("--augment",), Augmentation(), None),
        (("--augment", "--augment-period-epochs", 3), Augmentation(), 3),
    ],
)
def test_train_hands_on_what_is_random(
    swift, monkeypatch, capsys, arguments, augment, augment_period_epochs
):
    given = {}

    def job(*_, **options):
        given.update(options)
        raise ClientError("bad_configuration", "no job")

    monkeypatch.setattr(
        "hapi_client.model.torchvision_registry.build_model",
        lambda *_, **__: (None, None),
    )
    monkeypatch.setattr("hapi_client.job.transfer_job.TransferJob", job)
    words = ("train", "--data", "c/p", "--classes", 2, *arguments)
    assert hapi(monkeypatch, *words) == 1
    assert "no job" in capsys.readouterr().err
    assert given["config"].augment == augment
    assert given["config"].augment_period_epochs == augment_period_epochs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cut", "banana"), "cut is 'banana'"),
        (("--cut", "-1"), "cut is '-1'"),
        (("--encoding", "uint9"), "encoding is 'uint9'"),
        (("--min-precision", "low"), "min_precision is 'low'"),
        (("--cache", "on"), "cache is 'on'"),
        (
            (
                "--cut",
                "3",
                "--encoding",
                "uint8;zstd",
                "--min-precision",
                "half",
            ),
            "'uint8;zstd', which rounds more than min_precision 'half'",
        ),
        (("--save", "nowhere/model.pt"), "nowhere is not a folder"),
        (("--save", "/proc/model.pt"), "/proc/model.pt cannot be written"),
        (("--resume", "/proc/run.pt"), "/proc/run.pt cannot be written"),
        (
            ("--save", "run.pt", "--resume", "./run.pt"),
            "--save and --resume are both run.pt",
        ),
    ],
)
def test_train_judges_its_options_before_it_works(
    monkeypatch, capsys, arguments, message
):
    def works(*_, **__):
        raise AssertionError("it has begun")

    monkeypatch.setattr(
        "hapi_client.model.torchvision_registry.build_model", works
    )
    train = ("train", "--data", "c/p", "--classes", "2")
    assert hapi(monkeypatch, *train, *arguments) == 1
    assert message in capsys.readouterr().err


def test_train_looks_for_room_for_the_model_before_it_trains(
    monkeypatch, capsys, tmp_path
):
    asked = []

    def tried(path, num_bytes=0):
        asked.append(num_bytes)
        if num_bytes:
            raise ClientError("bad_configuration", "there is no room")

    monkeypatch.setattr("hapi_client.atomic_file.check_writable", tried)
    monkeypatch.setattr(
        "hapi_client.model.torchvision_registry.build_model",
        lambda *_, **__: (torch.nn.Linear(10, 3), None),
    )
    train = ("train", "--data", "c/p", "--classes", "2", "--save")
    assert hapi(monkeypatch, *train, tmp_path / "model.pt") == 1
    assert "there is no room" in capsys.readouterr().err
    assert asked == [0, 4 * (10 * 3 + 3)]


@pytest.mark.parametrize(
    ("cache", "by_cut", "is_told"),
    [
        ("readwrite", {0: 40}, True),
        ("read", {}, True),
        ("readwrite", {0: 20, 3: 20}, False),
        ("off", {0: 40}, False),
    ],
)
def test_cache_of_a_run_that_streams_is_told_to_be_idle(
    cache, by_cut, is_told
):
    text = idle_cache_text(cache, JobStats(samples_by_cut=by_cut))
    assert bool(text) == is_told
    assert not is_told or f"--cache {cache} had nothing to do" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name it with --data"),
        (("--data", "c/p", "--link", "1gbit"), "exclude each other"),
    ],
)
def test_plan_that_measures_says_what_it_needs(
    monkeypatch, capsys, arguments, message
):
    assert hapi(monkeypatch, "plan", "resnet18", "--measure", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_credentials_one_line_says_what_to_set(monkeypatch, capsys):
    assert hapi(monkeypatch, "ls", "c") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hapi: no credentials; set ST_AUTH")
    assert "bad_configuration" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ls", "s3://x"), "swift://CONTAINER"),
        (("upload", "/nowhere", "c/p"), "/nowhere does not exist"),
    ],
)
def test_wrong_values_are_one_line(
    swift, monkeypatch, capsys, arguments, text
):
    swift.script(Answer(404))
    assert hapi(monkeypatch, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def listing(*names: str) -> Answer:
    entries = [{"name": name, "hash": "e", "bytes": 1} for name in names]
    return Answer(200, json.dumps(entries).encode())


@pytest.mark.parametrize(
    ("listings", "message"),
    [
        ([listing("train/a.tar")], "hapi index swift://photos/train"),
        ([Answer(403)], "hapi index swift://photos/train"),
        (
            [listing(), listing("a.jpg", "val/a.tar", "x/y/_hapi")],
            "no object ending in .tar; among the data sets in this container "
            "are swift://photos/val (",
        ),
        (
            [listing(), listing(*(f"{n}/a.tar" for n in range(7)))],
            "swift://photos/3, swift://photos/4, ... (",
        ),
        ([listing(), listing("a.jpg")], "has no object ending in .tar ("),
        ([Answer(404)], "there is no container 'photos'"),
    ],
)
def test_a_missing_index_names_the_remedy(swift, listings, message):
    swift.script(Answer(404), *listings)
    with Connection() as connection, pytest.raises(HapiError) as caught:
        load_index(connection, Location("photos", "train"))
    assert message in str(caught.value)


def test_ls_lists_the_containers(swift, monkeypatch, capsys, tmp_path):
    entries = [{"name": "photos", "count": 3, "bytes": 3000}]
    swift.script(Answer(200, json.dumps(entries).encode()))
    path = tmp_path / "ls.json"
    assert hapi(monkeypatch, "ls", "--json", path) == 0
    assert "3 kB" in capsys.readouterr().out
    found = {"name": "photos", "objects": 3, "bytes": 3000}
    assert json.loads(path.read_text()) == {"containers": [found]}
    assert swift.requests[0].path.startswith("/v1/AUTH_test?format=json")


def test_ls_of_nothing_says_what_there_is(swift, monkeypatch, capsys):
    nothing = [listing(), listing()]
    swift.script(Answer(404), nothing[0], Answer(404), *nothing)
    assert hapi(monkeypatch, "ls", "photos/train") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "swift://photos/train has no object ending in .tar" in line


def test_ls_prints_and_writes_the_shards(swift, monkeypatch, capsys, tmp_path):
    row = IndexRow(0, "k", 0, 1024, 1)
    index = DataIndex((ShardIndex("train/a.tar", "e", (row,)),), ("x", "y"))
    swift.script(Answer(200, index.to_bytes()))
    path = tmp_path / "ls.json"
    assert hapi(monkeypatch, "ls", "c/train", "--json", path) == 0
    assert "train/a.tar" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {
        "shards": [
            {"name": "train/a.tar", "samples": 1, "bytes": 1024, "etag": "e"}
        ],
        "classes": ["x", "y"],
    }


def test_options_name_the_user(swift, monkeypatch, capsys):
    monkeypatch.delenv("ST_AUTH")
    swift.script(Answer(404), listing("a.tar"))
    assert hapi(monkeypatch, "-A", swift.auth_url, "ls", "c") == 0
    assert "no index" in capsys.readouterr().err
    assert hapi(monkeypatch, "-U", "me", "ls", "c") == 1
    assert "need --auth" in capsys.readouterr().err


def test_upload_wants_a_source_and_a_place(swift, monkeypatch, capsys):
    assert hapi(monkeypatch, "upload", "only-one") == 2
    assert "SOURCE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        *("upload", "index", "ls", "train", "plan", "demo"),
        *("models ls", "models rm", "doctor"),
    ],
)
def test_help_has_an_example_and_the_json_keys(monkeypatch, capsys, command):
    assert hapi(monkeypatch, *command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"hapi {command} " in text.replace("\n", " ")
    assert "Keys of --json:" in text


def test_version_is_the_distributions(monkeypatch, capsys):
    assert hapi(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("hapi ")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; import hapi_client.cli.main; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ctrl_c_ends_with_130(swift):
    swift.script(Answer(hang_seconds=30))
    process = subprocess.Popen(
        [sys.executable, "-m", "hapi_client.cli.main", "ls", "c"],
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + 30
    while not swift.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0),
        ([2.0, 1.0], [2.0, 0.5], 0.5),
        ([0.0], [0.0], 0),
        ([1.0], [1.0, 1.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
    ],
)
def test_the_largest_relative_difference(first, second, expected):
    assert largest_difference(first, second) == expected


@pytest.mark.parametrize(
    ("other", "agree"), [(1.0, True), (1.00005, True), (1.001, False)]
)
def test_curves_agree_within_the_tolerance(other, agree):
    def run(loss):
        return RunResult("x", 1, 0, 1.0, (loss,), 1.0, 0, 0)

    assert DemoResult(run(1.0), run(other)).curves_agree is agree


@pytest.mark.parametrize("path", ["nowhere/x.json", "."])
def test_json_path_is_refused_before_any_work(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert hapi(monkeypatch, "ls", "c", "--json", path) == 2
    assert "--json" in capsys.readouterr().err


def test_json_on_standard_output_is_all_that_stands_there(
    swift, monkeypatch, capsys
):
    entries = [{"name": "[red]", "count": 3, "bytes": 3000}]
    swift.script(Answer(200, json.dumps(entries).encode()))
    assert hapi(monkeypatch, "ls", "--json", "-") == 0
    shown = capsys.readouterr()
    [found] = json.loads(shown.out)["containers"]
    assert found["name"] == "[red]"
    assert "[red]" in shown.err  # the table


def test_a_reader_that_has_enough_is_no_error_to_tell_of(swift):
    entries = [{"name": "photos", "count": 3, "bytes": 3000}]
    for words in ((), ("--json", "-")):
        swift.script(Answer(200, json.dumps(entries).encode()))
        receiver, sender = os.pipe()
        os.close(receiver)
        done = subprocess.run(
            [sys.executable, "-m", "hapi_client.cli.main", "ls", *words],
            stdout=sender,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        os.close(sender)
        assert done.returncode == 1
        assert b"Error" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)]
)
def test_a_terminal_has_colours_unless_no_color_is_set(
    environment, is_coloured
):
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "hapi_client.cli.main", "doctor"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 1
    assert b"failure" in shown
    assert (b"\x1b[31m" in shown) is is_coloured


def test_what_is_no_terminal_gets_no_control_characters():
    for words in (("doctor",), ("--help",), ("train", "--help")):
        done = subprocess.run(
            [sys.executable, "-m", "hapi_client.cli.main", *words],
            capture_output=True,
            timeout=60,
        )
        assert done.stdout
        assert b"\x1b" not in done.stdout + done.stderr


def test_sigterm_unwinds_like_an_error(swift):
    swift.script(Answer(hang_seconds=30))
    process = subprocess.Popen(
        [sys.executable, "-m", "hapi_client.cli.main", "ls", "c"],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while not swift.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 143
    assert b"Traceback" not in errors


def test_demo_says_so_when_push_down_costs_bytes():
    def result(bytes):
        return RunResult("x", bytes, 30, 1.0, (1.0,), 0.5, 1, 0, False, 3)

    more = _bytes_sentence(DemoResult(result(10), result(25)))
    assert "2.5 times the bytes" in more
    less = _bytes_sentence(DemoResult(result(40), result(10)))
    assert "1/4.0 of the bytes, and 30 B more" in less
    # Each epoch saves 10 bytes; after three it is even.
    assert "less from 4 epochs on" in less


def test_demo_asks_for_its_photographs_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(HapiError, match=r"pip install '\.\[demo\]'"):
        check_plan(DemoPlan(model="nope"))
    with pytest.raises(HapiError, match="nope"):
        check_plan(DemoPlan(model="nope", data=(Path("a.tar"),)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"encoding": "int4"}, "int4"),
        ({"cut": 999}, "999"),
        ({"freeze": "nonsense"}, "nonsense"),
        ({"model": "nope"}, "nope"),
    ],
)
def test_plan_of_the_demo_is_judged_before_anything_starts(changed, said):
    with pytest.raises(HapiError, match=said):
        check_plan(DemoPlan(**changed))


def test_what_others_show_while_bars_rest_stays(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    before = threading.active_count()
    with ConsoleReporter() as reporter:
        for name in ("a", "b", "c"):
            file = reporter.reading(io.BytesIO(b"1234"), name, 4)
            file.read()
        with reporter.resting():
            for number in range(6):
                terminal.write(f"line {number}\n")
                reporter.note(f"epoch {number}: loss 1.0")
        reporter.reading(io.BytesIO(b"1234"), "d", 4).read()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before
    left = [line for line in shown(terminal.getvalue()) if line]
    assert left == [
        line
        for number in range(6)
        for line in (f"line {number}", f"epoch {number}: loss 1.0")
    ]


def test_without_a_terminal_only_notes_are_shown(capsys):
    with ConsoleReporter() as reporter, reporter.resting():
        reporter.note("a note")
    assert capsys.readouterr().err.strip() == "a note"


def test_log_of_a_command_stands_above_a_progress_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    record = logging.LogRecord("x", 30, "", 0, "a warning", None, None)
    TqdmLogHandler().emit(record)
    line = ProgressLine("epoch 0", 8, PlanStatus, Traffic())
    TqdmLogHandler().emit(record)
    above = ["a warning", "a warning"]
    *found, last = [each for each in shown(terminal.getvalue()) if each]
    assert found == above
    assert last.startswith("epoch 0 |")
    line.close()
    assert [each for each in shown(terminal.getvalue()) if each] == above


def test_a_cloud_of_the_present_folder_is_named_by_an_option(swift, tmp_path):
    """It comes before the environment, and nothing else is said."""
    pytest.importorskip("openstack", reason="needs openstacksdk (extra: dev)")
    swift.script(Answer(200, b"[]"))
    (tmp_path / "clouds.yaml").write_text(
        f"""
clouds:
  lab:
    auth_type: v1password
    auth: {{auth_url: {swift.auth_url}, username: u, password: k}}
"""
    )
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hapi_client.cli.main"),
            *("--os-cloud", "lab", "ls"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "ST_AUTH": "http://127.0.0.1:9",
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(swift.requests) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--os-cloud", "x", "-U", "me"), "--os-cloud goes without --auth"),
        (("--os-interface", "outside"), "OS_INTERFACE is 'outside'"),
        (("--os-cacert", "/none"), "'/none' does not exist"),
        (("--os-cert", "/none"), "'/none' does not exist"),
        (("--os-key", "/none"), "'/none' does not exist"),
    ],
)
def test_options_of_the_connection_are_judged(
    swift, monkeypatch, capsys, options, message
):
    assert hapi(monkeypatch, *options, "ls") == 1
    assert message in capsys.readouterr().err


def test_insecure_is_said_in_one_line(swift, monkeypatch, capsys, caplog):
    swift.script(Answer(200, b"[]"))
    assert hapi(monkeypatch, "--insecure", "ls") == 0
    assert caplog.text.count("insecure") == 1
