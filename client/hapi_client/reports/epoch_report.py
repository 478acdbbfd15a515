"""What one pass over the data took: figures, text, JSON.

The JSON form (:func:`report_body`) has the names of the attributes of
:class:`EpochReport`, its properties among them, as keys; they stay as they
are. A file has these under the key ``reports``, a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hapi_client.data.splits import TRAIN
from hapi_splitter.units import (
    bytes_text,
    count_text,
    number_text,
    percent_text,
    seconds_text,
)

WAITING, LAYERS, TRAINING = "waiting", "layers", "training"
PLANNING = "planning"
LOOP_STAGES = (WAITING, LAYERS, TRAINING, PLANNING)
_MIN_SECONDS = 1e-3
"""Stages of less are left out of texts."""
FETCH, DECODE = "fetch", "decode"
FETCH_STAGES = (FETCH, DECODE)


@dataclass(frozen=True)
class EpochReport:
    """Figures of one pass of ``job.loader`` over its data, on this rank.

    Seconds are those of the clock, but where they are called core-seconds.
    ``loop_seconds`` are of one thread and no more than ``seconds``;
    ``fetch_seconds`` and ``storage_seconds`` are sums over requests that run
    beside one another, and may be more.

    Attributes:
        epoch: number of the training epoch; None for a pass in the index's
            order, as evaluation makes it.
        split: of the data.
        is_finished: whether the loop was given all batches.
        samples: that the loop was given.
        expected_samples: of the whole pass; of a resumed epoch, what was
            left of it.
        seconds: from the first request to the end of the loop.
        received_bytes: bodies of the answers to its requests, failed and
            repeated ones too.
        sent_bytes: bodies of these requests.
        requests: these.
        storage_seconds: of pushed samples next to the data, by stage:
            ``queue`` (waiting for a turn on the device), ``read``, ``decode``,
            ``forward``, ``encode`` and ``send_blocked`` (the link or the
            client took no more). Nothing of plain reads, nor of kept
            features.
        storage_cpu_seconds: core-seconds of the worker for these.
        fetch_seconds: of the threads here that fetch: ``fetch`` (requests,
            from the question to the last byte; the work of the storage tier
            for pushed samples is in it) and ``decode`` (core-seconds: images
            decoded, features unpacked).
        loop_seconds: of the training loop's thread: ``waiting`` for data,
            ``layers`` behind the cut, ``training`` (the body of the loop),
            ``planning`` (a plan is measured or looked at again); the rest of
            ``seconds`` makes batches. An accelerator works on while the
            thread goes on, and its seconds fall where the thread waits for
            it.
        samples_by_cut: by the cut at which they came, 0 for images. Of an
            unfinished pass also those that the loop was not given yet.
        cached_samples: whose features the store had kept.
        retries: requests that were repeated.
        fallbacks: spans that were streamed because push-down failed, or left
            out a sample that can be decoded here.
        skipped_samples: left out under ``on_error="skip"``.
        saturated_features: that the encoding clipped.
        plan: in force at its end: ``60 % cut 9 · uint8 + 40 % stream``.
        plan_changes: meanwhile or since the pass before it, a first plan
            included.
        predicted_samples_per_second: of the plans in force, for the samples
            that came under one; None where none did.
        measured_per_predicted: how fast these came, over that; None where
            some had been kept, of which no plan tells.
        limited_by: resources that are in use all the time by the last plan:
            ``link``, ``server cpu``, ``server device``, ``client cpu``,
            ``client device``; none without a plan.
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
    storage_seconds: Mapping[str, float] = field(default_factory=dict)
    storage_cpu_seconds: float = 0.0
    fetch_seconds: Mapping[str, float] = field(default_factory=dict)
    loop_seconds: Mapping[str, float] = field(default_factory=dict)
    samples_by_cut: Mapping[int, int] = field(default_factory=dict)
    cached_samples: int = 0
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
        """``epoch 3``, or the split."""
        return pass_name(self.epoch, self.split)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Of its seconds, the part in which the loop had no data."""
        waiting = self.loop_seconds.get(WAITING, 0.0)
        return waiting / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """A few lines for people."""
        return "\n".join(
            [
                self._pace_text(),
                f"  plan: {self._plan_text()}",
                f"  over the wire: {self._wire_text()}",
                f"  training loop: {_stages_text(self.loop_seconds)}",
                f"  fetching threads: {_stages_text(self.fetch_seconds)}",
                f"  storage tier: {_stages_text(self.storage_seconds)}",
                f"  samples: {self._samples_text()}",
            ]
        )

    def _pace_text(self) -> str:
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
            (self.cached_samples, "kept sample"),
            (self.skipped_samples, "skipped sample"),
            (self.saturated_features, "saturated feature"),
            (self.retries, "retry"),
            (self.fallbacks, "fall-back"),
        ):
            if count:
                plural = "retries" if noun == "retry" else ""
                parts.append(count_text(count, noun, plural))
        return ", ".join(parts) or "none"


def pass_name(epoch: int | None, split: str) -> str:
    """``epoch 3``, or the split that was gone through in its order."""
    if epoch is not None:
        return f"epoch {epoch}"
    return f"{split}, in order" if split == TRAIN else split


def _stages_text(seconds: Mapping[str, float]) -> str:
    parts = [
        f"{stage.replace('_', '-')} {seconds_text(each)}"
        for stage, each in seconds.items()
        if each >= _MIN_SECONDS
    ]
    return ", ".join(parts) or "nothing"


def report_body(report: EpochReport) -> dict[str, Any]:
    """The JSON form."""
    body: dict[str, Any] = {"name": report.name}
    for each in fields(report):
        body[each.name] = getattr(report, each.name)
    return body | {
        "samples_by_cut": {
            str(cut): count for cut, count in report.samples_by_cut.items()
        },
        "limited_by": list(report.limited_by),
        "samples_per_second": report.samples_per_second,
        "waiting_share": report.waiting_share,
    }


def report_from_body(body: Any) -> EpochReport:
    """Reads what :func:`report_body` has made; unknown keys are ignored.

    Raises:
        ValueError: naming the key that is missing or makes no sense.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"{body!r:.80} stands where a report should")
    given = {}
    for each in fields(EpochReport):
        if each.name not in body:
            raise ValueError(f"a report has no {each.name!r}")
        value = body[each.name]
        try:
            given[each.name] = _READERS[str(each.type)](value)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{each.name} is {value!r:.80}; that should be {error}"
            ) from error
    return EpochReport(**given)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a whole number from 0 on")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("a number from 0 on")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a text")
    return value


def _amounts(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError("seconds by stage")
    return {str(name): _amount(each) for name, each in value.items()}


def _counts(value: Any) -> dict[int, int]:
    if not isinstance(value, Mapping) or not all(
        key.isdecimal() for key in value
    ):
        raise ValueError("samples by the number of a cut")
    return {int(cut): _count(count) for cut, count in value.items()}


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of texts")
    return tuple(map(_text, value))


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _count,
    "int | None": _or_none(_count),
    "float": _amount,
    "float | None": _or_none(_amount),
    "bool": _flag,
    "str": _text,
    "Mapping[str, float]": _amounts,
    "Mapping[int, int]": _counts,
    "tuple[str, ...]": _texts,
}
