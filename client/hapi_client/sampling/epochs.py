"""Epochs of a job: their order, their readers, and the resumable state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.resume_state import DataState, bad_state
from hapi_client.sampling.sampler import (
    DEFAULT_BUFFER_SPANS,
    ReadPlan,
    SamplerConfig,
    index_order,
    shuffled_order,
)
from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import MAX_NUMBER


@dataclass(frozen=True)
class EpochOptions:
    """Settings of the order of a job's epochs.

    Attributes:
        batch_size: samples of a step, of all ranks together.
        seed: seed of the order, at least 0.
        partition: division of an epoch; None for a default that suits data
            set and readers.
        buffer_spans: width of the shuffle buffer, in spans.
        num_workers: loader workers that share the batches of a rank.

    Raises:
        ClientError: ``bad_configuration`` for no integer, or one too small.
    """

    batch_size: int = 32
    seed: int = 0
    partition: EpochPartition | None = None
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    num_workers: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("batch_size", 1), ("seed", 0)):
            value = to_integer(name, getattr(self, name))
            if value < minimum:
                raise ClientError(
                    "bad_configuration",
                    f"{name} is {value}; at least {minimum}",
                )
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ReaderShare:
    """A reader's share of an epoch.

    Attributes:
        read_plan: pieces to read, and batches to deliver.
        num_steps: steps of this reader in the whole epoch, including those
            before a resume.
        delivered: called with the number of each delivered step.
    """

    read_plan: ReadPlan
    num_steps: int
    delivered: Callable[[int], None] = lambda step: None


class Epochs:
    """Orders of a data set's epochs, and the progress of training.

    Args:
        sizes: samples of each span.
        data: digest of the data set.
        options: settings of the order.

    Attributes:
        loaded: state of the resumed run, if one was loaded.

    Raises:
        ClientError: ``bad_configuration`` naming the option.
    """

    def __init__(
        self, sizes: Sequence[int], data: str, options: EpochOptions
    ) -> None:
        self._sizes = sizes
        self._data = data
        self._options = options
        self.loaded: DataState | None = None
        # True until a step is delivered: the loaded step is the first one.
        self._is_resuming = False
        self._state: DataState | None = None
        self._config(Reader(), 0, drop_last=False)

    def for_workers(self, num_workers: int) -> Epochs:
        """Returns the epochs of a loader with workers, in the same state."""
        options = replace(self._options, num_workers=num_workers)
        epochs = Epochs(self._sizes, self._data, options)
        epochs.loaded = self._state or self.loaded
        epochs._is_resuming = True
        return epochs

    @property
    def batch_size(self) -> int:
        """Samples of a step, of all ranks together."""
        return self._options.batch_size

    @property
    def epoch(self) -> int:
        """Next epoch to train."""
        state = self._state or self.loaded
        return state.epoch if state else 0

    @property
    def step(self) -> int:
        """Next step of that epoch."""
        state = self._state or self.loaded
        return state.step if state else 0

    def training(
        self, epoch: int, reader: Reader, *, drop_last: bool
    ) -> ReaderShare:
        """Returns a reader's share of a training epoch, from its next step.

        Args:
            epoch: number of the epoch.
            reader: the reader; its ``first_step`` is ignored.
            drop_last: leave out an incomplete last batch.

        Raises:
            ClientError: ``bad_configuration`` naming what is not possible,
                and what is.
        """
        epoch = to_integer("epoch", epoch)
        config = self._config(reader, epoch, drop_last=drop_last)
        order = shuffled_order(
            self._sizes, config, seed=self._options.seed, epoch=epoch
        )
        if not order.num_steps:
            raise self._no_step()
        first = self.first_step(epoch)
        state = self._start(config, epoch, first)
        loaded = self.loaded
        if loaded and first:
            _check_same_epoch(loaded, state, order.num_steps)

        def delivered(step: int) -> None:
            if self.loaded is not loaded:
                # Another state has been loaded since.
                return
            if first:
                # A later loader of this epoch starts it from its first step.
                self._is_resuming = False
            self._state = state.after(step, order.num_steps)

        try:
            read_plan = order.read_plan(replace(reader, first_step=first))
        except ClientError as error:
            error.message += self._remedy(epoch)
            raise
        return ReaderShare(
            read_plan,
            len(range(reader.worker, order.num_steps, reader.num_workers)),
            delivered,
        )

    def evaluation(
        self, sizes: Sequence[int], reader: Reader, *, drop_last: bool
    ) -> ReaderShare:
        """Returns a reader's share of a split in the order of its index.

        Args:
            sizes: samples of each span of the split.
            reader: the reader.
            drop_last: leave out an incomplete last batch.
        """
        partition = EpochPartition(reader.num_ranks, reader.num_workers)
        config = SamplerConfig(
            self._options.batch_size, partition, drop_last=drop_last
        )
        order = index_order(sizes, config)
        reading = order.read_plan(reader)
        return ReaderShare(reading, len(reading.batches))

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields of a
        :class:`hapi_client.sampling.resume_state.DataState`.
        """
        state = self._state or self.loaded
        if state is None:
            config = self._config(Reader(), 0, drop_last=False)
            state = self._start(config, 0, 0)
        return state.to_dict()

    def state_at(
        self, epoch: int, step: int, reader: Reader, *, drop_last: bool
    ) -> dict[str, Any]:
        """Returns the state before ``step`` of an epoch.

        Raises:
            ClientError: ``bad_configuration`` for a step that does not exist.
        """
        epoch, step = to_integer("epoch", epoch), to_integer("step", step)
        config = self._config(reader, epoch, drop_last=drop_last)
        num_steps = len(config.step_ends(sum(self._sizes)))
        if not 0 <= step <= num_steps:
            raise ClientError(
                "bad_configuration",
                f"step is {step}, but the epoch has {num_steps} steps",
            )
        state = self._start(config, epoch, 0)
        if step:
            state = state.after(step - 1, num_steps)
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes a run: the epoch's next loader begins with its step.

        Raises:
            ClientError: ``bad_state`` naming what is invalid, or differs
                from this job.
        """
        given = DataState.from_dict(state)
        expected = {
            "data": self._data,
            "seed": self._options.seed,
            "batch_size": self._options.batch_size,
        }
        partition = self._options.partition
        if partition is not None:
            expected |= {
                "batch_partitions": partition.batch_partitions,
                "step_partitions": partition.step_partitions,
            }
        for name, value in expected.items():
            if getattr(given, name) != value:
                raise bad_state(_difference(name, given, value))
        try:
            EpochPartition(given.batch_partitions, given.step_partitions)
        except ClientError as error:
            raise bad_state(error.message) from error
        self._options = replace(self._options, buffer_spans=given.buffer_spans)
        self.loaded, self._state = given, None
        self._is_resuming = True

    def first_step(self, epoch: int) -> int:
        """Returns the step with which an epoch's next loader begins."""
        if self._is_resuming and self._has_begun(epoch):
            return self.loaded.step if self.loaded else 0
        return 0

    def _has_begun(self, epoch: int) -> bool:
        """True if the resumed run has taken steps of the epoch."""
        loaded = self.loaded
        return loaded is not None and loaded.epoch == epoch and loaded.step > 0

    def _config(
        self, reader: Reader, epoch: int, *, drop_last: bool
    ) -> SamplerConfig:
        options = self._options
        partition = (
            options.partition
            or self._loaded_partition(reader, epoch)
            or EpochPartition.suited(
                len(self._sizes), reader.num_ranks, options.num_workers
            )
        )
        return SamplerConfig(
            options.batch_size, partition, options.buffer_spans, drop_last
        )

    def _loaded_partition(
        self, reader: Reader, epoch: int
    ) -> EpochPartition | None:
        """Returns the resumed run's partition, if it fits or must be kept."""
        if self.loaded is None:
            return None
        partition = EpochPartition(
            self.loaded.batch_partitions, self.loaded.step_partitions
        )
        fits = not (
            partition.batch_partitions % reader.num_ranks
            or partition.step_partitions % self._options.num_workers
        )
        return partition if fits or self._has_begun(epoch) else None

    def _remedy(self, epoch: int) -> str:
        """Suggests a remedy if readers cannot share an epoch."""
        if self._has_begun(epoch):
            return (
                f"; epoch {epoch} was started with other ranks or workers: "
                "finish it with those numbers, or start another epoch"
            )
        return "; or give another partition" if self._options.partition else ""

    def _no_step(self) -> ClientError:
        return ClientError(
            "bad_configuration",
            f"an epoch of {sum(self._sizes)} samples has no batch of "
            f"{self._options.batch_size}; use smaller batches, or do without "
            "drop_last",
        )

    def _start(
        self, config: SamplerConfig, epoch: int, step: int
    ) -> DataState:
        return DataState(
            data=self._data,
            seed=self._options.seed,
            batch_size=config.batch_size,
            batch_partitions=config.partition.batch_partitions,
            step_partitions=config.partition.step_partitions,
            buffer_spans=config.buffer_spans,
            drop_last=config.drop_last,
            epoch=epoch,
            step=step,
        )


