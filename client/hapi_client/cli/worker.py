"""``hapi worker``: the status of the local worker."""

from __future__ import annotations

import http.client
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from hapi_client.cli.context import (
    Columns,
    JsonPath,
    table_console,
    titled_table,
    write_json,
)
from hapi_protocol.errors import (
    InternalError,
    UnavailableError,
    error_from_body,
)
from hapi_protocol.unix_http import UnixConnection

DEFAULT_SOCKET = Path("/run/hapi/worker.sock.admin")
TIMEOUT_SECONDS = 10.0
DEVICE_COLUMNS: Columns = {
    "device": lambda device: (
        device["name"] + ("" if device["in_service"] else " (failed)")
    ),
    "models": lambda device: str(len(device["models"])),
    "parameters": "resident_bytes",
    "passes": "reserved_bytes",
    "longest pass": lambda device: f"{device['longest_pass_seconds']:.1f} s",
    "limit": "memory_limit_bytes",
    "in use (jobs)": lambda device: (
        ", ".join(
            f"{model['digest'][:12]} ({model['jobs']})"
            for model in device["models"]
            if model["jobs"]
        )
        or "-"
    ),
}
ACCOUNT_COLUMNS: Columns = {
    "account": lambda account: account["account"] or "(hidden)",
    "weight": lambda account: f"{account['weight']:g}",
    "share": lambda account: f"{100 * account['share']:.0f} %",
    "streams": "streams",
    "waiting": "waiting",
    "buffered": "buffered_bytes",
}

app = typer.Typer(
    help="Show the status of the local worker.", no_args_is_help=True
)


@app.command()
def status(
    socket: Annotated[
        Path,
        typer.Option(
            help="Socket of the worker, or its .admin socket.", metavar="PATH"
        ),
    ] = DEFAULT_SOCKET,
    watch: Annotated[
        float | None,
        typer.Option(
            help="Refresh every SECONDS until Ctrl-C.",
            metavar="SECONDS",
            min=0.2,
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show devices, models and accounts of the local worker.

    Only root and the worker's own user see the names of accounts.

    Examples:

        hapi worker status --watch 2

        hapi worker status --json status.json

    Keys of --json: version, pid, status, problem, uptime_seconds, cores,
    jobs_running, jobs_waiting, max_streams, max_streams_per_account, totals
    (samples, errors, passes, received_bytes, sent_bytes, out_of_memory,
    slow_passes),
    devices (name, in_service, forwards, memory_limit_bytes, resident_bytes,
    reserved_bytes, longest_pass_seconds, models), queues, accounts (account,
    weight, share, streams, waiting, buffered_bytes).
    """
    state = request_status(socket)
    if watch is None:
        table_console().print(tables(state))
        write_json(json_path, state)
        return
    with Live(tables(state), auto_refresh=False) as live:
        while True:
            write_json(json_path, state)
            before, requested = state, time.monotonic()
            time.sleep(watch)
            state = request_status(socket)
            seconds = time.monotonic() - requested
            live.update(tables(state, before, seconds), refresh=True)


def request_status(socket: Path) -> dict[str, Any]:
    """Requests the status of a worker.

    Raises:
        UnavailableError: if the socket cannot be connected to.
        HapiError: if the worker's response is an error.
    """
    connection = UnixConnection(socket, TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            "worker_unavailable",
            f"no worker answers at {socket} ({error}); check that hapi-worker "
            "runs, that this is its socket (option socket), and that you may "
            "read and write it",
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise error_from_body(answer.status, body)
    state = json.loads(body)
    if not isinstance(state, dict):
        raise InternalError(
            "internal", f"the response at {socket} is not that of a worker"
        )
    return state


def tables(
    state: dict[str, Any],
    before: dict[str, Any] | None = None,
    seconds: float = 0.0,
) -> Group:
    """Formats the status of a worker.

    Args:
        state: the status.
        before: an earlier status, for rates.
        seconds: between the two.
    """
    return Group(
        _headline(state, before, seconds),
        titled_table("Devices", state["devices"], DEVICE_COLUMNS),
        titled_table(
            "Accounts with streams", state["accounts"], ACCOUNT_COLUMNS
        ),
    )


def _headline(
    state: dict[str, Any], before: dict[str, Any] | None, seconds: float
) -> str:
    totals = state["totals"]
    uptime = timedelta(seconds=int(state["uptime_seconds"]))
    line = (
        f"hapi-worker {state['version']}, pid {state['pid']}: "
        f"{state['status']}, up {uptime}; "
        f"{state['jobs_running']} of {state['max_streams']} streams, "
        f"{state['jobs_waiting']} waiting; "
        f"{totals['samples']:.0f} samples, {totals['errors']:.0f} errors"
    )
    if before is None or seconds <= 0:
        return line
    rates = {
        key: max(totals[key] - before["totals"][key], 0.0) / seconds
        for key in totals
    }
    return (
        f"{line}\n{rates['samples']:.1f} samples/s, "
        f"{rates['received_bytes'] / 1e6:.1f} MB/s in, "
        f"{rates['sent_bytes'] / 1e6:.1f} MB/s out, "
        f"{rates['passes']:.1f} micro-batches/s"
    )
