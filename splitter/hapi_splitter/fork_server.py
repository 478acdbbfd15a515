"""A process that forks a child for each file from a stranger.

Packages are validated in such children, and large images decoded: a crash, an
endless loop or too much memory costs the child alone.

An interpreter with torch takes seconds to start.  The server starts once,
imports everything, and forks.  It is a new interpreter itself, with one
thread and no device: a process with threads, such as its user, must not fork.

A request consists of JSON and two descriptors: the file, and a socket for the
output of the child.  Its first line is the child's process id;
the server adds a line with the child's exit status there.  The server ends
with its user, at the end of file on its standard input, and its children end
with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

Request = dict[str, Any]
Work = Callable[[int, Request], Mapping[str, Any]]

START_SECONDS = 120.0
"""Longest start of a server, on a busy host."""
HANG_SECONDS = 20.0
"""Time without any CPU time after which a child hangs: a stopped process, or
a disk that does not answer."""
MAX_REQUEST_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 4 << 20
"""Limit of a child's output; only its end is read."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "KINETO_LOG_LEVEL": "5",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Hides GPUs and the messages of torch's profiler; no threads at import."""
_PR_SET_PDEATHSIG = 1
_INPUT, _OUTPUT, _ERRORS = range(3)


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> str:
        """Kills it, and returns its status and its last message.

        Its children are in its process group, and may be stopped.
        """
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        errors = self.process.communicate()[1]
        self.control.close()
        return f"status {self.process.returncode}: {last_line(errors)}"


class ForkServer:
    """Starts and uses a server; a context manager that ends it.

    Threads may share it, and their children run at the same time.  A server
    that was killed is started again.

    Args:
        module: the module that the server runs; it calls :func:`serve`.
    """

    def __init__(
        self, module: str = "hapi_splitter.package.subprocess_validation"
    ) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Starts the server and returns at once.

        Raises:
            OSError: the process cannot be started.
        """
        with self._lock:
            self._start()

    def end(self) -> None:
        """Kills the server and its children; requests fail from now on."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.end()
            self._running = None

    def run(
        self, file: int, request: Request, seconds: float
    ) -> tuple[bytes, int]:
        """Runs a child and returns its output and its exit status.

        Args:
            file: descriptor of the file, which the child may write to.
            request: argument of the child, a JSON object.
            seconds: after which the kernel ends the child (SIGALRM).

        Returns:
            The end of the output, and the status as that of
            :class:`subprocess.Popen`.

        Raises:
            OSError: the server ended or does not answer, the child hangs,
                or a process cannot be started.
        """
        message = json.dumps({"seconds": seconds, "request": request})
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                running = self._start()
                fds = [file, theirs.fileno()]
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(running.control, [message.encode()], fds)
            try:
                output = _read(ours, seconds + START_SECONDS)
            except TimeoutError:
                self._replace(running)
                raise
        output, _, last = output.rpartition(b"\n")
        end = _parse_end(last)
        if end is None:
            raise ConnectionError(self._replace(running))
        if "error" in end:
            raise OSError(end["error"])
        return output, int(end["status"])

    def _start(self) -> _Running:
        """Returns the running server; called with the lock held."""
        if self._is_closed:
            raise ConnectionError("the server of processes has been ended")
        if self._running is not None:
            if self._running.process.poll() is None:
                return self._running
            self._running.end()
            self._running = None
        # Python looks for modules in the working directory first, which may
        # be anyone's.  -P is newer than our oldest Python; -I drops the path.
        paths = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as on_error:
            on_error.enter_context(ours).settimeout(START_SECONDS)
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={**os.environ, "PYTHONPATH": paths, **_ENVIRONMENT},
                # A terminal's interrupt is for the user of the server.
                start_new_session=True,
            )
            on_error.pop_all()
        self._running = _Running(process, ours)
        return self._running

    def _replace(self, running: _Running) -> str:
        """Ends a server that fails, and says how it ended."""
        how = ""
        with self._lock:
            if self._running is running:
                self._running = None
                how = f" with {running.end()}"
        return f"the server of processes ended{how}"


def parse_answer(output: bytes) -> dict[str, Any] | None:
    """Returns the object that a child has written; None if it has not."""
    line = output.rstrip(b"\n").rpartition(b"\n")[2]
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    return None


def limit_memory(num_bytes: int) -> None:
    """Limits the address space of a child beyond what it has already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def last_line(output: bytes) -> str:
    """Returns the last line, or its end."""
    return output[-300:].decode("utf-8", "replace").strip().split("\n")[-1]


