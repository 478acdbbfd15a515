"""Inputs of a plan: samples, link, worker, training step, or assumptions."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hapi_client.data.index import load_index
from hapi_client.data.span_bytes import read_span
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.planning.client_facts import READ_SECONDS
from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.sample_probe import (
    ProbeSamples,
    read_samples,
    reference_samples,
)
from hapi_client.planning.worker_preparation import PROFILE_SECONDS
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import MAX_SPAN_SAMPLES, Span
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.samples import IMAGE
from hapi_splitter.planner.problem import StartupCost
from hapi_splitter.units import bytes_text, number_text, seconds_text

ASSUMED_LINK = 125e6
"""Bandwidth in bytes per second if none is given or measured: 1 Gbit/s."""
ASSUMED_SAMPLES = 10_000
LINK_FLOWS = 4
LINK_SECONDS = 3.0
REQUEST_SECONDS = 1.0
"""Time to measure requests of loose objects."""
FIRST_PART_BYTES = 64 * 1024
MAX_DOUBLINGS = 6
"""Each read of the link measurement is twice the one before, up to 4 MiB."""
TRAIN_STEPS = 3


@dataclass(frozen=True)
class PlanRequest:
    """The training run to plan for.

    Attributes:
        min_precision: lowest precision that a plan may use.
        epochs: number of epochs.
        batch_size: batch size of the training loop.
        link: bytes per second; None to measure or assume it.
        num_samples: None for those of the data set, or an assumed number.
        upload: if True, stores the package so that the worker can profile
            it; otherwise the worker is assumed to be like this machine.
        name: name of the model, for titles.
        cuts: cuts to measure in addition to those that a plan may use.
    """

    min_precision: str
    epochs: float
    batch_size: int
    link: float | None
    num_samples: int | None
    upload: bool
    name: str
    cuts: Sequence[int] = ()


@dataclass(frozen=True)
class PackingGain:
    """Gain of loose objects from being packed into shards.

    Attributes:
        read_seconds: time to read a sample, with :data:`LINK_FLOWS` at once.
        request_seconds: the part that a request of its own takes.
    """

    read_seconds: float
    request_seconds: float

    @property
    def times_faster(self) -> float:
        """Speed of reading shards over that of reading loose objects.

        A span of a shard takes one request.
        """
        saved = self.request_seconds * (1 - 1 / MAX_SPAN_SAMPLES)
        return self.read_seconds / (self.read_seconds - saved)

    @property
    def text(self) -> str:
        """One sentence for people."""
        return (
            "samples are loose objects: of "
            f"{seconds_text(self.read_seconds)} that reading one takes, "
            f"{seconds_text(self.request_seconds)} are its own request; "
            "packed into shards ('hapi upload'), they would be read "
            f"{number_text(self.times_faster)} times as fast"
        )


class StudyInputs:
    """Measures samples, link and worker, or notes assumptions.

    Attributes:
        packing: measured if samples are loose objects, else None.
    """

    packing: PackingGain | None = None

    def __init__(
        self,
        region: FrozenRegion,
        request: PlanRequest,
        reporter: Reporter,
        assume: Callable[[str], None],
    ) -> None:
        self._region = region
        self._request = request
        self._reporter = reporter
        self._assume = assume

    def data(
        self, connection: Connection | None, location: Location | None
    ) -> tuple[ProbeSamples, float, int]:
        """Returns samples, link in bytes per second, number of samples."""
        request = self._request
        if connection is None or location is None:
            generated = (
                "images are like a photograph of 500 x 375 pixels"
                if self._region.transform.medium.name == IMAGE.name
                else "arrays hold random numbers in the model's own shape and "
                "type"
            )
            self._assume(f"{generated}; --data measures yours")
            if request.link is None:
                self._assume(
                    "the link has 1 Gbit/s; --link sets another bandwidth"
                )
            if request.num_samples is None:
                self._assume(
                    f"there are {ASSUMED_SAMPLES} samples; --samples sets "
                    "another number"
                )
            return (
                reference_samples(self._region),
                request.link or ASSUMED_LINK,
                request.num_samples or ASSUMED_SAMPLES,
            )
        if request.upload:
            _require_hapi(connection)
        index = load_index(connection, location)
        spans = index.spans(container=location.container)
        link = request.link
        if link is None:
            self._reporter.note("measuring the link")
            link = measure_link(connection, spans)
        if loose := [span for span in spans if span.is_group]:
            self._reporter.note("measuring requests of single objects")
            request_seconds, sample_bytes = measure_requests(connection, loose)
            read_seconds = sample_bytes / link
            if request.link is not None:  # a link alone, without requests
                read_seconds += request_seconds
            self.packing = PackingGain(
                max(read_seconds, request_seconds), request_seconds
            )
        self._reporter.note(f"reading a few samples of {location}")
        probe = read_samples(
            connection,
            spans,
            medium=self._region.transform.medium,
            max_bytes=READ_SECONDS * link,
        )
        return probe, link, request.num_samples or len(index)

    def server(
        self, facts: LocalFacts, connection: Connection | None
    ) -> tuple[ModelProfile, StartupCost]:
        """Returns the worker's profile and the startup cost of push-down."""
        if connection is None or not self._request.upload:
            self._assume(
                "the storage side's worker is as fast as this machine"
                + ("" if connection else "; --data profiles the worker")
            )
            self._assume(
                "the worker checks, loads and profiles the model in no time; "
                "only the upload is counted"
            )
            stored = connection and self._region.find(
                connection, DEFAULT_MODELS_CONTAINER
            )
            if connection and stored:
                self._reporter.note(_stored_text(stored, connection))
            return facts.client, StartupCost(
                package_bytes=0 if stored else self._region.parameter_bytes
            )
        self._reporter.note("uploading the model package if needed")
        model, sent_bytes = self._region.store(
            connection, DEFAULT_MODELS_CONTAINER, self._reporter.reading
        )
        self._reporter.note(
            f"stored as {model.container}/{model.object}, "
            f"{bytes_text(sent_bytes)}; jobs with this model use it"
            if sent_bytes
            else _stored_text(model, connection)
        )
        self._reporter.note("the worker profiles the model")
        started = time.monotonic()
        profile = connection.get_profile(
            model.container,
            model.object,
            account=model.account,
            seconds=PROFILE_SECONDS,
        )
        seconds = time.monotonic() - started
        # The upload of this command counts: a job would have to do it.
        return profile, StartupCost(
            package_bytes=sent_bytes,
            load_seconds=profile.load_seconds,
            profile_seconds=max(0.0, seconds - profile.load_seconds),
        )


