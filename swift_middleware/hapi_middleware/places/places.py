"""Order of the places that a request may ask, and the asking."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from swift.common.storage_policy import POLICIES, REPL_POLICY

from hapi_middleware.config import PLACE_OBJECT, PLACE_PROXY, FilterConfig
from hapi_middleware.metrics import Metrics
from hapi_middleware.places.computer import (
    Computer,
    Granted,
    LocalComputer,
    Work,
)
from hapi_middleware.places.node_client import RETRY_SECONDS, Node, NodeClient
from hapi_middleware.places.node_computer import NodeComputer
from hapi_middleware.requests.stored_parts import StoredPart
from hapi_middleware.requests.subrequests import ObjectHead, Package
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import ModelInfo, StoredObject
from hapi_protocol.errors import HapiError, UnavailableError
from hapi_protocol.headers import ByteRange
from hapi_protocol.job_messages import ModelIdentity, ProfileRequest
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.signatures import read_keys

MAX_HANDOFFS = 3
"""Object servers without the object that are asked if bytes are sent to them
anyway."""
ELSEWHERE = frozenset(
    {
        "worker_unavailable",
        "service_unavailable",
        "source_damaged",
        "queue_full",
        "draining",
        "share_exceeded",
        "does_not_fit",
        "too_slow",
        "internal",
    }
)
"""Codes of errors after which the next place is asked."""
DAMAGED = frozenset({"damaged_shard", "empty_shard", "samples_out_of_range"})
"""Codes of errors after which one more place is asked: its replica may be
intact."""

_T = TypeVar("_T")


class Computers:
    """The places that a request may ask, in order.

    All methods raise the error of the last place that was asked, or of the
    one that will be free first.

    Args:
        places: the places.
        metrics: metrics of the filter.
    """

    def __init__(self, places: Sequence[Computer], metrics: Metrics) -> None:
        self._places = places
        self._metrics = metrics

    def after(self, first: Sequence[Computer]) -> Computers:
        """These places after others."""
        return Computers([*first, *self._places], self._metrics)

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model at the first place that answers."""
        return self._in_turn(lambda each: each.find_model(identity, trans_id))

    def get_profile(
        self, request: ProfileRequest, package: Package
    ) -> tuple[ModelIdentity, ModelProfile]:
        """Profile of a package, as :meth:`.Computer.get_profile`."""
        return self._in_turn(lambda each: each.get_profile(request, package))

    def start(
        self, work: Work, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job, as :meth:`.Computer.start`."""
        is_granted = False

        def answered(granted: Granted) -> bool:
            nonlocal is_granted
            is_granted = True
            return is_answered(granted)

        def start(place: Computer) -> WorkerStream | None:
            stream = place.start(work, answered)
            self._metrics.count(f"places.{place.KIND}")
            return stream

        return self._in_turn(
            start, lambda: work.is_repeatable or not is_granted
        )

    def begin(
        self, work: Work, on_granted: Callable[[Granted], None]
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
        errors: list[HapiError] = []
        damaged: list[HapiError] = []
        for place in self._places:
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
        metrics: Metrics,
        logger: Any,
    ) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._local = LocalComputer(worker, metrics)
        self._client: NodeClient | None = None
        if PLACE_OBJECT in config.places:
            keys = read_keys(Path(config.backend_key_file))
            self._client = NodeClient(config, keys, metrics, logger)

    @property
    def prefers_object_servers(self) -> bool:
        """True if object servers are the first choice."""
        return self._config.places[0] == PLACE_OBJECT

    def computers(
        self,
        name: str,
        head: ObjectHead,
        part: ByteRange | None = None,
        *,
        is_source: bool = True,
    ) -> Computers:
        """The places for a request.

        Args:
            name: ``/account/container/object`` of the source, or of the
                package if there is no single source.
            head: facts about it.
            part: the bytes that the job reads; None for all.
            is_source: it is the source, not the package.
        """
        stored = StoredPart.of_plain(name, head, part) if is_source else None
        if stored is not None and not _is_replicated(stored):
            stored = None
        places: list[Computer] = []
        for place in self._config.places:
            if place == PLACE_PROXY:
                places.append(self._local)
            elif stored is not None:
                places += self._storing(stored)
            else:
                places += self._sent_bytes(name, head.policy_index, part)
        return Computers(places, self._metrics)

    def next_to(
        self, stored: StoredPart | None, others: Computers
    ) -> Computers:
        """The object servers that have the bytes, and then other places."""
        if stored is None or not _is_replicated(stored):
            return others
        return others.after(self._storing(stored))

    def nearest(self, name: str, head: ObjectHead) -> list[Node]:
        """The object servers that have an object, first choice first.

        Args:
            name: ``/account/container/object``.
            head: facts about it.

        Returns:
            Nothing if no object server reads it by itself.
        """
        stored = StoredPart.of_plain(name, head, None)
        if stored is None or not _is_replicated(stored):
            return []
        return list(self._nodes(name, stored.policy_index, None, 0))

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
        nodes = self._nodes(stored.name, stored.policy_index, stored.part, 0)
        return [self._computer(each, stored) for each in nodes]

    def _sent_bytes(
        self, name: str, policy_index: int | None, part: ByteRange | None
    ) -> list[Computer]:
        """Object servers to which the bytes are sent."""
        nodes = self._nodes(name, policy_index, part, MAX_HANDOFFS)
        return [self._computer(each, None) for each in nodes]

    def _computer(
        self, node: Node, stored: StoredPart | Sequence[StoredObject] | None
    ) -> NodeComputer:
        assert self._client is not None, "nodes exist only with a client"
        return NodeComputer(self._client, node, stored, self._metrics)

    def _nodes(
        self,
        name: str,
        policy_index: int | None,
        part: ByteRange | None,
        num_handoffs: int,
    ) -> Iterator[Node]:
        """Object servers for a name, first choice first."""
        client = self._client
        if client is None:
            return
        first_byte = part.first if part else 0
        policy = (
            POLICIES.default
            if policy_index is None
            else POLICIES.get_by_index(policy_index)
        )
        ring = POLICIES.get_object_ring(policy.idx, self._config.swift_dir)
        partition, primaries = ring.get_nodes(*name[1:].split("/", 2))
        handoffs = islice(ring.get_more_nodes(partition), num_handoffs)
        proxy = getattr(self._app, "_pipeline_final_app", None)
        asked = [
            each
            for each in (*primaries, *handoffs)
            if not client.suppression.has((each["ip"], each["port"]))
            and not (proxy and proxy.error_limited(each))
        ]
        asked.sort(key=lambda each: spread(name, first_byte, each["id"]))
        options = proxy and proxy.get_policy_options(policy)
        if options and options.sorting_method == "affinity":
            asked.sort(key=options.read_affinity_sort_key)
        for each in asked:
            yield Node(each, partition, name, policy.idx)


def _is_replicated(stored: StoredPart) -> bool:
    policy = POLICIES.get_by_index(stored.policy_index)
    return bool(policy.policy_type == REPL_POLICY)


def spread(name: str, first_byte: int, device: int) -> bytes:
    """Rank of a device for a span: stable, and even over spans and devices.

    So a span meets its pages, its model and its coalescing partner again in
    the next epoch, and the spans of one shard use all replicas.  (Rendezvous
    hashing: if a device is missing, only its spans move.)
    """
    text = f"{name}\n{first_byte}\n{device}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
