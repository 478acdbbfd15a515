"""One request to the filter of an object server, and its frames."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from typing import Any, TypeVar

from hapi_middleware.concurrency import HTTP_ERRORS, Task
from hapi_middleware.places.node_faults import Node, NodeFaults
from hapi_middleware.worker.feature_stream import JobBody
from hapi_middleware.worker.worker_errors import RETRY_SECONDS
from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
    UnavailableError,
)
from hapi_protocol.frames import FrameError, FrameReader, Kind, read_error
from hapi_protocol.job_messages import JobGrant, Usage
from hapi_protocol.json_messages import JsonMessage

_Message = TypeVar("_Message", bound=JsonMessage)


@dataclass(eq=False)
class NodeExchange:
    """One request to the filter of an object server, and its frames.

    Args:
        faults: notes those of the object server.
        node: where it was sent.
        step: its step.
        connection: its connection, the message sent.
        response: its answer, of which the status has been read.

    Attributes:
        has_refused: the object server has ended it with an error of its own.
        usage: resource use of the job, once it is known.
    """

    faults: NodeFaults
    node: Node
    step: str
    connection: Any
    response: InitVar[Any]

    def __post_init__(self, response: Any) -> None:
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
                with self.faults.watching(self.node):
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
                raise self.faults.noted(
                    self.node, self.step, self._error(payload)
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
        received, payload = self.next()
        if received is not kind:
            raise self._damaged(f"{received.name} instead of {kind.name}")
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
        table, address = self.faults.table, self.node.address
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
                    self.connection.send(chunk_of(chunk))
                self.connection.send(chunk_of(b""))
            except (OSError, *HTTP_ERRORS):
                # The reading side finds out why.
                return
            except HapiError as error:
                self._send_error = error
                self.connection.sock.shutdown(1)
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
        self.connection.close()

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


def chunk_of(data: bytes) -> bytes:
    """Bytes as a chunk of an HTTP body; the last one is empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)
