"""Exchanges with the filters of object servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hapi_middleware.concurrency import (
    HTTP_ERRORS,
    Task,
    Timeout,
    http_connect,
)
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import Metrics, metric_name
from hapi_middleware.places.computer import BUSY
from hapi_middleware.places.node_table import NodeTable
from hapi_middleware.worker.feature_stream import JobBody
from hapi_middleware.worker.worker_client import HANGS
from hapi_protocol.backend import (
    BACKEND_VERSION,
    METHOD,
    STEP_JOB,
    STEP_MODEL,
)
from hapi_protocol.errors import (
    PACKAGE_REFUSED,
    AnnotationError,
    HapiError,
    UnavailableError,
)
from hapi_protocol.frames import FrameError, FrameReader, Kind, read_error
from hapi_protocol.job_messages import JobGrant, Usage
from hapi_protocol.json_messages import JsonMessage
from hapi_protocol.printable import printable
from hapi_protocol.signatures import SignedRequest, address_text

RETRY_SECONDS = 2.0
_MAX_REFUSAL_BYTES = 1024
_STALE = (404, 412, 422)
"""Statuses of an object server that does not have the object as it was named;
another one may have it."""
LONGEST_SECONDS = 3600.0
"""Longest time for which a worker that refuses a model is not sent it."""
ABSENT, DEGRADED = "absent", "degraded"
BRIEF_SECONDS = 2.0
_BRIEF = ("lost", "worker")
"""Faults that cost little to meet again, and that end with a restart: they
begin with two seconds, which double each time."""

_Message = TypeVar("_Message", bound=JsonMessage)


@dataclass(frozen=True)
class Node:
    """A device of an object server, and a path on it.

    Attributes:
        facts: the device, from the ring.
        partition: partition of the path.
        name: ``/account/container/object``.
        policy_index: of the storage policy.
    """

    facts: Mapping[str, Any]
    partition: int
    name: str
    policy_index: int

    @property
    def address(self) -> tuple[str, int]:
        """Address of the object server."""
        return self.facts["ip"], self.facts["port"]

    def __str__(self) -> str:
        ip, port = self.address
        return f"{ip}:{port}"


class NodeError(UnavailableError):
    """An object server that does not answer, or refuses.

    Args:
        problem: what is wrong, for users.
        reason: details for operators, which may name hosts.
        kind: last word of the metric that counts it.
    """

    def __init__(self, problem: str, reason: str, kind: str) -> None:
        super().__init__(
            "worker_unavailable",
            f"an object server {problem}; retry",
            retry_after=RETRY_SECONDS,
        )
        self.reason = f"{problem}: {reason}"
        self.kind = kind


class NodeClient:
    """Client of the filters of object servers.

    Args:
        config: options of the filter.
        keys: keys of the cluster; the first one signs.
        metrics: metrics of the filter.
        logger: Swift's.
        table: what is known of object servers; None for that of this host.

    Attributes:
        table: as given.
    """

    def __init__(
        self,
        config: FilterConfig,
        keys: Sequence[bytes],
        metrics: Metrics,
        logger: Any,
        table: NodeTable | None = None,
    ) -> None:
        self._config = config
        self._key = keys[0]
        self._metrics = metrics
        self._logger = logger
        self.table = table or NodeTable()

    def is_left_out(self, device: Mapping[str, Any]) -> bool:
        """True if a device of a ring, or its server, is not asked now."""
        address = device["ip"], device["port"]
        return self.table.is_left_out(*address) or self.table.is_left_out(
            *address, "device", device["device"]
        )

    def has_damaged(self, node: Node) -> bool:
        """True if a replica was damaged a while ago."""
        return self.table.is_left_out(*node.address, "object", node.name)

    def open(
        self, node: Node, step: str, message: JsonMessage, trans_id: str
    ) -> NodeExchange:
        """Sends a request and waits for the status.

        Args:
            node: where to send it.
            step: one of :data:`hapi_protocol.backend.STEPS`.
            message: message of the step.
            trans_id: transaction id of the client's request.

        Raises:
            UnavailableError: the object server does not answer, has no
                filter, or not the object.
        """
        connection = self._connect(node, step, message.to_body(), trans_id)
        try:
            with self.watching(node):
                response = connection.getresponse()
                refusal = b""
                if response.status != 200:
                    refusal = response.read(_MAX_REFUSAL_BYTES)
            if response.status != 200:
                raise self._refused(node, response.status, refusal)
        except BaseException:
            connection.close()
            raise
        return NodeExchange(self, node, step, connection, response)

    def _connect(
        self, node: Node, step: str, message: bytes, trans_id: str
    ) -> Any:
        facts = node.facts
        signed = SignedRequest(
            address=address_text(*node.address),
            path=f"/{facts['device']}/{node.partition}{node.name}",
            step=step,
            version=str(BACKEND_VERSION),
            policy_index=str(node.policy_index),
            timestamp=f"{time.time():.5f}",
            nonce=uuid.uuid4().hex,
            message=message,
        )
        with self.watching(node, self._config.object_connect_timeout):
            connection = http_connect(
                facts["ip"],
                facts["port"],
                facts["device"],
                node.partition,
                METHOD,
                node.name,
                headers={
                    "X-Trans-Id": trans_id,
                    "Transfer-Encoding": "chunked",
                    **signed.headers(self._key),
                },
            )
            # It fits into the socket's buffer.
            connection.send(_chunk(message))
        return connection

    @contextmanager
    def watching(
        self, node: Node, seconds: float | None = None
    ) -> Iterator[None]:
        """Suppresses an object server that breaks off in the block.

        Args:
            node: the object server.
            seconds: silence after which it counts as lost; None for that of
                the options.

        Raises:
            UnavailableError: it is silent, or breaks off.
        """
        limit = Timeout(seconds or self._config.object_silence_seconds)
        try:
            yield
        except (FrameError, OSError, *HTTP_ERRORS) as error:
            raise self._lost(node, error) from error
        except Timeout as error:
            if error is not limit:  # the caller's own
                raise
            raise self._lost(node, error) from error
        finally:
            limit.cancel()

    def _lost(self, node: Node, error: BaseException) -> UnavailableError:
        if isinstance(error, Timeout):
            return self._fault(node, "silent", "is silent", f"{error}")
        return self._fault(node, "lost", "cannot be reached", repr(error))

    def _refused(
        self, node: Node, status: int, body: bytes
    ) -> UnavailableError:
        text = printable(body.decode("utf-8", "replace"))
        reason = f"status {status} {text:.300}"
        if status == 507:
            device = node.facts["device"]
            return self._fault(
                node,
                "device",
                "has a device that is not mounted",
                str(device),
                "device",
                device,
            )
        if status in _STALE:
            self._count(node, "stale")
            return UnavailableError(
                "service_unavailable",
                f"an object server has {node.name} not as it was named "
                f"(status {status}); retry",
                object_name=node.name,
                retry_after=RETRY_SECONDS,
            )
        if status in (405, 501):
            return self._fault(
                node,
                ABSENT,
                "does not compute",
                f"status {status}: no filter there",
            )
        return self._fault(node, "refused", "refuses the request", reason)

    def noted(self, node: Node, step: str, error: HapiError) -> HapiError:
        """Notes the error of an object server's worker, and returns what the
        client may know of it."""
        if error.code == "source_damaged" and step == STEP_JOB:
            self.noted_damage(node, error)
        # The validation of a package says nothing of the worker.
        is_package = step == STEP_MODEL and not error.details.get(HANGS)
        if error.code == "worker_unavailable" and not (
            is_package or is_degraded(error)
        ):
            return self._fault(
                node,
                "silent" if error.details.get(HANGS) else "worker",
                "has no worker that answers",
                error.message,
            )
        if error.code in BUSY:
            self._count(node, "busy")
            self._logger.debug(
                "hapi: the worker of the object server %s is busy: %s",
                node,
                printable(str(error)),
            )
        return error

    def noted_damage(self, node: Node, error: HapiError) -> None:
        """Asks another replica from now on, until this one is put aside."""
        self._count(node, "damaged")
        if self.has_damaged(node):
            return  # requests at the same time count once
        self._logger.error(
            "hapi: the object server %s has a damaged replica: %s",
            node,
            printable(str(error)),
        )
        self.table.leave_out(
            *node.address,
            "object",
            node.name,
            seconds=self._config.object_suppress_seconds,
        )

    def noted_degraded(self, node: Node, model: str, error: HapiError) -> None:
        """Sends a package no more for a while to one that does not take it."""
        self._count(node, DEGRADED)
        if self.table.is_left_out(*node.address, "model", model):
            return  # requests at the same time count once
        seconds = self.table.back_off(
            *node.address,
            "model",
            model,
            seconds=self._config.object_suppress_seconds,
            longest=LONGEST_SECONDS,
        )
        self._logger.warning(
            "hapi: the worker of the object server %s does not take the model "
            "%s; it is not asked for it for %g s: %s",
            node,
            printable(model),
            seconds,
            printable(str(error)),
        )

    def _fault(
        self, node: Node, kind: str, problem: str, reason: str, *part: object
    ) -> NodeError:
        """Notes a fault of an object server, or of a part of it, and asks it
        no more for a while."""
        self._count(node, kind)
        error = NodeError(problem, reason, kind)
        if not self.table.is_left_out(*node.address, *part):
            is_usual = kind == ABSENT
            log = self._logger.debug if is_usual else self._logger.warning
            longest = self._config.object_suppress_seconds
            first = min(BRIEF_SECONDS, longest) if kind in _BRIEF else longest
            seconds = self.table.back_off(
                *node.address, *part, seconds=first, longest=longest
            )
            log(
                "hapi: the object server %s %s; it is not asked for %g s",
                node,
                printable(error.reason),
                seconds,
            )
        return error

    def _count(self, node: Node, kind: str) -> None:
        self._metrics.count(f"node.{kind}")
        self._metrics.count(f"node.{kind}.{metric_name(*node.address)}")


def is_degraded(error: HapiError) -> bool:
    """True for the refusal of a worker that cannot take packages."""
    return bool(error.details.get(PACKAGE_REFUSED))


class NodeExchange:
    """One request to the filter of an object server, and its frames.

    Args:
        client: the client that opened it.
        node: where it was sent.
        step: its step.
        connection: its connection, the message sent.
        response: its answer, of which the status has been read.

    Attributes:
        has_refused: the object server has ended it with an error of its own.
        usage: resource use of the job, once it is known.
    """

    def __init__(
        self,
        client: NodeClient,
        node: Node,
        step: str,
        connection: Any,
        response: Any,
    ) -> None:
        self._client = client
        self._node = node
        self._step = step
        self._connection = connection
        self._frames = FrameReader(response.read)
        self._sender: Task | None = None
        self._body: JobBody | None = None
        self._send_error: HapiError | None = None
        self._is_closed = False
        self._at_end = ExitStack()
        self.has_refused = False
        self.usage: Usage | None = None

    def next(self) -> tuple[Kind, bytes]:
        """The next frame that is no beat, and no usage.

        Raises:
            HapiError: the object server's own error, that of the bytes sent
                to it, or that it breaks off.
        """
        while True:
            try:
                with self._client.watching(self._node):
                    kind, payload = self._frames.next()
            except UnavailableError:
                if self._send_error is not None:
                    # The break is its consequence.
                    raise self._send_error from None
                raise
            if kind is Kind.ERROR:
                if self._send_error is not None:
                    raise self._send_error
                self.has_refused = True
                raise self._client.noted(
                    self._node, self._step, self._error(payload)
                )
            if kind is Kind.USAGE:
                self.usage = self.read(Usage, payload)
            elif kind is not Kind.BEAT:
                return kind, payload

    def expect(self, kind: Kind) -> bytes:
        """The payload of the next frame, which must have this kind.

        Raises:
            HapiError: as :meth:`next`, or another frame comes.
        """
        found, payload = self.next()
        if found is not kind:
            raise self._damaged(f"{found.name} instead of {kind.name}")
        return payload

    def read(self, kind: type[_Message], body: bytes) -> _Message:
        """Reads a message of the object server.

        Raises:
            UnavailableError: it is damaged, or of another release.
        """
        try:
            return kind.from_body(body)
        except AnnotationError as error:
            raise self._damaged(error.message) from error

    def granted(self, grant: JobGrant) -> None:
        """Counts a job until the exchange ends."""
        table, address = self._client.table, self._node.address
        table.forgive(*address)
        table.told(address, grant.jobs or 1)
        self._at_end.enter_context(table.running(address))

    def send(self, body: JobBody) -> None:
        """Sends the bytes after the message, in a green thread.

        Args:
            body: chunks that are not empty; closed at their end, or with the
                exchange.
        """

        def send_all() -> None:
            try:
                for chunk in body:
                    self._connection.send(_chunk(chunk))
                self._connection.send(_chunk(b""))
            except (OSError, *HTTP_ERRORS):
                # The reading side finds out why.
                return
            except HapiError as error:
                self._send_error = error
                self._connection.sock.shutdown(1)
            finally:
                body.close()

        self._body = body
        self._sender = Task(send_all)

    def close(self) -> None:
        """Ends the exchange in both directions.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._at_end.close()
        if self._sender is not None and self._body is not None:
            self._sender.cancel()
            self._body.close()
        self._connection.close()

    def _error(self, payload: bytes) -> HapiError:
        try:
            return read_error(payload)
        except FrameError as error:
            return self._damaged(str(error))

    def _damaged(self, problem: str) -> UnavailableError:
        return UnavailableError(
            "worker_unavailable",
            f"the answer of an object server is damaged: {problem}",
            retry_after=RETRY_SECONDS,
        )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
