"""Executor of one device: its models, its threads, its failures."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hapi_protocol.errors import DoesNotFitError, UnavailableError
from hapi_splitter.encodings import EncodedFeatures
from hapi_worker.execution.decode import Decoder
from hapi_worker.execution.forward import (
    PassResult,
    core_clock,
    encode_rows,
    is_device_failure,
    is_out_of_memory,
    padded,
    run_prefix,
)
from hapi_worker.execution.quarantine import ModelQuarantine
from hapi_worker.models.device_models import DeviceModels, Lease
from hapi_worker.models.working_memory import WorkingMemory
from hapi_worker.scheduling.fair_pool import FairPool

RETRY_SECONDS = 5.0
"""Another device has the model after an upload and a load: seconds."""
HANGING_KINDS = ("cuda",)
"""Kinds of devices on which a pass may never return; a CPU is only slow."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Executor:
    """One device: the models in its memory and the threads that use it.

    Args:
        name: such as ``cpu`` or ``cuda:1``; a number follows if several
            executors share a device.
        device_models: the models in its memory.
        pool: its threads.
        failed: called once when the device has left service.
    """

    name: str
    device_models: DeviceModels
    pool: FairPool
    failed: Callable[[Executor], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.device_models.guarded = self.guarded

    @property
    def device(self) -> torch.device:
        return self.device_models.device

    @property
    def in_service(self) -> bool:
        return self.device_models.in_service

    def failure(self) -> UnavailableError:
        """The error of jobs on a device that has failed."""
        return UnavailableError(
            "worker_unavailable",
            f"the device {self.name} has failed",
            retry_after=RETRY_SECONDS,
        )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Converts failures in its block to errors of the device or memory.

        Raises:
            UnavailableError: the device has failed.
            DoesNotFitError: it has no memory left.
        """
        try:
            yield
        except Exception as error:
            if is_device_failure(error):
                self.fail(error)
                raise self.failure() from error
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise DoesNotFitError(
                    "does_not_fit",
                    f"the device {self.name} has no memory left: {error}",
                ) from error
            raise

    def check_hanging(self, limit_seconds: float) -> None:
        """Fails the device if a pass on it does not return."""
        seconds = self.device_models.working_memory.longest_pass_seconds()
        if self.device.type in HANGING_KINDS and seconds > limit_seconds:
            self.fail(
                TimeoutError(f"a pass has not returned for {seconds:.0f} s")
            )

    def fail(self, error: Exception) -> None:
        """Takes the device out of service, for good."""
        with self._lock:
            if not self.in_service:
                return
            self.device_models.leave_service()
        logger.critical(
            "device %s has failed and leaves service: %s", self.name, error
        )
        self.failed(self)


def executor_of(executors: Iterable[Executor], lease: Lease) -> Executor:
    """Returns the executor of the device that has the leased model."""
    models = lease.device_models
    return next(e for e in executors if e.device_models is models)


@dataclass(eq=False)
class PrefixCompute:
    """The computation of a group: a model up to a cut, on one device.

    Args:
        lease: a job's hold on the model for the cut.
        executor: the device.
        quarantine: records passes that took too long.
        oom: called for each pass that ran out of memory.
        decoder: makes inputs of the model.
    """

    lease: Lease
    executor: Executor
    quarantine: ModelQuarantine
    oom: Callable[[], None]
    decoder: Decoder

    @property
    def input_bytes(self) -> int:
        """Bytes of one input."""
        return self.lease.frozen.form.num_bytes

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of one sample's features before encoding."""
        return self.lease.frozen.cuts[self.lease.cut - 1].bytes_per_sample

    def core_seconds(self) -> float:
        """Clock of the CPU time of the calling thread and its helpers."""
        return core_clock(self.executor.device)

    @property
    def memory(self) -> WorkingMemory:
        """Working memory of the device, which passes reserve."""
        return self.executor.device_models.working_memory

    def run(self, images: Sequence[torch.Tensor], size: int) -> PassResult:
        """Runs a pass of ``size`` on the calling thread of the device.

        Raises:
            UnavailableError: the device has failed.
            DoesNotFitError: not even one sample fits now.
        """
        started = time.monotonic()
        device = self.executor.device
        with self.executor.guarded():
            batch = padded(images, size, device)
            done = run_prefix(self.lease.prefix(), batch, device=device)
        if done.num_halvings:
            self.oom()
            tried = size >> (done.num_halvings - 1)
            self.memory.record_out_of_memory(self.lease, tried)
        self.quarantine.note(self.lease.digest, time.monotonic() - started)
        return done

    def encode(self, rows: torch.Tensor, encoding: str) -> EncodedFeatures:
        with self.executor.guarded():
            return encode_rows(rows, encoding)
