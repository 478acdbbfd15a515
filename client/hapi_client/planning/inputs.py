"""Inputs of the planner: parts of the job and remaining work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    """What a planner of a job works with.

    Attributes:
        connection: to the account.
        region: of the model.
        models_container: where packages are stored.
        read: gets samples to be measured, of so many bytes at most.
        measure: these and the client's device; called once, in the
            training loop's thread.
        horizon: of the job.
        options: when to look again.
        package_stored: told where the package is, and the bytes sent for
            it, before the first push.
        samples_so_far: that the training loops of all ranks have had.
        earlier_samples: likewise, of a run that this job goes on with.
        tracker: of the store's cache.
        listing: fills the tracker; None if nothing is cached.
    """

    connection: Connection
    region: FrozenRegion
    models_container: str
    read: Callable[[float], ProbeSamples]
    measure: Callable[[ProbeSamples], LocalFacts]
    remaining_work: RemainingWork
    options: ReplanOptions
    package_stored: Callable[[ModelPath, int], None]
    samples_so_far: Callable[[], int]
    earlier_samples: Callable[[], int] = lambda: 0
    tracker: CacheTracker = field(default_factory=CacheTracker)
    listing: CacheListing | None = None


@dataclass(frozen=True)
class RemainingWork:
    """How many samples are still to come.

    Without a number of epochs as many are expected as have come already,
    and at least the epoch under way: whoever has trained for long will go
    on for long, and a wrong guess costs at most as much again.

    Args:
        num_samples: of the data set.
        epochs: that the user announced, if so.
    """

    num_samples: int
    epochs: float | None

    def remaining_epochs(self, samples_so_far: int) -> float:
        """At least the rest of the epoch under way."""
        done = samples_so_far / self.num_samples
        if self.epochs is not None:
            return max(self.epochs - done, 1.0 - done % 1.0)
        return max(done, 1.0 - done % 1.0)
