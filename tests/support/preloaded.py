"""Python that has imported torch and our packages, for children of tests.

Two servers import them once, which takes seconds of CPU time, and fork for
each program.  What :mod:`preloaded_launcher`, which the test starts, does not
pass on is SIGSTOP, limits, affinity, and descriptors other than the standard
streams.  It is not the program's parent, and the interpreter has no teardown.
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
        watched = [listener, user, *programs, *connections]
        ready = select.select(watched, [], [])[0]
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
    """Fails if a fork would lose threads; that of pyarrow starts again."""
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
        sys.stdout.reconfigure(line_buffering=True)
    kind, *rest = arguments[arguments[0] == "-u" :]
    sys.executable = executable
    script_folder = os.path.dirname(os.path.realpath(kind))
    first = {"-m": folder, "-c": ""}.get(kind, script_folder)
    sys.path[:] = [first, *_python_path(), *own_path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = rest if kind == "-m" else [kind, *rest[kind == "-c" :]]
    if kind == "-m":
        sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        exec(rest[0], main.__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")


def _python_path() -> list[str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*filter(None, given)]


def main() -> None:
    own_path = sys.path[1:]
    sys.path[:1] = _python_path()
    for name in (*MODULES, *sys.argv[1:]):
        importlib.import_module(name)
    status = 0
    try:
        begin(*serve(), own_path)
    except SystemExit as ended:
        is_number = isinstance(ended.code or 0, int)
        status = (ended.code or 0) if is_number else 1
        if not is_number:
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
