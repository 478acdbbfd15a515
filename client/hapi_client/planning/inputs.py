"""Inputs of the planner: parts of the job and remaining work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hapi_client.metrics.events import WindowMetrics
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.replanner import ReplanOptions
from hapi_client.planning.sample_probe import ProbeSamples
from hapi_client.swift.connection import Connection
from hapi_protocol.headers import ModelPath


@dataclass(frozen=True)
class PlannerInputs:
    """Parts of a job that its planner uses.

    Attributes:
        connection: connection to the account.
        region: frozen region of the model.
        models_container: container in which packages are stored.
        read: reads samples to measure, up to a number of bytes.
        measure: measures these samples and the client's device; called once,
            in the training loop's thread.
        observe: returns what a window of raw reads shows of them, for jobs
            too short to measure, or costs of 0 without a window; None if it
            does not.
        remaining_work: estimates the remaining epochs.
        options: options of re-planning.
        package_stored: called before the first push-down with the path of
            the package and the bytes sent for it.
        try_push: pushes down one sample, so that the worker has loaded the
            package.
        samples_so_far: returns the samples delivered to the training loops
            of all ranks.
        earlier_samples: returns those of the run that this job continues.
        early_rate: returns the bytes per second of reads before the first
            loader; None without.
        early_samples: returns the samples of them, of all ranks, that are not
            used yet.
        tracker: tracker of the store's cache.
        listing: updates the tracker; None if nothing is cached.
    """

    connection: Connection
    region: FrozenRegion
    models_container: str
    read: Callable[[float], ProbeSamples]
    measure: Callable[[ProbeSamples], LocalFacts]
    observe: Callable[[WindowMetrics | None], LocalFacts | None]
    remaining_work: RemainingWork
    options: ReplanOptions
    package_stored: Callable[[ModelPath, int], None]
    try_push: Callable[[ModelPath], None]
    samples_so_far: Callable[[], int]
    earlier_samples: Callable[[], int] = lambda: 0
    early_rate: Callable[[], float | None] = lambda: None
    early_samples: Callable[[], int] = lambda: 0
    tracker: CacheTracker = field(default_factory=CacheTracker)
    listing: CacheListing | None = None


@dataclass(frozen=True)
class RemainingWork:
    """Estimates how many epochs are left.

    Without a number of epochs, as many are expected as have passed already,
    and at least the rest of this epoch: a wrong guess then costs at most as
    much time again. Features that are cached on this host are computed once.

    Args:
        num_samples: samples of the data set.
        epochs: number of epochs that the user announced; None if unknown.
        coverage: returns the fractions of the samples that are cached now,
            and in the end.
    """

    num_samples: int
    epochs: float | None
    coverage: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)

    def remaining_epochs(self, samples_so_far: int) -> float:
        """Returns the epochs to compute, at least one sample of one."""
        done = samples_so_far / self.num_samples
        expected = done if self.epochs is None else self.epochs - done
        remaining = max(expected, 1.0 - done % 1.0)
        now, later = self.coverage()
        once = min(later - now, remaining)
        repeated = remaining * (1.0 - later)
        return max(once + repeated, 1.0 / self.num_samples)
