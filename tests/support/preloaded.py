"""Python that has imported torch and our packages, for children of tests.

The imports take seconds of CPU time in each process.  Here two servers have
them once, and fork for each program.  These differ from programs of a new
Python in what :mod:`preloaded_launcher`, which the test starts, does not
pass on: SIGSTOP, limits, and descriptors other than the standard streams.
It is not their parent, and they skip the teardown of the interpreter.
Tests of those, of imports and of processes use ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import preloaded_launcher as launcher

MODULES = (
    *("torchvision", "torch.distributed.run", "hapi_client.cli.main"),
    *("hapi_client.job.transfer_job", "hapi_training.loop"),
)


@functools.cache
def python(*modules: str) -> str:
    """Path of an executable in place of ``sys.executable``.

    Args:
        modules: modules that it has imported in addition.
    """
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    atexit.register(shutil.rmtree, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
    }
    fixed = launcher.read_once(environment)
    (folder / "environment").write_bytes(marshal.dumps(fixed))
    for number in range(launcher.NUM_SERVERS):
        kind = socket.SOCK_SEQPACKET
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(str(folder / str(number)))
            listener.listen(100)
            server = subprocess.Popen(
                # With -E, the path of Python's own is known apart.
                [sys.executable, "-E", __file__, *modules],
                stdin=listener.fileno(),
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        atexit.register(server.__exit__, None, None, None)
    path = folder / "python"
    code = Path(launcher.__file__).read_text()
    path.write_text(f"#!{sys.executable} -SEI\n{code}")
    path.chmod(0o700)
    return str(path)


def serve() -> Any:
    """Forks for each request, which it returns in the new process.

    The server ends with its user, when the pipe to it breaks, and a program
    with its launcher.
    """
    listener = socket.socket(fileno=os.dup(0))
    user = os.dup(1)
    programs: dict[int, tuple[int, socket.socket]] = {}
    gc.freeze()  # a collection in a child would copy the server's pages
    while True:
        connections = [connection for _, connection in programs.values()]
        ready = select.select(
            [listener, user, *programs, *connections], [], []
        )[0]
        for end, (child, connection) in [*programs.items()]:
            if connection in ready or user in ready:
                os.killpg(child, signal.SIGKILL)
            if end in ready or user in ready:
                status = os.waitpid(child, 0)[1]
                _send(connection, os.waitstatus_to_exitcode(status))
                connection.close()
                os.close(end)
                del programs[end]
        if user in ready:
            os._exit(0)
        if listener in ready:
            connection = listener.accept()[0]
            data, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
            _check_threads()
            child = os.fork()
            os.setpgid(child, child)
            if not child:
                break
            _send(connection, child)
            programs[os.pidfd_open(child)] = child, connection
            for stream in streams:
                os.close(stream)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (user, *programs, *streams):
        os.close(descriptor)
    for opened in (listener, connection, *connections):
        opened.close()
    return marshal.loads(data)


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # killed meanwhile
        connection.send(str(number).encode())


def _check_threads() -> None:
    """That of jemalloc, which pyarrow contains, is prepared for forks."""
    tasks = Path("/proc/self/task").glob("*/comm")
    names = [path.read_text().strip() for path in tasks]
    others = [name for name in names if name != "jemalloc_bg_thd"]
    assert len(others) == 1, f"a fork would lose threads: {others}"


def begin(
    executable: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
    umask: int,
    own_path: list[str],
) -> None:
    """Runs a program as a new Python with these arguments does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(umask)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()
    if arguments[0] == "-u" or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind, *rest = arguments[arguments[0] == "-u" :]
    sys.executable = executable
    sys.path[:] = [*python_path(), *own_path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-m":
        sys.path.insert(0, folder)
        sys.argv = rest
        sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def python_path() -> list[str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*filter(None, given)]


def main() -> None:
    own_path = sys.path[1:]
    sys.path[:1] = python_path()
    for name in (*MODULES, *sys.argv[1:]):
        importlib.import_module(name)
    status: Any = None
    try:
        begin(*serve(), own_path)
    except SystemExit as ended:
        status = ended.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
