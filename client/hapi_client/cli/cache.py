"""``hapi cache``: features that the store keeps in an account."""

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
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.cache_admin import FeatureCache
from hapi_splitter.units import bytes_text

app = typer.Typer(
    no_args_is_help=True,
    help="Features that the store keeps in your account (X-Hapi-Cache).",
)

Source: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONTAINER[/OBJECT or PREFIX]]",
        help="Only features of these objects; swift:// before it is allowed.",
    ),
]


@app.command("ls")
def ls_command(
    context: typer.Context, source: Source = None, json_path: JsonPath = None
) -> None:
    """List what is kept, object by object; times are UTC.

    Examples:

        hapi cache ls

        hapi cache ls swift://photos/train

        hapi cache ls photos/train/shard-000000.tar

    Keys of --json: entries (source, key, length_bytes, stored).
    """
    with connect(context) as connection:
        entries = [
            entry
            for page in FeatureCache(connection).pages(source)
            for entry in page.entries
        ]
    if not entries:
        typer.echo(_nothing(source), err=True)
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
    """Say how much is kept, in all and container by container.

    The figures in all are those of Swift's container, which knows of changes
    after some seconds.

    Example:

        hapi cache stats

    Keys of --json: entries, length_bytes, containers (name, entries,
    length_bytes).
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    total = (0, 0)
    with connect(context) as connection:
        for page in FeatureCache(connection).pages():
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
        bool, typer.Option("--yes", "-y", help="Do not ask.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Delete what is kept; it is computed again when it is asked for.

    Without a source it is all of the account, and is asked about first.
    Exits with 1 where nothing is kept of a source.

    Examples:

        hapi cache purge swift://photos/train

        hapi cache purge --yes

    Keys of --json: deleted.
    """
    deleted = 0
    with connect(context) as connection, ConsoleReporter() as reporter:
        cache = FeatureCache(connection)
        if source is None and not is_sure:
            _ask(cache)
        for count in cache.purge(source):
            deleted += count
            if count:
                reporter.note(f"{deleted} deleted")
        if not deleted:
            reporter.note(_nothing(source))
    write_json(json_path, {"deleted": deleted})
    if source is not None and not deleted:
        raise typer.Exit(1)


def _ask(cache: FeatureCache) -> None:
    known = next(cache.pages())
    typer.confirm(
        "Delete all that is kept in the account "
        f"(entries: {known.num_entries}, {bytes_text(known.length_bytes)})?",
        abort=True,
        err=True,
    )


def _nothing(source: str | None) -> str:
    what = f" of {source}" if source else ""
    return f"nothing is kept{what}"
