"""What ``hapi plan`` finds out: costs, plan and alternatives, untrained."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hapi_client.data.index import load_index
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.plan_report.machine_load import other_work
from hapi_client.plan_report.plan_tables import ASSUMED, Report
from hapi_client.planning.device_profile import LocalFacts, measure
from hapi_client.planning.planner import PROFILE_SECONDS, READ_SECONDS
from hapi_client.planning.sample_probe import (
    ProbeSamples,
    read_samples,
    reference_samples,
)
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import Span
from hapi_protocol.encodings import ENCODINGS, FLOORS
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ByteRange
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.shards import ARRAY, IMAGE
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.planner.baseline_policies import PolicyInputs, alternatives
from hapi_splitter.planner.costs import Conditions, OneOff, build_problem
from hapi_splitter.planner.plan import Problem, solve, what_if
from hapi_splitter.units import (
    bytes_text,
    link_text,
    number_text,
    seconds_text,
)

logger = logging.getLogger(__name__)

ASSUMED_LINK = 125e6
"""Bytes per second of a link that nobody has told or measured: 1 Gbit/s."""
ASSUMED_SAMPLES = 10_000
LINK_FLOWS = 4
LINK_SECONDS = 3.0
FIRST_PART_BYTES = 64 * 1024
MAX_PART_BYTES = 4 * 1024 * 1024
"""Of one read: each is twice as long as the one before."""
TRAIN_STEPS = 3
BUSY = 0.3
"""Cores: what others use beside us may make all figures longer."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is wanted for.

    Attributes:
        floor: what may be rounded.
        epochs: that will be trained.
        batch_size: of the training loop.
        link: bytes per second; None to measure it, or to assume.
        num_samples: None for those of the data set, or an assumed number.
        upload: whether the package may be stored, for the worker's own
            profile; else the worker is taken to be like this machine.
        name: of the model, for titles.
        cuts: to measure beside those that may be part of a plan.
    """

    floor: str
    epochs: float
    batch_size: int
    link: float | None
    num_samples: int | None
    upload: bool
    name: str
    cuts: Sequence[int] = ()


@dataclass(frozen=True)
class PlanStudy:
    """The answer.

    Attributes:
        report: plan, alternatives and costs.
        other_floors: what they would change.
        conditions: measured, told or assumed.
        facts: that were measured here.
        server: profile of the worker, or of this machine in its place.
        assumptions: of what was not measured.
    """

    report: Report
    other_floors: tuple[str, ...]
    conditions: Conditions
    facts: LocalFacts
    server: ModelProfile
    assumptions: tuple[str, ...]


def advise(
    region: FrozenRegion,
    question: PlanRequest,
    reporter: Reporter,
    connection: Connection | None = None,
    location: Location | None = None,
) -> PlanStudy:
    """Measures, and plans without training.

    Args:
        region: of the model.
        question: see there.
        reporter: is told of the steps.
        connection: to the account; None to measure on this machine only.
        location: of an indexed data set, with ``connection``.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """
    assumptions: list[str] = []
    finder = _Finder(region, question, reporter, assumptions.append)
    probe, link, num_samples = finder.data(connection, location)
    reporter.note("measuring samples and this machine's device")
    with other_work() as others:
        facts = measure(region, probe, ENCODINGS, question.cuts)
    if others.cores > BUSY:
        assumptions.append(
            f"other work on this machine, {others.cores:.1f} cores of "
            f"{number_text(allowed_cores())} while it was measured, goes on; "
            "without it, streaming may be several times as fast: plan again "
            "then"
        )
    if facts.skipped:
        assumptions.append(
            f"cuts {', '.join(map(str, facts.skipped))}, for which there was "
            "no time, are none of the best"
        )
    server, one_off = finder.server(facts, connection)
    conditions = Conditions(
        link_bytes_per_second=link,
        train_seconds=train_seconds(region, question.batch_size),
    )

    def problem(floor: str) -> Problem:
        return build_problem(
            facts.cuts,
            server,
            facts.client,
            facts.samples,
            conditions,
            floor=floor,
            num_samples=num_samples,
            epochs=question.epochs,
            one_off=one_off,
        )

    rule_facts = PolicyInputs.of(
        facts.cuts,
        server,
        facts.samples,
        batch_size=question.batch_size,
        input_bytes=region.form.num_bytes,
    )
    asked = problem(question.floor)
    measured = _measured(facts, server, conditions)
    coarser = FLOORS[FLOORS.index(question.floor) + 1 :]
    return PlanStudy(
        Report(
            facts.cuts,
            asked,
            alternatives(asked, rule_facts),
            model=question.name,
            notes=(*measured, *(f"{ASSUMED}{each}" for each in assumptions)),
        ),
        what_if(solve(asked), {floor: problem(floor) for floor in coarser}),
        conditions,
        facts,
        server,
        tuple(assumptions),
    )


def _measured(
    facts: LocalFacts, server: ModelProfile, conditions: Conditions
) -> tuple[str, ...]:
    """What was measured, and how: sentences' beginnings."""
    tiers = [("this machine", facts.client)]
    if server is not facts.client:
        tiers.append(("the worker", server))
    return (
        f"link: {link_text(conditions.link_bytes_per_second)}",
        *(
            f"{name}: {profile.device_name}, {number_text(profile.cores)} "
            f"cores; layers in batches of {profile.best().batch}"
            for name, profile in tiers
        ),
        f"bytes, decoding and encoding: mean of {facts.num_probed} samples, "
        "on one core",
        f"the training step: {seconds_text(conditions.train_seconds)} a "
        "sample, SGD",
    )


