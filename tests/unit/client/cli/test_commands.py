"""The hapi command: errors, exit statuses, output and credentials."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from children import enable_interrupts
from hapi_client.cli import train_run
from hapi_client.cli.context import print_table
from hapi_client.cli.demo.command import DemoOptions, compare_bytes
from hapi_client.cli.demo.run import DemoResult, check_options
from hapi_client.cli.train_result import Run, TrainResult
from hapi_client.data.index import load_index
from hapi_client.metrics.events import JobStats
from hapi_client.model.registry import ModelSource
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_training.loop import EpochResult, History
from hapi_training.recipe import Recipe
from scripted_swift import Answer

MAIN = (sys.executable, "-m", "hapi_client.cli.main")
TRAIN = ("train", "--data", "c/p", "--classes", 2)
CONTAINERS = Answer(
    200, json.dumps([{"name": "[red]", "count": 3, "bytes": 3000}]).encode()
)


ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
RUN_COMMANDS = """
import sys
from hapi_client.cli import main

for words in sys.argv[1:]:
    sys.argv = ["hapi", *words.split()]
    try:
        main.main()
    except SystemExit as ended:
        status = ended.code
    slow = {"torch", "torchvision", "scipy", "pyarrow", "matplotlib"}
    print(status, *sorted(slow & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("library", "command", "extra"),
    [
        ("typer", "--version", "client"),
        ("torch", "plan resnet18 --link 10mbit", "client"),
        ("matplotlib", "plan resnet18 --plot plan.html", "plots"),
        ("matplotlib", "report run.json --html run.html", "plots"),
    ],
)
def test_missing_library_is_an_error_that_names_its_extra(
    library, command, extra, tmp_path
):
    (tmp_path / "run.json").write_text('{"reports": []}')
    script = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from hapi_client.cli import start; start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert library in done.stderr
    assert f"not installed: pip install 'swift-hapi[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def data(swift):
    """A Swift with an index of each data set."""
    rows = tuple(IndexRow(n, str(n), 512 * n, 512, n) for n in range(2))
    index = DataIndex((ShardIndex("p/a.tar", "etag", rows),))
    swift.script(Answer(200), Answer(200, index.to_bytes()))


def run_in_one_process(commands):
    """Prints exit statuses and the slow modules that are imported."""
    return subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, *commands],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ENVIRON["PYTHONPATH"]},
    )


def test_missing_credentials_are_an_error_before_torch_is_imported(tmp_path):
    commands = (
        "train --data c/p --classes 2",
        f"train --data c/p --classes 2 --report {tmp_path}/run.html",
        f"extract --data c/p {tmp_path}/features.npz",
        "plan resnet18 --data c/p",
        f"plan resnet18 --data c/p --plot {tmp_path}/plan.html",
        f"upload {tmp_path} c/p",
        *("index c/p", "ls", "info", "doctor", "cache ls", "cache stats"),
        *("cache purge --yes", "models ls", "models rm --all --yes"),
        "models publish resnet18",
    )
    done = run_in_one_process(commands)
    output = done.stdout.splitlines()
    assert [line for line in output if line[:2] == "1 "] == []
    assert output.count("1") == len(commands), done.stderr
    errors = [
        line for line in done.stderr.splitlines() if "no credentials" in line
    ]
    # The doctor reports them as a failed check.
    assert len(errors) == len(commands) - 1
    assert all(line.startswith("hapi: ") for line in errors)
    assert all("(code bad_configuration)" in line for line in errors)
    assert any("no credentials" in line for line in output)


def test_missing_container_is_an_error_before_torch_is_imported(
    swift, tmp_path
):
    swift.script(Answer(404))
    commands = (
        "train --data c/p --classes 2",
        f"extract --data c/p {tmp_path}/features.npz",
        "plan resnet18 --data c/p",
    )
    done = run_in_one_process(commands)
    assert done.stdout.splitlines() == ["1"] * len(commands), done.stderr
    assert done.stderr.count("there is no container 'c'") == len(commands)


