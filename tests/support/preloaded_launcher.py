"""Stands in for ``python``, and has a server of :mod:`preloaded` run it.

A copy is executed, next to the servers' sockets.  It passes on its standard
streams, signals that end or wake processes, and the status.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType

NUM_SERVERS = 2
"""Each has another order of sets, as two interpreters have."""
FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that Python and libraries read when they start."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("ATEN_", "MKL_", "OMP_", "PYTHON"))
        and name not in ("PYTHONPATH", "PYTHONUNBUFFERED")
    }


def main(executable: str, *arguments: str) -> None:
    folder = os.path.dirname(executable)
    with open(f"{folder}/environment", "rb") as file:
        is_same = marshal.load(file) == read_once(os.environ)
    first = next((word for word in arguments if word != "-u"), "-")
    if not is_same or (first[0] == "-" and first not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = int(os.environ.get("RANK", os.getpid()))
    server.connect(f"{folder}/{rank % NUM_SERVERS}")
    umask = os.umask(0)
    request = executable, arguments, {**os.environ}, os.getcwd(), umask
    socket.send_fds(server, [marshal.dumps(request)], [0, 1, 2])
    child = int(server.recv(100))

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(server.recv(100))
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv)
