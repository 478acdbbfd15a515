"""Has the training loop's own thread measure, between two of its spans.

torch's settings of precision are the whole process's, and must not change
while the loop computes; so what changes them does not run beside it. What is
fetched ahead meanwhile is not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.sample_probe import ProbeSamples
from hapi_protocol.errors import ClientError


class TrainingThreadProbe:
    """One measurement, asked for by one thread and made by another.

    Args:
        measure: of samples and device; runs in the loop's thread.
    """

    def __init__(self, measure: Callable[[ProbeSamples], LocalFacts]) -> None:
        self._measure = measure
        self._probe: ProbeSamples | None = None
        self._busy = threading.Lock()
        self._facts: LocalFacts | None = None
        self._failure: Exception | None = None

    @property
    def facts(self) -> LocalFacts | None:
        """What was measured, if it was."""
        return self._facts

    # --- the thread that wants them ---

    def ask(self, probe: ProbeSamples) -> None:
        """The next span's coming starts the measurement."""
        self._probe = probe

    def take_failure(self) -> Exception | None:
        """What has made the measurement fail; told once."""
        failure, self._failure = self._failure, None
        return failure

    # --- the training loop's thread ---

    def span_arrived(self) -> None:
        """Measures if it was asked to; raises nothing of its own."""
        # Several loops of one job may be under way; one of them measures.
        if self._probe is None or not self._busy.acquire(blocking=False):
            return
        try:
            if self._probe is not None:
                self._facts = self._measure(self._probe)
        except Exception as error:
            # The other thread tells of it: the loop must go on.
            self._failure = error
        except BaseException:
            self._failure = ClientError(
                "not_connected", "the loop was left while it measured"
            )
            raise
        finally:
            self._probe = None
            self._busy.release()
