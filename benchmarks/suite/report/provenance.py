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

_SEVERAL = """\
More than one machine has worked on this file.  Whatever is compared was
measured side by side on one of them, and a cell's bound is that of its own
processor; rates of different entries are not to be compared where their
processors differ."""


def machine_part(body: Mapping[str, Any]) -> Part:
    """Machine, versions, settings and commands.

    Args:
        body: of the results.
    """
    blocks: list[Block] = [
        Listing(machine_lines(body)),
        *_where(body["experiments"]),
        Text("Written by"),
        Commands(commands_of(body["settings"])),
        Table(
            ("Begun (UTC)", "Commit", "Processor", "Measures", "Load"),
            list(map(_begun, body["begun"])),
            4,
        ),
        Table(("Package", "Version"), sorted(body["versions"].items()), 2),
    ]
    return Part("Machine and commands", blocks)


def _where(experiments: Mapping[str, Any]) -> Iterator[Block]:
    """What was measured on which processor, if on several."""
    found: dict[str, dict[str, list[str]]] = {}
    for experiment, name, processor in _places(experiments):
        there = found.setdefault(processor, {})
        there.setdefault(experiment, []).append(f"``{name}``")
    if len(found) < 2:
        return
    yield Text(" ".join(_SEVERAL.split()))
    yield Listing(
        [
            f"{processor}: "
            + "; ".join(f"{name} {', '.join(n)}" for name, n in there.items())
            for processor, there in found.items()
        ]
    )


def _places(
    experiments: Mapping[str, Any],
) -> Iterator[tuple[str, str, str]]:
    """Experiment, entry and processor of all that was measured."""
    for name, section in experiments.items():
        held = section.get("body", section)
        for each in (*held.get("cells", ()), *held.get("entries", ())):
            # What an entry lacks is told by the part that shows it.
            if each["complete"] and "processor" in each:
                yield name, each["name"], each["processor"]


def _begun(run: Mapping[str, Any]) -> tuple[str, ...]:
    what = [*run["experiments"], *(f"``{each}``" for each in run["only"])]
    date = run["date"][:16].replace("T", " ")
    return (
        date,
        run["commit"] or "unknown",
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
        f"{settings['rounds']} interleaved rounds of each contender; {tiers}",
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
