"""``hapi upload`` and ``hapi index``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hapi_client.cli.context import (
    DataArgument,
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.options import ImageOption, LabelsOption
from hapi_client.data.indexing import IndexOptions, update_index
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
            help="Tar files, folders of tar files, one folder of class "
            "folders, or single images and flat folders of them; then the "
            "destination. The swift:// prefix is optional.",
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
    classes: Annotated[
        bool,
        typer.Option(
            help="Take the folders as classes; --no-classes packs what is in "
            "them without."
        ),
    ] = True,
    labels: LabelsOption = None,
    image: ImageOption = None,
    json_path: JsonPath = None,
) -> None:
    """Store a data set and its index.

    WebDataset tar files are stored unchanged. A folder of class folders
    (DIR/cat/1.jpg, DIR/dog/2.jpg) with images or NumPy arrays (.npy) is
    packed into shards; labels are the positions in the sorted class names.
    A folder of images without class folders, and single images, have no
    labels: hapi extract needs none.
    Shards that are stored already are skipped: repeat the command to
    continue an interrupted upload.

    Examples:

        hapi upload train-*.tar swift://photos/train

        hapi upload ./flowers photos/flowers --shard-samples 500

        hapi upload ./scans photos/scans --no-classes

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
                PackOptions(shard_samples, shard_bytes, classes),
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


def index_command(
    context: typer.Context,
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    json_path: JsonPath = None,
) -> None:
    """Write the index of a data set whose shards are stored in Swift.

    Each shard is read once on the storage side; only index rows travel.
    Shards whose ETag is in the index already are skipped. An interrupted
    command continues where it was. Folders that have an index of their own
    are other data sets and are left out. Loose images or arrays are listed
    only; a group of them counts as a shard.

    Examples:

        hapi index swift://photos/train

        hapi index swift://photos/train --labels json:annotation.class

    Keys of --json: indexed, skipped, removed, samples, empty, inner, notes.
    """
    with connect(context) as connection, ConsoleReporter() as reporter:
        report = update_index(
            connection,
            parse_location(data),
            lambda name: reporter.note(f"reading {name}"),
            IndexOptions(labels, image),
        )
        for note in report.notes:
            reporter.note(note)
        for name in report.empty:
            reporter.note(f"{name} has no sample")
        if report.inner:
            reporter.note(
                "left out, because they have an index of their own: "
                + ", ".join(report.inner)
            )
    facts = asdict(report)
    columns = {
        "indexed shards": "indexed",
        "unchanged": "skipped",
        "removed": "removed",
        "samples in index": "samples",
    }
    print_facts([facts], columns)
    write_json(json_path, facts)
