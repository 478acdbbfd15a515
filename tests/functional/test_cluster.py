"""The embedded cluster: a life from start to stop, and what may go wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from caller import Caller
from children import enable_interrupts, family
from hapi_cluster import LAYOUTS, Cluster
from hapi_cluster.errors import (
    AlreadyRunningError,
    DirectoryError,
    NotAClusterError,
    NotRunningError,
    PortBusyError,
    ServerEndedError,
    SettingsError,
    SocketPathError,
    StartError,
    SwiftMissingError,
    XattrError,
)
from waiting import until

pytest.importorskip("swift", reason="needs swift-hapi[cluster]")

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
BARE: dict[str, Any] = {"worker": False, "hapi_filter": False}
WATCHED: dict[str, Any] = {"hapi_filter": False, "worker_command": FAKE_WORKER}
DEADLINE_SECONDS = 300.0


@pytest.fixture
def directory(tmp_path_factory):
    """A new directory, in memory if possible; nothing runs in it after."""
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else tmp_path_factory.mktemp("d")
    path = parent / f"hapi-test-{os.getpid()}-{time.monotonic_ns()}"
    yield path
    if (path / "cluster.json").exists():
        Cluster(path).stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def bare():
    """One process of plain Swift, for tests that do not stop it."""
    with Cluster.temporary(**BARE) as running:
        yield running


def start(directory, **settings):
    return Cluster.start(
        directory, die_with_parent=True, **{**BARE, **settings}
    )


def request(
    cluster, method, path, body=None, user="test:tester", headers=None
):
    """A request in the account of the user; status and body."""
    account = f"AUTH_{user.partition(':')[0]}"
    caller = Caller(cluster, user)
    answer = caller.request(method, f"/{account}{path}", headers, body)
    caller.close()
    return answer.status_code, answer.content


def all_end(processes):
    until(lambda: not any(p.alive() for p in processes))


def listens(cluster):
    """The cluster's ports that still accept connections."""
    found = []
    for port in cluster.status()["ports"].values():
        with contextlib.suppress(ConnectionRefusedError):
            # A socket that is closed while we connect resets the connection.
            with contextlib.suppress(ConnectionResetError):
                socket.create_connection(("127.0.0.1", port), 1).close()
            found.append(port)
    return found


def hapi_cluster_command(*words):
    code = "from hapi_client.cli.cluster import app; app()"
    return [sys.executable, "-c", code, *map(str, words)]


