"""Workers that name a rendezvous (``HAPI_RENDEZVOUS``) come and go.

Keys of a ``TCPStore`` say who they are:

``members/<generation>``
    numbers of the members in the order of their ranks, and how many of the
    waiting workers they have admitted.  Whoever writes it first decides.
``waiting/<ticket>``
    number of a worker that waits to be admitted between two steps.
``arrived/<generation>/<number>``
    after a loss: steps that this member has taken.
``entered/<generation>/<number>``
    this member is about to make the group.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    TCPStore,
)

from hapi_client.sampling.distributed import Rank
from hapi_protocol.errors import ClientError
from hapi_training.liveness import ANSWER_SECONDS, Answering, Liveness
from hapi_training.membership import (
    Membership,
    WorkerLostError,
    leave_group,
    reaching_others,
)

logger = logging.getLogger(__name__)

RENDEZVOUS_VARIABLE = "HAPI_RENDEZVOUS"
# Chosen: nothing next to a step, and a request each to a store that answers
# thousands in a second.
POLL_SECONDS = 0.05
PATIENCE = 10
"""Time limits after which the others go on without a member that answers, but
does not come, as its loop may be waiting for data."""

_open: WeakValueDictionary[str, Membership] = WeakValueDictionary()
"""Memberships of this process, by the address of the rendezvous."""


@dataclass(frozen=True)
class Members:
    """A generation of workers.

    Attributes:
        numbers: number of each worker, in the order of their ranks.
        admitted: tickets of waiting workers that were looked at so far.
        done: collective operations that at least one of them has done.
    """

    numbers: tuple[int, ...] = ()
    admitted: int = 0
    done: int = 0

    def to_json(self) -> str:
        return json.dumps([self.numbers, self.admitted, self.done])

    @classmethod
    def from_json(cls, text: str) -> Members:
        numbers, admitted, done = json.loads(text)
        return cls(tuple(numbers), admitted, done)


def open_membership(
    device: torch.device, timeout_seconds: float, most: int
) -> Membership:
    """Returns the workers of this process's run.

    Args:
        device: device of the training.
        timeout_seconds: longest wait for an answer of another worker.
        most: largest number of workers that train at a time.

    Raises:
        ClientError: ``bad_configuration`` for a wrong ``HAPI_RENDEZVOUS``;
            ``worker_lost`` if nobody answers.
    """
    address = os.environ.get(RENDEZVOUS_VARIABLE)
    if address:
        return ElasticMembership(address, device, timeout_seconds, most)
    return Membership(device)


def open_store(address: str) -> TCPStore:
    """Returns a store that listens on an address.

    Raises:
        ClientError: ``bad_configuration`` if that is not possible.
    """
    host, port = _host_and_port(address)
    try:
        # torch listens on all addresses, and then waits for this one.
        [family, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        socket.create_server((host, port), family=family).close()
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (OSError, dist.DistError, RuntimeError) as error:
        raise ClientError(
            "bad_configuration",
            f"cannot listen on {address}: {str(error).splitlines()[0]}; give "
            "an address of this machine and a free port",
        ) from error


class ElasticMembership(Membership):
    """Workers that may come between steps, and go at any time.

    Args:
        address: ``HOST:PORT`` of the store, of ``hapi rendezvous``.
        device: device of the training.
        timeout_seconds: longest wait for an answer of another worker.
        most: largest number of workers; more wait until one ends.
    """

    is_elastic = True

    def __init__(
        self,
        address: str,
        device: torch.device,
        timeout_seconds: float,
        most: int,
    ) -> None:
        if dist.is_initialized() or "WORLD_SIZE" in os.environ:
            raise ClientError(
                "bad_configuration",
                f"{RENDEZVOUS_VARIABLE} is {address!r}, but this process "
                "belongs to a group of torchrun or torch.distributed already; "
                "start it with python, or unset the variable",
            )
        other = _open.get(address)
        if other is not None:
            raise ClientError(
                "bad_configuration",
                f"this process has VirtualNodes of the rendezvous {address} "
                "already; give one a module with all parts, such as "
                "nn.ModuleList([generator, critic])",
            )
        super().__init__(device)
        _open[address] = self
        self._most = most
        self._address = address
        self._timeout = self._limit = timeout_seconds
        self._began = time.monotonic()
        self._generation = -1
        self._members = Members()
        self._sees_waiting = True
        host, port = _host_and_port(address)
        with self._asking_the_store():
            self._store = _connected(host, port, timeout_seconds)
            self._number = self._store.add("numbers", 1)
        self._answering = Answering(str(self._number), host, port)
        self._set(f"address/{self._number}", self._answering.address)
        atexit.register(leave_group)

    def begin(self) -> None:
        """Notes that a collective operation begins."""
        self._began = time.monotonic()

    def facts(self, mine: Any) -> Any:
        """Returns the facts of the run's first worker, fit for JSON."""
        with self._asking_the_store():
            text = self._store.compare_set("facts", "", json.dumps(mine))
        return json.loads(text)

    def join(self) -> None:
        """Waits until the others admit this worker, between two steps."""
        ticket = self._wait_for_admission()
        self.begin()
        # Members may take long over a step, or evaluate.
        others, noted = self._others(math.inf), time.monotonic()
        while True:
            latest = self._latest()
            members = self._read(latest) if latest >= 0 else Members()
            if self._number in members.numbers:
                return self._enter(latest, members)
            if all(map(others.has_ended, members.numbers)):
                first = Members((self._number,), members.admitted)
                self._propose(latest + 1, first)
            elif members.admitted >= ticket:
                # It did not answer when it was its turn.
                ticket = self._wait_for_admission()
            elif time.monotonic() - noted > self._timeout:
                noted = time.monotonic()
                logger.info("waiting for a step of the other workers to end")
            time.sleep(POLL_SECONDS)

    def _wait_for_admission(self) -> int:
        """Gets in line with the others that wait; returns the ticket."""
        with self._asking_the_store():
            ticket = self._store.add("waiting", 1)
        self._set(f"waiting/{ticket}", str(self._number))
        return ticket

    def num_waiting(self) -> int:
        """Number of workers that wait to be admitted; on rank 0 only."""
        is_full = self.rank.world_size >= self._most
        if self.rank.rank or not self._sees_waiting or is_full:
            return 0
        try:
            return self._store.add("waiting", 0) - self._members.admitted
        except RuntimeError as error:
            self._sees_waiting = False
            logger.warning(
                "the rendezvous at %s does not answer: %s; training goes on, "
                "but nobody can join, and a lost worker ends it",
                self._address,
                error,
            )
            return 0

    def admit(self) -> None:
        """Makes the group of all members and those that wait."""
        self.begin()
        following, members = self._generation + 1, self._members.numbers
        others = self._others()
        if not self.rank.rank:
            self._propose(following, self._with_waiting(others))
        while not self._has(f"members/{following}"):
            if others.has_ended(members[0]):
                return self.regroup()
            time.sleep(POLL_SECONDS)
        self._enter(following, self._read(following))

    def _with_waiting(self, others: Liveness) -> Members:
        """Returns the members and as many that wait as there is room for."""
        numbers, ticket = list(self._members.numbers), self._members.admitted
        with self._asking_the_store():
            last = self._store.add("waiting", 0)
        while ticket < last and len(numbers) < self._most:
            ticket += 1
            key = f"waiting/{ticket}"
            began = time.monotonic()
            # Its worker sets it next, unless it was killed between.
            while not self._has(key):
                if time.monotonic() - began > ANSWER_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
            else:
                number = int(self._get(key))
                if number not in numbers and others.is_alive(number):
                    numbers.append(number)
        return Members(tuple(numbers), ticket, self.done)

    def regroup(self) -> None:
        """Makes the group of the members that are left, after a loss.

        Raises:
            ClientError: ``worker_lost`` if the others have gone on without
                this worker.
        """
        leave_group()
        following, members = self._generation + 1, self._members.numbers
        key = f"arrived/{following}"
        self._set(f"{key}/{self._number}", str(self.done))
        others = self._others()
        while not self._has(f"members/{following}"):
            left = [
                number
                for number in members
                if number == self._number or not others.has_ended(number)
            ]
            done = [
                int(self._get(f"{key}/{number}"))
                for number in left
                if self._has(f"{key}/{number}")
            ]
            if len(done) == len(left) and left[0] == self._number:
                admitted = self._members.admitted
                self._propose(
                    following, Members(tuple(left), admitted, max(done))
                )
            else:
                time.sleep(POLL_SECONDS)
        found = self._read(following)
        if self._number not in found.numbers:
            raise ClientError(
                "worker_lost",
                "the other workers have gone on without this one, which did "
                f"not answer for {self._timeout:g} s; start it again to join "
                "them",
            )
        num_lost = len(set(members) - set(found.numbers))
        if not num_lost:
            # Else workers that are slow in each step would never take one.
            self._limit = min(2 * self._limit, PATIENCE * self._timeout)
        logger.warning(
            "%s of %d workers lost; taking the step again, with %g s for each",
            num_lost or "none",
            len(members),
            self._limit,
        )
        self.is_ahead = found.done > self.done
        self._enter(following, found)

    def _others(self, patience: float = PATIENCE) -> Liveness:
        return Liveness(
            self._address_of,
            self._timeout,
            self._began,
            patience * self._timeout,
        )

    def _enter(self, generation: int, members: Members) -> None:
        """Makes the process group of a generation."""
        leave_group()
        self._generation, self._members = generation, members
        rank = members.numbers.index(self._number)
        self.rank = Rank(rank, len(members.numbers))
        if self.rank.world_size > 1:
            self._wait_for_members(f"entered/{generation}")
            store = PrefixStore(f"group/{generation}", self._store)
            with reaching_others("the start of a group"):
                dist.init_process_group(
                    store=store,
                    rank=rank,
                    world_size=self.rank.world_size,
                    backend=self._backend,
                    timeout=timedelta(seconds=self._limit),
                )

    def _wait_for_members(self, key: str) -> None:
        """Waits for all members, so that torch does not wait for a lost one.

        Raises:
            WorkerLostError: one of them has ended.
        """
        self._set(f"{key}/{self._number}", "")
        self.begin()
        others = self._others()
        for number in self._members.numbers:
            while not self._has(f"{key}/{number}"):
                if others.has_ended(number):
                    raise WorkerLostError(
                        "worker_lost", f"worker {number} has ended"
                    )
                time.sleep(POLL_SECONDS)

    def _propose(self, generation: int, members: Members) -> None:
        with self._asking_the_store():
            self._store.compare_set(
                f"members/{generation}", "", members.to_json()
            )
            self._store.set("latest", str(generation))

    def _latest(self) -> int:
        if not self._has("latest"):
            return -1
        latest = int(self._get("latest"))
        # Its writer may have been slower than the next one's.
        while self._has(f"members/{latest + 1}"):
            latest += 1
        return latest

    def _read(self, generation: int) -> Members:
        return Members.from_json(self._get(f"members/{generation}"))

    def _address_of(self, number: int) -> str:
        return self._get(f"address/{number}")

    def _get(self, key: str) -> str:
        with self._asking_the_store():
            return str(self._store.get(key), "utf-8")

    def _has(self, key: str) -> bool:
        with self._asking_the_store():
            return self._store.check([key])

    def _set(self, key: str, value: str) -> None:
        with self._asking_the_store():
            self._store.set(key, value)

    @contextmanager
    def _asking_the_store(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise ClientError(
                "worker_lost",
                f"the rendezvous at {self._address} does not answer: "
                f"{str(error).splitlines()[0]}; start it with 'hapi "
                "rendezvous', or check HAPI_RENDEZVOUS",
            ) from error


def _connected(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """Connects to a store.

    Raises:
        RuntimeError: there is none, or it does not answer in time.
    """
    _wait_for_listener(host, port, timeout_seconds)
    made: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout_seconds)
            made.set_result(
                TCPStore(host, port, is_master=False, timeout=limit)
            )
        except BaseException as error:
            made.set_exception(error)

    # In a thread, as torch waits for ever for a server of another kind.
    thread = threading.Thread(target=connect, name="hapi-store", daemon=True)
    thread.start()
    try:
        return made.result(timeout_seconds)
    except FutureTimeoutError as error:
        # A thread that is left in torch aborts the process at its end.
        _shut_down(host, port)
        thread.join(timeout_seconds)
        raise RuntimeError(
            f"no answer of a store in {timeout_seconds:g} s"
        ) from error


def _wait_for_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Waits until something listens: torch waits for twice its limit."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout_seconds).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(str(error)) from error
            time.sleep(POLL_SECONDS)


def _shut_down(host: str, port: int) -> None:
    """Ends this process's connections to an address, torch's included."""
    addresses = {
        info[4][:2]
        for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as ours:
                if ours.getpeername()[:2] in addresses:
                    ours.shutdown(socket.SHUT_RDWR)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ClientError(
            "bad_configuration",
            f"the rendezvous is {address!r}; give HOST:PORT of 'hapi "
            "rendezvous', as in HAPI_RENDEZVOUS=trainer-1:29400",
        )
    return host.strip("[]"), int(port)
