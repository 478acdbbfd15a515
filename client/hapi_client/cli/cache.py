"""``hapi cache``: the features cached in an account."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_splitter.units import bytes_text

app = typer.Typer(
    no_args_is_help=True,
    help="List and delete the features cached in your account.",
)

Source: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONTAINER[/OBJECT or PREFIX]]",
        help="Only features of these objects. The swift:// prefix is "
        "optional.",
    ),
]


@app.command("ls")
def ls_command(
    context: typer.Context, source: Source = None, json_path: JsonPath = None
) -> None:
    """List the cached features of each object; times are UTC.

    Examples:

        hapi cache ls

        hapi cache ls swift://photos/train

        hapi cache ls photos/train/shard-000000.tar

    Keys of --json: entries (source, key, length_bytes, stored).
    """
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
                each.source,
                bytes_text(each.length_bytes),
                each.stored.partition(".")[0],
                each.key[:12],
            )
            for each in entries
        ],
    )
    write_json(json_path, {"entries": [asdict(each) for each in entries]})


@app.command("stats")
def stats_command(context: typer.Context, json_path: JsonPath = None) -> None:
    """Show the size of the cache, in total and by container.

    Swift updates the total some seconds after a change.

    Example:

        hapi cache stats

    Keys of --json: entries, length_bytes, containers (name, entries,
    length_bytes).
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    total = (0, 0)
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
    is_sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Delete cached features; jobs compute them again when needed.

    Without a source, deletes the whole cache of the account after
    confirmation. Exits with 1 if nothing is cached for the source.

    Examples:

        hapi cache purge swift://photos/train

        hapi cache purge --yes

    Keys of --json: deleted.
    """
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
