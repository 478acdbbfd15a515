"""``hapi upload``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.data.shard_writer import (
    DEFAULT_SHARD_BYTES,
    DEFAULT_SHARD_SAMPLES,
)
from hapi_client.data.upload import PackOptions, upload
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_splitter.units import bytes_text


def upload_command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE… CONTAINER[/PREFIX]",
            help="Tar files, folders of them, or one folder of class "
            "folders; then where to.",
        ),
    ],
    shard_samples: Annotated[
        int,
        typer.Option(min=1, help="Most samples of a packed shard."),
    ] = DEFAULT_SHARD_SAMPLES,
    shard_bytes: Annotated[
        int, typer.Option(min=1, help="Most sample bytes of a packed shard.")
    ] = DEFAULT_SHARD_BYTES,
    json_path: JsonPath = None,
) -> None:
    """Store a data set and its index.

    WebDataset tar files are stored as they are. A folder of class folders
    (DIR/cat/1.jpg, DIR/dog/2.jpg), of images or of NumPy arrays (.npy), is
    packed into shards; labels are the positions in the sorted class names.
    What is in the store already is passed over, so a broken upload is
    repeated by the same command.

    Examples:

        hapi upload train-*.tar swift://photos/train

        hapi upload ./flowers photos/flowers --shard-samples 500

    Keys of --json: uploaded, skipped, bytes, samples, classes.
    """
    if len(arguments) < 2:
        raise typer.BadParameter("give at least one SOURCE and the place")
    *sources, place = arguments
    with connect(context) as connection, ConsoleReporter() as reporter:
        try:
            report = upload(
                connection,
                parse_location(place),
                [Path(source) for source in sources],
                reporter,
                PackOptions(shard_samples, shard_bytes),
            )
        except KeyboardInterrupt:
            reporter.note(
                "interrupted, and no index is written; the same command goes "
                "on behind what is stored"
            )
            raise
    print_table(
        ("uploaded shards", "already there", "bytes", "samples in index"),
        [
            (
                str(report.uploaded),
                str(report.skipped),
                bytes_text(report.bytes),
                str(report.samples),
            )
        ],
    )
    write_json(json_path, asdict(report))
