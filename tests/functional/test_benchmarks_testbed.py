"""Two tiers in network namespaces: the link, the cores, nothing left."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.testbed import folders
from benchmarks.testbed import two_tiers as testbed
from benchmarks.testbed.network import STORAGE_ADDRESS, missing_requirements

from children import enable_interrupts
from waiting import SECONDS, until

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"worker": False, "processes": False}
PAYLOAD_BYTES = 1_000_000

RECEIVE = f"""
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    left = {PAYLOAD_BYTES}
    while left:
        left -= len(sock.recv(65536)) or sys.exit("cut short")
"""
SEND = f"""
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        connection.sendall(bytes({PAYLOAD_BYTES}))
"""
HOLD = """
import sys, time
from benchmarks.testbed.two_tiers import two_tiers
with two_tiers(worker=False, processes=False) as bed:
    wait = "import time; time.sleep(600)"
    bed.client.start([sys.executable, "-c", wait, str(bed.folder)])
    print(bed.folder, bed.storage.namespace.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def network():
    missing = missing_requirements()
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)}")


@pytest.fixture(scope="module")
def cores():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two tiers need two cores")


@pytest.fixture(scope="module")
def bed(network, cores):
    with testbed.two_tiers(**SMALL) as running:
        yield running


@contextlib.contextmanager
def transfer(bed):
    """Sends a megabyte over the link while, and after, the body runs."""
    words = [sys.executable, "-c"]
    with contextlib.ExitStack() as stack:
        sender = bed.storage.start(
            [*words, SEND, STORAGE_ADDRESS], stdout=subprocess.PIPE
        )
        stack.callback(end, sender)
        port = sender.stdout.readline().decode().strip()
        receiver = bed.client.start([*words, RECEIVE, STORAGE_ADDRESS, port])
        stack.callback(end, receiver)
        yield
        assert receiver.wait(SECONDS) == 0
        assert sender.wait(SECONDS) == 0


def end(process):
    process.kill()
    process.wait(SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def test_the_link_carries_no_more_than_its_rate(bed):
    rate = 500_000.0
    bed.set_link(rate)
    started = time.monotonic()
    with transfer(bed):
        pass
    seconds = time.monotonic() - started
    # The burst passes at once; what follows does not.
    assert seconds >= 0.9 * PAYLOAD_BYTES / rate


def test_every_process_stays_on_the_core_of_its_tier(bed):
    found = bed.affinities()
    assert found
    assert all(cores == list(bed.storage.cores) for cores in found.values())
    process = bed.client.start(["sleep", "60"])
    try:
        until(lambda: os.sched_getaffinity(process.pid) == {*bed.client.cores})
    finally:
        end(process)
    assert not {*bed.storage.cores} & {*bed.client.cores}


@pytest.fixture
def holder(network, cores):
    """A process with a testbed of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=enable_interrupts,
    )
    yield process
    end(process)


def running_in(holder):
    assert select.select([holder.stdout], [], [], SECONDS)[0]
    folder, pid = holder.stdout.readline().decode().split()
    return Path(folder), Path("/proc") / pid


@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_when_the_process_is_ended(holder, signum):
    folder, namespace = running_in(holder)
    assert folder.exists()
    assert users_of(folder)
    holder.send_signal(signal.Signals[signum])
    holder.wait(SECONDS)
    until(lambda: not folder.exists())
    until(lambda: not users_of(folder))
    until(lambda: not namespace.exists())


def test_the_next_start_removes_what_a_killed_storage_tier_left(holder):
    folder, _ = running_in(holder)
    storage = users_of(folder)
    os.kill(holder.pid, signal.SIGSTOP)
    for pid in storage:
        # Some end with the one that started them.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert folder not in folders.remove_stale()
    holder.kill()
    holder.wait(SECONDS)
    assert folder in folders.remove_stale()
    assert not folder.exists()


def users_of(folder):
    """Processes with the folder in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(folder) in words:
            found.append(int(process.name))
    return found
