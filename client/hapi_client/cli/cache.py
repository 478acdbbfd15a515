"""``hapi cache``: cached features and splits.

Features are in an account or in a directory, splits on this host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from hapi_client.cli.context import (
    JsonOutput,
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.cli.options import one_of
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_splitter.freezing.split_store import disk_store
from hapi_splitter.private_folder import Entry, PrivateFolder
from hapi_splitter.units import bytes_text

app = typer.Typer(
    no_args_is_help=True,
    help="List and delete what is cached in your account, in a directory of "
    "this host, or of the splits of models (--in).",
)

STORE, SPLITS = "store", "splits"
_WIDTHS = {"key": 12, "model": 12}
"""Digits shown of long numbers."""

Source: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONTAINER[/OBJECT or PREFIX]]",
        help="Only features of these objects. The swift:// prefix is "
        "optional.",
    ),
]

WhereOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--in",
        metavar="store|splits|DIR",
        autocompletion=one_of(STORE, SPLITS),
        help="Cache: 'store' for the features in your account, 'splits' for "
        "the splits of models on this host (HAPI_CACHE_DIR), or a directory "
        "in which jobs cache features (CacheConfig.directory, hapi train "
        "--cache-dir). Only 'store' needs a login.",
    ),
]


@app.command("ls")
def ls_command(
    context: typer.Context,
    source: Source = None,
    where: WhereOption = STORE,
    json_path: JsonPath = None,
) -> None:
    """List the cached features of each object; times are UTC.

    In a directory, those of each model and data set; or the splits of models.

    Examples:

        hapi cache ls

        hapi cache ls swift://photos/train

        hapi cache ls photos/train/shard-000000.tar

        hapi cache ls --in ~/features

        hapi cache ls --in splits

    Keys of --json: entries (source, key, length_bytes, stored); of a
    directory (path, container, model, images, length_bytes, used); of splits
    (key, length_bytes, used).
    """
    folder = _host_folder(where, source)
    if folder is not None:
        _list_folder(folder, where == SPLITS, json_path)
        return
    with connect(context) as connection:
        entries = [
            entry
            for page in CacheAdminClient(connection).pages(source)
            for entry in page.entries
        ]
    if not entries:
        typer.echo(_nothing_cached(source), err=True)
    print_table(
        ("object", "bytes", "stored", "key"),
        [
            (
                entry.source,
                bytes_text(entry.length_bytes),
                entry.stored.partition(".")[0],
                entry.key[:12],
            )
            for entry in entries
        ],
    )
    write_json(json_path, {"entries": [asdict(entry) for entry in entries]})


@app.command("stats")
def stats_command(
    context: typer.Context,
    where: WhereOption = STORE,
    json_path: JsonPath = None,
) -> None:
    """Show the size of the cache, in total and by container.

    Swift updates the total some seconds after a change.

    Example:

        hapi cache stats

    Keys of --json: entries, length_bytes, containers (name, entries,
    length_bytes), which are empty for splits.
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    total = (0, 0)
    folder = _host_folder(where)
    if folder is not None:
        entries = folder.entries()
        total = len(entries), sum(entry.length_bytes for entry in entries)
        for cached in entries if where != SPLITS else ():
            container = _facts(cached, "container")["container"]
            counts[container] += 1
            sums[container] += cached.length_bytes
    else:
        with connect(context) as connection:
            for page in CacheAdminClient(connection).pages():
                total = page.num_entries, page.length_bytes
                for entry in page.entries:
                    container = entry.source.partition("/")[0]
                    counts[container] += 1
                    sums[container] += entry.length_bytes
    print_table(
        ("container", "entries", "bytes"),
        [
            *(
                (name, str(count), bytes_text(sums[name]))
                for name, count in sorted(counts.items())
            ),
            ("(all)", str(total[0]), bytes_text(total[1])),
        ],
    )
    write_json(
        json_path,
        {
            "entries": total[0],
            "length_bytes": total[1],
            "containers": [
                {"name": name, "entries": count, "length_bytes": sums[name]}
                for name, count in sorted(counts.items())
            ],
        },
    )


