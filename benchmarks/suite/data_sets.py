"""Stores the same photographs in Swift in all formats that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.opponents.training import Place
from benchmarks.suite.contenders import CLIENT, ask
from benchmarks.suite.workloads import Volume
from benchmarks.testbed.shards import write_shards
from benchmarks.testbed.two_tiers import Testbed

CONVERT = "benchmarks.opponents.convert"


def store(
    bed: Testbed,
    tars: Sequence[Path],
    name: str,
    volume: Volume,
    formats: Sequence[str] = (),
) -> Place:
    """Stores a data set, over a link without a limit.

    ``name`` is the container of the tar shards; ``formats`` are functions of
    :mod:`benchmarks.opponents.convert`.
    """
    if bed.shaped:
        bed.set_link(None)
    folder = bed.folder / "data" / name
    folder.mkdir(parents=True)
    paths = write_shards(tars, folder, volume.samples, volume.shard_samples)
    files = [str(path) for path in paths]
    with bed.client.remote(CLIENT) as client:
        ask(client, "upload", shards=files, container=name)
    environment = bed.client.environment
    place = Place(
        endpoint=environment["ST_AUTH"].partition("/auth")[0],
        auth_url=environment["ST_AUTH"],
        user=environment["ST_USER"],
        key=environment["ST_KEY"],
        container=name,
        shards=[path.name for path in paths],
        num_samples=volume.samples,
        cache_folder=str(bed.folder / "cache" / name),
    )
    if not formats:
        return place
    with bed.client.remote(CONVERT) as convert:
        for layout in formats:
            fields = ask(
                convert,
                layout,
                place=asdict(place),
                container=f"{name}-{layout}",
                paths=files,
            )
            place = replace(place, **fields)
    return place