def test_options_replace_variables(swift, hapi, monkeypatch, caplog, capsys):
    monkeypatch.delenv("ST_AUTH")
    swift.script(Answer(404), listing("a.tar"))
    assert hapi("-A", swift.auth_url, "--insecure", "ls", "c") == 0
    assert caplog.text.count("insecure") == 1
    assert "no index" in capsys.readouterr().err
    assert hapi("-U", "me", "ls", "c") == 1
    assert "need --auth" in capsys.readouterr().err


def test_cloud_of_the_current_folder_is_selected_by_an_option(swift, tmp_path):
    """The option precedes the environment, and no warning is printed."""
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
    done = subprocess.run(
        [*MAIN, "--os-cloud", "lab", "ls"],
        cwd=tmp_path,
        env={**ENVIRON, "ST_AUTH": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(swift.requests) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cut banana", "cut is 'banana'"),
        ("--store-cache on", "store is 'on'"),
        ("--device tpu", "device is 'tpu'"),
        (
            "--cut 3 --encoding uint8;zstd --min-precision half",
            "'uint8;zstd', which rounds more than min_precision 'half'",
        ),
        ("--save nowhere/model.pt", "nowhere is not a folder"),
        ("--save /proc/model.pt", "/proc/model.pt cannot be written"),
        ("--resume /proc/run.pt", "/proc/run.pt cannot be written"),
        ("--save run.pt --resume ./run.pt", "--save and --resume are both"),
        ("--report run.pdf", "run.pdf"),
    ],
)
def test_train_refuses_wrong_options_before_it_works(
    data, hapi, monkeypatch, capsys, words, message
):
    monkeypatch.setattr(ModelSource, "build_with_transform", None)
    assert hapi(*TRAIN, *words.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--os-cloud x -U me ls", 1, "--os-cloud"),
        ("--os-interface outside ls", 1, "'outside'"),
        ("--os-cacert /none ls", 1, "'/none'"),
        ("--os-cert /none ls", 1, "'/none'"),
        ("--os-key /none ls", 1, "'/none'"),
        ("ls s3://x", 1, "swift://CONTAINER"),
        ("upload /nowhere c/p", 1, "/nowhere does not exist"),
        ("upload only-one", 2, "SOURCE"),
        ("ls c --json nowhere/x.json", 2, "--json"),
        ("ls c --json .", 2, "--json"),
    ],
)
def test_wrong_value_is_named(swift, hapi, capsys, words, status, message):
    assert hapi(*words.split()) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoding", "int4"),
        ("cut", 999),
        ("freeze", "nonsense"),
        ("model", "nope"),
    ],
)
def test_demo_refuses_wrong_options_before_it_starts_swift(option, value):
    with pytest.raises(HapiError, match=str(value)):
        check_options(DemoOptions(**{option: value}))


