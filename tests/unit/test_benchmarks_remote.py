"""Questions to another process, and folders of processes that are gone."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import adaptation, cell_run, folders, tenants, worker
from benchmarks.client_tier import ClientTier
from benchmarks.network import FRAME_BYTES, PAYLOAD_BYTES, tbf
from benchmarks.remote import Remote, RemoteError
from benchmarks.speedometer import Speedometer
from benchmarks.stream_client import StreamClient

from hapi_cluster.process_identity import ProcessIdentity

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30.0

SCRIPT = """
import multiprocessing, os, sys, time
from benchmarks.remote import serve

def double(number):
    print("chatter")
    return 2 * number

def end():
    os._exit(7)

def fork():
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start()
    child.join(10)
    child.kill()
    return child.exitcode

def hang():
    time.sleep(1000)

try:
    serve({"double": double, "hang": hang, "end": end, "fork": fork})
finally:
    open(sys.argv[1], "w").close()
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "unwound")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with Remote(process, "helper") as running:
        yield running


def test_a_question_is_answered_whatever_the_handler_prints(
    remote: Remote,
) -> None:
    assert remote.ask("double", seconds=SECONDS, number=21) == 42


def test_an_error_over_there_is_raised_here_and_work_goes_on(
    remote: Remote,
) -> None:
    with pytest.raises(RemoteError, match="helper: double: TypeError"):
        remote.ask("double", seconds=SECONDS, wrong=1)
    assert remote.ask("double", seconds=SECONDS, number=1) == 2


def test_an_answering_process_may_fork(remote: Remote) -> None:
    assert remote.ask("fork", seconds=SECONDS) == 0


def test_a_process_that_ends_is_named(remote: Remote) -> None:
    with pytest.raises(RemoteError, match="ended with status 7"):
        remote.ask("end", seconds=SECONDS)


def test_a_handler_is_interrupted_when_the_asking_side_ends(
    remote: Remote, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match=r"hang: no answer within 0\.5 s"):
        remote.ask("hang", seconds=0.5)
    remote.close()
    assert (tmp_path / "unwound").exists()


# -- folders --------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "memory_folder", lambda: tmp_path)
    return tmp_path


def test_a_folder_is_kept_while_its_process_lives(memory: Path) -> None:
    folder = folders.new_folder()
    assert folder.parent == memory
    assert folders.owner_lives(folder)
    assert folders.remove_stale() == []
    assert folder.exists()


def test_folders_of_processes_that_are_gone_are_removed(
    memory: Path,
) -> None:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    # The number is given again, but not with that start time.
    stale = memory / (
        f"{folders.PREFIX}{identity.pid}-{identity.start_ticks - 1}-abc"
    )
    (stale / "data").mkdir(parents=True)
    (stale / "data" / "file").touch()
    other = memory / "other"
    other.mkdir()
    assert folders.remove_stale() == [stale]
    assert list(memory.iterdir()) == [other]


# -- the link ---------------------------------------------------------------


def test_the_rate_is_of_payload_and_headers_come_on_top() -> None:
    words = tbf(1e6)
    bits = int(words[words.index("rate") + 1].removesuffix("bit"))
    assert bits == round(8e6 * FRAME_BYTES / PAYLOAD_BYTES)
    assert int(words[words.index("burst") + 1]) >= FRAME_BYTES


@pytest.mark.parametrize(
    ("module", "answerer"),
    [
        (adaptation, ClientTier),
        (cell_run, ClientTier),
        (tenants, ClientTier),
        (worker, StreamClient),
    ],
)
def test_every_question_of_the_benches_is_answered(
    module: ModuleType, answerer: type
) -> None:
    questions = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_ask"
    ]
    assert questions
    for question in questions:
        do = question.args[1]
        assert isinstance(do, ast.Constant)
        asked = Speedometer if do.value == "read" else answerer
        signature = inspect.signature(getattr(asked, str(do.value)))
        names = {each.arg: None for each in question.keywords if each.arg}
        # Whoever spreads a mapping may ask for more.
        spreads = len(names) < len(question.keywords)
        bind = signature.bind_partial if spreads else signature.bind
        bind(None, **names)
