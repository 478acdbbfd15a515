"""``hapi upload``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.options import ImageOption, LabelsOption
from hapi_client.data.indexing import IndexOptions
from hapi_client.data.shard_writer import (
    DEFAULT_SHARD_BYTES,
    DEFAULT_SHARD_SAMPLES,
)
from hapi_client.data.upload import PackOptions, upload
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.swift_url import parse_location


def upload_command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE… CONTAINER[/PREFIX]",
            help="Tar files, folders of tar files, or one folder of class "
            "folders; then the destination. The swift:// prefix is optional.",
        ),
    ],
    shard_samples: Annotated[
        int,
        typer.Option(min=1, help="Maximum samples of a packed shard."),
    ] = DEFAULT_SHARD_SAMPLES,
    shard_bytes: Annotated[
        int,
        typer.Option(min=1, help="Maximum sample bytes of a packed shard."),
    ] = DEFAULT_SHARD_BYTES,
    labels: LabelsOption = None,
    image: ImageOption = None,
    json_path: JsonPath = None,
) -> None:
    """Store a data set and its index.

    WebDataset tar files are stored unchanged. A folder of class folders
    (DIR/cat/1.jpg, DIR/dog/2.jpg) with images or NumPy arrays (.npy) is
    packed into shards; labels are the positions in the sorted class names.
    Shards that are stored already are skipped: repeat the command to
    continue an interrupted upload.

    Examples:

        hapi upload train-*.tar swift://photos/train

        hapi upload ./flowers photos/flowers --shard-samples 500

    Keys of --json: uploaded, skipped, bytes, samples, classes.
    """
    if len(arguments) < 2:
        raise typer.BadParameter(
            "give at least one SOURCE and the destination"
        )
    *sources, destination = arguments
    with connect(context) as connection, ConsoleReporter() as reporter:
        try:
            report = upload(
                connection,
                parse_location(destination),
                [Path(source) for source in sources],
                reporter,
                PackOptions(shard_samples, shard_bytes),
                IndexOptions(labels, image),
            )
        except KeyboardInterrupt:
            reporter.note(
                "interrupted before the index was written; run the same "
                "command again to continue"
            )
            raise
    facts = asdict(report)
    columns = {
        "uploaded shards": "uploaded",
        "already stored": "skipped",
        "bytes": "bytes",
        "samples in index": "samples",
    }
    print_facts([facts], columns)
    write_json(json_path, facts)
