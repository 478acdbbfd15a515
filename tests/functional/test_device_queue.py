"""``hapi device-queue``: jobs that share a device, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from as_user import environment_of
from children import family, interruptible
from device_queues import SECONDS, start_queue
from forked_ranks import run_ranks
from hapi_client.cli import main as cli
from hapi_protocol.errors import ClientError
from hapi_training import VirtualNodes
from hapi_training import turns as protocol
from hapi_training.device_queue import status_of
from hapi_training.turns import DeviceQueue, Turns
from node_training import batches, digest, network, optimizer_of
from preloaded import python
from waiting import until

TIMEOUT = 5.0
MEMORY = 1 << 33
TRAINER = Path(__file__).parent.parent / "support" / "checkpoint_trainer.py"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device"


@pytest.fixture
def serve(cluster, path):
    """Starts a queue; all are ended after the test."""
    processes = []

    def serve(*options):
        environment = environment_of(cluster)
        processes.append(start_queue(environment, path, *options))
        return processes[-1]

    yield serve
    for process in processes:
        with process:
            process.kill()


def job(path, name="job", group="", seconds=TIMEOUT, **options):
    device = torch.device("cpu")
    queue = DeviceQueue(path, name=name, **options)
    return Turns(queue, device, 0, group or name, seconds)


def state_of(path, name="job"):
    jobs = status_of(path)["jobs"]
    states = [j["state"] for j in jobs if j["name"].startswith(f"{name} ")]
    return states[0] if states else None


def in_thread(function, *arguments):
    """Calls a function in a thread; its result or error is the answer."""
    results = []

    def run():
        try:
            results.append(function(*arguments))
        except ClientError as error:
            results.append(error)

    threading.Thread(target=run, daemon=True).start()
    return results


def test_jobs_have_turns_one_at_a_time(serve, path):
    process = serve("--policy", "fair")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = job(path, "first"), job(path, "second")
    for turns in (first, second):
        turns.take(1)
        turns.measured()
        turns.give_back()
    second.take(1)
    assert state_of(path, "second") == "has its turn"
    taken = in_thread(first.take, 7)
    until(lambda: state_of(path, "first") == "waits")
    assert not taken
    second.give_back()
    until(lambda: taken)
    (facts, _) = status_of(path)["jobs"]
    assert facts["turns"] == 1
    assert facts["left_seconds"] == pytest.approx(7 * facts["turn_seconds"])
    assert facts["waited_seconds"] > 0
    for turns in (first, second):
        turns.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    assert not path.exists()


def test_turn_of_a_dead_or_hung_holder_goes_on(serve, path):
    process = serve("--turn-limit", "5")
    dead, hung, other = (job(path, name) for name in ("dead", "hung", "other"))
    for turns in (dead, hung, other):
        turns.take(1)
        turns.measured()
        turns.give_back()
    dead.take(1)
    taken = in_thread(hung.take, 1)
    until(lambda: state_of(path, "hung") == "waits")
    dead._server.close()
    until(lambda: taken)
    # It does not give it back.
    other.take(1)
    with pytest.raises(
        ClientError, match="held its turn for more than 5 s"
    ) as caught:
        hung.give_back()
    assert caught.value.code == "queue_lost"
    ended = {
        job["name"][:4]: job["reason"] for job in status_of(path)["ended"]
    }
    assert ended["dead"] == "ended"
    assert "held its turn for more than 5 s" in ended["hung"]
    other.close()
    process.terminate()
    assert "hung" in process.communicate(timeout=SECONDS)[0]


def with_memory(monkeypatch, resident, peak):
    monkeypatch.setattr(
        protocol, "_memory_bytes", lambda device: (resident, peak)
    )


def test_memory_is_admitted(serve, path, monkeypatch):
    serve("--memory", MEMORY)
    first, second, third = (job(path, name) for name in ("a", "b", "c"))
    with_memory(monkeypatch, 1 << 31, 1 << 32)
    first.take(1)
    first.give_back()
    first.measured()
    with_memory(monkeypatch, 3 << 31, 7 << 30)
    second.take(1)
    second.give_back()
    second.measured()
    assert state_of(path, "b") == "waits for memory"
    with_memory(monkeypatch, 1 << 30, 1 << 30)
    # Another worker of the first job, which waits for it.
    other = job(path, "d", group="a")
    other.take(1)
    other.give_back()
    other.measured()
    other.take(1)
    other.close()
    taken = in_thread(second.take, 1)
    first.take(1)
    first.close()
    until(lambda: taken)
    second.close()
    with_memory(monkeypatch, 1, 2 * MEMORY)
    third.take(1)
    third.give_back()
    with pytest.raises(ClientError, match=r"needs 17\.2 GB at its peak, but"):
        third.measured()
    third.close()


def test_what_is_no_queue_of_ones_own_is_refused(serve, path, monkeypatch):
    with pytest.raises(ClientError, match=r"did not answer in 5 s") as caught:
        job(path)
    assert caught.value.code == "queue_lost"
    path.write_text("")
    with pytest.raises(ClientError, match="is no socket"):
        job(path)
    path.unlink()
    # Left by a queue that was killed.
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    serve()
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "VERSION", 99)
        with pytest.raises(ClientError, match="and this job version 99"):
            job(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(ClientError, match="belongs to user"):
            job(path)
    first = job(path)
    queue = DeviceQueue(path)
    with pytest.raises(ClientError, match=r"is for cpu.*computes on meta"):
        Turns(queue, torch.device("meta"), 0, "group", TIMEOUT)
    first.close()
    for wrong in (
        *({"weight": x} for x in (0, -1, float("inf"), float("nan"), "2")),
        *({"steps": 0}, {"steps": 1.5}, {"name": 5}, {"socket": 0}),
    ):
        (name,) = wrong
        with pytest.raises(ClientError, match=f"{name} (is|must)"):
            DeviceQueue(**{"socket": path, **wrong})
    # Lines that no job sends end its connection only.
    for line in (b"nonsense\n", b'{"want": 1}\n', b"x" * (1 << 17), b"[]\n"):
        with protocol.connected(path, TIMEOUT) as server:
            with suppress(OSError):
                server.sendall(line)
                server.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert not server.recv(100)
    assert status_of(path)["jobs"] == []


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (None, ("serve", "--policy", "x"), "give one of srtf, fair"),
        (Path.touch, ("serve",), "exists and is no socket"),
        (None, ("status",), "no device queue answers"),
    ],
)
def test_wrong_command_is_refused(
    path, make, words, message, monkeypatch, capsys
):
    if make:
        make(path)
    command, *rest = words
    monkeypatch.setattr(
        sys, "argv", ["hapi", "device-queue", command, str(path), *rest]
    )
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert message in capsys.readouterr().err


def test_second_queue_is_refused(serve, path, monkeypatch, capsys):
    serve()
    monkeypatch.setattr(sys, "argv", ["hapi", "device-queue", str(path)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert f"cannot serve at {path}: another run" in capsys.readouterr().err
    assert status_of(path)["jobs"] == []


def test_lost_queue_ends_jobs_in_time(serve, path):
    process = serve()
    holder, waiting, patient = (job(path, name) for name in ("a", "b", "c"))
    for turns in (holder, waiting, patient):
        turns.take(1)
        turns.measured()
        turns.give_back()
    holder.take(1)
    results = [in_thread(turns.take, 1) for turns in (waiting, patient)]
    until(lambda: state_of(path, "c") == "waits")
    process.kill()
    process.wait()
    with pytest.raises(ClientError, match="while this job had its turn"):
        holder.give_back()
    until(lambda: results[0] and results[1], SECONDS)
    assert [result[0].code for result in results] == ["queue_lost"] * 2
    # One that is started again in time goes on with those that wait.
    process = serve()
    again = job(path, "again", seconds=SECONDS)
    again.take(1)
    again.give_back()
    process.kill()
    process.wait()
    taken = in_thread(again.take, 1)
    serve()
    until(lambda: taken)
    again.close()


def test_stopped_queue_is_not_waited_for(serve, path):
    process = serve()
    turns = job(path)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ClientError, match="did not answer in 5 s"):
        turns.take(1)
    process.send_signal(signal.SIGCONT)


def test_ended_queue_gives_no_turn(serve, path):
    """Nor does one that is started again while a job has its turn."""
    process = serve("--turn-limit", "100")
    holder, waiting = (
        job(path, name, seconds=SECONDS) for name in ("holder", "waiting")
    )
    holder.take(1)
    taken = in_thread(waiting.take, 1)
    until(lambda: state_of(path, "waiting") == "waits")
    process.terminate()
    assert "Traceback" not in process.communicate(timeout=SECONDS)[0]
    serve("--turn-limit", "100")
    until(lambda: state_of(path, "waiting") == "waits")
    assert not taken
    with pytest.raises(ClientError, match="while this job had its turn"):
        holder.give_back()
    until(lambda: taken)
    waiting.close()


def test_forked_child_does_not_keep_the_turn(serve, path):
    serve()
    code = (
        "import os, sys, time, torch\n"
        "from hapi_training.turns import DeviceQueue, turns_of\n"
        "queue = DeviceQueue(sys.argv[1], name='parent')\n"
        "turns = turns_of(queue, torch.device('cpu'), 0, '', 5)\n"
        "turns.take(1)\n"
        "if not os.fork():\n"
        "    time.sleep(100)\n"
        "print(flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE
    ) as parent:
        processes = []
        try:
            parent.stdout.readline()
            processes = family(parent.pid)
            assert len(processes) == 2
            assert state_of(path, "parent") == "has its turn"
            parent.kill()
            other = job(path)
            other.take(1)
            other.close()
        finally:
            parent.kill()
            for process in processes:
                process.send(signal.SIGKILL)


def train_alternately(rank, path):
    """Two modules, as a generator and its critic, take turns, too."""
    pairs = [
        (module, VirtualNodes(module, 4, queue=path, timeout_seconds=5))
        for module in (network(), network())
    ]
    for steps in zip(*(n.steps(batches(4)) for _, n in pairs), strict=True):
        for (module, _), step in zip(pairs, steps, strict=True):
            updates = optimizer_of(module, "sgd")
            for images, labels in step:
                step.backward(cross_entropy(module(images), labels))
            updates.step()
            updates.zero_grad()
    pairs[0][1].close()
    digests = {digest(module.state_dict()) for module, _ in pairs}
    assert len(digests) == 1
    return digests.pop()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nodes_and_ranks_of_one_queue_do_not_wait_for_themselves(
    serve, path, num_ranks
):
    serve()
    idle = job(path, "idle")  # Has not taken a turn yet.
    digests = run_ranks(num_ranks, partial(train_alternately, path=path))
    assert len(set(digests)) == 1
    idle.close()


def test_interrupt_while_waiting_leaves_no_turn_behind(serve, path):
    """The process may go on, in a notebook."""
    serve()
    holder, interrupted = job(path, "holder"), job(path, "interrupted")
    holder.take(1)

    def interrupt():
        until(lambda: state_of(path, "interrupted") == "waits")
        os.kill(os.getpid(), signal.SIGINT)

    with interruptible():
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            interrupted.take(1)
    until(lambda: state_of(path, "interrupted") is None)
    holder.give_back()
    for turns in (holder, interrupted):
        turns.take(1)
        turns.close()


def hello(path, **facts):
    """A connection that has said hello, as no job of ours does."""
    own = {"hello": 1, "name": "x", "rank": 0, "group": "x", "weight": 1.0}
    server = protocol.connected(path, TIMEOUT)
    line = json.dumps({**own, "device": "cpu", "memory_bytes": 1, **facts})
    server.sendall(line.encode() + b"\n")
    return server


def test_wrong_messages_end_their_connection_only(serve, path):
    serve()
    # A device that has been left does not bind the jobs that come later.
    with hello(path, device="cuda:7") as server:
        assert b"welcome" in server.recv(100)
    until(lambda: not status_of(path)["jobs"])
    first, second = job(path, "first"), job(path, "second")
    first.take(1)
    for facts, line in (
        ({}, {"want": "soon"}),
        ({}, {"want": 0}),
        ({"weight": 0}, {}),
        ({"weight": float("nan")}, {}),
        ({}, {"hello": 1}),
        ({}, {"resident": "much", "peak": 1}),
    ):
        with hello(path, **facts) as server, suppress(OSError):
            server.sendall(json.dumps(line).encode() + b"\n")
            while server.recv(100):
                pass
    first.give_back()
    second.take(1)
    assert len(status_of(path)["jobs"]) == 2
    for turns in (first, second):
        turns.close()


def test_job_that_does_not_read_delays_nobody(serve, path):
    process = serve()
    with protocol.connected(path, 1.0) as server:
        with pytest.raises(TimeoutError):
            server.sendall(b'{"status": true}\n' * 1_000_000)
        turns = job(path)
        turns.take(1)
        turns.close()
        process.terminate()
        assert process.wait(SECONDS) == 0


class Trainer:
    """A training job that saves each step."""

    def __init__(self, environment, folder, steps, queue):
        self.result = folder / "result.json"
        options = {"local": str(folder / "run"), "queue": queue}
        self.process = subprocess.Popen(
            [
                *(python(), TRAINER, self.result, str(steps)),
                json.dumps(options),
            ],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self):
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors

    def digest(self):
        code, errors = self.end()
        assert not code, errors
        return json.loads(self.result.read_text())["digest"]


@pytest.fixture
def train(cluster, tmp_path):
    trainers = []

    def train(name, steps, queue=None):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        environment = environment_of(cluster)
        trainers.append(Trainer(environment, folder, steps, queue))
        return trainers[-1]

    yield train
    for trainer in trainers:
        for process in family(trainer.process.pid):
            process.send(signal.SIGKILL)
        trainer.process.communicate()


def test_jobs_are_those_alone_also_when_the_queue_is_killed(
    serve, train, path
):
    """Each ends with a named error, and goes on from its checkpoint."""
    steps = {"a": 60, "b": 90}
    alone = {name: train(f"{name} alone", steps[name]) for name in steps}
    alone = {name: trainer.digest() for name, trainer in alone.items()}
    process = serve()

    def start():
        return {
            name: train(name, count, {"socket": str(path), "steps": count})
            for name, count in steps.items()
        }

    jobs = start()
    for trainer in jobs.values():
        # Both have begun.
        assert trainer.process.stdout.readline()
        assert trainer.process.stdout.readline()
    assert {j["name"][:7] for j in status_of(path)["jobs"]} == {"checkpo"}
    process.kill()
    process.wait()
    for trainer in jobs.values():
        code, errors = trainer.end()
        assert code == 1
        assert "(code queue_lost)" in errors
    serve()
    jobs = start()
    assert {n: trainer.digest() for n, trainer in jobs.items()} == alone