def cli(*words):
    return subprocess.run(
        hapi_cluster_command(*words),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("processes", [False, True])
def test_data_is_served_again_after_stop_and_start(directory, processes):
    data = os.urandom(200_000)
    with start(directory, processes=processes) as cluster:
        url = cluster.proxy_url
        assert request(cluster, "PUT", "/c")[0] == 201
        assert request(cluster, "PUT", "/c/o", data)[0] == 201
        names = set(cluster.status()["children"])
    assert names == (
        {"account", "container", "object", "proxy"} if processes else {"swift"}
    )
    with start(directory) as cluster:
        assert cluster.proxy_url == url
        assert request(cluster, "GET", "/c/o") == (200, data)
        assert request(cluster, "GET", "/c") == (200, b"o\n")


def test_backends_get_new_ports_when_theirs_were_taken(directory):
    with start(directory) as cluster:
        request(cluster, "PUT", "/c")
        request(cluster, "PUT", "/c/o", b"data")
        port = cluster.status()["ports"]["object"]
    with socket.create_server(("127.0.0.1", port)), start(directory) as again:
        assert again.status()["ports"]["object"] != port
        assert request(again, "GET", "/c/o") == (200, b"data")


def test_each_policy_of_a_layout_keeps_its_objects(directory):
    policies = [policy["name"] for policy in LAYOUTS["mixed"].policies]
    with start(directory, layout="mixed") as cluster:
        for name in policies:
            made = request(
                cluster, "PUT", f"/{name}", headers={"X-Storage-Policy": name}
            )
            assert made[0] == 201
            data = name.encode() * 1000
            assert request(cluster, "PUT", f"/{name}/o", data)[0] == 201
            assert request(cluster, "GET", f"/{name}/o") == (200, data)
    # Fragments of 4 + 2, copies, fragments of 2 + 1.
    numbers = {"objects": 6, "objects-1": 3, "objects-2": 3}
    for folder, num_files in numbers.items():
        found = list(directory.glob(f"srv/*/{folder}/*/*/*/*.data"))
        assert len(found) == num_files, folder
    with pytest.raises(SettingsError, match="layout is 'mixed'"):
        start(directory, layout="single")


def test_encryption_keeps_plaintext_off_the_disk(directory):
    data = b"a very well known text" * 100
    with start(directory, encryption=True) as cluster:
        request(cluster, "PUT", "/c")
        assert request(cluster, "PUT", "/c/o", data)[0] == 201
        assert request(cluster, "GET", "/c/o") == (200, data)
    (stored,) = directory.glob("srv/*/objects/**/*.data")
    assert stored.stat().st_size == len(data)
    assert b"well known" not in stored.read_bytes()


def test_users_have_the_rights_of_swifts_functional_tests(bare):
    for user in ("test:tester", "test2:tester2", "admin:admin"):
        # 204 and not 200: the account exists before its first use.
        assert request(bare, "HEAD", "", user=user)[0] == 204, user
    assert request(bare, "PUT", "/c", user="test:tester3")[0] == 403


def etc():
    return {
        str(path): path.lstat().st_mtime_ns for path in Path("/etc").rglob("*")
    }


def test_nothing_is_left_after_stop_nor_written_in_etc(directory):
    before = etc()
    options = {"lone_child": "yes"}
    cluster = start(directory, **WATCHED, worker=True, worker_options=options)
    processes = family(cluster.supervisor_pid)
    assert cluster.worker_socket.exists()
    # The policies come from the directory's swift.conf.
    with urllib.request.urlopen(f"{cluster.proxy_url}/info") as answer:
        swift = json.load(answer)["swift"]
    assert [p["name"] for p in swift["policies"]] == ["single"]
    # supervisor, swift, worker and the child that the worker abandons
    assert len(processes) >= 4
    assert cluster.stop()
    assert "ended with its socket" in cluster.log("worker").read_text()
    assert [p for p in processes if p.alive()] == []
    assert listens(cluster) == []
    assert not (directory / "run").exists()
    assert cluster.stop() is False
    assert etc() == before


def test_secrets_are_readable_by_their_owner_only(bare):
    for name in ("secrets.json", "proxy-server.conf", "swift.conf"):
        mode = (bare.directory / "etc" / name).stat().st_mode
        assert mode & 0o777 == 0o600, name
    assert (bare.directory / "srv").stat().st_mode & 0o077 == 0


def test_a_killed_supervisor_leaves_nothing_and_can_be_replaced(directory):
    cluster = start(directory, **WATCHED, worker=True)
    request(cluster, "PUT", "/c")
    request(cluster, "PUT", "/c/o", b"data")
    processes = family(cluster.supervisor_pid)
    os.kill(cluster.supervisor_pid, signal.SIGKILL)
    all_end(processes)
    assert cluster.status()["status"] == "died"
    # Threads of a killed process may hold its sockets for a moment.
    until(lambda: listens(cluster) == [])
    # The stale socket is no obstacle.
    assert (directory / "run" / "worker.sock").exists()
    with start(directory, **WATCHED, worker=True) as again:
        assert request(again, "GET", "/c/o") == (200, b"data")


def test_the_cluster_ends_with_its_parent_however_that_ends(directory):
    code = (
        "import os, signal, sys, threading\n"
        "from hapi_cluster import Cluster\n"
        "def start():\n"
        "    cluster = Cluster.start(sys.argv[1], worker=False,\n"
        "        hapi_filter=False, die_with_parent=True)\n"
        "    print(cluster.supervisor_pid, flush=True)\n"
        # From a thread that ends at once: only the process counts.
        "thread = threading.Thread(target=start)\n"
        "thread.start(); thread.join(); sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        processes = family(pid)
        time.sleep(0.3)
        assert all(p.alive() for p in processes)
        parent.stdin.write("\n")
        parent.stdin.close()
        assert parent.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    all_end(processes)


def test_a_temporary_cluster_removes_its_directory():
    with Cluster.temporary(**BARE) as cluster:
        directory = cluster.directory
        assert directory.is_dir()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("victim", "number", "said"),
    [
        ("swift", signal.SIGKILL, "was killed by SIGKILL"),
        ("worker", signal.SIGTERM, "ended with exit status 0"),
    ],
)
def test_a_server_that_ends_is_named_and_ends_the_cluster(
    directory, victim, number, said
):
    with (  # noqa: PT012
        pytest.raises(ServerEndedError, match=said) as info,
        start(directory, **WATCHED, worker=True) as cluster,
    ):
        processes = family(cluster.supervisor_pid)
        os.kill(cluster.status()["children"][victim]["pid"], number)
        all_end(processes)
    assert info.value.message.startswith(f"{victim} (pid ")
    # The end of its log.
    lines = cluster.log(victim).read_text().splitlines()
    assert lines[-1] in info.value.message
    state = cluster.status()
    assert (state["status"], state["error"]) == ("died", str(info.value))
    assert listens(cluster) == []
    assert said in cli("status", directory).stderr
    with start(directory) as again:
        assert "error" not in again.status()


def test_a_second_start_is_refused_and_does_no_harm(bare):
    directory = bare.directory
    with pytest.raises(AlreadyRunningError, match="hapi cluster stop"):
        start(directory)
    assert request(bare, "PUT", "/second")[0] == 201


def test_a_busy_port_is_named(directory):
    # The second one could be shared with other listeners.
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(PortBusyError, match=str(port)):
                start(directory, port=port)
    with start(directory, port=port) as cluster:
        assert cluster.proxy_url == f"http://127.0.0.1:{port}"


def test_a_foreign_directory_is_left_alone(directory):
    directory.mkdir()
    (directory / "thesis.txt").write_text("dear")
    with pytest.raises(NotAClusterError, match=r"thesis\.txt"):
        start(directory)
    with pytest.raises(NotAClusterError):
        Cluster(directory).stop()
    assert os.listdir(directory) == ["thesis.txt"]


def test_a_directory_that_cannot_be_made_is_named(directory):
    with pytest.raises(DirectoryError, match="/proc/hapi"):
        start(Path("/proc/hapi"))
    directory.mkdir()
    (directory / "file").touch()
    with pytest.raises(DirectoryError, match="file"):
        start(directory / "file")


def test_missing_xattrs_are_explained(directory, monkeypatch):
    """A file system like NFS or ramfs; the next test has a real ramfs."""

    def refuse(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(XattrError, match="XFS"):
        start(directory)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("ramfs", "extended attributes"), ("tmpfs -o ro", "cannot use")],
)
def test_unfit_file_systems_are_refused(directory, kind, said):
    """In a mount namespace of its own, which vanishes with the process."""
    directory.mkdir()
    mount = f"mount -t {kind} none {directory}"
    unshare = ["unshare", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or (
        subprocess.run([*unshare, mount], capture_output=True).returncode
    ):
        pytest.skip("may not mount in a namespace of its own")
    command = hapi_cluster_command("start", directory, "--no-worker")
    done = subprocess.run(
        [*unshare, f'{mount} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Choose a directory" in done.stderr


def test_small_xattrs_are_a_warning(directory, monkeypatch):
    from hapi_cluster.preflight import check_xattrs

    directory.mkdir()
    setxattr = os.setxattr

    def like_ext4(path, name, value):
        if len(value) > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        setxattr(path, name, value)

    assert check_xattrs(directory) == [] or "/dev/shm" not in str(directory)
    monkeypatch.setattr(os, "setxattr", like_ext4)
    (warning,) = check_xattrs(directory)
    assert "ext4" in warning


def test_a_long_path_puts_the_socket_elsewhere(directory):
    deep = directory / ("d" * 100)
    with start(deep, **WATCHED, worker=True) as cluster:
        path = cluster.worker_socket
        assert path is not None
        assert directory not in path.parents
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()


def test_no_short_path_at_all_is_an_error(directory, monkeypatch):
    deep = directory / ("d" * 100)
    (directory / ("t" * 100)).mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(directory / ("t" * 100)))
    with pytest.raises(SocketPathError, match="TMPDIR"):
        start(deep, **WATCHED, worker=True)
    assert list((directory / ("t" * 100)).iterdir()) == []


def test_a_worker_that_cannot_start_shows_its_log(directory):
    options = {"fail": "on purpose"}
    with pytest.raises(ServerEndedError, match="fail = on purpose") as info:
        start(directory, **WATCHED, worker=True, worker_options=options)
    assert "worker.log" in info.value.message
    assert "exit status 1" in info.value.message
    assert Cluster(directory).status()["status"] == "died"
    assert listens(Cluster(directory)) == []
    # Nor does the next failure tell of this one.
    settings = {**WATCHED, "worker_options": {"fail": "once more"}}
    with pytest.raises(ServerEndedError, match="fail = once") as info:
        start(directory, **settings, worker=True)
    assert "on purpose" not in info.value.message
    with start(directory):
        pass


def test_a_worker_that_never_answers_meets_the_deadline(directory):
    silent = (sys.executable, "-c", "import time; time.sleep(600)")
    # Enough for Swift itself to start on a busy machine.
    settings = {**WATCHED, "worker_command": silent, "start_seconds": 12.0}
    begin = time.monotonic()
    with pytest.raises(StartError, match="worker did not answer within 12 s"):
        start(directory, **settings, worker=True)
    assert time.monotonic() - begin < DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layout": "raid"}, "raid"),
        ({"port": 70000}, "70000"),
        ({"start_seconds": 0}, "start_seconds"),
        ({"worker_options": {"a b": "1"}}, "a b"),
        ({"filter_options": {"a": "1\n[x]"}}, "filter_options"),
        ({"swift_options": {"x.conf": {}}}, "x.conf"),
        ({"swift_options": {"swift.conf": {"a]": {}}}}, "a]"),
        ({"swift_options": {"swift.conf": {"a": {"b c": "1"}}}}, "b c"),
        ({"swift_options": {"swift.conf": {"a": {"k=": "1"}}}}, "k="),
    ],
)
def test_a_bad_setting_is_named(directory, settings, said):
    with pytest.raises(SettingsError, match=said):
        start(directory, **settings)
    assert not directory.exists()


