"""Order of the places that a request may ask, and the asking."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from swift.common.storage_policy import POLICIES, REPL_POLICY

from hapi_middleware.config import PLACE_OBJECT, PLACE_PROXY, FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.computer import (
    BUSY,
    DAMAGED,
    ELSEWHERE,
    AuthorisedJob,
    Computer,
    Granted,
    LocalComputer,
)
from hapi_middleware.places.node_client import NodeClient
from hapi_middleware.places.node_computer import NodeComputer
from hapi_middleware.places.node_faults import Node
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.stored_parts import StoredPart
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_middleware.worker.worker_errors import RETRY_SECONDS
from hapi_protocol.backend import ModelInfo, StoredObject
from hapi_protocol.errors import HapiError, UnavailableError
from hapi_protocol.headers import ByteRange
from hapi_protocol.job_messages import ModelIdentity, ProfileRequest
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.signatures import read_keys

MAX_OTHERS = 64
"""Object servers without the object that bytes may be sent to.  If one in ten
computes, one of these does, but for one object of a thousand."""
MAX_UNKNOWN = 16
"""Object servers among them that are asked without having computed before."""
SLACK = 2
"""Jobs by which another replica's queue must be shorter to be asked first.
The rate is that of 0 and 1, and fewer spans leave their pages and their
coalescing partner (simulated: docs, Many storage nodes)."""
QUEUED_SECONDS = 10.0
"""Time after which no other queue is waited for: half of the default of the
worker's ``queue_seconds``."""

_T = TypeVar("_T")


