"""``hapi device-queue``: turns of several jobs on one device."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from hapi_client.cli.context import JsonPath, print_table, write_json
from hapi_client.cli.options import one_of
from hapi_protocol.errors import ClientError
from hapi_splitter.units import bytes_text

Socket: TypeAlias = Annotated[
    Path, typer.Argument(metavar="SOCKET", help="Path of the socket.")
]


class _ServingGroup(TyperGroup):
    """``hapi device-queue SOCKET`` stands for ``device-queue serve``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ServingGroup,
    no_args_is_help=True,
    help="Give several training jobs turns on one device, or show whose turn "
    "it is.\n\n'hapi device-queue SOCKET' serves.",
)


@app.command("serve")
def serve_command(
    socket: Socket,
    policy: Annotated[
        str,
        typer.Option(
            help="Who is next: 'srtf', the job that ends first, for the "
            "least mean time; or 'fair', equal seconds by weight.",
            autocompletion=one_of("srtf", "fair"),
        ),
    ] = "srtf",
    memory: Annotated[
        int | None,
        typer.Option(
            help="Memory of the device, in bytes. Default: as the first job "
            "finds it.",
            min=1,
        ),
    ] = None,
    turn_limit: Annotated[
        float,
        typer.Option(
            help="Longest turn, in seconds: a job that does not give it back "
            "is ended, and the others go on.",
            min=0.1,
        ),
    ] = 300.0,
) -> None:
    """Give the jobs that name SOCKET turns on one device, until Ctrl-C.

    A turn is the forward and backward pass of a virtual node. While a job
    waits for features, other workers or a checkpoint, others compute. Only
    this user can open the socket. If the queue ends, the job that has its
    turn ends with an error, and the others if it is not started again within
    30 seconds: start them again from their last checkpoints.

    Examples:

        hapi device-queue ~/gpu0 --policy fair

        hapi train --device-queue ~/gpu0 --data photos --classes 10

        hapi device-queue status ~/gpu0
    """
    from hapi_training.device_queue import Queue, run
    from hapi_training.turn_policies import POLICIES

    if policy not in POLICIES:
        raise ClientError(
            "bad_configuration",
            f"--policy is {policy!r}; give one of {', '.join(POLICIES)}",
        )
    ready = f"jobs may take turns: queue={str(socket)!r} (--device-queue)"
    queue = Queue(policy, memory, turn_limit)
    asyncio.run(run(socket, queue, lambda: typer.echo(ready)))


@app.command("status")
def status_command(socket: Socket, json_path: JsonPath = None) -> None:
    """Show the jobs of a queue: turns, waits and memory.

    Example:

        hapi device-queue status ~/gpu0

    Keys of --json: policy, device, memory_bytes, turn_limit_seconds,
    decision_ms_p99 (milliseconds in which a turn is given), jobs (name, pid,
    weight, state, turns, turn_seconds, waited_seconds, left_seconds,
    resident_bytes, peak_bytes), ended (the same, reason).
    """
    from hapi_training.device_queue import status_of

    facts = status_of(socket)
    print_table(
        ("job", "state", "turns", "seconds", "waited", "left", "memory"),
        [
            (
                job["name"],
                job["state"],
                str(job["turns"]),
                f"{job['turn_seconds']:.1f}",
                f"{job['waited_seconds']:.1f}",
                ""
                if job["left_seconds"] is None
                else f"{job['left_seconds']:.0f}",
                "" if not job["peak_bytes"] else bytes_text(job["peak_bytes"]),
            )
            for job in facts["jobs"]
        ],
        right=False,
    )
    for job in facts["ended"]:
        typer.echo(f"{job['name']}: {job['reason']}", err=True)
    write_json(json_path, facts)