_SAMPLES_MADE = {
    IMAGE: "images are like a photograph of 500 x 375 pixels",
    ARRAY: "arrays hold random numbers, stored as the model takes them,",
}


class _Finder:
    """Finds what is not on this machine, or says what it assumes."""

    def __init__(
        self,
        region: FrozenRegion,
        question: PlanRequest,
        reporter: Reporter,
        assume: Callable[[str], None],
    ) -> None:
        self._region = region
        self._question = question
        self._reporter = reporter
        self._assume = assume

    def data(
        self, connection: Connection | None, location: Location | None
    ) -> tuple[ProbeSamples, float, int]:
        """Samples, bytes per second of the link, number of samples."""
        question = self._question
        if connection is None or location is None:
            self._assume(
                f"{_SAMPLES_MADE[self._region.transform.medium]} made here; "
                "--data measures yours"
            )
            if question.link is None:
                self._assume("the link has 1 Gbit/s; --link tells another")
            if question.num_samples is None:
                self._assume(
                    f"there are {ASSUMED_SAMPLES} samples; --samples tells "
                    "another number"
                )
            return (
                reference_samples(self._region),
                question.link or ASSUMED_LINK,
                question.num_samples or ASSUMED_SAMPLES,
            )
        if question.upload:
            _require_hapi(connection)
        index = load_index(connection, location)
        spans = index.spans()
        link = question.link
        if link is None:
            self._reporter.note("measuring the link")
            link = measure_link(connection, location.container, spans)
        self._reporter.note(f"reading a few samples of {location}")
        probe = read_samples(
            connection,
            location.container,
            spans,
            medium=self._region.transform.medium,
            most_bytes=READ_SECONDS * link,
        )
        return probe, link, question.num_samples or len(index)

    def server(
        self, facts: LocalFacts, connection: Connection | None
    ) -> tuple[ModelProfile, OneOff]:
        """The worker's profile, and what push-down costs once."""
        if connection is None or not self._question.upload:
            self._assume(
                "the storage side's worker is as fast as this machine"
                + ("" if connection else "; --data asks the worker itself")
            )
            self._assume(
                "the worker checks, loads and profiles the model in no time; "
                "only its upload is counted"
            )
            return facts.client, OneOff(
                package_bytes=self._region.parameter_bytes
            )
        self._reporter.note("storing the model package unless it is there")
        model, sent_bytes = self._region.store(
            connection, DEFAULT_MODELS_CONTAINER, self._reporter.reading
        )
        place = f"{model.container}/{model.object}"
        self._reporter.note(
            f"stored as {place}, {bytes_text(sent_bytes)}; a job with this "
            "model uses it"
            if sent_bytes
            else f"the store has it as {place}"
        )
        self._reporter.note("the worker profiles the model")
        started = time.monotonic()
        profile = connection.get_profile(
            model.container, model.object, seconds=PROFILE_SECONDS
        )
        waited = time.monotonic() - started
        # What this very command has sent is counted: a job would have.
        return profile, OneOff(
            package_bytes=sent_bytes,
            load_seconds=profile.load_seconds,
            profile_seconds=max(0.0, waited - profile.load_seconds),
        )


