"""Workers that come and go give the model of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from as_user import environment_of
from hapi_client.swift.swift_url import parse_location
from hapi_training.rendezvous import RENDEZVOUS_VARIABLE
from jobs import upload_shards
from photos import shards_of
from waiting import until

EPOCHS = 40
STEPS = 5 * EPOCHS
KILLS = int(os.environ.get("HAPI_KILLS", "3"))
SECONDS = 200
SCRIPT = Path(__file__).parent.parent / "support" / "elastic_worker.py"


@pytest.fixture(scope="module")
def data(connection):
    shards = shards_of((40, 16, 33, 23), size=120)
    upload_shards(connection, parse_location("swift://nodes/train"), shards)


class Worker:
    """A worker process, and the steps that it has printed."""

    def __init__(self, environment, result, hurry):
        self.result = result
        self.steps = []
        self.errors = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                str(result),
                str(EPOCHS),
                str(hurry),
            ],
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
        self.process.send_signal(signum)


@pytest.fixture
def start(cluster, data, tmp_path):
    """Starts workers of a rendezvous; None for one alone."""
    workers = []
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )

    def start(*, alone=False):
        environment = {**environment_of(cluster), "OMP_NUM_THREADS": "1"}
        if not alone:
            environment[RENDEZVOUS_VARIABLE] = f"127.0.0.1:{store.port}"
        result = tmp_path / f"{len(workers)}.json"
        hurry = tmp_path if alone else tmp_path / "hurry"
        workers.append(Worker(environment, result, hurry))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture(scope="module")
def digests():
    return {}


def reference(start, digests):
    if not digests:
        digests["alone"] = start(alone=True).end()
    return digests["alone"]


@pytest.mark.timeout(400)
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
    assert [s["samples"] for s in first.steps if s["step"] % 5] == [
        24.0
    ] * sum(bool(s["step"] % 5) for s in first.steps)


@pytest.mark.timeout(400)
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
    until(lambda: "gone on without this one" in "".join(second.errors), 10)
    (tmp_path / "hurry").touch()
    assert first.end()["digest"] == expected["digest"]
