"""Starts a supervisor process and waits for its result."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from hapi_cluster.errors import StartError, error_from_json
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.process_control import KILL_SECONDS
from hapi_cluster.settings import ClusterSettings

START_MARGIN_SECONDS = 30.0
"""Time for the supervisor's own start, added to its deadline."""


def spawn_supervisor(
    paths: ClusterPaths, settings: ClusterSettings
) -> subprocess.Popen[bytes]:
    """Starts a supervisor and returns when all its servers answer.

    Raises:
        ClusterError: the error that the supervisor reports.
    """
    paths.logs.mkdir(mode=0o700, exist_ok=True)
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", "hapi_cluster.supervisor"]
    try:
        with paths.log("supervisor").open("ab") as log:
            process = subprocess.Popen(
                [*argv, str(paths.directory), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(write_end,),
            )
    finally:
        os.close(write_end)
    assert process.stdin is not None
    try:
        with process.stdin as stdin:
            stdin.write(settings.to_json().encode())
        result = _read_result(read_end, settings.start_seconds)
    except BaseException:
        # Ctrl-C does not reach the supervisor: it has its own session.
        process.terminate()
        _wait_for_end(process, settings)
        raise
    finally:
        os.close(read_end)
    if result.get("ok"):
        return process
    _wait_for_end(process, settings)
    if result:
        raise error_from_json(result)
    log_path = paths.log("supervisor")
    raise StartError(
        f"the supervisor gave no answer. The end of {log_path}:\n"
        f"{tail(log_path)}",
        f"Read {log_path}.",
    )


def _read_result(read_end: int, start_seconds: float) -> Mapping[str, Any]:
    """The supervisor's message; empty if it died or missed the deadline."""
    deadline = time.monotonic() + start_seconds + START_MARGIN_SECONDS
    data = b""
    while True:
        remaining = deadline - time.monotonic()
        if (
            remaining <= 0
            or not select.select([read_end], [], [], remaining)[0]
        ):
            return {}
        piece = os.read(read_end, 65536)
        if not piece:
            return dict(json.loads(data)) if data else {}
        data += piece


def _wait_for_end(
    process: subprocess.Popen[bytes], settings: ClusterSettings
) -> None:
    """Waits for a failed supervisor's end; kills one that hangs."""
    try:
        process.wait(settings.stop_seconds + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_SECONDS)
