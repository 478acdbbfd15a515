"""Tables of the results page, from a record.  No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Record = Mapping[str, Any]
Row = Sequence[str]

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "auto": "HAPI auto",
        "auto-cache": "HAPI auto, features cached in the store",
        "freeze-cache": "HAPI freeze, features cached in the store",
        "stream": "HAPI stream (no push-down)",
        "tar-stream": "tar stream",
        "webdataset": "webdataset",
        "mosaic": "mosaicml-streaming (disk cache)",
        "local-features": "features in client memory",
        "tar-stream-resized": "tar stream, resized photographs",
    }
)
"""Contenders of the whole runs, in the order of the table."""
TIERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "memory": ("in client memory", "the default"),
        "disk": ("in a directory of the client", "``CacheConfig.directory``"),
        "store": ("in the store", '``cut="freeze"``, ``cache="readwrite"``'),
    }
)
"""Place of cached features, and the options that use it."""


@dataclass(frozen=True)
class Table:
    """A table of texts, with its title."""

    title: str
    columns: Row
    rows: Sequence[Row]


def entries(record: Record, experiment: str) -> list[Mapping[str, Any]]:
    """Complete entries of an experiment; empty if it was not run."""
    section = record["experiments"].get(experiment, {})
    section = section.get("body", section)
    entries = section.get("cells") or section.get("entries") or []
    return [entry for entry in entries if entry["complete"]]


def interval(low: float, high: float, digits: int = 2) -> str:
    """``low … high``."""
    return f"{low:.{digits}f} … {high:.{digits}f}"


def _order(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["model"], cell["freeze"], cell["link"] or 0.0


def grid(record: Record) -> Table:
    """Epoch 1: ``auto`` and the best opponent of each cell."""
    rows = []
    for cell in sorted(entries(record, "grid"), key=_order):
        rates, best = cell["samples_per_second"], cell["best_external"]
        limit = cell["link_bytes_per_second"]
        link = f"{cell['link']:g} ({limit / 1e6:.1f} MB/s)" if limit else "-"
        rows.append(
            (
                cell["model"],
                cell["freeze"],
                link,
                f"{rates['auto']:.1f}",
                f"{best} {rates[best]:.1f}",
                f"{cell['ratio']['median']:.2f}",
                interval(*cell["ratio"]["interval"]),
            )
        )
    columns = (
        *("network", "frozen", "link", "auto, samples/s"),
        *("best loader, samples/s", "ratio", "95 % interval"),
    )
    return Table("Epoch 1", columns, rows)


def runs(record: Record) -> Table:
    """Whole runs: seconds by contender and cell, and ratios to the best."""
    cells = sorted(entries(record, "runs"), key=_order)
    rows = [
        [shown, *(_run_seconds(cell["cumulative"], name) for cell in cells)]
        for name, shown in NAMES.items()
    ]
    if any("epochs" in cell for cell in cells):
        over = [
            " / ".join(f"{x['auto_over_best']:.2f}" for x in epochs.values())
            for epochs in (cell.get("epochs", {}) for cell in cells)
        ]
        rows.append(["HAPI auto over the best loader", *over])
    columns = (
        "contender",
        *(other["name"].replace("/", " ") for other in cells),
    )
    return Table("Seconds of a run of 1, 5 and 20 epochs", columns, rows)


def _run_seconds(cumulative: Mapping[str, Any], name: str) -> str:
    """Seconds of whole runs, as far as there are any."""
    rows = []
    for count in (1, 5, 20):
        run = cumulative.get(f"{name}-{count}", cumulative.get(name))
        if run is not None and len(run["seconds"]) >= count:
            rows.append(f"{run['seconds'][count - 1]:.1f}")
    return " / ".join(rows) or "not run"


def later_speeds(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Later epochs over epoch 1 of streaming, by tier of the cache.

    Records of before these tiers have only that of the store.
    """
    if "later_over_stream_first" in cell:
        ratios: Mapping[str, Any] = cell["later_over_stream_first"]
        return ratios
    cached = cell["speedup"].get("freeze-cache")
    return {"store": cached["stream"]} if cached else {}


def tenants(record: Record) -> Table:
    """Several accounts at once, with the same network."""
    rows, tenants = [], entries(record, "tenants")
    for entry in sorted(tenants, key=lambda tenant: len(tenant["workloads"])):
        if len({*entry["workloads"]}) > 1:
            continue
        rates = entry["samples_per_second"]
        ratios = [
            a["samples_per_second"] / b["samples_per_second"]
            for a, b in zip(
                entry["rounds"]["auto"],
                entry["rounds"]["tar-stream"],
                strict=True,
            )
        ]
        rows.append(
            (
                str(len(entry["workloads"])),
                f"{rates['auto']:.0f}",
                f"{rates['tar-stream']:.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{entry['jain']['auto']:.3f}",
            )
        )
    columns = (
        *("jobs", "auto, samples/s", "tar stream, samples/s"),
        *("ratio", "Jain's index of auto"),
    )
    return Table("Jobs of several accounts at once", columns, rows)


def regret(record: Record) -> Table:
    """``auto`` and the best fixed cut of each cell."""
    rows = []
    for cell in sorted(entries(record, "regret"), key=_order):
        rates, best = cell["samples_per_second"], cell["best_static"]
        low, high = cell["interval"]
        rows.append(
            (
                cell["name"],
                f"{rates['auto']:.1f}",
                f"{best} {rates[best]:.1f}",
                f"{1 - cell['regret']:.2f}",
                interval(1 - high, 1 - low),
            )
        )
    columns = (
        *("cell", "auto, samples/s", "best fixed cut, samples/s"),
        *("ratio", "95 % interval"),
    )
    return Table("The plan and the best fixed cut", columns, rows)


def wire_bytes(record: Record) -> Table:
    """JPEG bytes over feature bytes, for the cuts with a goal."""
    goals = record["experiments"].get("bytes", {}).get("goals", ())
    rows = [
        (
            f"{goal['network']}, {goal['boundary']}",
            goal["encoding"],
            f"{goal['ratio']:.1f}",
            f"{goal['least_ratio']:g}",
        )
        for goal in goals
    ]
    columns = ("cut", "encoding", "times fewer bytes", "goal")
    return Table("Bytes of a sample", columns, rows)


def accuracy(record: Record) -> Table:
    """Accuracy of a tail by encoding, relative to float32."""
    section = record["experiments"].get("accuracy", {})
    rows = []
    for kind, freeze in section.get("freezes", {}).items():
        for name, result in freeze["ways"].items():
            off = result["difference"]
            rows.append(
                (
                    f"{kind} ({freeze['module']})",
                    name,
                    f"{result['mean']:.1%}",
                    f"{100 * off['mean']:+.2f}",
                    interval(100 * off["low"], 100 * off["high"], 1),
                )
            )
    columns = (
        *("frozen", "encoding", "accuracy"),
        *("points to float32", "range of 3 seeds"),
    )
    return Table("Accuracy of a tail", columns, rows)


TABLES: Mapping[str, Callable[[Record], Table]] = MappingProxyType(
    {
        "grid": grid,
        "runs": runs,
        "tenants": tenants,
        "regret": regret,
        "bytes": wire_bytes,
        "accuracy": accuracy,
    }
)


def goals(record: Record) -> Table:
    """Goals of all experiments that have one."""
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [
        (name, goal, words[met])
        for name, section in record["experiments"].items()
        for goal, met in section.get("met", {}).items()
    ]
    return Table("Goals", ("experiment", "goal", "verdict"), rows)
