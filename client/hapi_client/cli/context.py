"""What all commands share: the connection, tables, JSON files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_protocol.errors import ClientError


def checked_path(path: Path | None) -> Path | None:
    """Refuses before any work a path that could not be written after it.

    Raises:
        BadParameter: naming it.
    """
    if path is None:
        return None
    folder = path.parent
    if path.is_dir() or str(path) == "-":
        raise typer.BadParameter(f"{path} is no file name")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{folder} is no folder one can write to")
    return path


@dataclass(frozen=True)
class JsonOutput:
    """Where a result goes as JSON.

    Attributes:
        path: of a file; None for the stream.
        stream: standard output, as it was when the command began.
    """

    path: Path | None
    stream: TextIO

    def write(self, text: str) -> None:
        """
        Raises:
            ClientError: ``bad_configuration`` when that fails.
        """
        if self.path is None:
            self.stream.write(text)
            self.stream.flush()
            return
        try:
            self.path.write_text(text)
        except OSError as error:
            raise ClientError(
                "bad_configuration", f"the result cannot be written: {error}"
            ) from error


def _json_output(text: str) -> JsonOutput:
    path = None if text == "-" else checked_path(Path(text))
    return JsonOutput(path, sys.stdout)


def _free_standard_output(
    context: typer.Context, output: JsonOutput | None
) -> JsonOutput | None:
    """Where JSON goes to standard output, all else goes to standard error."""
    if output is not None and output.path is None:
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return output


JsonPath: TypeAlias = Annotated[
    JsonOutput | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Also write the result there, as JSON; - is standard output, "
        "and all else goes to standard error then.",
        parser=_json_output,
        callback=_free_standard_output,
    ),
]
DataArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONTAINER[/PREFIX]",
        help="Where the data set lies; swift:// before it is allowed.",
    ),
]


@dataclass(frozen=True)
class Login:
    """What the command line says of credentials, endpoints and TLS.

    Attributes:
        given: by environment variable, as if it had been set there.
    """

    given: Mapping[str, str] = field(default_factory=dict)

    def credentials(self) -> Credentials:
        """
        Raises:
            ClientError: ``bad_configuration`` naming what is missing.
        """
        environ = {**os.environ, **self.given}
        cloud = self.given.get("OS_CLOUD")
        is_v1 = any(name.startswith("ST_") for name in self.given)
        if is_v1 and cloud:
            raise ClientError(
                "bad_configuration",
                "--os-cloud goes without --auth, --user and --key",
            )
        if is_v1 and not environ.get("ST_AUTH"):
            raise ClientError(
                "bad_configuration",
                "--user and --key need --auth or ST_AUTH",
            )
        if cloud:
            return Credentials.from_cloud(cloud, environ)
        return Credentials.from_environment(environ)


def find_login(context: typer.Context) -> Login:
    """What the command line says; empty where it says nothing."""
    return context.find_object(Login) or Login()


def connect(context: typer.Context) -> Connection:
    """The connection that the command line or environment asks for."""
    return Connection(find_login(context).credentials())


def write_json(output: JsonOutput | None, facts: Mapping[str, Any]) -> None:
    """Writes ``facts`` where the command line says, if it does.

    Raises:
        ClientError: ``bad_configuration`` when that fails.
    """
    if output is not None:
        text = json.dumps(_finite(facts), indent=2, allow_nan=False)
        output.write(text + "\n")


def _finite(facts: Any) -> Any:
    """JSON has no word for a loss that has become infinite: null."""
    if isinstance(facts, float) and not math.isfinite(facts):
        return None
    if isinstance(facts, Mapping):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(each) for each in facts]
    return facts


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: bool = True,
) -> None:
    """Prints to standard output.

    Args:
        columns: their titles.
        rows: a text for each column.
        right: all columns but the first stand to the right.
    """
    table = Table()
    for number, column in enumerate(columns):
        is_right = right and number > 0
        table.add_column(column, justify="right" if is_right else "left")
    for row in rows:
        table.add_row(*row)
    # Names of objects are no markup.
    Console(highlight=False, markup=False).print(table)
