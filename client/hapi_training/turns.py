"""A job's turns on a device that it shares with others.

Over the socket of :mod:`hapi_training.queue_socket`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hapi_client.option_checks import check_integer, check_types
from hapi_protocol.errors import ClientError
from hapi_protocol.printable import printable
from hapi_training.queue_socket import VERSION, connected, turn_lock

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
WARN_SECONDS = 30.0
NAME_LENGTH = 80


@dataclass(frozen=True)
class DeviceQueue:
    """The queue from which a job takes its turns.

    ::

        queue = DeviceQueue("/run/user/1000/gpu0", steps=5 * len(data))
        nodes = VirtualNodes(tail, 8, queue=queue)

    Args:
        socket: socket of ``hapi device-queue``; one queue is for one device.
        name: name of the job in messages; by default that of the script.
        weight: its part of fair shares, above 0.
        steps: steps of the whole run, by which "srtf" knows how long the job
            takes; None if unknown: then as long again as it has run.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    socket: str | os.PathLike[str]
    name: str = ""
    weight: float = 1.0
    steps: int | None = None

    def __post_init__(self) -> None:
        check_types(
            {
                "socket": (str, os.PathLike),
                "name": (str,),
                "weight": (int, float),
            },
            vars(self),
        )
        if self.steps is not None:
            check_integer("steps", self.steps, 1)
        if not 0 < self.weight < math.inf:
            raise ClientError(
                "bad_configuration",
                f"weight is {self.weight!r}; give a finite number above 0",
            )


class NoQueue:
    """The turns of a job that has its device for itself."""

    def take(self, left: int | None) -> None:
        """Waits for a turn; a turn that it has already is given back first.

        Args:
            left: turns that the job has yet to take, with this one.
        """

    def give_back(self) -> None:
        """Gives the turn back, if there is one."""

    def measured(self) -> None:
        """Tells the memory that the job needs, after its first step."""

    def close(self) -> None:
        """Gives the turn back and leaves the queue."""


_holding: Turns | None = None
"""Turns of this process, while it has one."""


@contextmanager
def given_back() -> Iterator[None]:
    """Gives this process's turn back while it waits for something else."""
    turns = _holding
    if turns is None:
        yield
        return
    turns.give_back()
    yield
    turns.take(turns.left)