def _stored_text(model: ModelPath, connection: Connection) -> str:
    path = f"{model.container}/{model.object}"
    if model.account == connection.account:
        return f"already stored as {path}"
    return f"already in the model library, as {model.account}/{path}"


def _require_hapi(connection: Connection) -> None:
    try:
        connection.require_hapi()
    except ClientError as error:
        raise ClientError(
            error.code,
            f"{error.message}; --no-upload assumes a worker like this machine",
        ) from error


def measure_link(connection: Connection, spans: Sequence[Span]) -> float:
    """Returns the bytes per second of concurrent raw reads.

    Reads begin small, so that a slow link takes little longer than a fast one.

    Raises:
        HapiError: if a read fails.
    """

    def read(number: int, step: int) -> int:
        max_bytes = FIRST_PART_BYTES << min(step, MAX_DOUBLINGS)
        span = spans[number % len(spans)]
        return len(read_span(connection, span, max_bytes=max_bytes))

    return _sum_per_second(read, LINK_SECONDS)


def measure_requests(
    connection: Connection, groups: Sequence[Span]
) -> tuple[float, float]:
    """Measures the time of requests for loose objects.

    Args:
        connection: connection to the account.
        groups: groups of loose objects.

    Returns:
        Seconds of a request for one byte, with :data:`LINK_FLOWS` at once,
        and the mean bytes of an object.

    Raises:
        HapiError: if a read fails.
    """
    rows = [(span.container, row) for span in groups for row in span.rows]

    def read(number: int, _step: int) -> int:
        container, row = rows[number % len(rows)]
        first = ByteRange(0, 0)
        return len(
            connection.get_range(
                container, row.key, first, if_match=row.etag or ""
            )
        )

    seconds = 1.0 / _sum_per_second(read, REQUEST_SECONDS)
    return seconds, sum(row.length for _, row in rows) / len(rows)


def _sum_per_second(read: Callable[[int, int], int], seconds: float) -> float:
    """Returns the bytes per second of concurrent reads.

    Args:
        read: reads the span or object of a number and returns its bytes;
            the second argument counts the reads of the calling thread.
        seconds: time after which no read begins.
    """
    started = time.monotonic()

    def flow(first: int) -> int:
        count = 0
        for step in itertools.count():
            count += read(first + step * LINK_FLOWS, step)
            if time.monotonic() >= started + seconds:
                break
        return count

    with ThreadPoolExecutor(LINK_FLOWS) as pool:
        total = sum(pool.map(flow, range(LINK_FLOWS)))
    return total / (time.monotonic() - started)


def train_seconds(region: FrozenRegion, batch_size: int) -> float:
    """Returns the seconds per sample of an SGD step on a copy of the tail.

    The fastest of a few steps counts; 0 if there is nothing to train.

    Args:
        region: frozen region of the model, whose tail is not changed.
        batch_size: samples of the step.

    Raises:
        ClientError: ``bad_configuration`` if the tail fails.
    """
    try:
        tail = copy.deepcopy(region.tail).train()
        parameters = [p for p in tail.parameters() if p.requires_grad]
        if not parameters:
            return 0.0
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        features = torch.randn(
            batch_size,
            *region.cut_shape(region.num_cuts),
            dtype=region.cut_dtype(region.num_cuts),
            device=region.device,
        )

        def step_seconds() -> float:
            started = time.monotonic()
            optimizer.zero_grad()
            loss = _any_loss(tail(features))
            if loss is None:
                return 0.0
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()  # waits for the device
            return time.monotonic() - started

        _warm_up, *seconds = [step_seconds() for _ in range(1 + TRAIN_STEPS)]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ClientError(
            "bad_configuration",
            f"a training step of the tail fails with batch size {batch_size}: "
            f"{error}; set --batch-size to that of your training",
        ) from error
    return min(seconds) / batch_size


def _any_loss(outputs: Any) -> torch.Tensor | None:
    """Returns a loss of all outputs; None if none depends on parameters."""
    trained = [
        output.float().square().mean()
        for output in tree_leaves(outputs)
        if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    return torch.stack(trained).sum() if trained else None
