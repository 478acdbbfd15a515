"""What was measured where, with what, and by which commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import (
    Block,
    Commands,
    Listing,
    Part,
    Table,
    Text,
)


def machine_part(body: Mapping[str, Any]) -> Part:
    """Machine, versions, settings and commands.

    Args:
        body: of the results.
    """
    blocks: list[Block] = [
        Listing(machine_lines(body)),
        Text("Written by"),
        Commands(commands_of(body["settings"])),
        Table(
            ("Begun (UTC)", "Commit", "Measures"),
            list(map(_begun, body["begun"])),
            3,
        ),
        Table(("Package", "Version"), sorted(body["versions"].items()), 2),
    ]
    return Part("Machine and commands", blocks)


def _begun(run: Mapping[str, Any]) -> tuple[str, str, str]:
    what = [*run["experiments"], *(f"``{each}``" for each in run["only"])]
    date = run["date"][:16].replace("T", " ")
    return date, run["commit"] or "unknown", ", ".join(what) or "all"


def machine_lines(body: Mapping[str, Any]) -> list[str]:
    """Machine and settings."""
    machine = body["machine"]
    return [
        f"Processor: {machine['processor']}, {machine['cores']} cores",
        f"Memory: {machine['memory_bytes'] / 1e9:.0f} GB",
        f"Linux {machine['kernel']}; load at the start"
        f" {machine['load_at_start']:.2f}",
        *_settings(body["settings"]),
    ]


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
