"""Checkpoints of each step on disks and in a real Swift, through kills."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from as_user import environment_of, run
from children import family, run_family
from forked_ranks import run_ranks
from gateway import Storm, gateway_to
from hapi_client import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, HapiError
from hapi_training import CheckpointManager
from hapi_training.checkpoints import segments
from hapi_training.checkpoints.swift_folder import SwiftFolder
from hapi_training.store import RENDEZVOUS_VARIABLE
from jobs import connected
from preloaded import python
from waiting import SECONDS, until

STEPS = 8
KILLS = int(os.environ.get("HAPI_KILLS", "3"))
SCRIPT = Path(__file__).parent.parent / "support" / "checkpoint_trainer.py"


@pytest.fixture
def train(cluster, tmp_path):
    """Trains to the end on some ranks."""

    def train(num_ranks=1, steps=STEPS, **options):
        result = tmp_path / "result.json"
        command = command_of(num_ranks, result, steps, options)
        environment = {**environment_of(cluster), "OMP_NUM_THREADS": "1"}
        done = run_family(command, SECONDS, environment=environment)
        assert done.returncode == 0, done.stderr
        facts = json.loads(result.read_text())
        # Gloo of torch 2.9 prints there, too.
        lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
        facts["restored"] = json.loads(lines[0])["restored"]
        return facts

    return train


def command_of(num_ranks, result, steps, options, program=None):
    ranks = ["-m", "torch.distributed.run", "--standalone"]
    ranks += [f"--nproc-per-node={num_ranks}"]
    return [
        program or python(),
        *(ranks if num_ranks > 1 else []),
        *(str(SCRIPT), str(result), str(steps), json.dumps(options)),
    ]


@pytest.fixture
def remote(connection, request):
    name = f"swift://runs/{request.node.name}".replace("[", "-").strip("]")
    return SwiftFolder(connection, parse_location(name))


@pytest.fixture
def names(connection, remote):
    """Names of objects and of segments behind their prefix."""

    def names():
        location = remote.location
        return [
            sorted(
                info.name.removeprefix(f"{location.prefix}/")
                for info in connection.list(container, f"{location.prefix}/")
            )
            for container in ("runs", "runs_segments")
        ]

    return names


def test_run_goes_on_from_swift(
    train, remote, names, connection, cluster, tmp_path
):
    expected = train(local=str(tmp_path / "whole"))["digest"]
    place = str(remote.location)
    first = train(steps=5, remote=place, keep=2)
    stats = first["stats"]
    assert stats["saved"] == 5 == stats["uploaded"] + stats["dropped"]
    pointer = remote.pointer()
    assert pointer.step == 5
    objects, segments = names()
    # Of the last two that were uploaded.
    files = [name for name in objects if name.startswith("step-")]
    assert pointer.name in files
    assert objects == ["latest", "run.json", *files]
    assert 1 <= len(files) <= 2
    assert {int(name.partition("/")[0]) for name in segments} == {
        int(name[5:17]) for name in files
    }
    path = tmp_path / "file.pt"
    path.write_bytes(
        connection.get_object("runs", f"{remote.location.prefix}/{files[-1]}")
    )
    assert torch.load(path, weights_only=True, mmap=True)["step"] == 5
    look_at(cluster, tmp_path, place, [int(n[5:17]) for n in files][::-1])
    again = train(remote=place)
    assert again["restored"] == 5
    assert again["digest"] == expected


def look_at(cluster, folder, place, steps):
    """Uses the commands on checkpoints of these steps, newest first."""

    def hapi(*words):
        command = ("hapi", "checkpoints", *words, "--json", "o.json")
        (folder / "o.json").unlink(missing_ok=True)
        done = run(cluster, folder, command)
        path = folder / "o.json"
        facts = json.loads(path.read_text()) if path.exists() else None
        return done.returncode, facts, done.stderr + done.stdout

    status, facts, _ = hapi("ls", place)
    assert status == 0
    assert [c["step"] for c in facts["checkpoints"]] == steps
    assert all(c["length_bytes"] > 20_000 for c in facts["checkpoints"])
    status, facts, output = hapi("verify", place)
    assert status == 0
    assert all(c["whole"] for c in facts["checkpoints"])
    assert "whole, no digests" in output
    status, _, output = hapi("rm", place, str(steps[0]))
    assert status == 1
    assert "is the newest checkpoint" in output
    status, _, output = hapi("rm", place, "77")
    assert status == 1
    assert "no checkpoint of step 77" in output


def test_commands_on_a_folder(train, cluster, tmp_path):
    train(steps=4, local=str(tmp_path / "run"), keep=3)
    look_at(cluster, tmp_path, "run", [4, 3, 2])
    done = run(cluster, tmp_path, ("hapi", "checkpoints", "rm", "run", "3"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / f"step-{4:012}.pt").write_bytes(b"damaged")
    done = run(cluster, tmp_path, ("hapi", "checkpoints", "verify", "run"))
    assert done.returncode == 1
    assert "4    │ step 4: UnpicklingError: Weights" in done.stdout
    assert "2    │ whole" in done.stdout


def test_other_machines_go_on_from_swift(train, remote, tmp_path):
    """Four ranks save each step; the machine is lost; two go on elsewhere."""
    expected = train(local=str(tmp_path / "whole"))["digest"]
    place, folder = str(remote.location), tmp_path / "run"
    train(4, steps=5, remote=place, local=str(folder), keep=1)
    shutil.rmtree(folder)
    committed = remote.pointer().step
    assert committed == 5
    result = train(2, remote=place, local=str(tmp_path / "elsewhere"))
    assert result["restored"] == committed
    assert result["digest"] == expected


class Worker:
    """A worker of a rendezvous, and what it has printed."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        self.last = {"step": -1, "workers": 0}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.last = json.loads(line)

    def wait_for(self, step, workers):
        def is_there():
            assert self.process.poll() is None
            last = self.last.get("step", -1), self.last.get("workers", 0)
            return last[0] >= step and last[1] == workers

        until(is_there, SECONDS)


