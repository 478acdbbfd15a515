"""``hapi cluster``: runs Swift on this machine, in one directory."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hapi_client.cli.context import JsonPath, write_json
from hapi_client.cli.options import command_with, one_of, option

app = typer.Typer(
    help="Run a Swift cluster on this machine, without root.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path, typer.Argument(help="Directory of the cluster.", metavar="DIR")
]
KeyValues = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Option of a configuration file; KEY= for its default. "
        "Repeatable.",
    ),
]


@dataclass(frozen=True)
class StartOptions:
    """Options of ``hapi cluster start`` and ``run``; None as last time."""

    directory: Directory
    processes: bool | None = option(
        "Run each server in its own process. Default: no."
    )
    worker: bool | None = option("Also run hapi-worker. Default: yes.")
    hapi_filter: bool | None = option(
        "Add the hapi filter to the proxy. Default: yes.",
        names=("--hapi/--no-hapi",),
    )
    cache: bool | None = option("Let the filter cache features. Default: yes.")
    host: str | None = option("Address of the proxy. Default: 127.0.0.1.")
    port: int | None = option("Port of the proxy. Default: a free port.")
    layout: str | None = option(
        "Storage layout: single, replicated, ec or mixed; fixed when the "
        "cluster is created.",
        autocompletion=one_of("single", "replicated", "ec", "mixed"),
    )
    object_servers: int | None = option(
        "Object servers, each a process. Default: 1, in the process of all "
        "servers."
    )
    object_workers: int | None = option(
        "Object servers that compute features next to their disks, each with "
        "a worker. Default: 0."
    )
    encryption: bool | None = option("Encrypt stored data. Default: no.")
    worker_option: KeyValues = None
    filter_option: KeyValues = None
    object_option: KeyValues = None


@app.command(
    "run",
    help="""Run the cluster in DIR in the foreground, until Ctrl-C or SIGTERM.

    Directory and options are those of hapi cluster start. If a server ends,
    all end, and the error has the last lines of its log.

    Example:

        hapi cluster run ./swift
    """,
)
@app.command()
@command_with(StartOptions)
def start(context: typer.Context, options: StartOptions) -> None:
    """Start the cluster in DIR and return when all servers answer.

    DIR is created if it does not exist. A restarted cluster has its old data,
    and the options of its last start where none are given. --worker-option
    sets options of hapi-worker.conf, --filter-option those of the filter
    hapi, --object-option those of the filter hapi_object.

    Examples:

        hapi cluster start ./swift

        hapi cluster start ./swift --port 8080 --layout mixed
        --worker-option device=cpu --filter-option max_multi_objects=100

        hapi cluster start ./swift --layout replicated --no-worker
        --object-servers 3 --object-workers 2
    """
    from hapi_cluster import Cluster

    directory = options.directory
    with _readable_errors():
        settings = _settings(Cluster(directory).status(), asdict(options))
        if context.info_name == "run":
            Cluster.run(directory, partial(_print_use, directory), **settings)
            typer.echo("Stopped.")
        else:
            cluster = Cluster.start(directory, **settings)
            _print_use(directory, cluster.status())


def _settings(last: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a start: if not given, those of the last start."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        kind = name.removesuffix("_option")
        if kind != name:
            options = {"cache": "true"} if kind == "filter" else {}
            options |= last.get(f"{name}s", {})
            options |= _parse_pairs(value or [])
            settings[f"{name}s"] = {k: v for k, v in options.items() if v}
        elif name not in ("directory", "cache"):
            settings[name] = last.get(name) if value is None else value
    if given["cache"] is not None:
        settings["filter_options"]["cache"] = str(given["cache"]).lower()
    return {k: v for k, v in settings.items() if v is not None}


def _print_use(directory: Path, state: dict[str, Any]) -> None:
    for warning in state["warnings"]:
        typer.echo(f"Warning: {warning}", err=True)
    typer.echo(f"Running: {state['proxy_url']}")
    quoted = shlex.quote(str(directory))
    typer.echo(f'Use it:  eval "$(hapi cluster env {quoted})"')


@app.command()
def stop(directory: Directory) -> None:
    """Stop the cluster in DIR and keep its data.

    Example:

        hapi cluster stop ./swift
    """
    from hapi_cluster import Cluster

    with _readable_errors():
        stopped = Cluster(directory).stop()
        typer.echo("Stopped." if stopped else "The cluster was not running.")


@app.command()
def status(
    directory: Directory,
    json_path: JsonPath = None,
) -> None:
    """Show the state of the cluster in DIR; exit with 1 unless it runs.

    Examples:

        hapi cluster status ./swift

        hapi cluster status ./swift --json -

    Keys of --json: directory, status (running, starting, stopped, died or
    absent). If it was ever started also proxy_url, auth_url, layout, children
    (by name: pid, log), supervisor_pid, warnings and the options of the
    start. If one of its servers ended: error.
    """
    from hapi_cluster import Cluster

    with _readable_errors():
        state = Cluster(directory).status()
        _print_status(state)
        write_json(json_path, state)
    if state["status"] != "running":
        raise typer.Exit(1)


@app.command()
def env(directory: Directory) -> None:
    """Print the credentials as shell exports, for swift and hapi commands.

    Example:

        eval "$(hapi cluster env ./swift)"
    """
    from hapi_cluster import Cluster

    with _readable_errors():
        values = Cluster.attach(directory).environment
        words = [f"{k}={shlex.quote(v)}" for k, v in values.items()]
        typer.echo("export " + " ".join(words))


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Prints an error of the cluster with its remedy, and exits with 1."""
    from hapi_cluster import ClusterError

    try:
        yield
    except ClusterError as error:
        typer.echo(f"Error: {error.message}\n{error.remedy}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _parse_pairs(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{key!r} is not KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _print_status(state: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    rows = {
        "directory": state["directory"],
        "status": state["status"],
        "url": state.get("proxy_url"),
        "auth": state.get("auth_url"),
        "layout": state.get("layout"),
        "worker socket": state.get("worker_socket"),
        "supervisor": state.get("supervisor_pid"),
    }
    for name, child in state.get("children", {}).items():
        rows[name] = f"{child['pid'] or 'not running'}, {child['log']}"
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    Console(soft_wrap=True).print(table)
    if "error" in state:
        typer.echo(f"Error: {state['error']}", err=True)
    for warning in state.get("warnings", []):
        typer.echo(f"Warning: {warning}", err=True)