def _require_hapi(connection: Connection) -> None:
    try:
        connection.require_hapi()
    except ClientError as error:
        raise ClientError(
            error.code,
            f"{error.message}; --no-upload plans with a worker like this "
            "machine",
        ) from error


def measure_link(
    connection: Connection, container: str, spans: Sequence[Span]
) -> float:
    """Bytes per second of several plain reads at a time, undecoded.

    They begin small, so that a slow link takes little longer than a fast one.

    Raises:
        HapiError: of a read.
    """
    deadline = time.monotonic() + LINK_SECONDS

    def read(flow: int) -> int:
        count = 0
        number = flow
        most_bytes = FIRST_PART_BYTES
        while time.monotonic() < deadline:
            span = spans[number % len(spans)]
            data = connection.get_range(
                container,
                span.shard,
                _beginning(span, most_bytes),
                if_match=span.etag,
            )
            count += len(data)
            number += LINK_FLOWS
            most_bytes = min(2 * most_bytes, MAX_PART_BYTES)
        return count

    started = time.monotonic()
    with ThreadPoolExecutor(LINK_FLOWS) as pool:
        total = sum(pool.map(read, range(LINK_FLOWS)))
    return total / (time.monotonic() - started)


def _beginning(span: Span, most_bytes: int) -> ByteRange:
    whole = span.byte_range
    return ByteRange(
        whole.first, min(whole.last, whole.first + most_bytes - 1)
    )


def train_seconds(region: FrozenRegion, batch_size: int) -> float:
    """Seconds per sample of a step of SGD on a copy of the tail.

    Args:
        region: of the model; its tail is left as it is.
        batch_size: of the step.

    Returns:
        The fastest of a few, divided by the batch; 0 where there is nothing
        to train.

    Raises:
        ClientError: ``bad_configuration`` when the tail fails.
    """
    try:
        return _train_seconds(region, batch_size)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ClientError(
            "bad_configuration",
            f"a training step of the tail fails with a batch size of "
            f"{batch_size}: {error}; --batch-size takes that of your training",
        ) from error


def _train_seconds(region: FrozenRegion, batch_size: int) -> float:
    tail = copy.deepcopy(region.tail).train()
    device = region.device
    features = torch.randn(
        batch_size, *region.cut_shape(region.num_cuts), device=device
    )
    parameters = [p for p in tail.parameters() if p.requires_grad]
    if not parameters:
        return 0.0
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    seconds = []
    for _ in range(1 + TRAIN_STEPS):
        started = time.monotonic()
        optimizer.zero_grad()
        loss = _any_loss(tail(features))
        if loss is None:
            return 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # waits for the device
        seconds.append(time.monotonic() - started)
    return min(seconds[1:]) / batch_size


def _any_loss(outputs: Any) -> torch.Tensor | None:
    """A number that all outputs have a part in; None if none is trained."""
    trained = [
        each.float().square().mean()
        for each in tree_leaves(outputs)
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    return torch.stack(trained).sum() if trained else None
