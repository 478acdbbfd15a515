"""The epochs of a job: their order, its readers, and where it stands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.sampler import (
    DEFAULT_BUFFER_SPANS,
    ReadPlan,
    SamplerConfig,
    index_order,
    shuffled_order,
)
from hapi_client.sampling.sampler_state import DataState, bad_state
from hapi_protocol.errors import ClientError

Made = TypeVar("Made")


@dataclass(frozen=True)
class EpochOptions:
    """What the order of epochs depends on, as a user gives it.

    Attributes:
        batch_size: samples of a step, of all ranks together.
        seed: not negative.
        lanes: None for what suits data set and readers.
        buffer_spans: width of the shuffle buffer.
        num_workers: of a loader, to share the batches of a rank.
    """

    batch_size: int = 32
    seed: int = 0
    partition: EpochPartition | None = None
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    num_workers: int = 1


@dataclass(frozen=True)
class ReaderShare:
    """A reader's share of an epoch.

    Attributes:
        reading: what to read, and its batches.
        num_steps: of this reader in the whole epoch, those before a resume
            among them.
        delivered: to be told of each step that is delivered.
    """

    read_plan: ReadPlan
    num_steps: int
    delivered: Callable[[int], None] = lambda step: None


class Epochs:
    """Orders of a data set's epochs, and how far training has come.

    Args:
        sizes: samples of each span.
        data: digest of the data set.
        options: of the order.

    Attributes:
        loaded: where the run that is gone on with stood, if there is one.

    Raises:
        ClientError: ``bad_configuration`` naming the option.
    """

    def __init__(
        self, sizes: Sequence[int], data: str, options: EpochOptions
    ) -> None:
        self._sizes = sizes
        self._data = data
        self._options = replace(
            options,
            batch_size=to_integer("batch_size", options.batch_size),
            seed=to_integer("seed", options.seed),
        )
        self.loaded: DataState | None = None
        # Until its next step is delivered, it is where its epoch begins.
        self._is_loaded_due = False
        self._state: DataState | None = None
        _sensible(lambda: self._rules(Reader(), 0, drop_last=False))

    def for_workers(self, num_workers: int) -> Epochs:
        """The same for a loader of some workers, from where these stand."""
        options = replace(self._options, num_workers=num_workers)
        made = Epochs(self._sizes, self._data, options)
        made.loaded = self._state or self.loaded
        made._is_loaded_due = True
        return made

    @property
    def epoch(self) -> int:
        """In which to go on: that of the state, or the first."""
        state = self._state or self.loaded
        return state.epoch if state else 0

    @property
    def step(self) -> int:
        """With which to go on in that epoch."""
        state = self._state or self.loaded
        return state.step if state else 0

    def training(
        self, epoch: int, reader: Reader, *, drop_last: bool
    ) -> ReaderShare:
        """A reader's share of a training epoch, from where it stands.

        Args:
            epoch: its number.
            reader: whose ``first_step`` does not count.
            drop_last: leave out a shorter last batch.

        Raises:
            ClientError: ``bad_configuration`` naming what cannot be, and
                what can.
        """
        epoch = to_integer("epoch", epoch)
        rules = self._rules(reader, epoch, drop_last=drop_last)
        order = _sensible(
            lambda: shuffled_order(
                self._sizes, rules, seed=self._options.seed, epoch=epoch
            )
        )
        if not order.num_steps:
            raise self._no_step()
        first = self.first_step(epoch)
        state = self._start(rules, epoch, first)
        loaded = self.loaded
        if loaded and first:
            _check_same_epoch(loaded, state, order.num_steps)

        def delivered(step: int) -> None:
            if self.loaded is not loaded:
                # Another state was loaded since, which stands.
                return
            if first:
                # A loader of the epoch that is made now begins it anew.
                self._is_loaded_due = False
            self._state = state.behind(step, order.num_steps)

        return ReaderShare(
            _sensible(
                lambda: order.read_plan(replace(reader, first_step=first)),
                self._remedy(reader, epoch),
            ),
            len(range(reader.worker, order.num_steps, reader.num_workers)),
            delivered,
        )

    def evaluation(
        self, sizes: Sequence[int], reader: Reader, *, drop_last: bool
    ) -> ReaderShare:
        """A reader's share of the index's order.

        Args:
            sizes: samples of each span, of any split.
            reader: whose share.
            drop_last: leave out a shorter last batch.
        """
        partition = EpochPartition(reader.num_ranks, reader.num_workers)
        rules = SamplerConfig(
            self._options.batch_size, partition, drop_last=drop_last
        )
        order = index_order(sizes, rules)
        reading = _sensible(lambda: order.read_plan(reader))
        return ReaderShare(reading, len(reading.batches))

    def state_dict(self) -> dict[str, Any]:
        """Where training stands; see
        :class:`hapi_client.sampling.sampler_state.DataState`.
        """
        state = self._state or self.loaded
        if state is None:
            rules = self._rules(Reader(), 0, drop_last=False)
            state = self._start(rules, 0, 0)
        return state.to_dict()

    def state_at(
        self, epoch: int, step: int, reader: Reader, *, drop_last: bool
    ) -> dict[str, Any]:
        """The state when the steps below ``step`` of an epoch were taken.

        Raises:
            ClientError: ``bad_configuration`` for a step that there is not.
        """
        epoch, step = to_integer("epoch", epoch), to_integer("step", step)
        rules = self._rules(reader, epoch, drop_last=drop_last)
        num_steps = len(rules.step_ends(sum(self._sizes)))
        if not 0 <= step <= num_steps:
            raise ClientError(
                "bad_configuration",
                f"step is {step}, of an epoch of {num_steps} steps",
            )
        state = self._start(rules, epoch, 0)
        if step:
            state = state.behind(step - 1, num_steps)
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there: the epoch's loader begins with that step.

        Raises:
            ClientError: ``bad_state`` naming what is wrong with it, or does
                not go with this job.
        """
        given = DataState.from_dict(state)
        mine = {
            "data": self._data,
            "seed": self._options.seed,
            "batch_size": self._options.batch_size,
        }
        partition = self._options.partition
        if partition is not None:
            mine |= {
                "parts": partition.batch_partitions,
                "turns": partition.step_partitions,
            }
        for name, value in mine.items():
            if getattr(given, name) != value:
                raise bad_state(_difference(name, given, value))
        try:
            EpochPartition(given.parts, given.turns)
        except ValueError as error:
            raise bad_state(str(error)) from error
        self._options = replace(self._options, buffer_spans=given.buffer_spans)
        self.loaded, self._state = given, None
        self._is_loaded_due = True

    def first_step(self, epoch: int) -> int:
        """With which an epoch's next loader begins."""
        if self._is_loaded_due and self._has_begun(epoch):
            return self.loaded.step if self.loaded else 0
        return 0

    def _has_begun(self, epoch: int) -> bool:
        """Whether the run that is gone on with has taken steps of it."""
        loaded = self.loaded
        return loaded is not None and loaded.epoch == epoch and loaded.step > 0

    def _rules(
        self, reader: Reader, epoch: int, *, drop_last: bool
    ) -> SamplerConfig:
        options = self._options
        partition = (
            options.partition
            or self._lanes_of_state(reader, epoch)
            or EpochPartition.suited(
                len(self._sizes), reader.num_ranks, options.num_workers
            )
        )
        return SamplerConfig(
            options.batch_size, partition, options.buffer_spans, drop_last
        )

    def _lanes_of_state(
        self, reader: Reader, epoch: int
    ) -> EpochPartition | None:
        """Those of the run that is gone on with, while they can be kept."""
        if self.loaded is None:
            return None
        partition = EpochPartition(self.loaded.parts, self.loaded.turns)
        fits = not (
            partition.batch_partitions % reader.num_ranks
            or partition.step_partitions % self._options.num_workers
        )
        return partition if fits or self._has_begun(epoch) else None

    def _remedy(self, reader: Reader, epoch: int) -> str:
        """For readers that cannot share an epoch."""
        if self._has_begun(epoch):
            return (
                f"epoch {epoch} was begun with other ranks or workers: end it "
                "with such numbers, or begin another epoch"
            )
        if reader.num_workers not in (1, self._options.num_workers):
            return f"use job.dataset(num_workers={reader.num_workers})"
        return "or give other lanes" if self._options.partition else ""

    def _no_step(self) -> ClientError:
        return ClientError(
            "bad_configuration",
            f"an epoch of {sum(self._sizes)} samples has no batch of "
            f"{self._options.batch_size}; use smaller batches, or leave out "
            "drop_last",
        )

    def _start(self, rules: SamplerConfig, epoch: int, step: int) -> DataState:
        return DataState(
            data=self._data,
            seed=self._options.seed,
            batch_size=rules.batch_size,
            parts=rules.partition.batch_partitions,
            turns=rules.partition.step_partitions,
            buffer_spans=rules.buffer_spans,
            drop_last=rules.drop_last,
            epoch=epoch,
            step=step,
        )


def _check_same_epoch(
    loaded: DataState, state: DataState, num_steps: int
) -> None:
    if loaded.drop_last != state.drop_last:
        raise bad_state(
            f"it was made with drop_last={loaded.drop_last}, and this "
            f"loader has drop_last={state.drop_last}"
        )
    if loaded.step >= num_steps:
        raise bad_state(
            f"its step is {loaded.step}, of an epoch of {num_steps}"
        )


def _difference(name: str, given: DataState, mine: Any) -> str:
    if name == "data":
        return (
            "it is of another data set, or of shards that have changed since"
        )
    return f"its {name} is {getattr(given, name)!r}, and this job's {mine!r}"


def _sensible(make: Callable[[], Made], remedy: str = "") -> Made:
    try:
        return make()
    except ValueError as error:
        raise ClientError(
            "bad_configuration", "; ".join(filter(None, [str(error), remedy]))
        ) from error


def to_integer(name: str, value: Any) -> int:
    """Python's own: NumPy's are not fit for JSON.

    Raises:
        ClientError: ``bad_configuration`` for what is none.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise ClientError(
            "bad_configuration", f"{name} is {value!r}; a whole number"
        ) from error
