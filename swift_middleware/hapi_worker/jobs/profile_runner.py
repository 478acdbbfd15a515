"""Runs that profile a model, on a thread of its device."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hapi_protocol.errors import DoesNotFitError, HapiError, InternalError
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.profiling.profiler import profile_model
from hapi_worker.execution.device_executor import Executor, executor_of
from hapi_worker.execution.forward import is_out_of_memory
from hapi_worker.models.device_models import Lease
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.scheduling.fair_pool import FairPool

QUIET_SECONDS = 5.0
"""Longest wait for running work of the pools to end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileRunner:
    """Measures models while the pools of a worker pause.

    Args:
        executors: the devices.
        pools: all pools of the worker; they pause during a profile.
        batches: batch sizes to measure, if they fit the memory.
        cores: cores of this host that the worker may use.
        budget_seconds: device time for one profile.
    """

    executors: Sequence[Executor]
    pools: Sequence[FairPool]
    batches: Sequence[int]
    cores: float
    budget_seconds: float

    def measure(self, lease: Lease) -> ModelProfile | HapiError:
        """Profiles a leased model; called on a thread of its device."""
        try:
            guarded = executor_of(self.executors, lease).guarded()
            with self._quiet(lease), guarded:
                return self._measured(lease)
        except HapiError as error:
            return error
        except Exception as error:
            return _failure(error)

    @contextlib.contextmanager
    def _quiet(self, lease: Lease) -> Iterator[None]:
        """Runs its block while the pools are paused.

        Raises:
            UnavailableError: ``queue_full``: running work does not end.
        """
        mine = executor_of(self.executors, lease).pool
        until = time.monotonic() + QUIET_SECONDS
        with contextlib.ExitStack() as pauses:
            for pool in self.pools:
                left = max(until - time.monotonic(), 0.0)
                allowed = int(pool is mine)
                if not pauses.enter_context(
                    pool.paused(left, num_allowed=allowed)
                ):
                    raise too_busy_error(
                        "queue_full",
                        "the samples of other jobs took more than "
                        f"{QUIET_SECONDS:g} s to decode or to compute, and a "
                        "profile would measure that too",
                    )
            yield

    def _measured(self, lease: Lease) -> ModelProfile:
        started = time.monotonic()
        device_models = lease.device_models
        # At least one sample: the lease holds the memory for it.
        with device_models.working_memory.reserve_alone(
            lease, max(self.batches)
        ) as largest:
            batches = [size for size in self.batches if size <= largest]
            profile = profile_model(
                lease.frozen,
                device_models.device,
                cores=self.cores,
                num_devices=sum(e.pool.num_threads for e in self.executors),
                memory_limit_bytes=device_models.limit_bytes,
                digest=lease.digest,
                batches=batches or [1],
                budget_seconds=self.budget_seconds,
                load_seconds=lease.load_seconds,
            )
        logger.info(
            "profile of model %s: batches of %s in %.2f s",
            lease.digest[:12],
            ", ".join(str(size.batch) for size in profile.batches),
            time.monotonic() - started,
        )
        return profile


def _failure(error: Exception) -> HapiError:
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return DoesNotFitError(
            "does_not_fit",
            f"the device has no memory left for one sample: {error}",
        )
    logger.error("a defect: a profile failed", exc_info=error)
    return InternalError(
        "internal", f"the worker failed: {type(error).__name__}"
    )
