"""The ``hapi`` command."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version

import typer
from urllib3.exceptions import InsecureRequestWarning

from hapi_client.cli import (
    cache,
    checkpoints,
    cluster,
    device_queue,
    models,
    worker,
)
from hapi_client.cli.context import Login
from hapi_client.cli.demo.command import demo_command
from hapi_client.cli.doctor import doctor_command
from hapi_client.cli.extract import extract_command
from hapi_client.cli.info import info_command
from hapi_client.cli.ls import ls_command
from hapi_client.cli.options import command_with, option
from hapi_client.cli.plan import plan_command
from hapi_client.cli.rendezvous import rendezvous_command
from hapi_client.cli.report import report_command
from hapi_client.cli.train import train_command
from hapi_client.cli.upload import index_command, upload_command
from hapi_client.reports.terminal import TqdmLogHandler
from hapi_protocol.errors import HapiError
from hapi_protocol.printable import LineFormatter, printable

EXIT_FAILURE = 1
EXIT_TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Transfer learning on data in OpenStack Swift, with the frozen "
    "layers computed next to the data.\n\nThe first complete set of "
    "credentials is used: the options --auth, --user, --key, or --os-cloud; "
    "ST_AUTH, ST_USER, ST_KEY; OS_CLOUD; OS_AUTH_URL with OS_USERNAME, "
    "OS_PASSWORD, OS_PROJECT_NAME, or with OS_APPLICATION_CREDENTIAL_ID and "
    "_SECRET.\n\nExit status: 0 done; 1 failed, or a check has failed; "
    "2 wrong command line; 130 Ctrl-C; 143 SIGTERM.",
)
app.command("upload")(upload_command)
app.command("index")(index_command)
app.command("ls")(ls_command)
app.command("info")(info_command)
app.command("plan")(plan_command)
app.command("train")(train_command)
app.command("extract")(extract_command)
app.command("report")(report_command)
app.command("rendezvous")(rendezvous_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.add_typer(cache.app, name="cache")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(device_queue.app, name="device-queue")
app.add_typer(models.app, name="models")
app.add_typer(cluster.app, name="cluster")
app.add_typer(worker.app, name="worker")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hapi {version('swift-hapi')}")
        raise typer.Exit


@dataclass(frozen=True)
class RootOptions:
    """Options before a command.

    Those of the login replace the environment variables of the same names.
    """

    st_auth: str | None = option(
        "Auth URL. Default: $ST_AUTH.", names=("--auth", "-A")
    )
    st_user: str | None = option(
        "User. Default: $ST_USER.", names=("--user", "-U")
    )
    st_key: str | None = option(
        "Key. Default: $ST_KEY.", names=("--key", "-K")
    )
    os_cloud: str | None = option(
        "Name of a cloud in clouds.yaml. Default: $OS_CLOUD."
    )
    os_region_name: str | None = option(
        "Keystone region. Default: $OS_REGION_NAME."
    )
    os_interface: str | None = option(
        "Endpoint: public, internal or admin. Default: $OS_INTERFACE or "
        "$OS_ENDPOINT_TYPE."
    )
    os_cacert: str | None = option("CA bundle for TLS. Default: $OS_CACERT.")
    os_cert: str | None = option("TLS client certificate. Default: $OS_CERT.")
    os_key: str | None = option("Key of --os-cert. Default: $OS_KEY.")
    os_insecure: bool = option(
        "Do not verify TLS certificates (insecure). Default: $OS_INSECURE.",
        False,
        names=("--insecure",),
    )
    verbose: bool = option("Log each step.", False, names=("--verbose", "-v"))
    version: bool = option(
        "Show the version and exit.",
        False,
        names=("--version",),
        callback=_print_version,
        is_eager=True,
    )


@app.callback()
@command_with(RootOptions)
def root(context: typer.Context, options: RootOptions) -> None:
    """Reads the options before a command."""
    variables = {
        name.upper(): str(value)
        for name, value in asdict(options).items()
        if name.startswith(("st_", "os_")) and value
    }
    context.obj = Login(variables)
    # The connection warns once itself.
    warnings.simplefilter("ignore", InsecureRequestWarning)
    handler = TqdmLogHandler()
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        handlers=[handler],
    )
    if not options.verbose:
        # Its warnings on each retry repeat ours at greater length.
        logging.getLogger("urllib3").setLevel(logging.ERROR)


def _end(*_: object) -> None:
    # A second one must not break off the end, or the interpreter's own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)


def main() -> None:
    """Runs a command; errors become one line and an exit status.

    Exits with 1 after a ``HapiError``, 2 after a wrong command line,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    # The exception unwinds, so temporary files and a demo's Swift go away.
    signal.signal(signal.SIGTERM, _end)
    try:
        # The shell asks for completions by this name, however we were run.
        app(prog_name="hapi")
    except HapiError as error:
        print(f"hapi: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
