"""Workers that come and go give the model of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from itertools import chain, groupby
from pathlib import Path

import pytest
import torch.distributed as dist

from as_user import environment_of
from children import family
from hapi_client.swift.swift_url import parse_location
from hapi_training.store import RENDEZVOUS_VARIABLE
from jobs import upload_shards
from photos import shards_of
from waiting import SECONDS, until

EPOCHS = 40
SHARDS = (40, 16, 33, 23)
STEPS = 5 * EPOCHS
NODES = set(map(str, range(8)))
KILLS = int(os.environ.get("HAPI_KILLS", "3"))
SCRIPT = Path(__file__).parent.parent / "support" / "elastic_worker.py"
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "1:2"),
    *("--rdzv-backend", "c10d", "--max-restarts", "100"),
    # A restart waits for more machines: 30 s by default.
    *("--rdzv-conf", "last_call_timeout=2"),
)
"""Also for one worker of a machine, which is the default."""


@pytest.fixture(scope="module")
def data(connection):
    shards = shards_of(SHARDS, size=120)
    upload_shards(connection, parse_location("swift://nodes/train"), shards)


class Worker:
    """A worker process, and the steps that it has printed."""

    def __init__(self, environment, result, command):
        self.result = result
        self.steps = []
        self.errors = []
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stream, lines in (
            (self.process.stdout, self.steps),
            (self.process.stderr, self.errors),
        ):
            threading.Thread(
                target=self._read, args=(stream, lines), daemon=True
            ).start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append(json.loads(line) if lines is self.steps else line)

    @property
    def step(self):
        return self.steps[-1]["step"] if self.steps else -1

    def wait_for(self, step):
        def is_there():
            assert self.process.poll() is None, "".join(self.errors)
            return self.step >= step

        until(is_there, SECONDS)

    def end(self):
        assert self.process.wait(SECONDS) == 0, "".join(self.errors)
        return json.loads(self.result.read_text())

    def kill(self, signum=signal.SIGKILL):
        """Ends it with its children: torchrun and the worker."""
        for process in family(self.process.pid):
            process.send(signum)


@pytest.fixture
def start(cluster, data, tmp_path):
    """Starts workers: of a rendezvous, alone, or under torchrun."""
    workers = []
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )

    def start(*state, alone=False, torchrun=(), epochs=EPOCHS):
        environment = {**environment_of(cluster), "OMP_NUM_THREADS": "1"}
        if torchrun:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        elif not alone:
            environment[RENDEZVOUS_VARIABLE] = f"127.0.0.1:{store.port}"
        result = tmp_path / f"{0 if torchrun else len(workers)}.json"
        is_fast = alone and not state
        hurry = tmp_path if is_fast else tmp_path / "hurry"
        command = [*torchrun, SCRIPT, result, epochs, hurry, *state]
        workers.append(Worker(environment, result, command))
        return workers[-1]

    start.workers = workers
    yield start
    for worker in workers:
        worker.kill()
        worker.process.wait()


@pytest.fixture(scope="module")
def digests():
    return {}


def reference(start, digests):
    if not digests:
        worker = start(alone=True)
        digests["alone"] = worker.end()
        check_each_sample_once([worker])
    return digests["alone"]


def check_each_sample_once(workers, steps=STEPS):
    """From what all workers have printed."""
    lines = [line for worker in workers for line in worker.steps]
    lines.sort(key=lambda line: line["step"])
    seen = {}
    for number, same in groupby(lines, key=lambda line: line["step"]):
        nodes = {}
        for line in same:
            # A step that was taken again has the same samples.
            for node, samples in line["samples"].items():
                assert nodes.setdefault(node, samples) == samples
        assert nodes.keys() == NODES, number
        epoch = seen.setdefault((number - 1) // 5, [])
        epoch += chain.from_iterable(nodes.values())
    assert sum(map(len, seen.values())) == steps // 5 * sum(SHARDS)
    assert all(set(samples) == set(seen[0]) for samples in seen.values())
    assert all(len(samples) == len(set(samples)) for samples in seen.values())


def test_workers_join_and_are_killed(start, digests, tmp_path):
    expected = reference(start, digests)
    dice = random.Random(5)
    first = start()
    first.wait_for(1)
    others = []
    for number in range(KILLS):
        others.append(start())
        others[-1].wait_for(0)
        # All have nodes: the newcomer was admitted without a restart.
        if number % 3 == 2:
            # The first, with the lowest rank, may be lost like any other.
            first.kill()
            first = others.pop()
        else:
            first.wait_for(first.step + dice.randint(1, 3))
            others.pop(dice.randrange(len(others))).kill()
        first.wait_for(first.step + 1)
    (tmp_path / "hurry").touch()
    result = first.end()
    assert result["digest"] == expected["digest"]
    assert len(result["losses"]) == STEPS
    check_each_sample_once(start.workers[1:])


def test_stopped_worker_is_given_up_and_ends(start, digests, tmp_path):
    expected = reference(start, digests)
    first, second = start(), start()
    first.wait_for(1)
    second.wait_for(0)
    second.kill(signal.SIGSTOP)
    step = first.step
    first.wait_for(step + 3)
    second.kill(signal.SIGCONT)
    assert second.process.wait(SECONDS) == 1
    until(lambda: "gone on without this one" in "".join(second.errors))
    (tmp_path / "hurry").touch()
    assert first.end()["digest"] == expected["digest"]


def test_machines_of_torchrun_are_killed_and_come_again(
    start, digests, tmp_path
):
    expected = reference(start, digests)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    torchrun = (*TORCHRUN, "--rdzv-endpoint", endpoint)
    state = tmp_path / "state.pt"
    first = start(state, torchrun=torchrun)
    first.wait_for(1)
    kills = max(1, KILLS // 3)
    for _ in range(kills):
        second = start(state, torchrun=torchrun)
        second.wait_for(first.step + 2)
        second.kill()
        first.wait_for(first.step + 3)
    (tmp_path / "hurry").touch()
    result = first.end()
    assert result["digest"] == expected["digest"]
    check_each_sample_once(start.workers[-1 - kills :])


def test_control_state_of_another_step_is_noticed(start, tmp_path):
    state = tmp_path / "state.pt"
    first = start(state, "late", alone=True, epochs=3)
    first.wait_for(3)
    first.kill()
    (tmp_path / "hurry").touch()
    second = start(state, "late", alone=True, epochs=3)
    second.end()
    with pytest.raises(AssertionError):
        check_each_sample_once([first, second], steps=15)
