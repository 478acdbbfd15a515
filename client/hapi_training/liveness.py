"""Asks other workers whether they are alive; each answers in a thread.

A worker that has ended refuses connections to its address.  One that is
stopped or cut off does not answer, and is given up after a time limit.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

ANSWER_SECONDS = 1.0
"""Time that a worker has for one answer."""


class Answering:
    """Answers the question whether this process is alive, in a thread.

    Args:
        answer: the answer.
        host: host of the store, by whose route the others reach this one.
        port: its port.
    """

    def __init__(self, answer: str, host: str, port: int) -> None:
        with socket.create_connection((host, port)) as reached:
            family, mine = reached.family, reached.getsockname()[0]
        self._server = socket.create_server((mine, 0), family=family)
        self._answer = answer.encode()
        self.address = json.dumps([mine, self._server.getsockname()[1]])
        threading.Thread(
            target=self._run, name="hapi-alive", daemon=True
        ).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection, suppress(OSError):
                connection.sendall(self._answer)


class Liveness:
    """Asks other workers now and then whether they are alive.

    Args:
        address_of: returns the address of a worker by its number.
        timeout_seconds: time after which a silent one counts as ended.
        began: since when this one waits for them, by the monotonic clock.
        patience_seconds: time after which one that answers counts as ended.
    """

    def __init__(
        self,
        address_of: Callable[[int], str],
        timeout_seconds: float,
        began: float,
        patience_seconds: float,
    ) -> None:
        self._address_of = address_of
        self._timeout = timeout_seconds
        self._began = began
        self._patience = patience_seconds
        self._heard: dict[int, float] = {}
        self._ended: set[int] = set()

    def is_alive(self, number: int) -> bool:
        """Returns True if a worker has just answered."""
        return number not in self._ended and bool(self._answer(number))

    def has_ended(self, number: int) -> bool:
        """Returns True if a worker has ended, or is given up."""
        if number in self._ended:
            return True
        answer, now = self._answer(number), time.monotonic()
        if answer:
            self._heard[number] = now
        silent_seconds = now - self._heard.get(number, self._began)
        if (
            answer is False
            or silent_seconds > self._timeout
            or now - self._began > self._patience
        ):
            self._ended.add(number)
        return number in self._ended

    def _answer(self, number: int) -> bool | None:
        """Returns True if a worker is alive, False if not; None if silent."""
        host, port = json.loads(self._address_of(number))
        try:
            with socket.create_connection(
                (host, port), timeout=ANSWER_SECONDS
            ) as connection:
                answer = connection.recv(64)
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:
            return None
        # Another process may have got the port since.
        return answer == str(number).encode()
