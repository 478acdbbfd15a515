"""``hapi models``: the model packages stored in an account."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from hapi_client.cli.options import command_with, complete_model, option
from hapi_client.cli.parse import parse_age
from hapi_client.model.package_store import (
    DEFAULT_MODELS_CONTAINER,
    StoredPackage,
    delete_package,
    list_packages,
    older_than,
    read_all_metadata,
    select_packages,
)
from hapi_client.model.torchvision_names import classifier_names
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.capabilities import model_library
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.package.metadata import PackageMetadata
from hapi_splitter.units import bytes_text

SHOWN_DIGITS = 12
EVERYBODY = ".r:*"
EXIT_FAILURE = 1

app = typer.Typer(
    no_args_is_help=True,
    help="List, delete and publish the model packages in your account.",
)

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


PUBLISHED_COLUMNS: Columns = {
    "model": "model",
    "freeze": lambda package: str(package["freeze"] or ""),
    "package": lambda package: (package["digest"] or "")[:SHOWN_DIGITS],
    "bytes": lambda package: (
        bytes_text(package["bytes"]) if package["digest"] else ""
    ),
    "state": lambda package: package["problem"] or package["state"],
}


@dataclass(frozen=True)
class PublishOptions:
    """Options of ``hapi models publish``."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL…",
            help="Names of torchvision models, or timm:NAME.",
            autocompletion=complete_model,
        ),
    ] = None
    all_torchvision: bool = option(
        "All classifiers of torchvision.", False, names=("--all-torchvision",)
    )
    freeze: list[str] | None = option(
        "Last frozen module, or several separated by commas; repeat the "
        "option for more packages of each model. Default: all but the last "
        "linear layer.",
        metavar="MODULE",
    )
    weights: str = option(
        "Weights of torchvision models. timm's are part of NAME.",
        "DEFAULT",
        metavar="NAME",
    )
    container: str | None = option(
        "Container of your account. Default: the cluster's model library, if "
        "it is in your account.",
        metavar="NAME",
    )
    read_acl: str | None = option(
        "Set the container's X-Container-Read. Default: .r:* (everybody) for "
        "a new container, else unchanged.",
        metavar="ACL",
    )
    dry_run: bool = option(
        "Publish nothing; show the sizes.", False, names=("--dry-run",)
    )
    json_path: JsonPath = None


@app.command("publish")
@command_with(PublishOptions)
def publish_command(context: typer.Context, options: PublishOptions) -> None:
    """Publish packages of pretrained models, for jobs of other accounts.

    Jobs look for a package in the model library (option model_library of the
    filter) before they upload it. They find it if they use the same weights,
    freeze point and transform, and the same releases of torch and torchvision
    as this command. The transform is that of the weights.

    Packages that are already published are skipped: run the command again
    after an interruption. A model that fails does not stop the others; the
    command then exits with 1. Weights are downloaded unless they are cached,
    also by --dry-run.

    Examples:

        hapi models publish resnet18 vit_b_16

        hapi models publish timm:vit_small_patch16_224.augreg_in21k --dry-run

        hapi models publish --all-torchvision --container models

    Keys of --json: account, container, read_acl (null if the container does
    not exist); packages (model, freeze, state, digest, bytes, problem). state
    is published, present (already), missing (with --dry-run) or failed.
    """
    names = list(options.models or ())
    if options.all_torchvision:
        names += classifier_names()
    if not names:
        raise typer.BadParameter("give MODELs, or --all-torchvision")
    names = list(dict.fromkeys(names))
    with connect(context) as connection, ConsoleReporter() as reporter:
        library = _library(connection)
        account = connection.account
        target = options.container or _own_library(library, account)
        acl = connection.read_acl(target)
        is_new_acl = acl is None or options.read_acl is not None
        if is_new_acl and not options.dry_run:
            acl = EVERYBODY if options.read_acl is None else options.read_acl
            connection.put_container(target, acl)
        # Imported here: torch takes seconds.
        from hapi_client.model.publisher import FAILED, Publisher

        publisher = Publisher(
            connection,
            target,
            options.weights,
            reporter,
            dry_run=options.dry_run,
        )
        packages = []
        for number, name in enumerate(names, 1):
            reporter.note(f"{name} ({number} of {len(names)})")
            for package in publisher.publish(name, options.freeze or [None]):
                packages.append(asdict(package))
                reason = package.problem or package.state
                reporter.note(f"  {package.freeze}: {reason}")
    print_facts(packages, PUBLISHED_COLUMNS, right=False)
    if library != (account, target):
        typer.echo(
            "Jobs will look there if the filter of the proxies has "
            f"model_library = {account}/{target}"
        )
    facts = {"account": account, "container": target, "read_acl": acl}
    write_json(options.json_path, {**facts, "packages": packages})
    if any(package["state"] == FAILED for package in packages):
        raise typer.Exit(EXIT_FAILURE)


def _library(connection: Connection) -> tuple[str, str] | None:
    try:
        return model_library(connection.require_hapi(any_version=True))
    except HapiError:
        return None  # a proxy without the filter, so far


def _own_library(library: tuple[str, str] | None, account: str) -> str:
    """Returns the container of the library, which the account must own.

    Raises:
        ClientError: ``bad_configuration`` naming the remedy.
    """
    if library is None:
        raise ClientError(
            "bad_configuration",
            "the cluster names no model library (model_library of the "
            "filter); name a container of your account by --container",
        )
    if library[0] != account:
        raise ClientError(
            "bad_configuration",
            f"the model library {'/'.join(library)} is not in your account "
            f"{account}; log in to its account, or give --container",
        )
    return library[1]