def _read(ours: socket.socket, seconds: float) -> bytes:
    """Reads to the end of file, and returns what follows the first line.

    Raises:
        TimeoutError: it is not reached within ``seconds``, or the child
            hangs.
    """
    output = bytearray()
    child: _Child | None = None
    started = time.monotonic()
    while time.monotonic() < started + (seconds if child else START_SECONDS):
        ours.settimeout(HANG_SECONDS / 4)
        try:
            piece = ours.recv(1 << 16)
        except TimeoutError:
            if child is not None:
                child.check_progress()
            continue
        if not piece:
            return bytes(output)
        if child is None:
            line, _, piece = piece.partition(b"\n")
            child = _Child(line.decode())
        output += piece
        del output[:-MAX_OUTPUT_BYTES]
    raise TimeoutError("the server of processes does not answer")


class _Child:
    """Progress of a child, by its CPU time."""

    def __init__(self, pid: str) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._ticks: list[str] | None = None
        self._since = time.monotonic()

    def check_progress(self) -> None:
        """
        Raises:
            TimeoutError: it has not run for too long.
        """
        ticks = []
        with contextlib.suppress(OSError):
            # utime and stime (proc(5)); the name may contain anything.
            ticks = self._stat.read_text().rpartition(")")[2].split()[11:13]
        now = time.monotonic()
        if ticks != self._ticks:
            self._ticks, self._since = ticks, now
        elif now - self._since > HANG_SECONDS:
            raise TimeoutError(
                f"its process used no CPU time for {HANG_SECONDS:g} s"
            )


def _parse_end(line: bytes) -> dict[str, Any] | None:
    end = parse_answer(line)
    return end if end and end.keys() & {"status", "error"} else None


def serve(work: Work) -> NoReturn:
    """Forks a child for each request; exits when the user has ended.

    Args:
        work: called in a child with the descriptor of the file and the
            request; its result is written as JSON.
    """
    server = _Server(work)
    gc.freeze()  # a collection in a child would copy the server's pages
    while server.handle():
        pass
    os._exit(0)


class _Server:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._pid = os.getpid()
        self._libc = ctypes.CDLL(None)
        self._control = socket.socket(fileno=os.dup(_INPUT))
        self._readable, self._writable = socket.socketpair()
        self._writable.setblocking(False)
        signal.set_wakeup_fd(
            self._writable.fileno(), warn_on_full_buffer=False
        )
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._outputs: dict[int, socket.socket] = {}
        """By process id of the child."""

    def handle(self) -> bool:
        """Waits for a request or an exiting child.

        Returns False if the client process has exited.
        """
        ready = select.select([self._control, self._readable], [], [])[0]
        if self._readable in ready:
            self._readable.recv(1 << 16)
            self._reap()
        if self._control not in ready:
            return True
        message, fds, *_ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 2)
        if message:
            self._fork(json.loads(message), *fds)
        return bool(message)

    def _fork(self, message: Request, file: int, number: int) -> None:
        output = socket.socket(fileno=number)
        try:
            pid = os.fork()
        except OSError as error:
            _finish(output, {"error": f"cannot start a process: {error}"})
        else:
            if pid == 0:
                self._run_child(message, file, output)
            self._outputs[pid] = output
        os.close(file)

    def _run_child(
        self, message: Request, file: int, output: socket.socket
    ) -> NoReturn:
        status = 1
        try:
            self._detach(output)
            os.write(_OUTPUT, b"%d\n" % os.getpid())
            signal.setitimer(signal.ITIMER_REAL, message["seconds"])
            answer = self._work(file, message["request"])
            sys.stdout.write("\n" + json.dumps(answer))
            sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _detach(self, output: socket.socket) -> None:
        """Leaves the child what it needs, and ends it with the server."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(os.open(os.devnull, os.O_RDONLY), _INPUT)
        os.dup2(output.fileno(), _OUTPUT)
        os.dup2(output.fileno(), _ERRORS)
        for descriptor in (self._control, self._readable, self._writable):
            descriptor.close()
        for other in self._outputs.values():
            other.close()

    def _reap(self) -> None:
        while self._outputs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            end = {"status": os.waitstatus_to_exitcode(status)}
            _finish(self._outputs.pop(pid), end)


def _finish(output: socket.socket, end: dict[str, Any]) -> None:
    """Sends the last line; the user may have ended."""
    with output, contextlib.suppress(OSError):
        output.sendall(b"\n" + json.dumps(end).encode())
