"""The same photographs in Swift, stored in all the ways that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.opponents.training import Place
from benchmarks.remote import Remote
from benchmarks.shards import write_shards
from benchmarks.testbed import Testbed

CLIENT = "benchmarks.client_tier"
CONVERT = "benchmarks.opponents.convert"
SECONDS = 1800.0
WAYS = ("images", "mds", "resized")


def store(
    bed: Testbed,
    tars: Sequence[Path],
    name: str,
    num_samples: int,
    shard_samples: int,
    ways: Sequence[str] = (),
    resize_size: int = 256,
) -> Place:
    """Stores a data set; the link is without a limit meanwhile.

    Args:
        bed: the testbed.
        tars: where the photographs come from, repeated as often as it takes.
        name: container of the tar shards, which get an index, as
            resized ones do.
        num_samples, shard_samples: of all shards, of each one.
        ways: what else to store, of :data:`WAYS`.
        resize_size: pixels of the shorter side, for ``resized``.
    """
    if bed.shaped:
        bed.set_link(None)
    folder = bed.folder / "data" / name
    folder.mkdir(parents=True)
    paths = write_shards(tars, folder, num_samples, shard_samples)
    files = [str(path) for path in paths]
    with bed.client.remote(CLIENT) as client:
        _ask(client, "upload", shards=files, container=name)
    environment = bed.client.environment
    place = Place(
        endpoint=environment["ST_AUTH"].partition("/auth")[0],
        auth_url=environment["ST_AUTH"],
        user=environment["ST_USER"],
        key=environment["ST_KEY"],
        container=name,
        shards=[path.name for path in paths],
        num_samples=num_samples,
        cache_folder=str(bed.folder / "cache" / name),
    )
    if not ways:
        return place
    with bed.client.remote(CONVERT) as convert:
        for way in ways:
            more = {"resize_size": resize_size} if way == "resized" else {}
            made = _ask(
                convert,
                way,
                place=asdict(place),
                container=f"{name}-{way}",
                paths=files,
                **more,
            )
            place = replace(place, **made["place"])
    if place.resized:
        with bed.client.remote(CLIENT) as client:
            _ask(client, "index", container=place.resized)
    return place


def _ask(remote: Remote, do: str, **arguments: Any) -> Any:
    return remote.ask(do, seconds=SECONDS, **arguments)
