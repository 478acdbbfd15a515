"""Reports of passes as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_client.reports.epoch_report import (
    FETCH_STAGES,
    LOOP_STAGES,
    EpochReport,
)
from hapi_client.reports.table import Table
from hapi_protocol.feature_stream import CLOCK_STAGES
from hapi_splitter.units import bytes_text, number_text, percent_text

_Cell = Callable[[EpochReport], str]

_PACE: Sequence[tuple[str, _Cell]] = (
    ("pass", lambda r: label(r)),
    ("plan", lambda r: r.plan),
    ("limited by", lambda r: ", ".join(r.limited_by)),
    ("samples", lambda r: f"{r.samples:,}"),
    ("seconds", lambda r: number_text(r.seconds)),
    ("samples/s", lambda r: number_text(r.samples_per_second)),
    ("predicted", lambda r: _number(r.predicted_samples_per_second)),
    ("reached", lambda r: _share(r.measured_per_predicted)),
    ("waiting", lambda r: percent_text(r.waiting_share)),
)
_TRAFFIC: Sequence[tuple[str, _Cell]] = (
    ("pass", lambda r: label(r)),
    ("samples by cut", lambda r: by_cut_text(r)),
    ("received", lambda r: bytes_text(r.received_bytes)),
    ("sent", lambda r: bytes_text(r.sent_bytes)),
    ("requests", lambda r: f"{r.requests:,}"),
    ("retries", lambda r: _count(r.retries)),
    ("fall-backs", lambda r: _count(r.fallbacks)),
    ("kept", lambda r: _count(r.cached_samples)),
    ("skipped", lambda r: _count(r.skipped_samples)),
    ("new plans", lambda r: _count(r.plan_changes)),
)
_ESSENTIALS: Sequence[tuple[str, _Cell]] = (
    ("pass", lambda r: label(r)),
    ("samples/s", lambda r: number_text(r.samples_per_second)),
    ("predicted", lambda r: _number(r.predicted_samples_per_second)),
    ("received", lambda r: bytes_text(r.received_bytes)),
    ("waiting", lambda r: percent_text(r.waiting_share)),
    ("limited by", lambda r: ", ".join(r.limited_by) or "-"),
    ("plan", lambda r: r.plan),
)
_PACE_NOTE = (
    "Samples/s are those of the whole pass. Predicted are those of its plans, "
    "reached is how fast the samples under a plan came, over that. Waiting is "
    "the part of the seconds in which the training loop had no data. A pass "
    "with * was not finished."
)
_TRAFFIC_NOTE = (
    "Bytes are bodies of requests and answers, failed ones too. Cut 0 stands "
    "for samples that came as images. Fall-backs are spans that should have "
    "been pushed, and were streamed; kept are samples whose features the "
    "store had."
)
_HERE_NOTE = (
    "Seconds: those of the training loop are of one thread; those of the "
    "threads that fetch are sums over requests beside one another, and may be "
    "more. In 'fetch' is what the storage tier did for pushed samples; "
    "'decode' counts core-seconds."
)
_STORAGE_NOTE = (
    "Seconds for pushed samples, summed over requests beside one another; "
    "'cpu' counts core-seconds of the worker. Kept features take none of "
    "them, and plain reads do not tell."
)


def label(report: EpochReport) -> str:
    """The name of a pass, marked where it was not finished."""
    return report.name if report.is_finished else f"{report.name} *"


def by_cut_text(report: EpochReport) -> str:
    """``0: 64, 42: 256``."""
    return ", ".join(
        f"{cut}: {count:,}"
        for cut, count in sorted(report.samples_by_cut.items())
    )


def pace_table(reports: Sequence[EpochReport]) -> Table:
    """How fast each pass was, and what it was limited by."""
    return _table(_PACE, reports, 3, _PACE_NOTE)


def traffic_table(reports: Sequence[EpochReport]) -> Table:
    """What went over the wire, and what went wrong."""
    return _table(_TRAFFIC, reports, 2, _TRAFFIC_NOTE)


def client_table(reports: Sequence[EpochReport]) -> Table:
    """Where the time went on this side."""
    rows = tuple(
        (
            label(each),
            *(_number(each.loop_seconds.get(name)) for name in LOOP_STAGES),
            *(_number(each.fetch_seconds.get(name)) for name in FETCH_STAGES),
        )
        for each in reports
    )
    header = ("pass", *(f"loop: {name}" for name in LOOP_STAGES))
    header += tuple(f"threads: {name}" for name in FETCH_STAGES)
    return Table(header, rows, 1, _HERE_NOTE)


def storage_table(reports: Sequence[EpochReport]) -> Table:
    """Where the time went next to the data."""
    rows = tuple(
        (
            label(each),
            *(_number(each.storage_seconds.get(s)) for s in CLOCK_STAGES),
            _number(each.storage_cpu_seconds),
        )
        for each in reports
    )
    stages = (name.replace("_", "-") for name in CLOCK_STAGES)
    return Table(("pass", *stages, "cpu"), rows, 1, _STORAGE_NOTE)


def essentials(reports: Sequence[EpochReport]) -> Table:
    """What is worth a glance behind each run."""
    return _table(_ESSENTIALS, reports, 1, "")


def tables(reports: Sequence[EpochReport]) -> dict[str, Table]:
    """All, by their title."""
    return {
        "How fast": pace_table(reports),
        "Over the wire": traffic_table(reports),
        "Where the time went here": client_table(reports),
        "Where the time went in the storage tier": storage_table(reports),
    }


def _table(
    columns: Sequence[tuple[str, _Cell]],
    reports: Sequence[EpochReport],
    num_text: int,
    note: str,
) -> Table:
    header = tuple(name for name, _ in columns)
    rows = tuple(tuple(cell(r) for _, cell in columns) for r in reports)
    return Table(header, rows, num_text, note)


def _number(number: float | None) -> str:
    return number_text(number) if number else "-"


def _share(share: float | None) -> str:
    return "-" if share is None else percent_text(share)


def _count(count: int) -> str:
    return f"{count:,}" if count else "-"
