"""``hapi models publish``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from hapi_client.cli.context import (
    Columns,
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.options import command_with, complete_model, option
from hapi_client.model.torchvision_names import classifier_names
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.capabilities import model_library
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.units import bytes_text

EVERYBODY = ".r:*"
EXIT_FAILURE = 1
SHOWN_DIGITS = 12
COLUMNS: Columns = {
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
    print_facts(packages, COLUMNS, right=False)
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
