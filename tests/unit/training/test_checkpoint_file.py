"""Checkpoint files are always complete and belong to one run."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from children import interruptible
from full_disk import no_file_beyond
from hapi_client.atomic_file import TRIAL_BYTES, check_writable, file_lock
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    defer_interrupts,
    random_state,
    save_atomically,
    set_random_state,
)

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs a GPU"
        ),
    ),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_is_synced_before_it_replaces_the_old_one(path, monkeypatch):
    calls = []

    def record(name):
        function = getattr(os, name)

        def recorded(*arguments):
            calls.append(name)
            function(*arguments)

        monkeypatch.setattr(os, name, recorded)

    record("fsync")
    record("replace")
    save_atomically({"x": 1}, path)
    assert calls == ["fsync", "replace"]
    assert names(path.parent) == ["run.pt"]


def test_failed_save_keeps_the_previous_file(path):
    save_atomically({"x": 1}, path)
    too_large = pytest.raises(ClientError, match="File too large")
    with too_large, no_file_beyond(100_000):
        save_atomically({"x": torch.zeros(10**6)}, path)
    assert names(path.parent) == ["run.pt"]
    assert torch.load(path, weights_only=True) == {"x": 1}


INTERRUPTED = """
import sys
from pathlib import Path
import torch
from hapi_training.checkpoint_file import save_atomically

path = Path(sys.argv[1])
large = {"new": torch.zeros(20_000)}
lines = 0
moment = 0

def trace(frame, event, argument):
    global lines
    if not frame.f_code.co_filename.endswith(
        ("torch/serialization.py", "checkpoint_file.py", "atomic_file.py")
    ):
        return None
    lines += event in ("line", "return")
    if lines == moment:
        sys.settrace(None)
        raise KeyboardInterrupt
    return trace

save_atomically(large, path)
num_interrupts = 0
for moment in range(1, 10_000):
    save_atomically({"old": 1}, path)
    lines = 0
    sys.settrace(trace)
    try:
        save_atomically(large, path)
    except KeyboardInterrupt:
        num_interrupts += 1
    sys.settrace(None)
    assert list(torch.load(path, weights_only=True)) in (["old"], ["new"])
    if lines < moment:
        break
print(num_interrupts)
"""


def test_save_interrupted_at_any_line_leaves_a_complete_file(path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
    assert names(path.parent) == ["run.pt"]


def test_folder_at_the_temporary_path_is_a_named_error(path):
    path.with_name("run.pt.part").mkdir()
    with pytest.raises(ClientError, match=r"run\.pt cannot be written"):
        save_atomically({"x": 1}, path)


def test_first_interrupt_is_deferred_and_the_second_one_is_not(caplog):
    with interruptible(), defer_interrupts() as stop_requested:
        signal.raise_signal(signal.SIGINT)
        assert stop_requested.is_set()
        assert "Ctrl-C again" in caplog.text
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ignored_interrupts_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupts() as stop_requested:
            signal.raise_signal(signal.SIGINT)
            assert not stop_requested.is_set()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_second_run_with_the_same_file_is_refused(path):
    with file_lock(path):
        refused = pytest.raises(ClientError, match="another run")
        with refused as caught, file_lock(path):
            pytest.fail("two runs have the lock")
        assert caught.value.code == "bad_configuration"
        assert str(path) in caught.value.message
        with file_lock(path.with_name("other.pt")):
            pass
    with file_lock(path):
        pass
    assert names(path.parent) == []


def test_lock_whose_file_was_removed_is_refused(path, monkeypatch):
    def flock(file, how):
        Path(file.name).unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    refused = pytest.raises(ClientError, match="another run")
    with refused, file_lock(path):
        pytest.fail("the lock belongs to nobody")


def test_file_system_without_locks_is_a_warning(path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with file_lock(path):
        assert "cannot be locked" in caplog.text


def test_check_for_space_changes_nothing(path):
    part = path.with_name("run.pt.part")
    path.write_bytes(b"previous")
    part.write_bytes(b"of another run")
    check_writable(path, TRIAL_BYTES + 1)
    assert names(path.parent) == ["run.pt", "run.pt.part"]
    assert path.read_bytes() == b"previous"
    assert part.read_bytes() == b"of another run"


@pytest.mark.parametrize(
    ("num_bytes", "free_bytes"),
    [(1, 0), (TRIAL_BYTES, TRIAL_BYTES // 2), (3 * TRIAL_BYTES, TRIAL_BYTES)],
)
def test_full_disk_is_found_before_training(path, num_bytes, free_bytes):
    with pytest.raises(ClientError) as caught, no_file_beyond(free_bytes):
        check_writable(path, num_bytes)
    assert caught.value.code == "bad_configuration"
    assert str(path) in caught.value.message
    assert "make room" in caught.value.message
    assert names(path.parent) == []


def test_folder_that_cannot_be_written_is_named(tmp_path):
    path = Path("/proc/run.pt")
    words = r"/proc/run\.pt cannot be written"
    with pytest.raises(ClientError, match=words):
        check_writable(path)
    with pytest.raises(ClientError, match=words), file_lock(path):
        pytest.fail("the file is locked")
    with pytest.raises(ClientError, match="nowhere"):
        check_writable(tmp_path / "nowhere" / "run.pt")


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_continue_after_restoring(device):
    with torch.random.fork_rng():
        state = random_state(device)
        expected = torch.rand(3), torch.rand(3, device=device)
        set_random_state(device, state)
        assert torch.equal(torch.rand(3), expected[0])
        assert torch.equal(torch.rand(3, device=device), expected[1])
        # A state without its device, or with one that is not here.
        set_random_state(CPU, {**state, "cuda": torch.zeros(16).byte()})
        assert torch.equal(torch.rand(3), expected[0])
        state = random_state(CPU)
        following = torch.rand(3)
        set_random_state(device, state)
        assert torch.equal(torch.rand(3), following)
