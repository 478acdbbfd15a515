"""The report of one epoch: fields, text, JSON.

The JSON keys (:func:`report_body`) are the attributes and properties of
:class:`EpochReport`; they are stable. A file has a list of these objects
under the key ``reports``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from hapi_client.data.splits import TRAIN
from hapi_client.metrics.events import WAITING
from hapi_protocol.json_messages import read_amount, read_count, read_fields
from hapi_splitter.units import (
    bytes_text,
    count_text,
    number_text,
    percent_text,
    seconds_text,
)

_MIN_SECONDS = 1e-3
"""Shorter stages are left out of texts."""
FETCH, DECODE = "fetch", "decode"
FETCH_STAGES = (FETCH, DECODE)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.80} is not a JSON object")
    return value


def _read_seconds(value: Any) -> dict[str, float]:
    return {
        name: read_amount(amount) for name, amount in _object(value).items()
    }


def _read_counts(value: Any) -> dict[int, int]:
    return {int(cut): read_count(n) for cut, n in _object(value).items()}


StageSeconds: TypeAlias = Annotated[Mapping[str, float], _read_seconds]
"""Seconds by stage."""
CutCounts: TypeAlias = Annotated[Mapping[int, int], _read_counts]
"""Numbers of samples by cut."""


@dataclass(frozen=True, repr=False)
class EpochReport:
    """Report of one pass over the data, on this rank.

    Seconds are wall-clock seconds unless called core-seconds.
    ``loop_seconds`` belong to one thread and sum to at most ``seconds``;
    ``fetch_seconds`` and ``storage_seconds`` are sums over concurrent
    requests and may be larger.

    Attributes:
        epoch: number of the training epoch; None for evaluation, which reads
            samples in the order of the index.
        split: split of the data.
        is_finished: True if the loop received all batches.
        samples: received by the loop.
        expected_samples: samples of the whole epoch; of a resumed epoch, of
            its remainder.
        seconds: from the first request to the end of the loop.
        received_bytes: response bodies, including failed and repeated
            requests.
        sent_bytes: request bodies.
        requests: number of requests.
        storage_seconds: time of pushed-down samples on the storage side, by
            stage: ``queue`` (waiting for the device), ``read``, ``decode``,
            ``forward``, ``encode`` and ``send_blocked`` (the link or the
            client accepts no more). Raw reads and cached features have none.
        storage_cpu_seconds: core-seconds of the worker for these samples.
        fetch_seconds: time of the client's fetching threads: ``fetch``
            (requests, from sending to the last byte; contains the storage
            side's time for pushed-down samples) and ``decode``
            (core-seconds for decoding images and unpacking features).
        loop_seconds: time of the training loop's thread: ``waiting`` for
            data, ``layers`` after the cut, ``training`` (the loop's body),
            ``planning`` (measurements for a plan and re-plans); the rest of
            ``seconds`` assembles batches. Time of an accelerator counts where
            the thread waits for it.
        samples_by_cut: number of samples by cut, 0 for raw reads. Of an
            unfinished epoch, includes samples that the loop has not received.
        cached_samples: samples whose features were cached in Swift.
        local_hits: samples whose features were cached on this host.
        retries: repeated requests.
        fallbacks: spans read raw because push-down failed or could not
            decode one of their samples.
        skipped_samples: left out because of ``on_error="skip"``.
        saturated_features: clipped by the encoding.
        plan: in use at the end: ``60 % cut 9 · uint8 + 40 % stream``.
        plan_changes: during the epoch and since the previous one, the first
            plan included.
        predicted_samples_per_second: throughput predicted by the plans for
            the samples read under one; None without a plan.
        measured_per_predicted: measured throughput of these samples divided
            by the prediction; None if some were cached, because plans do not
            predict those.
        limited_by: resources that limit the throughput by the last plan:
            ``link``, ``server cpu``, ``server device``, ``client cpu``,
            ``client device``; empty without a plan.
    """

    epoch: int | None = None
    split: str = TRAIN
    is_finished: bool = True
    samples: int = 0
    expected_samples: int = 0
    seconds: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    requests: int = 0
    storage_seconds: StageSeconds = field(default_factory=dict)
    storage_cpu_seconds: float = 0.0
    fetch_seconds: StageSeconds = field(default_factory=dict)
    loop_seconds: StageSeconds = field(default_factory=dict)
    samples_by_cut: CutCounts = field(default_factory=dict)
    cached_samples: int = 0
    local_hits: int = 0
    retries: int = 0
    fallbacks: int = 0
    skipped_samples: int = 0
    saturated_features: int = 0
    plan: str = "stream"
    plan_changes: int = 0
    predicted_samples_per_second: float | None = None
    measured_per_predicted: float | None = None
    limited_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``epoch 3``, or the name of the split."""
        return epoch_name(self.epoch, self.split)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Fraction of the seconds in which the loop waited for data."""
        waiting = self.loop_seconds.get(WAITING, 0.0)
        return waiting / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """Formats the report as a few lines for people."""
        return "\n".join(
            [
                self._throughput_text(),
                f"  plan: {self._plan_text()}",
                f"  over the wire: {self._wire_text()}",
                f"  training loop: {_stages_text(self.loop_seconds)}",
                f"  fetching threads: {_stages_text(self.fetch_seconds)}",
                f"  storage side: {_stages_text(self.storage_seconds)}",
                f"  samples: {self._samples_text()}",
            ]
        )

    def __repr__(self) -> str:
        return str(self)

    def _throughput_text(self) -> str:
        count = count_text(self.samples, "sample")
        if not self.is_finished:
            count += f" of {self.expected_samples:,}, unfinished,"
        text = (
            f"{self.name}: {count} in {seconds_text(self.seconds)}, "
            f"{number_text(self.samples_per_second)} samples/s"
        )
        predicted = self.predicted_samples_per_second
        if predicted is None or self.measured_per_predicted is None:
            return text
        return (
            f"{text}; under a plan {percent_text(self.measured_per_predicted)}"
            f" of the {number_text(predicted)} that it predicted"
        )

    def _plan_text(self) -> str:
        text = self.plan
        if self.limited_by:
            text += f", limited by {' and '.join(self.limited_by)}"
        if self.plan_changes:
            text += f", {count_text(self.plan_changes, 'change')}"
        return text

    def _wire_text(self) -> str:
        return (
            f"{bytes_text(self.received_bytes)} received, "
            f"{bytes_text(self.sent_bytes)} sent, "
            f"{count_text(self.requests, 'request')}"
        )

    def _samples_text(self) -> str:
        parts = [
            f"{count:,} {f'at cut {cut}' if cut else 'streamed'}"
            for cut, count in sorted(self.samples_by_cut.items())
        ]
        for count, noun in (
            (self.cached_samples, "cached sample"),
            (self.skipped_samples, "skipped sample"),
            (self.saturated_features, "saturated feature"),
            (self.retries, "retry"),
            (self.fallbacks, "fallback"),
        ):
            if count:
                plural = "retries" if noun == "retry" else ""
                parts.append(count_text(count, noun, plural))
        if self.local_hits:
            hits = count_text(self.local_hits, "sample")
            parts.append(f"{hits} from this host's cache")
        return ", ".join(parts) or "none"


def epoch_name(epoch: int | None, split: str) -> str:
    """Returns ``epoch 3``, or the name of the split that is evaluated."""
    if epoch is not None:
        return f"epoch {epoch}"
    return f"{split}, in order" if split == TRAIN else split


def _stages_text(seconds: Mapping[str, float]) -> str:
    parts = [
        f"{stage.replace('_', '-')} {seconds_text(duration)}"
        for stage, duration in seconds.items()
        if duration >= _MIN_SECONDS
    ]
    return ", ".join(parts) or "nothing"


def report_body(report: EpochReport) -> dict[str, Any]:
    """Returns the JSON form of a report."""
    return vars(report) | {
        "name": report.name,
        "samples_by_cut": {
            str(cut): count for cut, count in report.samples_by_cut.items()
        },
        "samples_per_second": report.samples_per_second,
        "waiting_share": report.waiting_share,
    }


def report_from_body(body: Any) -> EpochReport:
    """Reads the JSON form of a report; unknown keys are ignored.

    Raises:
        ValueError: naming the key that is missing or has a wrong value.
    """
    return read_fields(EpochReport, body)
