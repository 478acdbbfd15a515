"""Runs the client's measurement in the thread of the training loop.

Measuring changes torch's settings of precision, which are global: they must
not change while the loop computes.  Spans are still read ahead meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.sample_probe import ProbeSamples
from hapi_protocol.errors import ClientError


class TrainingThreadProbe:
    """A measurement that planning requests from the training thread.

    Args:
        measure: measures samples and device; runs in the loop's thread.
    """

    def __init__(self, measure: Callable[[ProbeSamples], LocalFacts]) -> None:
        self._measure = measure
        self._probe: ProbeSamples | None = None
        self._busy = threading.Lock()
        self._facts: LocalFacts | None = None
        self._failure: Exception | None = None

    @property
    def facts(self) -> LocalFacts | None:
        """Result of the measurement; None before."""
        return self._facts

    # --- the planning thread ---

    def request(self, probe: ProbeSamples) -> None:
        """Requests a measurement, which begins when the next span arrives."""
        self._probe = probe

    def take_failure(self) -> Exception | None:
        """Returns the error of the measurement once, then None."""
        failure, self._failure = self._failure, None
        return failure

    # --- the training loop's thread ---

    def span_arrived(self) -> None:
        """Measures if requested; an error is left to the planning thread."""
        # A job may have several loops at a time; one of them measures.
        if self._probe is None or not self._busy.acquire(blocking=False):
            return
        try:
            if self._probe is not None:
                self._facts = self._measure(self._probe)
        except Exception as error:
            # The planning thread reports it: the loop must go on.
            self._failure = error
        except BaseException:
            self._failure = ClientError(
                "not_connected",
                "the training loop ended during the measurement",
            )
            raise
        finally:
            self._probe = None
            self._busy.release()