def test_missing_swift_names_the_extra(directory, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SwiftMissingError, match=r"swift-hapi\[cluster\]"):
        start(directory)


def test_attach_needs_a_running_cluster(directory, bare):
    with pytest.raises(NotRunningError, match="hapi cluster start"):
        Cluster.attach(directory)
    other = Cluster.attach(bare.directory)
    assert other.auth_url == bare.auth_url
    assert other.worker_socket is None


def test_the_commands_work_together_with_the_swift_client(directory, tmp_path):
    begun = cli("start", directory, "--no-worker", "--no-hapi")
    assert begun.returncode == 0, begun.stderr
    again = cli("start", directory, "--no-worker", "--no-hapi")
    assert again.returncode == 1
    assert "running already" in again.stderr

    (tmp_path / "o").write_bytes(b"data")
    exports = cli("env", directory).stdout
    swift = Path(sys.executable).with_name("swift")
    script = f'eval "$1"; {swift} upload c o && {swift} download c o -o -'
    done = subprocess.run(
        ["sh", "-c", script, "sh", exports],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "o\ndata", done.stderr

    shown = cli("status", directory, "--json", tmp_path / "status.json")
    assert shown.returncode == 0
    state = json.loads((tmp_path / "status.json").read_text())
    assert state["status"] == "running"
    assert state["auth_url"] in exports

    assert cli("stop", directory).stdout == "Stopped.\n"
    assert cli("stop", directory).stdout == "The cluster was not running.\n"
    stopped = cli("status", directory)
    assert stopped.returncode == 1
    assert "stopped" in stopped.stdout


def test_restart_has_the_options_of_the_last_start(directory):
    def started(*words):
        done = cli("start", directory, *words)
        assert done.returncode == 0, done.stderr
        try:
            state = json.loads(cli("status", directory, "--json", "-").stdout)
            url = f"{state['proxy_url']}/info"
            with urllib.request.urlopen(url) as answer:
                return state, json.load(answer)["hapi"]
        finally:
            cli("stop", directory)

    option = "max_multi_objects=7"
    for words in (("--no-worker", "--filter-option", option), ()):
        state, info = started(*words)
        assert state["worker"] is False
        assert state["filter_options"]["max_multi_objects"] == "7"
        assert info["cache"] is True
    started("--no-cache", "--filter-option", "max_multi_objects=")
    state, info = started()
    assert info["cache"] is False
    assert state["filter_options"] == {"cache": "false"}


def test_commands_on_a_directory_that_never_was(directory):
    shown = cli("status", directory)
    assert (shown.returncode, "absent" in shown.stdout) == (1, True)
    exports = cli("env", directory)
    # Nothing that eval would run.
    assert (exports.returncode, exports.stdout) == (1, "")
    assert "hapi cluster start" in exports.stderr
    ended = cli("stop", directory)
    assert ended.returncode == 1
    assert "holds no cluster" in ended.stderr
    assert not directory.exists()


@pytest.fixture
def foreground(directory):
    """``hapi cluster run``, with a reader of its output."""
    with subprocess.Popen(
        hapi_cluster_command("run", directory, "--no-worker"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_interrupts,
    ) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(2)]
        assert Cluster(directory).proxy_url in shown[0]
        assert "hapi cluster env" in shown[1]
        yield process
        process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
)
def test_a_cluster_in_the_foreground_ends_by_a_signal(
    directory, foreground, number
):
    cluster = Cluster.attach(directory)
    assert cluster.supervisor_pid == foreground.pid
    assert "running already" in cli("start", directory).stderr
    processes = family(foreground.pid)
    assert len(processes) == 2
    foreground.send_signal(number)
    killed = number == signal.SIGKILL
    assert foreground.wait(DEADLINE_SECONDS) == (-number if killed else 0)
    all_end(processes)
    assert cluster.status()["status"] == ("died" if killed else "stopped")


def test_a_cluster_in_the_foreground_ends_with_a_server(directory, foreground):
    child = Cluster(directory).status()["children"]["swift"]
    os.kill(child["pid"], signal.SIGKILL)
    _, errors = foreground.communicate(timeout=DEADLINE_SECONDS)
    assert foreground.returncode == 1
    assert f"Error: swift (pid {child['pid']}) was killed by SIG" in errors
    assert f"Read {child['log']}, then start again." in errors


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, "stopped"), (signal.SIGKILL, "died")],
)
def test_an_interrupted_start_leaves_nothing(directory, number, status):
    command = hapi_cluster_command("start", directory, "--no-worker")
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=enable_interrupts,
    ) as starting:
        until((directory / "cluster.json").exists)
        processes = family(Cluster(directory).supervisor_pid)
        starting.send_signal(number)
        assert starting.wait(DEADLINE_SECONDS) != 0
    all_end(processes)
    assert Cluster(directory).status()["status"] == status
