"""Starts a supervisor process and waits for its result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection

from hapi_cluster.errors import ClusterError, StartError
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.settings import ClusterSettings

START_MARGIN_SECONDS = 30.0
"""Time for the supervisor's own start, added to its deadline."""
KILL_SECONDS = 5.0
"""Time for the kernel to end a killed process; a deadline only."""


def spawn_supervisor(
    paths: ClusterPaths, settings: ClusterSettings, die_with_parent: bool
) -> subprocess.Popen[bytes]:
    """Starts a supervisor and returns when all its servers answer.

    Raises:
        ClusterError: the error that the supervisor reports.
    """
    paths.logs.mkdir(mode=0o700, exist_ok=True)
    ours, theirs = multiprocessing.Pipe()
    descriptors = [theirs.fileno()]
    with ours, theirs, contextlib.ExitStack() as stack:
        if die_with_parent:
            # PR_SET_PDEATHSIG would fire when the calling *thread* ends.
            descriptors.append(os.pidfd_open(os.getpid()))
            stack.callback(os.close, descriptors[-1])
        log = stack.enter_context(paths.log("supervisor").open("ab"))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hapi_cluster"),
                *(str(paths.directory), *map(str, descriptors)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            pass_fds=descriptors,
        )
        theirs.close()
        try:
            error = _result(ours, paths, settings)
            if error is not None:
                raise error
        except BaseException:
            # Ctrl-C does not reach the supervisor: it has its own session.
            process.terminate()
            try:
                process.wait(settings.stop_seconds + KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(KILL_SECONDS)
            raise
    return process


def _result(
    supervisor: Connection, paths: ClusterPaths, settings: ClusterSettings
) -> ClusterError | None:
    """The error that the supervisor sends; None if all servers answer."""
    with contextlib.suppress(EOFError, ConnectionError):
        supervisor.send(settings)
        if supervisor.poll(settings.start_seconds + START_MARGIN_SECONDS):
            error: ClusterError | None = supervisor.recv()
            return error
    log = paths.log("supervisor")
    return StartError(
        f"the supervisor gave no answer. The end of {log}:\n{tail(log)}",
        f"Read {log}.",
    )
