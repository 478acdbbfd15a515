"""Prepares a worker for a job: package, model in memory, profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hapi_client.planning.inputs import PlannerInputs
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.headers import CACHE_OFF, ModelPath
from hapi_protocol.profiles import ModelProfile

logger = logging.getLogger(__name__)

# The first profile of a package may take a minute, and a worker sends nothing
# before its end.
PROFILE_SECONDS = 180.0
"""Deadline of one request for a profile."""


class WorkerPreparation:
    """Stores a job's package, and has the worker load and profile it.

    Args:
        parts: parts of the job.

    Attributes:
        model: path of the package; None before it is stored.
        encodings: encodings that the proxy supports.
    """

    def __init__(self, parts: PlannerInputs) -> None:
        self._parts = parts
        self.model: ModelPath | None = None
        self.encodings: Sequence[str] = ENCODINGS

    def upload_bytes(self) -> int:
        """Returns the bytes to upload; 0 if the package is in the store."""
        parts = self._parts
        path = parts.region.find(parts.connection, parts.models_container)
        return parts.region.parameter_bytes if path is None else 0

    def store(self) -> ModelPath:
        """Stores the package, and pushes down one sample.

        Raw reads go on while the worker checks and loads it.

        Raises:
            HapiError: if that is not possible.
        """
        parts = self._parts
        section = parts.connection.require_hapi()
        self.encodings = section.get("encodings", ENCODINGS)
        started = time.monotonic()
        model, sent_bytes = parts.region.store(
            parts.connection, parts.models_container
        )
        parts.package_stored(model, sent_bytes)
        self.model = model
        logger.info(
            "package stored: %d bytes in %.1f s",
            sent_bytes,
            time.monotonic() - started,
        )
        parts.try_push(model)
        return model

    def profile(self, assumed: ModelProfile | None) -> ModelProfile:
        """Returns the worker's profile, with the package stored.

        Args:
            assumed: profile to begin with, because measuring takes the
                worker seconds; None to measure.  Not used by a job with the
                store's cache, which has to know the worker.

        Raises:
            HapiError: if that is not possible.
        """
        parts = self._parts
        model = self.model or self.store()
        has_cache = parts.tracker.mode != CACHE_OFF
        profile = None if has_cache else assumed
        if profile is None:
            profile = parts.connection.get_profile(
                model.container,
                model.object,
                account=model.account,
                seconds=PROFILE_SECONDS,
            )
        if has_cache and parts.connection.require_hapi().get("cache"):
            parts.tracker.identify(profile.digest, profile.numerics_tag)
        if parts.listing is not None:
            parts.listing.read()
        return profile
