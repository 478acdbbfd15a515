"""What was measured where, with what, and by which commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import (
    Block,
    Commands,
    Listing,
    Part,
    Table,
    Text,
)
from benchmarks.suite.report.figures import fixed

_PROCESSORS = """\
More than one machine has worked on this file.  Whatever is compared was
measured side by side on one of them, and a cell's bound is that of its own
processor; rates of different entries are not to be compared where their
processors differ."""
_COMMITS = """\
More than one version of HAPI was measured.  Of an entry that was measured
again only the last figure is here."""
_LOAD = """\
Load is the average of the minute before the run began: 1 is one busy core."""
_UNKNOWN = "unknown"


def machine_part(body: Mapping[str, Any]) -> Part:
    """Machine, versions, settings and commands.

    Args:
        body: of the results.
    """
    blocks: list[Block] = [
        Listing(machine_lines(body)),
        *_origins(body["experiments"]),
        Text("Written by"),
        Commands(commands_of(body["settings"])),
        Text(_LOAD),
        Table(
            ("Begun (UTC)", "Commit", "Processor", "Measures", "Load"),
            list(map(_begun, body["begun"])),
            4,
        ),
        Table(("Package", "Version"), sorted(body["versions"].items()), 2),
    ]
    return Part("Machine and commands", blocks)


def _origins(experiments: Mapping[str, Any]) -> Iterator[Block]:
    """Of which version and on which processor each entry was measured, where
    there are several."""
    entries = list(_entries(experiments))
    processors = {each["processor"] for _, each in entries}
    commits = {each.get("commit") for _, each in entries}
    if len(processors) > 1:
        yield Text(" ".join(_PROCESSORS.split()))
    if len(commits) > 1:
        yield Text(" ".join(_COMMITS.split()))
    if len(processors) > 1 or len(commits) > 1:
        yield Table(
            ("Experiment", "Entry", "Begun (UTC)", "Commit", "Processor"),
            [
                (
                    name,
                    f"``{each['name']}``",
                    _minute(each["date"]),
                    each.get("commit") or _UNKNOWN,
                    each["processor"],
                )
                for name, each in entries
            ],
            5,
        )


def _entries(
    experiments: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name of the experiment, and each entry that was measured."""
    for name, section in experiments.items():
        held = section.get("body", section)
        for each in (*held.get("cells", ()), *held.get("entries", ())):
            # What an entry lacks is told by the part that shows it.
            if each["complete"] and {"processor", "date"} <= {*each}:
                yield name, each


def _minute(date: str) -> str:
    return date[:16].replace("T", " ")


def _begun(run: Mapping[str, Any]) -> tuple[str, ...]:
    what = [*run["experiments"], *(f"``{each}``" for each in run["only"])]
    return (
        _minute(run["date"]),
        run["commit"] or _UNKNOWN,
        run["processor"],
        ", ".join(what) or "all",
        fixed(run["load_at_start"]),
    )


def machine_lines(body: Mapping[str, Any]) -> list[str]:
    """Machines and settings."""
    machines = dict.fromkeys(
        f"Processor: {run['processor']}, {run['cores']} cores;"
        f" {run['memory_bytes'] / 1e9:.0f} GB of memory;"
        f" Linux {run['kernel']}"
        for run in body["begun"]
    )
    return [*machines, *_settings(body["settings"])]


def _settings(settings: Mapping[str, Any]) -> list[str]:
    cores = settings.get("cores")
    tiers = "one core for each tier"
    if cores:
        storage, client = (",".join(map(str, each)) for each in cores)
        tiers = f"cores {storage} for storage, {client} for the client"
    devices = ", ".join(
        f"{tier} on {settings[f'{tier}_device']}"
        for tier in ("worker", "client")
        if settings.get(f"{tier}_device")
    )
    return [
        f"{settings['rounds']} interleaved rounds, of contenders that are not"
        f" far behind in the first one; {tiers}",
        "A shaped link between two network namespaces"
        if settings["shaped"]
        else "No link was shaped: both tiers share one network",
        *([f"Devices: {devices}"] if devices else []),
        f"Photographs: {len(settings['tars'])} tars"
        f" ({', '.join(settings['tars'])})",
        *(
            ["A smoke test: few cells and short passes, which prove nothing"]
            if settings["quick"]
            else []
        ),
    ]


def commands_of(settings: Mapping[str, Any]) -> Sequence[str]:
    """Which measure the same, and write this."""
    run = "python -m benchmarks run --data DIR --json bench.json"
    if settings["quick"]:
        run += " --quick"
    run += f" --rounds {settings['rounds']}"
    if not settings["shaped"]:
        run += " --no-netns"
    if settings.get("cores"):
        for tier, cores in zip(
            ("storage", "client"), settings["cores"], strict=True
        ):
            run += f" --{tier}-cores {','.join(map(str, cores))}"
    for tier in ("client", "worker"):
        device = settings.get(f"{tier}_device", "cpu")
        if device != "cpu":
            run += f" --{tier}-device {device}"
    if settings.get("scale", 1) != 1:
        run += f" --scale {settings['scale']}"
    return (
        run,
        "python -m benchmarks report bench.json --html report"
        " --rst docs/comparison.rst --images docs/images/comparison",
    )