class Turns(NoQueue):
    """Turns on a device, from a queue.

    Args:
        queue: the queue.
        device: the device.
        rank: rank of this worker, for its name.
        group: the same for all workers of the job.
        timeout_seconds: longest wait for a queue that does not answer.

    Attributes:
        left: as told with the last turn.

    Raises:
        ClientError: from each method; ``bad_configuration`` for a socket of
            someone else or a queue that refuses the job; ``queue_lost`` if
            the queue cannot be reached, or has taken a turn away.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        device: torch.device,
        rank: int,
        group: str,
        timeout_seconds: float,
    ) -> None:
        self._path = Path(queue.socket)
        self._device = device
        self._timeout = timeout_seconds
        self._hello = {
            "hello": VERSION,
            "name": printable(
                queue.name or Path(sys.argv[0]).name or "python"
            )[:NAME_LENGTH],
            "rank": rank,
            "group": group,
            "weight": queue.weight,
            "device": str(device),
            "memory_bytes": _device_bytes(device),
        }
        self._memory: dict[str, int] = {}
        self._server: socket.socket | None = None
        self._received = b""
        self.left: int | None = None
        self._holds = self._has_warned = False
        self._lock: int | None = None
        self._connect()

    def take(self, left: int | None) -> None:
        global _holding
        self.left = left
        has_asked = self._holds
        if has_asked:
            # At once, so that this job can be the next, too.
            self._end_turn({"done": True, "want": left})
        while True:
            try:
                if self._server is None:
                    self._connect()
                if not has_asked:
                    self._send({"want": left})
                self._wait_for_turn()
                break
            except OSError:
                # It has no turn: a queue that is started again may give one.
                self._disconnect()
                has_asked = False
            except BaseException:
                # Else a turn that comes after an interrupt would be nobody's.
                self._disconnect()
                raise
        self._holds, _holding = True, self
        # For a queue that is started again while this one has its turn.
        assert self._lock is not None, "is connected"
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _wait_for_turn(self) -> None:
        started = time.monotonic()
        while "turn" not in self._answer():
            if not self._has_warned and (
                time.monotonic() - started > WARN_SECONDS
            ):
                self._has_warned = True
                logger.warning(
                    "waiting for a turn on the device; 'hapi device-queue "
                    "status %s' shows the jobs before this one",
                    self._path,
                )

    def give_back(self) -> None:
        if self._holds:
            self._end_turn({"done": True})

    def _end_turn(self, message: dict[str, Any]) -> None:
        global _holding
        self._holds, _holding = False, None
        if self._device.type == "cuda":
            # Until then the device computes what was asked of it.
            torch.cuda.synchronize(self._device)
        try:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._send(message)
            # Without this answer the turn may have been taken away before.
            while "done" not in self._answer():
                pass
        except OSError as error:
            reason = self._last_words()
            self._disconnect()
            raise ClientError(
                "queue_lost",
                f"{reason or f'the device queue {self._path} was lost'} while "
                "this job had its turn; others may have computed at the same "
                "time. Start the job again from its last checkpoint",
            ) from error
        except BaseException:
            self._disconnect()
            raise

    def _last_words(self) -> str:
        """Why the queue has closed the connection, if it has said so."""
        try:
            while True:
                self._answer()
        except ClientError as error:
            return f"the device queue {self._path} says: {error.message};"
        except OSError:
            return ""

    def measured(self) -> None:
        if self._memory:
            return
        resident, peak = _memory_bytes(self._device)
        self._memory = {"resident": resident, "peak": peak}
        try:
            self._send(self._memory)
            while "noted" not in self._answer():
                pass
        except OSError:
            # take() connects again, and tells it again.
            self._disconnect()
        except BaseException:
            self._disconnect()
            raise

    @property
    def is_connected(self) -> bool:
        """True until close()."""
        return self._server is not None

    def close(self) -> None:
        self.give_back()
        self._disconnect()

    def _connect(self) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._server = connected(self._path, self._timeout)
                self._received = b""
                self._lock = turn_lock(self._path)
                self._send({**self._hello, **self._memory})
                self._answer()
                return
            except OSError as error:
                self._disconnect()
                if time.monotonic() > deadline:
                    raise ClientError(
                        "queue_lost",
                        f"the device queue {self._path} did not answer in "
                        f"{self._timeout:g} s ({error}); start it (hapi "
                        "device-queue), or leave out queue=",
                    ) from error
            except BaseException:
                self._disconnect()
                raise
            time.sleep(RETRY_SECONDS)

    def forget(self) -> None:
        """Leaves the turn to the parent, in a process that was forked."""
        global _holding
        self._holds, _holding = False, None
        self._disconnect()

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _send(self, message: dict[str, Any]) -> None:
        if self._server is None:
            raise ConnectionError("the queue is not connected")
        self._server.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        """Returns the next message of the queue."""
        assert self._server is not None, "is connected"
        while b"\n" not in self._received:
            data = self._server.recv(4096)
            if not data:
                raise ConnectionError("the queue has closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            code = answer.get("code", "bad_configuration")
            raise ClientError(code, str(answer["error"]))
        return answer


_shared: tuple[str, Turns] | None = None
"""The queue of this process, and its turns."""


def turns_of(
    queue: DeviceQueue,
    device: torch.device,
    rank: int,
    group: str,
    timeout_seconds: float,
) -> Turns:
    """Returns this process's turns: there is one queue for all its nodes.

    Else they would wait for each other.

    Raises:
        ClientError: as for :class:`Turns`; ``bad_configuration`` for another
            queue than that of the process.
    """
    global _shared
    path = os.path.realpath(queue.socket)
    if _shared is not None and _shared[1].is_connected:
        if _shared[0] != path:
            raise ClientError(
                "bad_configuration",
                f"this process takes turns from {_shared[0]} already, not "
                f"from {path}; use one device, or close() the other nodes",
            )
        return _shared[1]
    turns = Turns(queue, device, rank, group, timeout_seconds)
    if _shared is None:
        os.register_at_fork(after_in_child=_forget_shared)
    _shared = path, turns
    return turns


def _forget_shared() -> None:
    if _shared is not None:
        _shared[1].forget()


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_bytes(device: torch.device) -> tuple[int, int]:
    """Memory that is used between turns, and at most in a turn."""
    if device.type == "cuda":
        return (
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
        )
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return min(resident, peak), peak
