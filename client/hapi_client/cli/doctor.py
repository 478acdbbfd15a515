"""``hapi doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hapi_client.cli.context import (
    JsonOutput,
    JsonPath,
    find_login,
    table_console,
    write_json,
)
from hapi_client.doctor.check_runner import (
    FAILURE,
    OK,
    SKIPPED,
    WARNING,
    Finding,
)
from hapi_client.doctor.node_checks import node_findings
from hapi_client.doctor.pushdown_checks import DEFAULT_SECONDS, findings
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.printable import printable
from hapi_splitter.units import count_text

EXIT_FAILURE = 1
_COLORS = {OK: "green", WARNING: "yellow", FAILURE: "red", SKIPPED: ""}
_ORDER = {state: number for number, state in enumerate(_COLORS)}


def doctor_command(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Argument(
            metavar="[CONTAINER[/PREFIX]]",
            help="Also check this data set. The swift:// prefix is optional.",
        ),
    ] = "",
    models_container: Annotated[
        str,
        typer.Option(metavar="NAME", help="Container of the model packages."),
    ] = DEFAULT_MODELS_CONTAINER,
    nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check the object servers instead, as this "
            "proxy-server.conf asks them. For operators, on a proxy's host.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Timeout of one HTTP request, in seconds.",
        ),
    ] = DEFAULT_SECONDS,
    json_path: JsonPath = None,
) -> None:
    """Check everything that push-down needs, and name the remedies.

    Prints one line per check: ok, warning, failure with its remedy, or
    skipped because an earlier check failed; with --nodes, a table of the
    object servers, each of which tries to take a model. A shard of one sample
    is stored in the container of the model packages (created if needed),
    processed by the worker and deleted again. Exits with 1 if a check failed.

    Examples:

        hapi doctor

        hapi --os-cloud lab doctor swift://photos/train

        hapi doctor --nodes /etc/swift/proxy-server.conf

    Keys of --json: ok; checks (check, state, found, remedy, trans_id). Names
    of the checks: credentials, auth, storage_url, account, filter, versions,
    limits, cache, places, library, models, worker; for a data set: index,
    read, list, etags; with --nodes: the address of each object server.
    """
    if nodes is not None:
        _report(node_findings(nodes), json_path, _print_table)
        return
    checked = findings(
        lambda: find_login(context).credentials(),
        parse_location(data) if data else None,
        models_container,
        timeout,
    )
    _report(checked, json_path, _print_lines)


def _report(
    checked: Iterable[Finding],
    json_path: JsonOutput | None,
    show: Callable[[Iterable[Finding]], list[Finding]],
) -> None:
    shown = show(checked)
    counts = Counter(finding.state for finding in shown)
    typer.echo(
        f"{counts[OK]} ok, {count_text(counts[WARNING], 'warning')}, "
        f"{count_text(counts[FAILURE], 'failure')}, {counts[SKIPPED]} skipped"
    )
    is_ok = not counts[FAILURE]
    checks = [asdict(finding) for finding in shown]
    write_json(json_path, {"ok": is_ok, "checks": checks})
    if not is_ok:
        raise typer.Exit(EXIT_FAILURE)


def _print_lines(checked: Iterable[Finding]) -> list[Finding]:
    """Prints each finding when it is made."""
    return [_print(finding) for finding in checked]


def _print_table(checked: Iterable[Finding]) -> list[Finding]:
    """Prints findings by object server, the bad ones last."""
    ordered = sorted(checked, key=lambda f: (_ORDER[f.state], f.check))
    table = Table("object server", "state", "found", "remedy")
    for finding in ordered:
        texts = map(printable, (finding.check, finding.state, finding.found))
        table.add_row(*texts, finding.remedy, style=_COLORS[finding.state])
    table_console().print(table)
    return ordered


def _print(finding: Finding) -> Finding:
    text = finding.found
    if finding.trans_id:
        text += f" [{finding.trans_id}]"
    if finding.remedy:
        text += f" -> {finding.remedy}"
    state = (f"{finding.state:<8}", _COLORS[finding.state])
    line = Text.assemble(
        state, f" {finding.check:<12} {printable(' '.join(text.split()))}"
    )
    # Unlike typer, rich respects NO_COLOR.
    Console(highlight=False, soft_wrap=True).print(line)
    return finding
