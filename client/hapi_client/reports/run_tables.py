"""The reports of a run as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import FETCH_STAGES, EpochReport
from hapi_client.reports.table import Table
from hapi_protocol.feature_stream import CLOCK_STAGES
from hapi_splitter.units import bytes_text, number_text, percent_text

_Cell = Callable[[EpochReport], str]

_THROUGHPUT: Sequence[tuple[str, _Cell]] = (
    ("epoch", lambda r: label(r)),
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
    ("epoch", lambda r: label(r)),
    ("samples by cut", lambda r: by_cut_text(r)),
    ("received", lambda r: bytes_text(r.received_bytes)),
    ("sent", lambda r: bytes_text(r.sent_bytes)),
    ("requests", lambda r: f"{r.requests:,}"),
    ("retries", lambda r: _count(r.retries)),
    ("fallbacks", lambda r: _count(r.fallbacks)),
    ("cached", lambda r: _count(r.cached_samples)),
    ("on this host", lambda r: _count(r.local_hits)),
    ("skipped", lambda r: _count(r.skipped_samples)),
    ("new plans", lambda r: _count(r.plan_changes)),
)
_ESSENTIALS: Sequence[tuple[str, _Cell]] = (
    ("epoch", lambda r: label(r)),
    ("samples/s", lambda r: number_text(r.samples_per_second)),
    ("predicted", lambda r: _number(r.predicted_samples_per_second)),
    ("received", lambda r: bytes_text(r.received_bytes)),
    ("waiting", lambda r: percent_text(r.waiting_share)),
    ("limited by", lambda r: ", ".join(r.limited_by) or "-"),
    ("plan", lambda r: r.plan),
)
_THROUGHPUT_NOTE = (
    "samples/s: of the whole epoch. predicted: by its plans. reached: "
    "measured throughput of the samples read under a plan, relative to that. "
    "waiting: part of the seconds in which the training loop had no data. "
    "* marks an unfinished epoch."
)
_TRAFFIC_NOTE = (
    "received, sent: bodies of responses and requests, including failed ones. "
    "Cut 0: raw reads. fallbacks: spans that were read raw because push-down "
    "failed. cached: samples whose features were cached in Swift. on this "
    "host: in memory or in a directory."
)
_CLIENT_NOTE = (
    "Seconds of the training loop's thread, and of the fetching threads: sums "
    "over concurrent requests. 'fetch' contains the storage side's time for "
    "pushed-down samples; 'decode' counts core-seconds."
)
_STORAGE_NOTE = (
    "Seconds for pushed-down samples, summed over concurrent requests; 'cpu' "
    "counts core-seconds of the worker. Cached features and raw reads have "
    "none."
)


def label(report: EpochReport) -> str:
    """Returns the name of an epoch, marked if it is unfinished."""
    return report.name if report.is_finished else f"{report.name} *"


def by_cut_text(report: EpochReport) -> str:
    """Formats samples by cut: ``0: 64, 42: 256``."""
    return ", ".join(
        f"{cut}: {count:,}"
        for cut, count in sorted(report.samples_by_cut.items())
    )


def throughput_table(reports: Sequence[EpochReport]) -> Table:
    """Throughput of each epoch and its limiting resources."""
    return _table(_THROUGHPUT, reports, 3, _THROUGHPUT_NOTE)


def traffic_table(reports: Sequence[EpochReport]) -> Table:
    """Traffic, retries, fallbacks and cache hits of each epoch."""
    return _table(_TRAFFIC, reports, 2, _TRAFFIC_NOTE)


def client_table(reports: Sequence[EpochReport]) -> Table:
    """Time of the client's threads by stage."""
    rows = tuple(
        (
            label(each),
            *(_number(each.loop_seconds.get(name)) for name in LOOP_STAGES),
            *(_number(each.fetch_seconds.get(name)) for name in FETCH_STAGES),
        )
        for each in reports
    )
    header = ("epoch", *(f"loop: {name}" for name in LOOP_STAGES))
    header += tuple(f"threads: {name}" for name in FETCH_STAGES)
    return Table(header, rows, 1, _CLIENT_NOTE)


def storage_table(reports: Sequence[EpochReport]) -> Table:
    """Time of the storage side by stage."""
    rows = tuple(
        (
            label(each),
            *(_number(each.storage_seconds.get(s)) for s in CLOCK_STAGES),
            _number(each.storage_cpu_seconds),
        )
        for each in reports
    )
    stages = (name.replace("_", "-") for name in CLOCK_STAGES)
    return Table(("epoch", *stages, "cpu"), rows, 1, _STORAGE_NOTE)


def essentials(reports: Sequence[EpochReport]) -> Table:
    """The summary that is printed after each run."""
    return _table(_ESSENTIALS, reports, 1, "")


def tables(reports: Sequence[EpochReport]) -> dict[str, Table]:
    """Returns all tables by title."""
    return {
        "Throughput": throughput_table(reports),
        "Traffic": traffic_table(reports),
        "Time on the client": client_table(reports),
        "Time on the storage side": storage_table(reports),
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
