"""``hapi checkpoints``: those of a run, in a folder or in Swift."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.swift.swift_url import SCHEME, parse_location
from hapi_protocol.errors import ClientError, NotFoundError
from hapi_splitter.units import bytes_text

if TYPE_CHECKING:
    from hapi_training.checkpoints.folder import Folder
    from hapi_training.checkpoints.swift_folder import SwiftFolder

app = typer.Typer(
    no_args_is_help=True,
    help="List, check and delete the checkpoints of a run (hapi train "
    "--resume, --remote; CheckpointManager).",
)
Place: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER|FILE.pt|swift://CONTAINER/PREFIX",
        help="Folder, file, or prefix in Swift.",
    ),
]


@app.command("ls")
def ls_command(
    context: typer.Context, place: Place, json_path: JsonPath = None
) -> None:
    """List the checkpoints, the newest first.

    Examples:

        hapi checkpoints ls run

        hapi checkpoints ls swift://runs/photos

    Keys of --json: checkpoints (step, length_bytes).
    """
    with _opened(context, place) as folder:
        entries = []
        for step in folder.steps():
            # A run that goes on deletes old ones.
            with suppress(NotFoundError, FileNotFoundError):
                entries.append((step, folder.size(step)))
    if not entries:
        typer.echo(f"there is no checkpoint in {place}", err=True)
    print_table(
        ("step", "bytes"),
        [(str(step), bytes_text(size)) for step, size in entries],
    )
    write_json(
        json_path,
        {
            "checkpoints": [
                {"step": step, "length_bytes": size} for step, size in entries
            ]
        },
    )


@app.command("verify")
def verify_command(
    context: typer.Context, place: Place, json_path: JsonPath = None
) -> None:
    """Load each checkpoint, and compare its digests, if it has any.

    Exits with 1 if one of them is damaged, or if there is none.

    Example:

        hapi checkpoints verify swift://runs/photos

    Keys of --json: checkpoints (step, whole, has_digests, reason).
    """
    # torch takes seconds to import.
    from hapi_training.checkpoints.content import checked
    from hapi_training.checkpoints.swift_folder import readable

    facts = []
    with _opened(context, place) as folder:
        for step in folder.steps():
            has_digests, reason = False, ""
            try:
                data = readable(step, partial(folder.whole, step))
                name = f"step {step}"
                content = checked(data, name, or_lightning=True)
                has_digests = content.get("digests") is not None
            except ClientError as error:
                reason = error.message
            facts.append(
                {
                    "step": step,
                    "whole": not reason,
                    "has_digests": has_digests,
                    "reason": reason,
                }
            )
    print_table(
        ("step", "result"),
        [
            (
                str(fact["step"]),
                str(fact["reason"])
                or ("whole" if fact["has_digests"] else "whole, no digests"),
            )
            for fact in facts
        ],
        right=False,
    )
    write_json(json_path, {"checkpoints": facts})
    if not facts:
        typer.echo(f"there is no checkpoint in {place}", err=True)
    if not facts or not all(fact["whole"] for fact in facts):
        raise typer.Exit(1)


@app.command("rm")
def rm_command(
    context: typer.Context,
    place: Place,
    steps: Annotated[
        list[int], typer.Argument(metavar="STEP…", help="Steps to delete.")
    ],
    json_path: JsonPath = None,
) -> None:
    """Delete checkpoints, but not the newest one.

    Example:

        hapi checkpoints rm run 100 200

    Keys of --json: deleted.
    """
    with _opened(context, place) as folder:
        known = folder.steps()
        unknown = sorted(set(steps) - set(known))
        if unknown:
            raise ClientError(
                "bad_configuration",
                f"{place} has no checkpoint of step {unknown[0]}; it has "
                f"those of {known}",
            )
        if known[0] in steps:
            raise ClientError(
                "bad_configuration",
                f"step {known[0]} is the newest checkpoint of {place}, which "
                "a run would go on from; delete the whole place instead (rm "
                "-r, or swift delete, of container and <container>_segments)",
            )
        for step in steps:
            folder.remove(step)
    typer.echo(f"{len(steps)} deleted", err=True)
    write_json(json_path, {"deleted": steps})


@contextmanager
def _opened(
    context: typer.Context, place: str
) -> Iterator[Folder | SwiftFolder]:
    is_remote = place.startswith(SCHEME)
    if not is_remote and not Path(place).exists():
        raise ClientError(
            "bad_configuration",
            f"there is no folder or file {place}; give that of --resume, or "
            "swift://container/prefix",
        )
    with connect(context) if is_remote else nullcontext() as connection:
        # torch takes seconds to import.
        from hapi_training.checkpoints.folder import naming, place_of
        from hapi_training.checkpoints.swift_folder import SwiftFolder

        if connection is not None:
            yield SwiftFolder(connection, parse_location(place))
        else:
            with naming(Path(place)):
                yield place_of(place)