def _check_same_epoch(
    loaded: DataState, state: DataState, num_steps: int
) -> None:
    if loaded.drop_last != state.drop_last:
        raise bad_state(
            f"it has drop_last={loaded.drop_last}, but this loader has "
            f"drop_last={state.drop_last}"
        )
    if loaded.step >= num_steps:
        raise bad_state(
            f"its step is {loaded.step}, but an epoch has {num_steps} steps"
        )


def _difference(name: str, given: DataState, mine: Any) -> str:
    if name == "data":
        return (
            "it belongs to another data set, or its shards have changed since"
        )
    return f"its {name} is {getattr(given, name)!r}, this job's is {mine!r}"


def check_epoch(epoch: Any) -> int:
    """Returns the number of an epoch as Python's int.

    Raises:
        ClientError: ``bad_configuration`` if it is none.
    """
    number = to_integer("epoch", epoch)
    if not 0 <= number <= MAX_NUMBER:
        raise ClientError(
            "bad_configuration",
            f"epoch is {number}; give an integer from 0 to 2**63 - 1",
        )
    return number


def to_integer(name: str, value: Any) -> int:
    """Converts to Python's int, since NumPy's integers are not valid JSON.

    Raises:
        ClientError: ``bad_configuration`` if it is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise ClientError(
            "bad_configuration", f"{name} is {value!r}; give an integer"
        ) from error
