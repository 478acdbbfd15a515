"""A queue that gives jobs turns on one device, one at a time.

Over the socket of :mod:`hapi_training.queue_socket`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hapi_protocol.errors import ClientError
from hapi_splitter.units import bytes_text
from hapi_training.queue_socket import (
    ALIVE_SECONDS,
    VERSION,
    connected,
    is_turn_taken,
    listening,
    peer_of,
)
from hapi_training.turn_policies import POLICIES, Share

logger = logging.getLogger(__name__)

OPEN_SECONDS = 0.1
"""Interval at which a new queue looks for the holder of an earlier one."""
LINE_BYTES = 1 << 16
"""Longest line that a job may send."""
NUM_DECISIONS = 10_000
"""Decisions whose seconds are kept."""
NUM_ENDED = 20
"""Ended jobs that the status names."""


class Refused(Exception):
    """Why a job cannot have turns."""


class _Job:
    """A job's connection.

    Attributes:
        share: what the policy knows of it.
        name: name and rank.
        pid: its process.
        waiting_since: since when it waits for a turn, by the monotonic clock;
            None if it does not.
        turn_since: since when it has its turn; None if it has none.
        waited_seconds: seconds of its waiting so far.
        resident: bytes of the device between turns; None before it has
            told them.
        peak: most bytes of the device.
        group: the same of all workers of a job, which need each other.
        is_admitted: False if its memory does not fit with that of the others.
        end: why it was ended.
    """

    def __init__(self, writer: asyncio.StreamWriter, pid: int) -> None:
        self.share = Share(1.0)
        self.name = self.group = f"process {pid}"
        self.pid = pid
        self.waiting_since: float | None = None
        self.turn_since: float | None = None
        self.waited_seconds = 0.0
        self.resident: int | None = None
        self.peak = 0
        self.is_admitted = True
        self.end = "ended"
        self._writer = writer

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def close(self, reason: str) -> None:
        """Ends the connection; the job notices when it gives its turn back."""
        self.end = reason
        self.send({"error": f"this job {reason}", "code": "queue_lost"})
        self._writer.close()

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pid": self.pid,
            "weight": self.share.weight,
            "state": "has its turn"
            if self.turn_since is not None
            else "waits for memory"
            if not self.is_admitted
            else "waits"
            if self.waiting_since is not None
            else "is away",
            "turns": self.share.turns,
            "turn_seconds": self.share.seconds,
            "waited_seconds": self.waited_seconds,
            "left_seconds": None
            if self.share.left is None
            else self.share.left_seconds(),
            "resident_bytes": self.resident,
            "peak_bytes": self.peak,
        }


class Queue:
    """The jobs of one device, and whose turn it is.

    Args:
        policy: a key of :data:`.POLICIES`.
        memory_bytes: memory of the device; None for what the first job says,
            as the device is the first job's until all have left.
        turn_seconds: longest turn; a job that has not given it back is ended.
    """

    def __init__(
        self, policy: str, memory_bytes: int | None, turn_seconds: float
    ) -> None:
        self._policy_name, self._policy = policy, POLICIES[policy]()
        self._given_bytes = self._memory_bytes = memory_bytes
        self._turn_seconds = turn_seconds
        self._device: str | None = None
        self._jobs: list[_Job] = []
        self._holder: _Job | None = None
        self._decisions: deque[float] = deque(maxlen=NUM_DECISIONS)
        self._ended: deque[dict[str, Any]] = deque(maxlen=NUM_ENDED)
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        # A new queue waits for the holder of one that was killed.
        self._is_open = False

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection until its end."""
        pid, uid = peer_of(writer.get_extra_info("socket"))
        job = _Job(writer, pid)
        task = asyncio.current_task()
        assert task is not None, "is a coroutine"
        self._connections[task] = writer
        try:
            if uid != os.getuid():
                raise Refused(
                    f"the device queue is of user {os.getuid()}, and this job "
                    f"of user {uid}; start a queue of your own"
                )
            while line := await reader.readline():
                self._handle(job, json.loads(line))
                # One that does not read is not answered without limit.
                await writer.drain()
        except Refused as error:
            job.send({"error": str(error)})
            job.end = f"refused: {error}"
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
            OSError,
        ) as error:
            job.end = f"broken: {error!r}"
        finally:
            del self._connections[task]
            self._leave(job)
            writer.close()

    async def stop(self) -> None:
        """Ends all connections, and gives no turn any more."""
        self._is_open = False
        for writer in self._connections.values():
            # Without waiting for one that does not read.
            writer.transport.abort()
        if self._connections:
            await asyncio.wait([*self._connections])

    def _handle(self, job: _Job, message: dict[str, Any]) -> None:
        if "status" in message:
            job.send(self.facts())
        elif "hello" in message and job not in self._jobs:
            self._enter(job, message)
        elif "hello" in message or job not in self._jobs:
            raise ValueError("one hello, first")
        if "done" in message and job is self._holder:
            self._end_turn(job)
            job.send({"done": True})
        if "want" in message:
            left = message["want"]
            if not (left is None or (type(left) is int and left > 0)):
                raise ValueError(f"{left!r} turns left")
            job.share.left = left
            job.waiting_since = time.monotonic()
            self._policy.asks(job.share)
        if "peak" in message and "hello" not in message:
            self._declare(job, message["resident"], message["peak"])
            job.send({"noted": True})
        self._decide()

    def _enter(self, job: _Job, hello: dict[str, Any]) -> None:
        if hello["hello"] != VERSION:
            raise Refused(
                f"the device queue speaks version {VERSION}, and this job "
                f"version {hello['hello']}; install the same release of HAPI "
                "for both"
            )
        if not self._jobs:
            self._device = str(hello["device"])
            self._memory_bytes = self._given_bytes or int(
                hello["memory_bytes"]
            )
        if hello["device"] != self._device:
            raise Refused(
                f"the device queue is for {self._device}, and this job "
                f"computes on {hello['device']}; start a queue for each device"
            )
        weight = float(hello["weight"])
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight {weight}")
        job.share = Share(weight)
        job.name = f"{hello['name']} (rank {hello['rank']}, pid {job.pid})"
        job.group = str(hello["group"])
        self._jobs.append(job)
        job.send({"welcome": VERSION})
        logger.info("%s joins", job.name)
        if "peak" in hello:
            self._declare(job, hello["resident"], hello["peak"])

    def _declare(self, job: _Job, resident: int, peak: int) -> None:
        assert self._memory_bytes is not None, "told with the hello"
        job.resident, job.peak = int(resident), int(peak)
        own = [other for other in self._jobs if other.group == job.group]
        needed = _most_bytes(own)
        if needed > self._memory_bytes:
            raise Refused(
                f"the job needs {bytes_text(needed)} at its peak, but the "
                f"device has {bytes_text(self._memory_bytes)}; give it "
                "smaller nodes (more of them), or the queue more (--memory)"
            )
        job.is_admitted = False
        self._admit()
        if not job.is_admitted:
            logger.info("%s waits for memory", job.name)

    def _admit(self) -> None:
        """Admits jobs that fit next to the others, in the order of arrival."""
        assert self._memory_bytes is not None, "told with the hello"
        told = [job for job in self._jobs if job.resident is not None]
        inside = [job for job in told if job.is_admitted]
        is_full = False
        for job in told:
            if job.is_admitted:
                continue
            # Workers of a job wait for each other.
            is_known = job.group in {other.group for other in inside}
            needed = _most_bytes([*inside, job])
            is_full |= bool(inside) and needed > self._memory_bytes
            if is_full and not is_known:
                continue
            job.is_admitted = True
            inside.append(job)

    def _end_turn(self, job: _Job) -> None:
        assert job.turn_since is not None, "it is the holder"
        seconds = time.monotonic() - job.turn_since
        job.turn_since = self._holder = None
        job.share.turns += 1
        job.share.seconds += seconds
        self._policy.ends(job.share, seconds)

    def _leave(self, job: _Job) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        if job is self._holder:
            self._end_turn(job)
        self._ended.append({**job.facts(), "reason": job.end})
        logger.info("%s: %s", job.name, job.end)
        if self._memory_bytes is not None:
            self._admit()
        self._decide()

    def _decide(self) -> None:
        """Gives the next turn, if there is none."""
        if self._holder is not None or not self._is_open:
            return
        started = time.perf_counter()
        waiting = {
            job.share: job
            for job in self._jobs
            if job.waiting_since is not None and job.is_admitted
        }
        if not waiting:
            return
        job = waiting[self._policy.choose(waiting)]
        now = time.monotonic()
        assert job.waiting_since is not None, "it is one of these"
        job.waited_seconds += now - job.waiting_since
        job.waiting_since, job.turn_since = None, now
        self._holder = job
        self._decisions.append(time.perf_counter() - started)
        job.send({"turn": True})

    async def watch(self, path: Path) -> None:
        """Opens the queue, tells that it lives, and ends long turns.

        Args:
            path: its socket.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            if not self._is_open and (
                waited > self._turn_seconds or not is_turn_taken(path)
            ):
                self._is_open = True
                self._decide()
            await asyncio.sleep(
                min(ALIVE_SECONDS, self._turn_seconds / 4)
                if self._is_open
                else OPEN_SECONDS
            )
            for job in self._jobs:
                if job.waiting_since is not None:
                    job.send({"alive": True})
            holder = self._holder
            if holder is None or holder.turn_since is None:
                continue
            if time.monotonic() - holder.turn_since > self._turn_seconds:
                reason = (
                    f"held its turn for more than {self._turn_seconds:g} s "
                    "(--turn-limit)"
                )
                logger.warning("%s %s; others go on", holder.name, reason)
                holder.close(reason)
                self._leave(holder)

    def facts(self) -> dict[str, Any]:
        """The status, fit for JSON."""
        seconds = sorted(self._decisions) or [0.0]
        return {
            "policy": self._policy_name,
            "device": self._device,
            "memory_bytes": self._memory_bytes,
            "turn_limit_seconds": self._turn_seconds,
            "decision_ms_p99": 1000 * seconds[99 * len(seconds) // 100],
            "jobs": [job.facts() for job in self._jobs],
            "ended": [*self._ended],
        }


def _most_bytes(jobs: Sequence[_Job]) -> int:
    """Memory that jobs need: what all keep, and the most of a turn."""
    resident = [job.resident or 0 for job in jobs]
    return sum(resident) + max(
        max(0, job.peak - kept)
        for job, kept in zip(jobs, resident, strict=True)
    )


async def run(
    path: Path, queue: Queue, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        path: path of the socket.
        queue: the queue.
        on_ready: called when jobs can connect.

    Raises:
        ClientError: ``bad_configuration`` if the socket cannot be used, or
            another queue runs there.
    """
    with listening(path) as listener:
        server = await asyncio.start_unix_server(
            queue.serve, sock=listener, limit=LINE_BYTES, backlog=1000
        )
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        watching = asyncio.create_task(queue.watch(path))
        on_ready()
        await stop.wait()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        server.close()
        await queue.stop()


def status_of(path: Path, timeout_seconds: float = 5.0) -> dict[str, Any]:
    """Returns the status of a running queue.

    Raises:
        ClientError: ``bad_configuration`` if the path is something else;
            ``queue_lost`` if no queue answers.
    """
    try:
        with connected(path, timeout_seconds) as server:
            server.sendall(b'{"status": true}\n')
            with server.makefile() as lines:
                facts: dict[str, Any] = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise ClientError(
            "queue_lost",
            f"no device queue answers at {path} ({error}); start it with "
            f"hapi device-queue {path}",
        ) from error
    return facts