def test_demo_without_photographs_needs_data(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(HapiError, match=r"pip install '\.\[demo\]'"):
        check_options(DemoOptions(model="nope"))
    with pytest.raises(HapiError, match="nope"):
        check_options(DemoOptions(model="nope", data=[Path("a.tar")]))


@pytest.mark.parametrize(
    ("words", "augment", "period"),
    [
        ("", None, None),
        ("--augment", Augmentation(), None),
        ("--augment --augment-period-epochs 3", Augmentation(), 3),
    ],
)
def test_train_passes_augmentation_to_the_job(
    data, hapi, monkeypatch, words, augment, period
):
    job = Mock(side_effect=ClientError("bad_configuration", "no job"))
    built = Mock(return_value=(None, None))
    monkeypatch.setattr(ModelSource, "build_with_transform", built)
    monkeypatch.setattr(train_run, "TransferJob", job)
    assert hapi(*TRAIN, *words.split()) == 1
    config = job.call_args.kwargs["config"]
    assert config.augment == augment
    assert config.augment_period_epochs == period


def test_train_checks_space_for_the_model_before_it_trains(
    data, hapi, monkeypatch, capsys, tmp_path
):
    checked = []

    def check(path, num_bytes=0):
        checked.append(num_bytes)
        if num_bytes:
            raise ClientError("bad_configuration", "there is no room")

    for module in ("train", "train_run"):
        monkeypatch.setattr(f"hapi_client.cli.{module}.check_writable", check)
    built = Mock(return_value=(torch.nn.Linear(10, 3), None))
    monkeypatch.setattr(ModelSource, "build_with_transform", built)
    assert hapi(*TRAIN, "--save", tmp_path / "model.pt") == 1
    assert "there is no room" in capsys.readouterr().err
    assert checked == [0, 4 * (10 * 3 + 3)]


def test_cache_without_push_down_is_reported_as_unused():
    for cache, by_cut, is_unused in (
        ("readwrite", {0: 40}, True),
        ("read", {}, True),
        ("readwrite", {0: 20, 3: 20}, False),
        ("off", {0: 40}, False),
    ):
        stats = JobStats(samples_by_cut=by_cut)
        assert bool(train_run.unused_cache_text(cache, stats)) == is_unused


def listing(*names):
    entries = [{"name": name, "hash": "e", "bytes": 1} for name in names]
    return Answer(200, json.dumps(entries).encode())


@pytest.mark.parametrize(
    ("listings", "message"),
    [
        ([listing("train/a.tar")], "hapi index swift://photos/train"),
        ([Answer(403)], "hapi index swift://photos/train"),
        (
            [listing(), listing("a.jpg", "val/a.tar", "x/y/_hapi")],
            "swift://photos/val (",
        ),
        (
            [listing(), listing(*(f"{n}/a.tar" for n in range(7)))],
            "swift://photos/3, swift://photos/4, ... (",
        ),
        ([listing(), listing("a.jpg")], ".tar ("),
        ([Answer(404)], "'photos'"),
    ],
)
def test_missing_index_names_the_remedy(swift, listings, message):
    swift.script(Answer(404), *listings)
    with Connection() as connection, pytest.raises(HapiError) as caught:
        load_index(connection, Location("photos", "train"))
    assert message in str(caught.value)


def test_ls_lists_containers(swift, hapi, capsys, tmp_path):
    swift.script(CONTAINERS)
    path = tmp_path / "ls.json"
    assert hapi("ls", "--json", path) == 0
    assert "3 kB" in capsys.readouterr().out
    entry = {"name": "[red]", "objects": 3, "bytes": 3000}
    assert json.loads(path.read_text()) == {"containers": [entry]}
    assert hapi("ls", "--json", "-") == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == {"containers": [entry]}
    assert "[red]" in output.err  # the table
    assert swift.requests[0].path.startswith("/v1/AUTH_test?format=json")


def test_ls_of_an_empty_prefix_is_an_error(swift, hapi, capsys):
    empty = [listing(), listing()]
    swift.script(Answer(404), empty[0], Answer(404), *empty)
    assert hapi("ls", "photos/train") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "swift://photos/train" in line


def test_ls_lists_shards(swift, hapi, capsys, tmp_path):
    row, name = IndexRow(0, "k", 0, 1024, 1), "train/a.tar"
    index = DataIndex((ShardIndex(name, "e", (row,)),), ("x", "y"))
    swift.script(Answer(200, index.to_bytes()))
    path = tmp_path / "ls.json"
    assert hapi("ls", "c/train", "--json", path) == 0
    assert name in capsys.readouterr().out
    shard = {"name": name, "samples": 1, "bytes": 1024, "etag": "e"}
    found = json.loads(path.read_text())
    assert found == {"shards": [shard], "classes": ["x", "y"]}


def test_names_do_not_control_the_terminal(swift, hapi, capsys):
    name = "\x1b[2J\nb\x9b31m"
    row = {"name": name, "count": 3, "bytes": 3000}
    swift.script(Answer(200, json.dumps([row]).encode()))
    assert hapi("ls") == 0
    swift.answers.clear()
    swift.script(Answer(404))
    assert hapi("ls", name) == 1
    output = capsys.readouterr()
    shown = r"\x1b[2J\nb\x9b31m"
    assert shown in output.out
    assert shown in output.err
    assert "\x1b" not in output.out + output.err


def test_version_is_the_distributions(hapi, capsys):
    assert hapi("--version") == 0
    assert capsys.readouterr().out.startswith("hapi ")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signal_ends_a_command_without_traceback(swift, number, status):
    swift.script(Answer(hang_seconds=30))
    process = subprocess.Popen(
        [*MAIN, "ls", "c"],
        stderr=subprocess.PIPE,
        preexec_fn=enable_interrupts,
    )
    deadline = time.monotonic() + 30
    while not swift.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == status
    assert b"Traceback" not in errors


def test_closed_pipe_is_not_reported(swift):
    for words in ((), ("--json", "-")):
        swift.script(CONTAINERS)
        receiver, sender = os.pipe()
        os.close(receiver)
        done = subprocess.run(
            [*MAIN, "ls", *words],
            stdout=sender,
            stderr=subprocess.PIPE,
            timeout=300,
        )
        os.close(sender)
        assert done.returncode == 1
        assert b"Error" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)]
)
def test_terminal_has_colours_unless_no_color_is_set(environment, is_coloured):
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*MAIN, "doctor"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        timeout=300,
    )
    os.close(theirs)
    output = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 1
    assert b"failure" in output
    assert (b"\x1b[31m" in output) is is_coloured


