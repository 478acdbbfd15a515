"""Faults of object servers: counted, logged, and left out for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from hapi_middleware.concurrency import HTTP_ERRORS, Timeout
from hapi_middleware.metrics import FilterMetrics, metric_name
from hapi_middleware.places.computer import BUSY
from hapi_middleware.places.node_table import NodeTable
from hapi_middleware.worker.worker_client import HANGS
from hapi_middleware.worker.worker_errors import RETRY_SECONDS
from hapi_protocol.backend import STEP_JOB, STEP_MODEL
from hapi_protocol.errors import PACKAGE_REFUSED, HapiError, UnavailableError
from hapi_protocol.frames import FrameError
from hapi_protocol.printable import printable

_STALE = (404, 412, 422)
"""Statuses of an object server that does not have the object as it was named;
another one may have it."""
LONGEST_SECONDS = 3600.0
"""Longest time for which a worker that refuses a model is not sent it."""
ABSENT, DEGRADED = "absent", "degraded"
BRIEF_SECONDS = 2.0
"""A worker restarts in seconds, and one request in two seconds costs
little."""
_BRIEF = ("lost", "worker")
"""Faults that cost little to meet again, and that end with a restart: they
begin with two seconds, which double each time."""


@dataclass(frozen=True)
class Node:
    """A device of an object server, and a path on it.

    Attributes:
        facts: the device, from the ring.
        partition: partition of the path.
        name: ``/account/container/object``.
        policy_index: number of the storage policy.
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


@dataclass(eq=False)
class NodeFaults:
    """Notes the faults of object servers.

    Args:
        table: what is known of object servers.
        metrics: metrics of the filter.
        logger: Swift's.
        silence_seconds: silence after which an object server counts as lost.
        suppress_seconds: longest time for which one is left out.
    """

    table: NodeTable
    metrics: FilterMetrics
    logger: Any
    _: KW_ONLY
    silence_seconds: float
    suppress_seconds: float

    def is_left_out(self, device: Mapping[str, Any]) -> bool:
        """True if a device of a ring, or its server, is not asked now."""
        address = device["ip"], device["port"]
        return self.table.is_left_out(*address) or self.table.is_left_out(
            *address, "device", device["device"]
        )

    def has_damaged(self, node: Node) -> bool:
        """True if a replica was damaged a while ago."""
        return self.table.is_left_out(*node.address, "object", node.name)

    @contextmanager
    def watching(
        self, node: Node, seconds: float | None = None
    ) -> Iterator[None]:
        """Leaves out an object server that breaks off in the block.

        Args:
            node: the object server.
            seconds: silence after which it counts as lost; None for that of
                the options.

        Raises:
            UnavailableError: it is silent, or breaks off.
        """
        limit = Timeout(seconds or self.silence_seconds)
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

    def refused(
        self, node: Node, status: int, body: bytes
    ) -> UnavailableError:
        """Notes an answer other than 200, and returns what it means."""
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
            self.logger.debug(
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
        self.logger.error(
            "hapi: the object server %s has a damaged replica: %s",
            node,
            printable(str(error)),
        )
        self.table.leave_out(
            *node.address,
            "object",
            node.name,
            seconds=self.suppress_seconds,
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
            seconds=self.suppress_seconds,
            longest=LONGEST_SECONDS,
        )
        self.logger.warning(
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
            log = self.logger.debug if is_usual else self.logger.warning
            longest = self.suppress_seconds
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
        self.metrics.count(f"node.{kind}")
        self.metrics.count(f"node.{kind}.{metric_name(*node.address)}")


def is_degraded(error: HapiError) -> bool:
    """True for the refusal of a worker that cannot take packages."""
    return bool(error.details.get(PACKAGE_REFUSED))