@app.command("purge")
def purge_command(
    context: typer.Context,
    source: Source = None,
    where: WhereOption = STORE,
    is_sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Delete cached features; jobs compute them again when needed.

    Without a source, deletes the whole cache of the account after
    confirmation. Exits with 1 if nothing is cached for the source. On this
    host (--in), deletes what no running job uses.

    Examples:

        hapi cache purge swift://photos/train

        hapi cache purge --yes

        hapi cache purge --in ~/features

        hapi cache purge --in splits

    Keys of --json: deleted; with --in also in_use.
    """
    folder = _host_folder(where, source)
    if folder is not None:
        _purge_folder(folder, is_sure, json_path)
        return
    deleted = 0
    with connect(context) as connection, ConsoleReporter() as reporter:
        cache = CacheAdminClient(connection)
        if source is None and not is_sure:
            _confirm(cache)
        for count in cache.purge(source):
            deleted += count
            if count:
                reporter.note(f"{deleted} deleted")
        if not deleted:
            reporter.note(_nothing_cached(source))
    write_json(json_path, {"deleted": deleted})
    if source is not None and not deleted:
        raise typer.Exit(1)


def _confirm(cache: CacheAdminClient) -> None:
    page = next(cache.pages())
    typer.confirm(
        "Delete the whole cache of the account "
        f"({page.num_entries} entries, {bytes_text(page.length_bytes)})?",
        abort=True,
        err=True,
    )


def _nothing_cached(source: str | None) -> str:
    return f"nothing is cached for {source or 'this account'}"


def _host_folder(
    where: str, source: str | None = None
) -> PrivateFolder | None:
    """Opens a cache of this host; returns None for that of the account."""
    from hapi_client.caching.directory import CacheDirectory

    if where == STORE:
        return None
    if source is not None:
        raise typer.BadParameter(
            f"{source}: with --in {where}, give no object: only the cache in "
            "the account has entries of objects"
        )
    try:
        if where == SPLITS:
            folder: PrivateFolder | None = disk_store()
        elif Path(where).expanduser().is_dir():
            folder = CacheDirectory(Path(where).expanduser())
        else:
            raise typer.BadParameter(
                f"--in is {where}; give 'store', 'splits', or a directory "
                "that exists"
            )
        if folder is not None:
            folder.entries()
    except OSError as error:
        raise typer.BadParameter(
            f"the cache cannot be used: {error}"
        ) from error
    if folder is None:
        raise typer.BadParameter(
            "HAPI_CACHE_DIR is empty, so that no split is cached on this host"
        )
    return folder


def _facts(entry: Entry, *names: str) -> dict[str, str]:
    from hapi_client.caching.row_map import read_facts

    facts = read_facts(entry.path)
    return {name: str(facts.get(name, "(damaged)")) for name in names}


def _utc(seconds: float) -> str:
    time = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return time.replace(tzinfo=None).isoformat(timespec="seconds")


def _list_folder(
    folder: PrivateFolder, is_split: bool, json_path: JsonOutput | None
) -> None:
    columns = ("key",) if is_split else ("container", "model", "images")
    entries = [
        {
            **(
                {"key": entry.key}
                if is_split
                else {"path": str(entry.path), **_facts(entry, *columns)}
            ),
            "length_bytes": entry.length_bytes,
            "used": _utc(entry.used),
        }
        for entry in folder.entries()
    ]
    if not entries:
        typer.echo(f"nothing is cached in {folder.path}", err=True)
    print_table(
        (*columns, "bytes", "last used"),
        [
            (
                *(str(entry[name])[: _WIDTHS.get(name)] for name in columns),
                bytes_text(int(str(entry["length_bytes"]))),
                str(entry["used"]),
            )
            for entry in entries
        ],
    )
    write_json(json_path, {"entries": entries})


def _purge_folder(
    folder: PrivateFolder,
    is_sure: bool,
    json_path: JsonOutput | None,
) -> None:
    sizes = [entry.length_bytes for entry in folder.entries()]
    if sizes and not is_sure:
        typer.confirm(
            f"Delete all of {folder.path} ({len(sizes)} entries, "
            f"{bytes_text(sum(sizes))})?",
            abort=True,
            err=True,
        )
    deleted, in_use = folder.purge()
    text = f"{deleted} deleted"
    if in_use:
        text += f", {in_use} in use by running jobs"
    typer.echo(text, err=True)
    write_json(json_path, {"deleted": deleted, "in_use": in_use})
