"""The reports of a run as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import FETCH_STAGES, EpochReport
from hapi_client.reports.table import Table
from hapi_protocol.feature_stream import CLOCK_STAGES
from hapi_splitter.units import bytes_text, number_text, percent_text

_Column = tuple[str, Callable[[EpochReport], str]]
"""Name of a column, and its cell for an epoch."""


def _stages(
    seconds: str, names: Sequence[str], prefix: str = ""
) -> Iterator[_Column]:
    """Yields a column of seconds for each stage.

    Args:
        seconds: attribute of the report.
        names: stages.
        prefix: prefix of the columns' names.
    """

    def value(stage: str, report: EpochReport) -> str:
        return _number(getattr(report, seconds).get(stage))

    for name in names:
        yield f"{prefix}{name.replace('_', '-')}", partial(value, name)


_EPOCH: _Column = ("epoch", lambda r: label(r))
_THROUGHPUT: Sequence[_Column] = (
    _EPOCH,
    ("plan", lambda r: r.plan),
    ("limited by", lambda r: ", ".join(r.limited_by)),
    ("samples", lambda r: f"{r.samples:,}"),
    ("seconds", lambda r: number_text(r.seconds)),
    ("samples/s", lambda r: number_text(r.samples_per_second)),
    ("predicted", lambda r: _number(r.predicted_samples_per_second)),
    ("reached", lambda r: _share(r.measured_per_predicted)),
    ("waiting", lambda r: percent_text(r.waiting_share)),
)
_TRAFFIC: Sequence[_Column] = (
    _EPOCH,
    ("samples by cut", lambda r: _by_cut_text(r)),
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
_CLIENT: Sequence[_Column] = (
    _EPOCH,
    *_stages("loop_seconds", LOOP_STAGES, "loop: "),
    *_stages("fetch_seconds", FETCH_STAGES, "threads: "),
)
_STORAGE: Sequence[_Column] = (
    _EPOCH,
    *_stages("storage_seconds", CLOCK_STAGES),
    ("cpu", lambda r: _number(r.storage_cpu_seconds)),
)
_ESSENTIALS: Sequence[_Column] = (
    _EPOCH,
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


def _by_cut_text(report: EpochReport) -> str:
    """Formats samples by cut: ``0: 64, 42: 256``."""
    return ", ".join(
        f"{cut}: {count:,}"
        for cut, count in sorted(report.samples_by_cut.items())
    )


def essentials(reports: Sequence[EpochReport]) -> Table:
    """The summary that is printed after each run."""
    return _table(_ESSENTIALS, reports, 1, "")


def tables(reports: Sequence[EpochReport]) -> dict[str, Table]:
    """Returns all tables by title."""
    return {
        title: _table(columns, reports, num_text, note)
        for title, columns, num_text, note in (
            ("Throughput", _THROUGHPUT, 3, _THROUGHPUT_NOTE),
            ("Traffic", _TRAFFIC, 2, _TRAFFIC_NOTE),
            ("Time on the client", _CLIENT, 1, _CLIENT_NOTE),
            ("Time on the storage side", _STORAGE, 1, _STORAGE_NOTE),
        )
    }


def _table(
    columns: Sequence[_Column],
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
