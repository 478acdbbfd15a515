"""``hapi extract``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hapi_client.cli import completion
from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.cli.options import (
    CheckpointOption,
    CutOption,
    EncodingOption,
    FloorOption,
    cut_value,
    what_is_cut,
)
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_splitter.units import bytes_text, count_text

if TYPE_CHECKING:
    from hapi_client.export.extract import Extraction
    from hapi_client.metrics.counters import JobStats

BATCH_SIZE = 64
"""The most samples of a span: no more of them need wait for one another."""


def extract_command(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Where to write; ends in .parquet, .arrow (an IPC file) or "
            ".npz, which says what is written.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="swift://CONTAINER[/PREFIX]",
            help="An indexed data set, with labels or without.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            autocompletion=completion.models,
            help="As in torchvision.models; or MODULE:FUNCTION, which "
            "yields a model of yours (or a pair: frozen, tail).",
        ),
    ] = "resnet18",
    freeze: Annotated[
        str | None,
        typer.Option(
            help="Name of the last frozen module, or several, separated by "
            "commas; all but the last linear layer if absent. Layers "
            "without parameters behind it (pooling, flatten) belong to it."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.published_weights,
            help="Published weights (DEFAULT), downloaded, and their "
            "transform of images; random if absent.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    cut: CutOption = "auto",
    floor: FloorOption = "lossless",
    encoding: EncodingOption = None,
    device: Annotated[
        str,
        typer.Option(
            autocompletion=completion.devices,
            help="Of this machine: cpu, cuda, cuda:1.",
        ),
    ] = "cpu",
    skip_bad_samples: Annotated[
        bool,
        typer.Option(
            "--skip-bad-samples",
            help="Leave undecodable samples out, and count them; else the "
            "first one is an error.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite OUT if it is there."),
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Write the features of a data set to a file, for other tools.

    In the order of the index, without augmentation, float32 whatever the
    encoding: key, label, class name where the index knows names, and the
    features in their shape. What they are (model, freeze, digest of the
    weights, transform, cut, digest of the data) stands in the file. It is
    written as OUT.part and moved when it is whole; a run that breaks off
    leaves nothing, and begins anew.

    Examples:

        hapi extract --data swift://photos/train --model resnet18
        --weights DEFAULT features.parquet

        hapi extract --data photos/train --freeze layer4 --floor half
        --skip-bad-samples features.npz

    Keys of --json: path, samples, skipped, shape, bytes, about (what stands
    in the file: model, freeze, weights, transform, cut, encodings, shape,
    data, data_digest, hapi), stats (as of hapi train).
    """
    # torch takes seconds to import; --help must not wait for it.
    from hapi_client.data.labels import OPTIONAL
    from hapi_client.export.extract import check_place, extract
    from hapi_client.job.options import check_cut, checked_encodings
    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.model.frozen_region import input_transform
    from hapi_client.model.registry import (
        ModelSource,
        chosen_freeze,
        named_device,
    )

    check_cut(cut_value(cut))
    checked_encodings(encoding, floor)
    place = parse_location(data)
    check_place(out, overwrite=force)
    on = named_device(device)
    source = ModelSource(model, weights, checkpoint)
    network, published = source.build_with_transform()
    transform = input_transform(published)
    with connect(context) as connection, ConsoleReporter() as reporter:
        if source.is_random:
            reporter.note("weights are random: no --weights, no --checkpoint")
        with TransferJob(
            network,
            freeze=chosen_freeze(network, freeze, transform),
            data=data,
            batch_size=BATCH_SIZE,
            transform=transform,
            cut=cut_value(cut),
            encoding=encoding,
            floor=floor,
            epochs=1,
            labels=OPTIONAL,
            on_error="skip" if skip_bad_samples else "raise",
            connection=connection,
            device=on,
        ) as job:
            reporter.note(
                f"{count_text(job.num_samples, 'sample')}, {what_is_cut(job)}"
            )
            with reporter.resting():
                done = extract(
                    job,
                    out,
                    overwrite=force,
                    about={"model": model, "data": str(place)},
                )
            stats = job.stats
    _print(done, stats)
    write_json(json_path, _facts(done, stats))


def _facts(done: Extraction, stats: JobStats) -> dict[str, Any]:
    return {
        "path": str(done.path),
        "samples": done.samples,
        "skipped": done.skipped,
        "shape": list(done.shape),
        "bytes": done.length_bytes,
        "about": dict(done.about),
        "stats": asdict(stats),
    }


def _print(done: Extraction, stats: JobStats) -> None:
    print_table(
        ("file", "samples", "skipped", "shape", "bytes", "over the wire"),
        [
            (
                str(done.path),
                str(done.samples),
                str(done.skipped),
                "x".join(map(str, done.shape)),
                bytes_text(done.length_bytes),
                bytes_text(stats.bytes),
            )
        ],
    )
