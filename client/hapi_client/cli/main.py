"""The ``hapi`` command."""

from __future__ import annotations

import logging
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from hapi_client.cli import cache, cluster, worker
from hapi_client.cli.context import Login
from hapi_client.cli.demo import demo_command
from hapi_client.cli.index import index_command, ls_command
from hapi_client.cli.plan import plan_command
from hapi_client.cli.train import train_command
from hapi_client.cli.upload import upload_command
from hapi_protocol.errors import HapiError

EXIT_FAILURE = 1
EXIT_TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Transfer learning on data in OpenStack Swift, with the frozen "
    "layers computed next to the data.",
)
app.command("upload")(upload_command)
app.command("index")(index_command)
app.command("ls")(ls_command)
app.command("plan")(plan_command)
app.command("train")(train_command)
app.command("demo")(demo_command)
app.add_typer(cache.app, name="cache")
app.add_typer(cluster.app, name="cluster")
app.add_typer(worker.app, name="worker")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hapi {version('swift-hapi')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    auth_url: Annotated[
        str | None,
        typer.Option("--auth", "-A", help="Auth URL; else ST_AUTH."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-U", help="User; else ST_USER.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-K", help="Key; else ST_KEY.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what is done.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Credentials come from -A, -U, -K, from ST_AUTH, ST_USER, ST_KEY, or
    from OS_AUTH_URL, OS_USERNAME, OS_PASSWORD, OS_PROJECT_NAME.
    """
    context.obj = Login(auth_url, user, key)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    if not verbose:
        # Its lines on each retry say what ours say, at greater length.
        logging.getLogger("urllib3").setLevel(logging.ERROR)


def main() -> None:
    """Runs a command; errors become one line and an exit status.

    Exits with 1 after an error of ours, 2 after a wrong command line,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    # Unwinds, so that temporary files and a demo's Swift are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        app()
    except HapiError as error:
        print(f"hapi: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