def test_checkpoints_go_on_while_workers_come_and_go(
    train, remote, cluster, tmp_path
):
    """Any of two workers is killed, also the one that commits."""
    dice, steps = random.Random(3), 1000
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    environment = {
        **environment_of(cluster),
        "OMP_NUM_THREADS": "1",
        RENDEZVOUS_VARIABLE: f"127.0.0.1:{store.port}",
    }
    hurry = tmp_path / "hurry"
    options = {
        "remote": str(remote.location),
        "local": str(tmp_path / "run"),
        "restores": False,
        "seconds": 0.2,
        "steps_after": [str(hurry), 5],
    }
    result = tmp_path / "elastic.json"
    command = command_of(1, result, steps, options)
    workers = [Worker(command, environment)]
    try:
        workers[0].wait_for(0, 1)
        for _ in range(KILLS):
            workers.append(Worker(command, environment))
            step = workers[0].last["step"] + dice.randint(1, 4)
            workers[0].wait_for(step, 2)
            workers.pop(dice.randrange(2)).process.kill()
            workers[0].wait_for(step + 2, 1)
        hurry.touch()
        assert workers[0].process.wait(SECONDS) == 0
    finally:
        for worker in workers:
            worker.process.kill()
    facts = json.loads(result.read_text())
    alone = train(steps=facts["step"], local=str(tmp_path / "whole"))
    assert facts["digest"] == alone["digest"]
    assert remote.pointer().step == facts["step"]