@dataclass(eq=False)
class Computers:
    """The places that a request may ask, in order.

    All methods raise the error of the last place that was asked, or of the
    one that will be free first.

    Args:
        places: the places.
        metrics: metrics of the filter.
        others: finds places that are asked after these.
    """

    places: Sequence[Computer]
    metrics: FilterMetrics
    others: Callable[[], Sequence[Computer]] = tuple

    def after(self, first: Sequence[Computer]) -> Computers:
        """These places after others."""
        places = [*first, *self.places]
        return Computers(places, self.metrics, self.others)

    def _in_order(self) -> Iterator[Computer]:
        yield from self.places
        yield from self.others()

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model at the first place that answers."""
        return self._in_turn(
            lambda place: place.find_model(identity, trans_id)
        )

    def get_profile(
        self, request: ProfileRequest, package: Package
    ) -> tuple[ModelIdentity, ModelProfile]:
        """Profile of a package, as :meth:`.Computer.get_profile`."""
        return self._in_turn(lambda place: place.get_profile(request, package))

    def start(
        self, work: AuthorisedJob, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job, as :meth:`.Computer.start`."""
        is_granted = False

        def answered(granted: Granted) -> bool:
            nonlocal is_granted
            is_granted = True
            return is_answered(granted)

        def start(place: Computer) -> WorkerStream | None:
            stream = place.start(work, answered)
            self.metrics.count(f"places.{place.KIND}")
            return stream

        return self._in_turn(
            start, lambda: work.is_repeatable or not is_granted
        )

    def begin(
        self, work: AuthorisedJob, on_granted: Callable[[Granted], None]
    ) -> WorkerStream:
        """Starts a job whose answer is not known before.

        Args:
            work: the job.
            on_granted: called with each grant.
        """

        def is_answered(granted: Granted) -> bool:
            on_granted(granted)
            return False

        stream = self.start(work, is_answered)
        assert stream is not None, "is_answered() is never True"
        return stream

    def _in_turn(
        self,
        ask: Callable[[Computer], _T],
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _T:
        started = time.monotonic()
        errors: list[HapiError] = []
        damaged: list[HapiError] = []
        for place in self._in_order():
            try:
                return ask(place)
            except HapiError as error:
                if error.code in DAMAGED:
                    damaged.append(error)
                elif error.code not in ELSEWHERE:
                    raise
                errors.append(error)
                if len(damaged) > 1 or not may_repeat():
                    raise
                has_queued = time.monotonic() - started > QUEUED_SECONDS
                if error.code in BUSY and has_queued:
                    break  # one queue has been waited for
        if damaged:
            raise damaged[0]
        if not errors:
            raise UnavailableError(
                "worker_unavailable",
                "no object server that computes features answers; retry",
                retry_after=RETRY_SECONDS,
            )
        raise min(errors, key=_seconds_to_retry)


def _seconds_to_retry(error: HapiError) -> float:
    return float("inf") if error.retry_after is None else error.retry_after


class Places:
    """Makes the places of a request.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        worker: client of this host's worker.
        metrics: metrics of the filter.
        logger: Swift's.

    Raises:
        ValueError: the key of the object servers cannot be used.
    """

    def __init__(
        self,
        app: Any,
        config: FilterConfig,
        worker: WorkerClient,
        metrics: FilterMetrics,
        logger: Any,
    ) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._local: list[Computer] = []
        if PLACE_PROXY in config.places:
            self._local = [LocalComputer(worker, metrics)]
        self._client: NodeClient | None = None
        if PLACE_OBJECT in config.places:
            keys = read_keys(Path(config.backend_key_file))
            self._client = NodeClient(config, keys, metrics, logger)

    @property
    def prefers_object_servers(self) -> bool:
        """True if object servers are the first choice."""
        return self._config.places[0] == PLACE_OBJECT

    def computers(
        self, name: str, head: ObjectHead, part: ByteRange | None
    ) -> Computers:
        """The places for the bytes of an object.

        Args:
            name: ``/account/container/object``.
            head: facts about it.
            part: the bytes that the job reads; None for all.
        """
        stored = StoredPart.of_plain(name, head, part)
        near = self._storing(stored) if stored is not None else []
        places = (
            [*near, *self._local]
            if self.prefers_object_servers
            else [*self._local, *near]
        )
        return self._with_others(places, name, head, part)

    def receiving(self, name: str, head: ObjectHead) -> Computers:
        """The places for bytes that the proxy reads, its own first.

        Args:
            name: name whose object servers come next.
            head: facts about its object.
        """
        return self._with_others(self._local, name, head)

    def profiling(self, name: str, head: ObjectHead) -> Computers:
        """The places for a package, in the order of the configuration.

        Args:
            name: ``/account/container/object`` of the package.
            head: facts about it.
        """
        if not self.prefers_object_servers:
            return self._with_others(self._local, name, head)
        sent = self._sent_bytes(name, head.policy_index, None)
        return Computers([*sent, *self._local], self._metrics)

    def _with_others(
        self,
        places: Sequence[Computer],
        name: str,
        head: ObjectHead,
        part: ByteRange | None = None,
    ) -> Computers:
        """Places, and then all that bytes can be sent to."""
        others = partial(self._sent_bytes, name, head.policy_index, part)
        return Computers(places, self._metrics, others)

    def next_to(
        self, stored: StoredPart | None, others: Computers
    ) -> Computers:
        """The object servers that have the bytes, and then other places."""
        return (
            others if stored is None else others.after(self._storing(stored))
        )

    def nearest(self, name: str, head: ObjectHead) -> list[Node]:
        """The object servers that have an object, first choice first.

        Args:
            name: ``/account/container/object``.
            head: facts about it.

        Returns:
            Nothing if no object server reads it by itself.
        """
        stored = StoredPart.of_plain(name, head, None)
        return [] if stored is None else self._holders(stored)

    def storing_many(
        self, node: Node, stored: Sequence[StoredObject]
    ) -> Computers:
        """An object server that reads many objects.

        Args:
            node: the object server, and the path of one of them.
            stored: the objects.
        """
        return Computers([self._computer(node, stored)], self._metrics)

    def _storing(self, stored: StoredPart) -> list[Computer]:
        """Object servers that have the bytes."""
        nodes = self._holders(stored)
        return [self._computer(node, stored) for node in nodes]

    def _holders(self, stored: StoredPart) -> list[Node]:
        """Object servers that have the bytes, first choice first."""
        client = self._client
        policy = POLICIES.get_by_index(stored.policy_index)
        if client is None or policy.policy_type != REPL_POLICY:
            return []
        ring = self._ring(policy)
        partition, devices = ring.get_nodes(*stored.name[1:].split("/", 2))
        first_byte = stored.part.first if stored.part else 0
        nodes = [
            Node(device, partition, stored.name, policy.idx)
            for device in self._in_order(
                devices, stored.name, first_byte, policy, reads=True
            )
        ]
        return [node for node in nodes if not client.faults.has_damaged(node)]

    def _sent_bytes(
        self, name: str, policy_index: int | None, part: ByteRange | None
    ) -> list[Computer]:
        """Object servers to which bytes are sent: those of the name, then
        those that have computed lately, then some of the others."""
        client = self._client
        if client is None:
            return []
        policy = (
            POLICIES.default
            if policy_index is None
            else POLICIES.get_by_index(policy_index)
        )
        ring = self._ring(policy)
        partition, devices = ring.get_nodes(*name[1:].split("/", 2))
        first_byte = part.first if part else 0
        in_order = partial(
            self._in_order,
            name=name,
            first_byte=first_byte,
            policy=policy,
            reads=False,
        )
        primaries = in_order(devices)
        others = islice(ring.get_more_nodes(partition), MAX_OTHERS)
        known: list[Any] = []
        unknown: list[Any] = []
        seen = {(device["ip"], device["port"]) for device in devices}
        for device in others:
            address = device["ip"], device["port"]
            if address in seen or client.table.is_left_out(*address):
                continue
            seen.add(address)
            is_known = client.table.has_computed(address)
            (known if is_known else unknown).append(device)
        known = in_order(known)
        return [
            self._computer(Node(device, partition, name, policy.idx), None)
            for device in (*primaries, *known, *unknown[:MAX_UNKNOWN])
        ]

    def _computer(
        self, node: Node, stored: StoredPart | Sequence[StoredObject] | None
    ) -> NodeComputer:
        assert self._client is not None, "nodes exist only with a client"
        return NodeComputer(self._client, node, stored, self._metrics)

    def _ring(self, policy: Any) -> Any:
        return POLICIES.get_object_ring(policy.idx, self._config.swift_dir)

    def _is_left_out(self, device: Mapping[str, Any]) -> bool:
        assert self._client is not None, "devices are asked with a client"
        proxy = getattr(self._app, "_pipeline_final_app", None)
        return self._client.faults.is_left_out(device) or bool(
            proxy and proxy.error_limited(device)
        )

    def _in_order(
        self,
        devices: Iterable[Any],
        name: str,
        first_byte: int,
        policy: Any,
        *,
        reads: bool,
    ) -> list[Any]:
        """Devices that may be asked for a span, first choice first.

        Args:
            devices: devices of a ring.
            name: ``/account/container/object``.
            first_byte: first byte of the span.
            policy: the storage policy.
            reads: the devices themselves are read, not only their servers
                sent bytes.
        """
        assert self._client is not None, "devices are asked with a client"
        table = self._client.table
        asked = [
            device
            for device in devices
            if not (
                self._is_left_out(device)
                if reads
                else table.is_left_out(device["ip"], device["port"])
            )
        ]
        asked.sort(key=lambda device: spread(name, first_byte, device["id"]))
        jobs = {
            device["id"]: table.jobs((device["ip"], device["port"]))
            for device in asked
        }
        least = min(jobs.values(), default=0) + SLACK
        asked.sort(key=lambda device: max(jobs[device["id"]], least))
        proxy = getattr(self._app, "_pipeline_final_app", None)
        options = proxy and proxy.get_policy_options(policy)
        if options and options.sorting_method == "affinity":
            asked.sort(key=options.read_affinity_sort_key)
        return asked


def spread(name: str, first_byte: int, device: int) -> bytes:
    """Rank of a device for a span: stable, and even over spans and devices.

    So a span meets its pages, its model and its coalescing partner again in
    the next epoch, and the spans of one shard use all replicas.  (Rendezvous
    hashing: if a device is missing, only its spans move.)
    """
    text = f"{name}\n{first_byte}\n{device}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
