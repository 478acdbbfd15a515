"""The paste filter of object servers: answers the verb ``HAPI``.

It belongs directly left of ``object-server``.  All other requests pass
unchanged.  A request is refused before the object is opened and before the
worker is asked, unless a proxy with the cluster's key has signed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swift.common.swob import Response, wsgi_to_str
from swift.common.utils import get_logger

from hapi_middleware.config import ObjectFilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.object_server.framed_answer import FramedAnswer
from hapi_middleware.object_server.local_object import (
    NotHereError,
)
from hapi_middleware.object_server.steps import PREFIX, Steps, own_address
from hapi_middleware.object_server.worker_watch import WorkerWatch
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.shared_table import shared_table
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import (
    BACKEND_VERSION,
    HEADER_MESSAGE_BYTES,
    HEADER_SIGNATURE,
    HEADER_VERSION,
    METHOD,
    STEPS,
)
from hapi_protocol.errors import HapiError
from hapi_protocol.json_messages import MAX_MESSAGE_BYTES
from hapi_protocol.printable import printable
from hapi_protocol.signatures import (
    SignedRequest,
    Verifier,
    read_keys,
)

PING_SECONDS = 2.0
"""Longest answer of a worker to a ping: with ``beat_seconds`` less than the
proxy's ``object_silence_seconds``."""
SEEN_BUCKETS = 1 << 17
"""Room for a million signatures, of 25 MB: those of a minute at 5,000 requests
per second take a third of it."""

StartResponse = Callable[..., Any]


@dataclass(eq=False, repr=False)
class ObjectMiddleware:
    """The WSGI filter: checks requests, and frames the answers.

    Args:
        app: the object server.
        config: options of the filter.
        verifier: checks signatures.
        logger: Swift's logger, with statsd.
    """

    app: Any
    config: ObjectFilterConfig
    verifier: Verifier
    logger: Any

    def __post_init__(self) -> None:
        self._metrics = FilterMetrics(self.logger, PREFIX)
        self._watch = WorkerWatch(self._metrics, self.logger)
        self._worker = WorkerClient(self.config)
        self._steps = Steps(
            self.app,
            self.config,
            self.logger,
            self._metrics,
            self._worker,
            self._watch,
        )

    def __call__(self, env: Env, start_response: StartResponse) -> Any:
        if env["REQUEST_METHOD"] != METHOD:
            return self.app(env, start_response)
        self.logger.txn_id = env.get("HTTP_X_TRANS_ID")
        return self._answer(env)(env, start_response)

    def _answer(self, env: Env) -> Response:
        version = _header(env, HEADER_VERSION)
        if version != str(BACKEND_VERSION):
            return self._refuse(
                env,
                400,
                f"version {version!r:.20} of the protocol between filters; "
                f"this host has {BACKEND_VERSION}: install one release",
            )
        message = self._message(env)
        if message is None:
            return self._refuse(env, 400, "it has no message")
        request = SignedRequest.received(
            wsgi_to_str(env["PATH_INFO"]),
            lambda name: _header(env, name),
            message,
        )
        problem = self.verifier.problem(
            request,
            _header(env, HEADER_SIGNATURE),
            own_address(env),
        )
        if problem is not None:
            return self._refuse(env, 403, problem)
        if request.step not in STEPS:
            return self._refuse(env, 400, f"step {request.step!r:.20}")
        try:
            work = self._steps.work(env, request.step, message)
        except NotHereError as error:
            self._metrics.count("not_here")
            self.logger.debug("hapi_object: %s", error)
            return Response(status=error.status)
        except HapiError as error:
            return self._refuse(env, 400, str(error))
        # Each frame is sent at once.
        env["eventlet.minimum_write_chunk_size"] = 0
        answer = FramedAnswer(
            work,
            self.config.beat_seconds,
            self.logger,
            ping=lambda: self._worker.ping(PING_SECONDS),
            failed=partial(self._watch.failed, own_address(env), request.step),
        )
        return Response(
            status=200,
            headers={"Content-Type": "application/octet-stream"},
            app_iter=answer,
        )

    def _message(self, env: Env) -> bytes | None:
        length = _header(env, HEADER_MESSAGE_BYTES)
        if not (length.isascii() and length.isdigit() and len(length) < 6):
            return None
        if not 0 < int(length) <= MAX_MESSAGE_BYTES:
            return None
        try:
            message = env["wsgi.input"].read(int(length))
        except (OSError, ValueError):
            return None
        return message if len(message) == int(length) else None

    def _refuse(self, env: Env, status: int, reason: str) -> Response:
        self._metrics.count("refused")
        self.logger.warning(
            "hapi_object: refused a request of %s: %s",
            env.get("REMOTE_ADDR", "an unknown host"),
            printable(reason),
        )
        return Response(status=status, body=reason.encode())


def _header(env: Env, name: str) -> str:
    return str(env.get("HTTP_" + name.upper().replace("-", "_"), ""))


def filter_factory(
    global_conf: Mapping[str, str], **local_conf: str
) -> Callable[[Any], ObjectMiddleware]:
    """Paste's entry point (``use = egg:swift-hapi#hapi_object``).

    Raises:
        ValueError: an unknown option, a bad value or a bad key; from the
            returned factory: a wrong position in the pipeline.
    """
    config = ObjectFilterConfig.from_conf(global_conf, local_conf)
    keys = read_keys(Path(config.backend_key_file))
    logger = get_logger({**global_conf, **local_conf}, log_route=PREFIX)

    def factory(app: Any) -> ObjectMiddleware:
        if getattr(app, "app", None) is not None:
            raise ValueError(
                "[filter:hapi_object] must be the last filter, directly left "
                f"of object-server; {type(app).__name__} is right of it"
            )
        is_new = shared_table("seen", SEEN_BUCKETS).put_new
        verifier = Verifier(keys, time.time, is_new, config.addresses)
        return ObjectMiddleware(app, config, verifier, logger)

    return factory
