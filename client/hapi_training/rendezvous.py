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
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hapi_client.sampling.distributed import Rank
from hapi_protocol.errors import ClientError
from hapi_training.liveness import ANSWER_SECONDS, Answering, Liveness
from hapi_training.membership import (
    Membership,
    WorkerLostError,
    leave_group,
    reaching_others,
)
from hapi_training.store import POLL_SECONDS, RENDEZVOUS_VARIABLE, Store

logger = logging.getLogger(__name__)

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
        self._timeout = self._limit = timeout_seconds
        self._began = time.monotonic()
        self._generation = -1
        self._members = Members()
        self._sees_waiting = True
        self._store = Store(address, timeout_seconds)
        self._number = self._store.add("numbers", 1)
        self._answering = Answering(
            str(self._number), self._store.host, self._store.port
        )
        self._store.set(f"address/{self._number}", self._answering.address)
        atexit.register(leave_group)

    def begin(self) -> None:
        """Notes that a collective operation begins."""
        self._began = time.monotonic()

    def facts(self, mine: Any) -> Any:
        """Returns the facts of the run's first worker, fit for JSON."""
        return json.loads(self._store.set_first("facts", json.dumps(mine)))

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
        ticket = self._store.add("waiting", 1)
        self._store.set(f"waiting/{ticket}", str(self._number))
        return ticket

    def num_waiting(self) -> int:
        """Number of workers that wait to be admitted; on rank 0 only."""
        is_full = self.rank.world_size >= self._most
        if self.rank.rank or not self._sees_waiting or is_full:
            return 0
        try:
            return self._store.add("waiting", 0) - self._members.admitted
        except ClientError as error:
            self._sees_waiting = False
            logger.warning(
                "%s; training goes on, but nobody can join, and a lost worker "
                "ends it",
                error.message,
            )
            return 0

    def admit(self) -> None:
        """Makes the group of all members and those that wait."""
        self.begin()
        following, members = self._generation + 1, self._members.numbers
        others = self._others()
        if not self.rank.rank:
            self._propose(following, self._with_waiting(others))
        while not self._store.has(f"members/{following}"):
            if others.has_ended(members[0]):
                return self.regroup()
            time.sleep(POLL_SECONDS)
        self._enter(following, self._read(following))

    def _with_waiting(self, others: Liveness) -> Members:
        """Returns the members and as many that wait as there is room for."""
        numbers, ticket = list(self._members.numbers), self._members.admitted
        last = self._store.add("waiting", 0)
        while ticket < last and len(numbers) < self._most:
            ticket += 1
            key = f"waiting/{ticket}"
            began = time.monotonic()
            # Its worker sets it next, unless it was killed between.
            while not self._store.has(key):
                if time.monotonic() - began > ANSWER_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
            else:
                number = int(self._store.get(key))
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
        self._store.set(f"{key}/{self._number}", str(self.done))
        others = self._others()
        while not self._store.has(f"members/{following}"):
            left = [
                number
                for number in members
                if number == self._number or not others.has_ended(number)
            ]
            done = [
                int(self._store.get(f"{key}/{number}"))
                for number in left
                if self._store.has(f"{key}/{number}")
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
            store = PrefixStore(f"group/{generation}", self._store.torch)
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
        self._store.set(f"{key}/{self._number}", "")
        self.begin()
        others = self._others()
        for number in self._members.numbers:
            while not self._store.has(f"{key}/{number}"):
                if others.has_ended(number):
                    raise WorkerLostError(
                        "worker_lost", f"worker {number} has ended"
                    )
                time.sleep(POLL_SECONDS)

    def _propose(self, generation: int, members: Members) -> None:
        self._store.set_first(f"members/{generation}", members.to_json())
        self._store.set("latest", str(generation))

    def _latest(self) -> int:
        if not self._store.has("latest"):
            return -1
        latest = int(self._store.get("latest"))
        # Its writer may have been slower than the next one's.
        while self._store.has(f"members/{latest + 1}"):
            latest += 1
        return latest

    def _read(self, generation: int) -> Members:
        return Members.from_json(self._store.get(f"members/{generation}"))

    def _address_of(self, number: int) -> str:
        return self._store.get(f"address/{number}")