@pytest.fixture
def through(cluster, monkeypatch):
    """A gateway that fails at will, and a connection through it."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 << 10)
    with (
        gateway_to(cluster.proxy_url) as gateway,
        connected(cluster, auth_url=f"{gateway.url}/auth/v1.0") as connection,
    ):
        yield gateway, connection


def test_uploads_get_through_a_storm(through, remote, names):
    """503, tokens that expire, and connections that break."""
    gateway, connection = through
    state = {"module": torch.nn.Linear(200, 100), "number": 0}
    place = {"remote": str(remote.location), "connection": connection}
    with CheckpointManager(state, **place) as checkpoints:
        checkpoints.save()
        checkpoints.wait()
        gateway.storm = Storm(refused=0.1, expired=0.02, torn=0.03)
        while state["number"] < 7 or not gateway.happened["expired"]:
            state["number"] += 1
            checkpoints.save()
            checkpoints.wait()
        # Away for longer than the requests are repeated.
        gateway.storm = Storm(refused=1.0)
        threading.Timer(10, lambda: setattr(gateway, "storm", None)).start()
        state["number"] += 1
        checkpoints.save()
    assert gateway.happened["refused"] > 3
    last = state["number"]
    again = {"module": torch.nn.Linear(200, 100), "number": 0}
    with CheckpointManager(again, **place) as others:
        assert others.restore()
    assert again["number"] == last
    assert torch.equal(again["module"].weight, state["module"].weight)
    objects, segments = names()
    assert objects[-2:] == [f"step-{n:012}.pt" for n in (last, last + 1)]
    assert len(segments) == 2 * num_segments(remote)


def test_swift_that_is_away_is_an_error_and_costs_nothing(
    through, remote, names
):
    gateway, connection = through
    state = {"module": torch.nn.Linear(200, 100), "number": 0}
    place = {"remote": str(remote.location), "connection": connection}
    with CheckpointManager(state, keep=1, **place) as checkpoints:
        checkpoints.save()
        checkpoints.wait()
        # After two segments of the second one.
        put, left, lock = connection.put, [1, 2], threading.Lock()

        def put_some(*arguments, **options):
            with lock:
                if left and left.pop():
                    return put(*arguments, **options)
                gateway.storm = Storm(refused=1.0)
            return put(*arguments, **options)

        connection.put = put_some
        state["number"] = 1
        checkpoints._uploads.deadline_seconds = 1.0
        checkpoints.save()
        with pytest.raises(HapiError, match="503") as caught:
            checkpoints.wait()
        assert "runs_segments/" in str(caught.value)
        gateway.storm, connection.put = None, put
        assert remote.pointer().step == 1
        assert len(names()[1]) > num_segments(remote)
        # Training goes on; what was left of the second one is collected by
        # the next run.
        state["number"] = 2
        checkpoints.save()
    assert remote.pointer().step == 3
    state["number"] = -1
    with CheckpointManager(state, keep=1, **place) as checkpoints:
        assert checkpoints.restore()
        assert state["number"] == 2
        checkpoints.save()
    objects, segments = names()
    assert objects == ["latest", "run.json", f"step-{4:012}.pt"]
    assert len(segments) == num_segments(remote)


def num_segments(remote):
    return -(-remote.pointer().size // segments.SEGMENT_BYTES)


def test_damage_in_swift_is_passed_over(remote, connection, names, caplog):
    state = {"number": 0}
    place = {"remote": str(remote.location), "connection": connection}
    with CheckpointManager(state, keep=9, **place) as checkpoints:
        for number in (1, 2, 3, 4):
            state["number"] = number
            checkpoints.save()
            checkpoints.wait()
    prefix = remote.location.prefix
    # A missing segment, and a missing object that the pointer names; and
    # what is no checkpoint.
    (segment,) = (name for name in names()[1] if int(name[:12]) == 3)
    connection.delete("runs_segments", f"{prefix}/{segment}")
    connection.delete("runs", f"{prefix}/step-{4:012}.pt")
    name = f"{prefix}/step-{9:012}.pt"
    connection.put("runs", name, io.BytesIO(b"\x80hostile"), 8)
    with CheckpointManager(state, keep=9, **place) as checkpoints:
        assert checkpoints.restore()
        assert state["number"] == 2
        assert "step 3: " in caplog.text
        assert "step 4: " in caplog.text
        checkpoints.save()
    assert names()[0][2:] == [f"step-{n:012}.pt" for n in (1, 2, 3)]
    state["number"] = 0
    with CheckpointManager(state, **place) as checkpoints:
        assert checkpoints.restore()
    assert state["number"] == 2
    connection.put("runs", f"{prefix}/latest", io.BytesIO(b"{}"), 2)
    checkpoints = CheckpointManager(state, **place)
    with checkpoints, pytest.raises(ClientError, match="latest is no pointer"):
        checkpoints.restore()


def rank_that_waits(rank, environment, place):
    """Returns the step that is in Swift when ``wait`` has returned."""
    os.environ.update(environment)
    commit = SwiftFolder.commit

    def slow_commit(*arguments):
        time.sleep(1)
        commit(*arguments)

    SwiftFolder.commit = slow_commit
    with CheckpointManager({"number": 3}, remote=place) as checkpoints:
        checkpoints.save()
        checkpoints.wait()
        with Connection() as connection:
            folder = SwiftFolder(connection, parse_location(place))
            return folder.pointer().step


def test_all_ranks_wait_for_the_commit(cluster, remote):
    run = partial(
        rank_that_waits,
        environment=dict(cluster.environment),
        place=str(remote.location),
    )
    assert run_ranks(2, run) == [1, 1]


class Observer:
    """Loads whatever the pointer names, as soon as it names it."""

    def __init__(self, remote, connection):
        self._remote, self._connection = remote, connection
        self.steps, self.errors = [], []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()

    def _run(self):
        while not self._ends.wait(0.005):
            pointer = self._remote.pointer()
            if pointer is None or self.steps[-1:] == [pointer.step]:
                continue
            try:
                data = self._remote.read(
                    pointer.step, pointer.etag, 0, pointer.size
                )
                content = torch.load(io.BytesIO(data), weights_only=True)
                assert content["step"] == pointer.step
                self.steps.append(pointer.step)
            except Exception as error:
                # Replaced and deleted meanwhile: the pointer has moved on.
                if self._remote.pointer() == pointer:
                    self.errors.append(error)


@pytest.mark.parametrize(
    ("place", "num_ranks"),
    [("local", 2), ("remote", 1), ("local", 1), ("remote", 2)][: KILLS - 1],
)
def test_killed_runs_go_on_from_whole_checkpoints(
    train, remote, connection, cluster, tmp_path, num_ranks, place
):
    dice = random.Random(num_ranks)
    options = {
        "local": {"local": str(tmp_path / "run")},
        "remote": {"remote": str(remote.location)},
    }[place]
    environment = {**environment_of(cluster), "OMP_NUM_THREADS": "1"}
    steps = 10 + 8 * KILLS
    restored = []
    with Observer(remote, connection) as observer:
        for _ in range(KILLS):
            whole = committed(remote, tmp_path / "run", place)
            with subprocess.Popen(
                command_of(
                    num_ranks,
                    tmp_path / "result.json",
                    steps,
                    {**options, "seconds": 0.1},
                    sys.executable,  # whose family is killed
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            ) as child:
                lines = (json.loads(line) for line in child.stdout)
                restored.append(next(lines)["restored"])
                assert restored[-1] >= whole
                last = restored[-1] + dice.randint(1, 8)
                for line in lines:
                    if line.get("whole", 0) >= last:
                        break
                # One rank, which torchrun follows with the others, or all.
                group = family(child.pid)
                some = group[-1:] if dice.random() < 0.5 else group
                for process in some:
                    process.send(signal.SIGKILL)
                child.communicate(timeout=SECONDS)
        result = train(num_ranks, steps, **options)
    assert result["restored"] >= restored[-1]
    assert not observer.errors
    if place == "remote":
        assert observer.steps[-1] == steps
        assert observer.steps == sorted(observer.steps)
    whole_run = train(steps=steps, local=str(tmp_path / "whole"))
    assert result["digest"] == whole_run["digest"]


def committed(remote, folder, place):
    """Step of the newest checkpoint that is whole."""
    if place == "local":
        steps = [int(p.name[5:17]) for p in folder.glob("step-*.pt")]
        return max(steps, default=0)
    pointer = remote.pointer()
    return pointer.step if pointer else 0
