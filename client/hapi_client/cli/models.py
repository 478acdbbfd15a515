"""``hapi models``: the model packages stored in an account."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, TypeAlias

import typer

from hapi_client.cli.context import (
    Columns,
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.parse import parse_age
from hapi_client.cli.publish import publish_command
from hapi_client.model.package_store import (
    DEFAULT_MODELS_CONTAINER,
    StoredPackage,
    delete_package,
    list_packages,
    older_than,
    read_all_metadata,
    select_packages,
)
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.package.metadata import PackageMetadata
from hapi_splitter.units import bytes_text

SHOWN_DIGITS = 12

app = typer.Typer(
    no_args_is_help=True,
    help="List, delete and publish the model packages in your account.",
)
app.command("publish")(publish_command)

Container: TypeAlias = Annotated[
    str,
    typer.Option(
        "--container", metavar="NAME", help="Container of the packages."
    ),
]


@app.command("ls")
def ls_command(
    context: typer.Context,
    container: Container = DEFAULT_MODELS_CONTAINER,
    json_path: JsonPath = None,
) -> None:
    """List the packages, latest first.

    Only the header of each package is read.

    Examples:

        hapi models ls

        hapi models ls --container shared-models --json models.json

    Keys of --json: packages (digest, bytes, stored, sample, output, cuts,
    ends_with, producer, problem). sample and output are shapes; problem is
    the reason if the others are null.
    """
    with connect(context) as connection:
        packages = list_packages(connection, container)
        read = list(read_all_metadata(connection, container, packages))
    facts = [_facts(*row) for row in zip(packages, read, strict=True)]
    columns: Columns = {
        "package": lambda facts: facts["digest"][:SHOWN_DIGITS],
        "bytes": "bytes",
        "stored": lambda facts: facts["stored"].partition("T")[0],
        "sample": "sample",
        "cuts": "cuts",
        "output": "output",
        "ends with": "ends_with",
        "producer": _producer_text,
    }
    print_facts(facts, columns)
    write_json(json_path, {"packages": facts})


def _producer_text(facts: Mapping[str, Any]) -> str:
    if facts["problem"] is not None:
        return str(facts["problem"])
    return f"torch {facts['producer'].get('torch', '?')}"


def _facts(
    package: StoredPackage, metadata: PackageMetadata | HapiError
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "digest": package.digest,
        "bytes": package.info.length_bytes,
        "stored": package.info.stored,
    }
    if isinstance(metadata, HapiError):
        unknown = ("sample", "output", "cuts", "ends_with", "producer")
        return {**facts, **dict.fromkeys(unknown), "problem": str(metadata)}
    return {
        **facts,
        "sample": list(metadata.sample_shape),
        "output": list(metadata.cuts[-1].shape),
        "cuts": len(metadata.cuts),
        "ends_with": metadata.cuts[-1].module,
        "producer": metadata.producer,
        "problem": None,
    }


@app.command("rm")
def rm_command(
    context: typer.Context,
    digests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIGEST…",
            help="Digests of packages, or their first digits.",
        ),
    ] = None,
    all_packages: Annotated[
        bool,
        typer.Option("--all", help="Delete all packages of the container."),
    ] = False,
    age: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Delete packages stored longer ago: 12h, 30d, 8w.",
        ),
    ] = None,
    container: Container = DEFAULT_MODELS_CONTAINER,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Delete packages; a job that needs one stores it again.

    Nothing is deleted if a DIGEST matches no package or several. The time of
    storing is not the time of last use: running jobs fall back to raw reads
    when the worker needs a deleted package.

    Examples:

        hapi models rm 01f1c2 --yes

        hapi models rm --older-than 30d

    Keys of --json: deleted, missing (digests; missing ones were deleted
    meanwhile), bytes.
    """
    if sum((bool(digests), all_packages, age is not None)) != 1:
        raise typer.BadParameter("give DIGESTs, or --all, or --older-than")
    oldest = None if age is None else parse_age(age)
    with connect(context) as connection:
        packages = list_packages(connection, container)
        if digests:
            packages = select_packages(packages, digests)
        elif oldest is not None:
            packages = older_than(packages, oldest, datetime.now(timezone.utc))
        if packages and not yes:
            _confirm(packages, container)
        facts = _delete(connection, container, packages)
    write_json(json_path, facts)


def _delete(
    connection: Connection, container: str, packages: list[StoredPackage]
) -> dict[str, Any]:
    deleted: list[str] = []
    missing: list[str] = []
    num_bytes = 0
    with ConsoleReporter() as reporter:
        for package in packages:
            if delete_package(connection, container, package):
                deleted.append(package.digest)
                num_bytes += package.info.length_bytes
            else:
                missing.append(package.digest)
                reporter.note(f"{package.digest} was deleted meanwhile")
        reporter.note(
            f"{len(deleted)} deleted from {container}, {bytes_text(num_bytes)}"
        )
    return {"deleted": deleted, "missing": missing, "bytes": num_bytes}


def _confirm(packages: list[StoredPackage], container: str) -> None:
    """Asks before packages are deleted.

    Raises:
        ClientError: ``bad_configuration`` if standard input is no terminal.
        Abort: if the answer is no.
    """
    num_bytes = sum(package.info.length_bytes for package in packages)
    question = (
        f"delete {len(packages)} packages ({bytes_text(num_bytes)}) from "
        f"{container}?"
    )
    if not sys.stdin.isatty():
        raise ClientError(
            "bad_configuration",
            f"{question} There is no terminal for the answer; give --yes",
        )
    typer.confirm(question, abort=True, err=True)
