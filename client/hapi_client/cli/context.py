"""The connection, tables and JSON files of all commands."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from hapi_client.progress import is_terminal
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_protocol.errors import ClientError
from hapi_protocol.printable import printable
from hapi_splitter.units import bytes_text

Columns: TypeAlias = Mapping[str, str | Callable[[Mapping[str, Any]], str]]
PIPE_COLUMNS = 1000
"""Beyond the width of any table; rich fills no more of it than it needs."""
OUTPUT = "Output"
"""Title of a group of options in --help."""


def checked_path(path: Path | None) -> Path | None:
    """Checks, before any work, that a file can be written.

    Raises:
        BadParameter: naming the path.
    """
    if path is None:
        return None
    folder = path.parent
    if path.is_dir() or str(path) == "-":
        raise typer.BadParameter(f"{path} is not a file name")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{folder} is not a writable folder")
    return path


class JsonOutput(NamedTuple):
    """The destination of a result as JSON.

    Attributes:
        path: path of a file; None for the standard output.
        stream: standard output, as it was when the command began.
    """

    path: Path | None
    stream: TextIO


def _json_output(text: str) -> JsonOutput:
    path = None if text == "-" else checked_path(Path(text))
    return JsonOutput(path, sys.stdout)


def _redirect_prints(
    context: typer.Context, output: JsonOutput | None
) -> JsonOutput | None:
    """Sends prints to standard error if JSON goes to standard output."""
    if output is not None and output.path is None:
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return output


def _json_option(panel: str | None) -> Any:
    return typer.Option(
        "--json",
        metavar="PATH",
        help='Also write the result as JSON to PATH. With "-", JSON goes to '
        "stdout and everything else to stderr.",
        parser=_json_output,
        callback=_redirect_prints,
        rich_help_panel=panel,
    )


JsonPath: TypeAlias = Annotated[JsonOutput | None, _json_option(None)]
# For commands whose other options are grouped, too.
GroupedJsonPath: TypeAlias = Annotated[JsonOutput | None, _json_option(OUTPUT)]
DataArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONTAINER[/PREFIX]",
        help="Data set in Swift. The swift:// prefix is optional.",
    ),
]


@dataclass(frozen=True)
class Login:
    """Credentials, endpoints and TLS settings given on the command line.

    Attributes:
        variables: values by the environment variable that they replace.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    def credentials(self) -> Credentials:
        """Reads credentials from the command line and the environment.

        Raises:
            ClientError: ``bad_configuration`` naming the missing variables.
        """
        environ = {**os.environ, **self.variables}
        cloud = self.variables.get("OS_CLOUD")
        is_v1 = any(name.startswith("ST_") for name in self.variables)
        if is_v1 and cloud:
            raise ClientError(
                "bad_configuration",
                "--os-cloud cannot be combined with --auth, --user and --key",
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
    """Returns the login options of the command line."""
    return context.find_object(Login) or Login()


def connect(context: typer.Context) -> Connection:
    """Creates the connection; no request is sent yet.

    Commands call it before they import torch, which takes seconds.

    Raises:
        ClientError: ``bad_configuration`` if credentials are missing.
    """
    return Connection(find_login(context).credentials())


def check_data(connection: Connection, data: str) -> None:
    """Checks by a short request that a data set has an index.

    Commands call it before they import torch, too.

    Raises:
        HapiError: naming what is there instead.
    """
    # It imports NumPy.
    from hapi_client.data.splits import check_indexes

    check_indexes(connection, data)


def write_json(output: JsonOutput | None, facts: Mapping[str, Any]) -> None:
    """Writes ``facts`` if the command line has ``--json``.

    Raises:
        ClientError: ``bad_configuration`` if the file cannot be written.
    """
    if output is None:
        return
    text = json.dumps(_finite(facts), indent=2, allow_nan=False) + "\n"
    if output.path is None:
        output.stream.write(text)
        output.stream.flush()
        return
    try:
        output.path.write_text(text)
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"the result cannot be written as JSON: {error}",
        ) from error


def _finite(facts: Any) -> Any:
    """Replaces infinite numbers, which JSON does not have, by None."""
    if isinstance(facts, float) and not math.isfinite(facts):
        return None
    if isinstance(facts, Mapping):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(fact) for fact in facts]
    return facts


def say(line: str) -> None:
    """Prints one line to standard output, without wrapping or markup."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(printable(line), markup=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: bool = True,
) -> None:
    """Prints a table to standard output.

    Args:
        columns: titles.
        rows: one text per column.
        right: align all columns but the first to the right.
    """
    # Names of objects may look like markup.
    table_console(markup=False).print(_table(columns, rows, right))


def table_console(**options: Any) -> Console:
    """Returns a console for tables: in a file or pipe they are not cut."""
    is_limited = is_terminal(sys.stdout) or "COLUMNS" in os.environ
    width = None if is_limited else PIPE_COLUMNS
    return Console(highlight=False, width=width, **options)


def print_facts(
    facts: Iterable[Mapping[str, Any]], columns: Columns, right: bool = True
) -> None:
    """Prints JSON objects as the rows of a table.

    Args:
        facts: one object per row.
        columns: title of each column, with the key of its value, or a
            function of the object that returns the text.
        right: align all columns but the first to the right.
    """
    print_table(tuple(columns), _cells(facts, columns), right=right)


def titled_table(
    title: str, facts: Iterable[Mapping[str, Any]], columns: Columns
) -> Table:
    """Makes a table of JSON objects; see :func:`print_facts`."""
    table = _table(tuple(columns), _cells(facts, columns))
    table.title, table.title_justify = title, "left"
    return table


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: bool = True
) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        is_right = right and number > 0
        table.add_column(
            column,
            justify="right" if is_right else "left",
            overflow="fold",  # the default replaces ends of words by "…"
        )
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def _cells(
    facts: Iterable[Mapping[str, Any]], columns: Columns
) -> list[list[str]]:
    return [
        [
            column(row) if callable(column) else _cell(column, row[column])
            for column in columns.values()
        ]
        for row in facts
    ]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "?"
    if key.endswith("bytes"):
        return bytes_text(value)
    return shape_text(value) if isinstance(value, list) else str(value)


def shape_text(shape: Sequence[int]) -> str:
    """Formats a shape: ``3x224x224``."""
    return "x".join(map(str, shape))
