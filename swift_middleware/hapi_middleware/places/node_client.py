"""Requests to the filters of object servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hapi_middleware.concurrency import http_connect
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.node_exchange import NodeExchange, chunk_of
from hapi_middleware.places.node_faults import Node, NodeFaults
from hapi_middleware.places.node_table import NodeTable
from hapi_protocol.backend import BACKEND_VERSION, METHOD
from hapi_protocol.json_messages import JsonMessage
from hapi_protocol.signatures import SignedRequest, address_text

_MAX_REFUSAL_BYTES = 1024
"""A refusal is a line of text for the log."""


@dataclass(eq=False, repr=False)
class NodeClient:
    """Client of the filters of object servers.

    Args:
        config: options of the filter.
        keys: keys of the cluster; the first one signs.
        metrics: metrics of the filter.
        logger: Swift's.
        table: what is known of object servers; by default on this host.

    Attributes:
        faults: notes and knows their faults.
    """

    config: FilterConfig
    keys: Sequence[bytes]
    metrics: FilterMetrics
    logger: Any
    table: NodeTable = field(default_factory=NodeTable)

    def __post_init__(self) -> None:
        self.faults = NodeFaults(
            self.table,
            self.metrics,
            self.logger,
            silence_seconds=self.config.object_silence_seconds,
            suppress_seconds=self.config.object_suppress_seconds,
        )

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
            with self.faults.watching(node):
                response = connection.getresponse()
                refusal = b""
                if response.status != 200:
                    refusal = response.read(_MAX_REFUSAL_BYTES)
            if response.status != 200:
                raise self.faults.refused(node, response.status, refusal)
        except BaseException:
            connection.close()
            raise
        return NodeExchange(self.faults, node, step, connection, response)

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
        with self.faults.watching(node, self.config.object_connect_timeout):
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
                    **signed.headers(self.keys[0]),
                },
            )
            # It fits into the socket's buffer.
            connection.send(chunk_of(message))
        return connection
