"""``hapi models publish``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.cli.options import complete_model
from hapi_client.model.torchvision_names import classifier_names
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.capabilities import model_library
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError, HapiError
from hapi_splitter.units import bytes_text

if TYPE_CHECKING:
    from hapi_client.model.publisher import PublishedPackage

EVERYBODY = ".r:*"
EXIT_FAILURE = 1
SHOWN_DIGITS = 12


def publish_command(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL…",
            help="Names of torchvision models, or timm:NAME.",
            autocompletion=complete_model,
        ),
    ] = None,
    all_torchvision: Annotated[
        bool,
        typer.Option(
            "--all-torchvision", help="All classifiers of torchvision."
        ),
    ] = False,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Last frozen module, or several separated by commas; repeat "
            "the option for more packages of each model. Default: all but "
            "the last linear layer.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Weights of torchvision models. timm's are part of NAME.",
        ),
    ] = "DEFAULT",
    container: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Container of your account. Default: the cluster's model "
            "library, if it is in your account.",
        ),
    ] = None,
    read_acl: Annotated[
        str | None,
        typer.Option(
            metavar="ACL",
            help="Set the container's X-Container-Read. Default: .r:* "
            "(everybody) for a new container, else unchanged.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Publish nothing; show the sizes."),
    ] = False,
    json_path: JsonPath = None,
) -> None:
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
    names = list(models or ())
    if all_torchvision:
        names += classifier_names()
    if not names:
        raise typer.BadParameter("give MODELs, or --all-torchvision")
    names = list(dict.fromkeys(names))
    with connect(context) as connection, ConsoleReporter() as reporter:
        library = _library(connection)
        account = connection.account
        target = container or _own_library(library, account)
        acl = connection.read_acl(target)
        if not dry_run and (acl is None or read_acl is not None):
            acl = EVERYBODY if read_acl is None else read_acl
            connection.put_container(target, acl)
        # Imported here: torch takes seconds.
        from hapi_client.model.publisher import FAILED, Publisher

        publisher = Publisher(
            connection, target, weights, reporter, dry_run=dry_run
        )
        packages = []
        for number, name in enumerate(names, 1):
            reporter.note(f"{name} ({number} of {len(names)})")
            for each in publisher.publish(name, freeze or [None]):
                packages.append(each)
                reporter.note(f"  {each.freeze}: {each.problem or each.state}")
    _print(packages)
    if library != (account, target):
        typer.echo(
            "Jobs will look there if the filter of the proxies has "
            f"model_library = {account}/{target}"
        )
    facts = {"account": account, "container": target, "read_acl": acl}
    rows = [asdict(each) for each in packages]
    write_json(json_path, {**facts, "packages": rows})
    if any(each.state == FAILED for each in packages):
        raise typer.Exit(EXIT_FAILURE)


def _print(packages: Sequence[PublishedPackage]) -> None:
    print_table(
        ("model", "freeze", "package", "bytes", "state"),
        [
            (
                each.model,
                str(each.freeze or ""),
                (each.digest or "")[:SHOWN_DIGITS],
                bytes_text(each.bytes) if each.digest else "",
                each.problem or each.state,
            )
            for each in packages
        ],
        right=False,
    )


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
