"""Files that a run keeps: whole at every moment, and of one run only."""

from __future__ import annotations

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
from hapi_client.atomic_file import TRIAL_BYTES, check_writable
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    Checkpoint,
    heeding_interrupts,
    random_state,
    set_random_state,
    write_whole,
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_on_the_disk_before_it_takes_the_place(
    tmp_path, monkeypatch
):
    done = []

    def recorded(name):
        do = getattr(os, name)

        def called(*arguments):
            done.append(name)
            do(*arguments)

        return called

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    write_whole({"x": 1}, tmp_path / "run.pt")
    assert done == ["fsync", "replace"]
    assert names(tmp_path) == ["run.pt"]


def test_what_a_killed_run_left_is_used_again(tmp_path):
    (tmp_path / "run.pt.part").write_bytes(b"half of a checkpoint")
    (tmp_path / "run.pt.lock").touch()
    checkpoint = Checkpoint(tmp_path / "run.pt")
    with checkpoint.held():
        checkpoint.save(number=7)
    assert names(tmp_path) == ["run.pt"]
    assert checkpoint.load()["number"] == 7


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    path = tmp_path / "run.pt"
    write_whole({"x": 1}, path)
    too_large = pytest.raises(ClientError, match="File too large")
    with too_large, no_file_beyond(100_000):
        write_whole({"x": torch.zeros(10**6)}, path)
    assert names(tmp_path) == ["run.pt"]
    assert torch.load(path, weights_only=True) == {"x": 1}


def test_a_save_that_is_interrupted_leaves_the_one_before(
    tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    write_whole({"x": 1}, path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole({"x": 2}, path)
    assert names(tmp_path) == ["run.pt"]
    assert torch.load(path, weights_only=True) == {"x": 1}


INTERRUPTED = """
import sys
from pathlib import Path
import torch
from hapi_training.checkpoint_file import write_whole

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

write_whole(large, path)
num_interrupts = 0
for moment in range(1, 10_000):
    write_whole({"old": 1}, path)
    lines = 0
    sys.settrace(trace)
    try:
        write_whole(large, path)
    except KeyboardInterrupt:
        num_interrupts += 1
    sys.settrace(None)
    assert list(torch.load(path, weights_only=True)) in (["old"], ["new"])
    if lines < moment:
        break
print(num_interrupts)
"""


def test_a_save_may_be_interrupted_at_any_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run.pt")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_a_link_is_locked_and_written_where_it_points_to(tmp_path):
    path, link = tmp_path / "run.pt", tmp_path / "link.pt"
    link.symlink_to(path)
    refused = pytest.raises(ClientError, match="another run uses")
    with Checkpoint(path).held(), refused, Checkpoint(link).held():
        pytest.fail("two runs have the file")
    Checkpoint(link).save(number=7)
    assert link.is_symlink()
    assert Checkpoint(path).load()["number"] == 7


def test_a_file_that_cannot_be_read_is_not_said_to_be_something_else(
    tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    write_whole({"version": 1}, path)

    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(torch, "load", broken)
    with pytest.raises(ClientError, match=r"cannot be read: .*Input/output"):
        Checkpoint(path).load()


def test_folder_in_the_place_of_the_part_is_a_named_error(tmp_path):
    (tmp_path / "run.pt.part").mkdir()
    with pytest.raises(ClientError, match=r"run\.pt cannot be written"):
        write_whole({"x": 1}, tmp_path / "run.pt")


def test_first_interrupt_is_told_and_the_second_interrupts(caplog):
    with interruptible(), heeding_interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        assert "ending behind this step; once more" in caplog.text
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupts_that_do_not_matter_still_do_not(caplog):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeding_interrupts() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked.is_set()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_run_with_the_same_file_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    with Checkpoint(path).held():
        refused = pytest.raises(ClientError, match="another run uses")
        with refused as caught, Checkpoint(path).held():
            pytest.fail("two runs have the file")
        assert caught.value.code == "bad_configuration"
        assert str(path) in caught.value.message
        with Checkpoint(tmp_path / "other.pt").held():
            pass
    with Checkpoint(path).held():
        pass
    assert names(tmp_path) == []


def test_a_lock_whose_file_is_gone_is_none(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"

    def too_late(file, how):
        Path(file.name).unlink()

    monkeypatch.setattr(fcntl, "flock", too_late)
    refused = pytest.raises(ClientError, match="another run uses")
    with refused, Checkpoint(path).held():
        pytest.fail("the lock is nobody's")


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with Checkpoint(tmp_path / "run.pt").held():
        assert "cannot be locked" in caplog.text


def test_a_trial_leaves_everything_as_it_is(tmp_path):
    (tmp_path / "run.pt").write_bytes(b"kept")
    (tmp_path / "run.pt.part").write_bytes(b"of another run")
    check_writable(tmp_path / "run.pt", TRIAL_BYTES + 1)
    assert names(tmp_path) == ["run.pt", "run.pt.part"]
    assert (tmp_path / "run.pt").read_bytes() == b"kept"
    assert (tmp_path / "run.pt.part").read_bytes() == b"of another run"


@pytest.mark.parametrize(
    ("num_bytes", "room"),
    [(1, 0), (TRIAL_BYTES, TRIAL_BYTES // 2), (3 * TRIAL_BYTES, TRIAL_BYTES)],
)
def test_a_disk_without_room_is_found_by_the_trial(tmp_path, num_bytes, room):
    with pytest.raises(ClientError) as caught, no_file_beyond(room):
        check_writable(tmp_path / "run.pt", num_bytes)
    assert caught.value.code == "bad_configuration"
    for words in (str(tmp_path / "run.pt"), "make room, or choose a"):
        assert words in caught.value.message
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_named():
    path = Path("/proc/run.pt")
    words = r"/proc/run\.pt cannot be written"
    with pytest.raises(ClientError, match=words):
        check_writable(path)
    with pytest.raises(ClientError, match=words), Checkpoint(path).held():
        pytest.fail("it is held")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ClientError, match="nowhere is not a folder"):
        check_writable(tmp_path / "nowhere" / "run.pt")


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_go_on_where_they_were(device):
    with torch.random.fork_rng():
        state = random_state(device)
        first = torch.rand(3), torch.rand(3, device=device)
        set_random_state(device, state)
        assert torch.equal(torch.rand(3), first[0])
        assert torch.equal(torch.rand(3, device=device), first[1])


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_of_another_device_are_left_alone(device):
    with torch.random.fork_rng():
        state = random_state(CPU)
        first = torch.rand(3)
        set_random_state(device, state)
        assert torch.equal(torch.rand(3), first)
        set_random_state(CPU, {**state, "cuda": torch.zeros(16).byte()})
        assert torch.equal(torch.rand(3), first)
