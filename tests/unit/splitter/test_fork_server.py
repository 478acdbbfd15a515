"""Validations in forks of a server, and the ends of either."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from children import family
from hapi_protocol.errors import PackageError, UnavailableError
from hapi_splitter import fork_server
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.package.subprocess_validation import (
    ProcessLimits,
    validate_package,
)
from hostile import attacks, valid_package
from paused_validation import SECONDS, paused_validations, servers
from waiting import until

NUM_VALIDATIONS = 50
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGXCPU)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, ForkServer() as server:
        # Without it, libraries start a thread for each core.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        server.begin()
        yield server


@pytest.fixture(scope="module")
def pausing(tmp_path_factory):
    with paused_validations(tmp_path_factory.mktemp("paused")) as paused:
        yield paused


@pytest.fixture
def paused(pausing):
    pausing.pause()
    return pausing


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def validate(server, **options):
    return validate_package(valid_package(), server=server, **options).digest


@pytest.mark.parametrize(
    ("build", "reason"), attacks().values(), ids=attacks()
)
def test_hostile_package_is_refused_by_name_and_leaves_no_trace(
    build, reason, tmp_path, server
):
    data = build(tmp_path / "trace")
    with pytest.raises(PackageError, match=reason):
        validate_package(data, server=server)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ProcessLimits(wall_seconds=0.001), r"took over 0\.001 s"),
        (ProcessLimits(cpu_seconds=0), "status -24: "),
        (ProcessLimits(memory_bytes=0), "status|does not run"),
    ],
    ids=["wall", "cpu", "memory"],
)
def test_limit_of_one_validation_is_a_refusal_and_spares_the_server(
    limits, reason, server
):
    digest = validate(server)
    [before] = servers(os.getpid())
    with pytest.raises(PackageError, match=reason):
        validate(server, process_limits=limits)
    assert validate(server) == digest
    assert servers(os.getpid()) == [before]


def test_server_has_one_thread_and_no_descriptor_of_its_user(server):
    readable, writable = os.pipe()
    with os.fdopen(readable), os.fdopen(writable):
        os.set_inheritable(readable, True)
        pipe = os.readlink(f"/proc/self/fd/{readable}")
        with ForkServer() as another:
            validate(another)
            pids = [each.pid for each in servers(os.getpid())]
            assert len(pids) == 2
            for pid in pids:
                process = Path(f"/proc/{pid}")
                assert len(list((process / "task").iterdir())) == 1
                files = [p.readlink() for p in (process / "fd").iterdir()]
                assert Path(pipe) not in files


def test_validations_leave_no_descriptor_and_no_process(server):
    def footprint():
        [found] = servers(os.getpid())
        pids = (os.getpid(), found.pid)
        fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        return found, fds

    validate(server)
    before = footprint()
    for number in range(NUM_VALIDATIONS):
        with pytest.raises(PackageError):
            validate_package(b"junk" * number, server=server)
    assert footprint() == before


def test_two_validations_run_at_the_same_time(paused, pool):
    results = [pool.submit(validate, paused.server) for _ in range(2)]
    until(lambda: len(paused.children()) == 2, SECONDS)
    paused.release()
    assert len({result.result() for result in results}) == 1


def test_killed_server_is_replaced_before_the_next_validation(paused):
    paused.release()
    digest = validate(paused.server)
    [before] = servers(os.getpid(), "paused_validation")
    before.send(signal.SIGKILL)
    assert validate(paused.server) == digest
    assert servers(os.getpid(), "paused_validation") != [before]


def test_server_killed_during_two_validations_costs_one_try(paused, pool):
    results = [pool.submit(validate, paused.server) for _ in range(2)]
    until(lambda: len(paused.children()) == 2, SECONDS)
    before, *children = servers(os.getpid(), "paused_validation")
    before.send(signal.SIGKILL)
    for child in children:
        child.wait(SECONDS)
    paused.release()
    assert len({result.result() for result in results}) == 1


def test_validation_that_was_killed_is_tried_again(paused, pool):
    result = pool.submit(validate, paused.server)
    paused.child().send(signal.SIGKILL)
    paused.release()
    assert result.result() == validate(paused.server)


def test_validation_that_was_killed_twice_may_be_tried_later(paused, pool):
    result = pool.submit(validate, paused.server)
    for _ in range(2):
        child = paused.child()
        child.send(signal.SIGKILL)
        child.wait(SECONDS)
    with pytest.raises(UnavailableError, match="was killed") as raised:
        result.result()
    assert (raised.value.status, raised.value.retry_after) == (503, 5.0)


def test_validation_that_hangs_may_be_tried_later(paused, pool, monkeypatch):
    paused.release()
    digest = validate(paused.server)
    paused.pause()
    monkeypatch.setattr(fork_server, "HANG_SECONDS", 1.0)
    result = pool.submit(validate, paused.server)
    for _ in range(2):
        child = paused.child()
        child.send(signal.SIGSTOP)
        child.wait(SECONDS)
    with pytest.raises(UnavailableError, match="used no CPU time for 1 s"):
        result.result()
    paused.release()
    assert validate(paused.server) == digest


@pytest.mark.parametrize("number", CRASHES, ids=lambda number: number.name)
def test_crash_is_a_refusal(paused, pool, number):
    result = pool.submit(validate, paused.server)
    paused.child().send(number)
    with pytest.raises(PackageError, match=f"with status -{number:d}: "):
        result.result()


def test_server_that_was_ended_does_not_start_again():
    before = servers(os.getpid())
    server = ForkServer()
    server.end()
    with pytest.raises(UnavailableError, match="has been ended"):
        validate(server)
    assert servers(os.getpid()) == before


def test_end_does_not_wait_for_a_child_that_was_stopped_at_its_start(pool):
    def is_stopped():
        children = servers(os.getpid(), "stopped_child")[1:]
        stats = [Path(f"/proc/{each.pid}/stat") for each in children]
        states = [stat.read_text().rpartition(")")[2] for stat in stats]
        return [state.split()[0] for state in states] == ["T"]

    server = ForkServer("stopped_child")
    result = pool.submit(validate, server)
    until(is_stopped, SECONDS)
    server.end()
    with pytest.raises(UnavailableError, match="has been ended"):
        result.result()


def test_first_load_after_warming_up_imports_nothing():
    code = (
        "import sys\n"
        "from hapi_splitter.graph.shapes import warm_up\n"
        "from hapi_splitter.package.reader import load_package\n"
        "warm_up()\n"
        "before = set(sys.modules)\n"
        "load_package(sys.stdin.buffer.read()).to('cpu', fast=True)\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        input=valid_package(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )


def test_server_imports_nothing_from_the_working_directory(
    tmp_path, monkeypatch
):
    code = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"
    for module in ("queue", "random", "torch", "hapi_splitter", "runpy"):
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with ForkServer() as server:
        validate(server)
    assert not list(tmp_path.glob("*.ran"))


def test_server_that_cannot_start_is_named():
    with (
        ForkServer("no_such_module") as server,
        pytest.raises(UnavailableError, match="No module named no_such_modu"),
    ):
        validate(server)


def test_server_and_children_end_with_a_killed_user(paused):
    code = (
        "from test_fork_server import ForkServer, validate\n"
        "validate(ForkServer('paused_validation'))"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    user = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        until(lambda: len(family(user.pid)) == 3, SECONDS)
        processes = family(user.pid)
    finally:
        user.kill()
        user.wait()
    for process in processes:
        process.wait(SECONDS)
