"""What all commands share: the connection, tables, JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from hapi_client.connection import Connection
from hapi_client.credentials import Credentials
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


JsonPath: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Also write the result there, as JSON.",
        callback=checked_path,
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
    """The credentials of the command line; None where not given."""

    auth_url: str | None = None
    user: str | None = None
    key: str | None = None

    def connect(self) -> Connection:
        """
        Raises:
            ClientError: ``bad_configuration`` naming what is missing.
        """
        given = (self.auth_url, self.user, self.key)
        if not any(given):
            return Connection(Credentials.from_environment(os.environ))
        environ = {
            **os.environ,
            **{
                variable: value
                for variable, value in zip(
                    ("ST_AUTH", "ST_USER", "ST_KEY"), given, strict=True
                )
                if value
            },
        }
        if not environ.get("ST_AUTH"):
            raise ClientError(
                "bad_configuration",
                "--user and --key need --auth or ST_AUTH",
            )
        return Connection(Credentials.from_environment(environ))


def connect(context: typer.Context) -> Connection:
    """The connection that the command line or environment asks for."""
    login: Login = context.find_object(Login) or Login()
    return login.connect()


def write_json(path: Path | None, facts: Mapping[str, Any]) -> None:
    """Writes ``facts`` to ``path`` unless it is None.

    Raises:
        ClientError: ``bad_configuration`` when that fails.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise ClientError(
            "bad_configuration", f"the result cannot be written: {error}"
        ) from error


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints to standard output; all columns but the first to the right."""
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