@pytest.mark.parametrize("words", [("doctor",), ("train", "--help")])
def test_pipe_gets_no_control_characters(words):
    done = subprocess.run([*MAIN, *words], capture_output=True, timeout=300)
    assert done.stdout
    assert b"\x1b" not in done.stdout + done.stderr


def test_tables_in_a_pipe_are_not_cut(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(("a long title " * 9, "b"), [("x" * 150, "y")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "x" * 150 in lines[3]
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("a", "b"), [("x" * 150, "y")])
    assert "…" not in (printed := capsys.readouterr().out)
    assert printed.count("x") == 150


def demo_run(num_bytes=1, losses=(1.0,)):
    epochs = [EpochResult(list(losses)), EpochResult(), EpochResult()]
    stats = JobStats(bytes=num_bytes, package_bytes=30)
    run = Run("", Recipe(), History(epochs))
    return TrainResult("x", "body", 2, Mock(cut=1), stats, [run])


@pytest.mark.parametrize(
    ("first", "second", "difference", "agree"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0, True),
        ([2.0, 1.0], [2.0, 0.5], 0.5, False),
        ([0.0], [0.0], 0, True),
        ([1.0], [1.0, 1.0], math.inf, False),
        ([math.nan], [1.0], math.inf, False),
        ([1.0], [1.00005], pytest.approx(5e-5, rel=1e-3), True),
        ([1.0], [1.001], pytest.approx(1e-3, rel=1e-2), False),
    ],
)
def test_loss_curves_agree_within_the_tolerance(
    first, second, difference, agree
):
    result = DemoResult(demo_run(losses=first), demo_run(losses=second))
    assert result.max_loss_difference == difference
    assert result.curves_agree is agree


@pytest.mark.parametrize(
    ("streaming", "pushdown", "texts"),
    [
        (10, 25, ["2.5 times the bytes"]),
        # Each of three epochs saves 10 bytes.
        (40, 10, ["1/4.0 of the bytes, and 30 B more", "after 4 epochs"]),
    ],
)
def test_demo_compares_bytes(streaming, pushdown, texts):
    result = DemoResult(demo_run(streaming), demo_run(pushdown))
    for text in texts:
        assert text in compare_bytes(result)
