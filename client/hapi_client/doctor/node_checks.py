"""Checks of a cluster's object servers, on the host of a proxy."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hapi_client.doctor.check_runner import FAILURE, OK, WARNING, Finding

CHECK = "nodes"
_MODULE = "hapi_middleware.places.node_check"
_REMEDIES = {
    "absent": (
        "if it is to compute, add the filter hapi_object to its pipeline and "
        "restart it (docs, Compute on the object servers)"
    ),
    "degraded": (
        "its worker cannot take models: see the worker's log there for what "
        "the host refuses (TMPDIR, TasksMax, SELinux, permissions)"
    ),
    "draining": "its worker is ending; wait for its start",
    "lost": "start the object server, or let this host reach its port",
    "refused": "give both hosts one release, one key, and the right time",
    "silent": "restart what hangs there: the object server or hapi-worker",
    "worker": "start hapi-worker there",
}
_OTHER_REMEDY = "look for this host in the log of the object server"


def node_findings(conf: Path) -> Iterator[Finding]:
    """Yields a finding for each object server in the rings.

    Args:
        conf: ``proxy-server.conf``; its key and rings must be readable.
    """
    if find_spec("swift") is None:
        yield Finding(
            FAILURE,
            "Swift is not installed in this Python",
            f"run 'python3 -m {_MODULE} {conf}' on the host of a proxy, with "
            "the Python of Swift",
            check=CHECK,
        )
        return
    # A process of its own: this one imports no server of Swift.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(conf)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            yield _finding(json.loads(line))
        process.wait()
        errors.seek(0)
        problem = errors.read().strip()
    if process.returncode:
        reason = problem.splitlines()[-1] if problem else "no error output"
        yield Finding(
            FAILURE,
            reason,
            "name a proxy's configuration, as a user who may read it, the "
            "rings and the key",
            check=CHECK,
        )


def _finding(answer: dict[str, Any]) -> Finding:
    state, remedy = OK, ""
    if answer["state"] != "computes":
        state = WARNING if answer["state"] == "absent" else FAILURE
        remedy = _REMEDIES.get(answer["state"], _OTHER_REMEDY)
    devices, policies = answer["devices"], ", ".join(answer["policies"])
    found = f"{len(devices)} devices of {policies}: {answer['detail']}"
    return Finding(state, found, remedy, check=answer["node"])
