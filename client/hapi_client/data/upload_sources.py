"""Local sources of an upload: tar files, and folders of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hapi_client.data.listing import SHARD_SUFFIX
from hapi_client.data.shard_writer import (
    SampleFolder,
    find_class_names,
    find_sample,
    is_sample,
    read_flat,
    read_folder,
)
from hapi_protocol.errors import ClientError
from hapi_protocol.samples import SNIFF_BYTES, compression_message, is_hidden


def packed_samples(
    sources: Sequence[Path], *, has_classes: bool = True
) -> SampleFolder | None:
    """Lists the samples of sources that have to be packed into shards.

    Args:
        sources: files and folders.
        has_classes: False to take all files of folders without classes.

    Returns:
        None for tar files, or folders of them.

    Raises:
        ClientError: ``bad_configuration`` naming an invalid source.
    """
    for source in sources:
        if not source.exists():
            raise ClientError("bad_configuration", f"{source} does not exist")
    folder = class_folder(sources) if has_classes else None
    if folder is not None:
        return read_folder(folder)
    is_flat = not has_classes or any(
        is_sample(path)
        for source in sources
        for path in ([source] if source.is_file() else source.iterdir())
    )
    if not is_flat:
        return None
    for source in sources:
        tars = _tars_in(source) if source.is_dir() else []
        if tars or source.suffix == SHARD_SUFFIX:
            raise ClientError(
                "bad_configuration",
                f"{tars[0] if tars else source} is a shard, but other sources "
                "are single samples; upload them separately",
            )
    return read_flat(sources)


def class_folder(sources: Sequence[Path]) -> Path | None:
    folders = [
        source
        for source in sources
        if source.is_dir()
        and find_class_names(source)
        and (find_sample(source) or not any(map(is_sample, source.iterdir())))
    ]
    for source in list(folders):
        if tars := _tars_in(source):
            folders.remove(source)
            if sample := find_sample(source):
                raise ClientError(
                    "bad_configuration",
                    f"{source} has shards ({tars[0].name}) and class folders "
                    f"({sample.relative_to(source)}); upload the shards as "
                    f"'{source}/*{SHARD_SUFFIX}', and the class folders from "
                    "a folder of their own",
                )
    if folders and len(sources) > 1:
        raise ClientError(
            "bad_configuration",
            f"{folders[0]} is a folder of class folders; upload it alone, "
            "because its classes are numbered together",
        )
    return folders[0] if folders else None


def _tars_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix == SHARD_SUFFIX
        and path.is_file()
        and not is_hidden(path.name)
    )


def tar_paths(sources: Sequence[Path]) -> list[Path]:
    paths: list[Path] = []
    for source in sources:
        tars = _tars_in(source) if source.is_dir() else [source]
        if not tars or tars[0].suffix != SHARD_SUFFIX:
            compression = None
            if source.is_file():
                with source.open("rb") as file:
                    compression = compression_message(file.read(SNIFF_BYTES))
            raise ClientError(
                "bad_configuration",
                f"{source}: {compression}"
                if compression
                else f"{source} is neither a {SHARD_SUFFIX} file nor a folder "
                "of such files, of samples, or of class folders",
            )
        paths += tars
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.name in by_name:
            raise ClientError(
                "bad_configuration",
                f"{by_name[path.name]} and {path} would become the same "
                "object; rename one of them",
            )
        by_name[path.name] = path
    return paths
