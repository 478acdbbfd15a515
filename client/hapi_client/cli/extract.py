"""``hapi extract``: options and output; imports torch only to extract."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from hapi_client.cli.context import (
    OUTPUT,
    Columns,
    check_data,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.options import (
    JobOptions,
    argument,
    command_with,
    describe_cut,
    option,
    parse_cut,
)
from hapi_client.progress import Reporter, SilentReporter
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_splitter.units import bytes_text, count_text

if TYPE_CHECKING:
    from hapi_client.export.extract import Extraction
    from hapi_client.metrics.events import JobStats

MAX_SPAN_SAMPLES = 64
"""Larger spans would only delay the first features."""


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(JobOptions):
    """Options of ``hapi extract``."""

    out: str = argument(
        "File to write. The suffix sets the format: .parquet, .arrow (Arrow "
        "IPC file) or .npz. Or a folder for Parquet files, that ends in / or "
        "exists.",
        "OUT",
    )
    force: bool = option(
        "Overwrite the file OUT if it exists.",
        False,
        OUTPUT,
        names=("--force",),
    )
    part_samples: int | None = option(
        "Maximum number of samples of a file in the folder OUT; a file has "
        "at least what one request reads, such as 64 samples. Default: "
        "10,000, or a 16th of the data set.",
        panel=OUTPUT,
    )


@command_with(ExtractOptions)
def extract_command(context: typer.Context, options: ExtractOptions) -> None:
    """Write the features of a data set to files, for other tools.

    Samples are in the order of the index and not augmented. Each has its key
    (unique in its object), the URL of its object (the shard, or the file) and
    of its data set, its label and class name (if the index has them), and its
    features as float32 in the model's shape, independent of --encoding. A
    file also describes the features: model, freeze, digest of the weights,
    transform, cut, digest of the data. It is written as OUT.part and renamed
    when it is complete; an interrupted run leaves no file and starts again.

    A folder has files of some samples each, and _manifest.json. The same
    command goes on where it was interrupted. Under torchrun the ranks share
    the files, as do commands on several machines that have the folder.

    Examples:

        hapi extract --data swift://photos/train --model resnet18
        --weights DEFAULT features.parquet

        hapi extract --data photos/train --freeze layer4 --min-precision half
        --skip-bad-samples features.npz

        torchrun --nproc-per-node=2 -m hapi_client.cli.main extract
        --data photos/train features/

    Keys of --json: path, samples, computed (samples that this process
    has written), skipped, shape, bytes, about (the file's
    description: model, freeze, weights, transform, cut, encodings, shape,
    data, data_digest, hapi), stats (as of hapi train).
    """
    parse_location(options.data)
    with connect(context) as connection, ConsoleReporter() as reporter:
        check_data(connection, options.data)
        extraction, stats = extract_features(options, connection, reporter)
        # torch takes seconds to import.
        from hapi_client.cli.train_run import is_first_rank

        if not is_first_rank():
            return
    facts = _facts(extraction, stats)
    columns: Columns = {
        "path": "path",
        **{key: key for key in ("samples", "skipped", "shape", "bytes")},
        "over the wire": lambda facts: bytes_text(facts["stats"]["bytes"]),
    }
    print_facts([facts], columns)
    write_json(options.json_path, facts)


def extract_features(
    options: ExtractOptions, connection: Connection, reporter: Reporter
) -> tuple[Extraction, JobStats]:
    """Computes the features and writes the file.

    Raises:
        HapiError: naming a wrong option, or of the job.
    """
    from hapi_client.caching.cache_config import CacheConfig
    from hapi_client.cli.train_run import is_first_rank
    from hapi_client.data.labels import OPTIONAL
    from hapi_client.export.extract import check_target, extract, is_folder
    from hapi_client.job.options import JobConfig, PlanConfig
    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.loading.read_config import ReadConfig
    from hapi_client.model.registry import ModelSource, parse_freeze
    from hapi_client.model.split_arguments import input_transform, parse_device

    if not is_first_rank():
        reporter = SilentReporter()
    config = JobConfig(
        cut=parse_cut(options.cut),
        device=parse_device(options.device),
        precision=options.precision or "float32",
        plan=PlanConfig(
            encoding=options.encoding,
            min_precision=options.min_precision,
            epochs=1,
        ),
        read=ReadConfig(
            on_error="skip" if options.skip_bad_samples else "raise",
        ),
        cache=CacheConfig(memory_bytes=0),  # each sample is read once
        connection=connection,
    )
    target: dict[str, Any] = {
        "overwrite": options.force,
        "part_samples": options.part_samples,
    }
    check_target(options.out, **target)
    source = ModelSource(options.model, options.weights, options.checkpoint)
    network, published_transform = source.build_with_transform()
    transform = input_transform(
        published_transform, image=options.image, exif=options.exif
    )
    if source.is_random:
        reporter.note("weights are random: no --weights, no --checkpoint")
    with TransferJob(
        network,
        freeze=parse_freeze(network, options.freeze, transform),
        data=options.data,
        batch_size=MAX_SPAN_SAMPLES,
        transform=transform,
        labels=OPTIONAL,
        config=config,
    ) as job:
        reporter.note(
            f"{count_text(job.num_samples, 'sample')}, {describe_cut(job)}"
        )
        about = {
            "model": options.model,
            "data": str(parse_location(options.data)),
        }
        try:
            extraction = extract(job, options.out, about=about, **target)
        except KeyboardInterrupt:
            if is_folder(options.out):
                reporter.note(
                    f"interrupted; the same command goes on from {options.out}"
                )
            raise
        if extraction.samples and not extraction.computed:
            reporter.note(
                f"{options.out} is complete: nothing was computed here"
            )
        return extraction, job.stats


def _facts(extraction: Extraction, stats: JobStats) -> dict[str, Any]:
    return {
        "path": str(extraction.path),
        "samples": extraction.samples,
        "computed": extraction.computed,
        "skipped": extraction.skipped,
        "shape": list(extraction.shape),
        "bytes": extraction.length_bytes,
        "about": dict(extraction.about),
        "stats": asdict(stats),
    }
