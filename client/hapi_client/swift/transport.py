"""HTTP below :mod:`hapi_client.swift.connection`: pools, retries, cancelling.

A thread that waits on a socket cannot be stopped from outside by Python.
So each connection notes, before it sends and before it waits for an answer,
which :class:`CancelScope` its thread works for; cancelling a scope shuts the
sockets of its threads down and they end at once.  That is what makes Ctrl-C
and ``close()`` prompt.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import BaseHTTPResponse
from urllib3.util.retry import Retry

from hapi_client.swift.retry import RETRYABLE_STATUSES, Backoff
from hapi_client.swift.tls import TLSOptions
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    from typing_extensions import Self

SEND_BLOCK_BYTES = 1024 * 1024


class CancelScope:
    """Work of one or more threads that ends together."""

    def __init__(self) -> None:
        # Not an Event, whose lock is not reentrant: Python's collector may
        # cancel from the very thread that waits here.
        self._changed = threading.Condition(threading.RLock())
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether the work is to end."""
        return self._cancelled

    def set_cancelled(self) -> None:
        """Wakes those that wait."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises ``not_connected`` once the scope is cancelled."""
        if self.cancelled:
            raise ClientError("not_connected", "the loader was closed")

    def wait(self, seconds: float) -> None:
        """Sleeps; raises as :meth:`check` when cancelled meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled, seconds)
        self.check()


class SocketOwners:
    """Which scope waits on which socket."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owners: weakref.WeakKeyDictionary[socket.socket, CancelScope] = (
            weakref.WeakKeyDictionary()
        )
        self._local = threading.local()
        self._default = CancelScope()

    @property
    def scope(self) -> CancelScope:
        """The scope of the running thread."""
        scope: CancelScope = getattr(self._local, "scope", self._default)
        return scope

    @contextlib.contextmanager
    def working_for(self, scope: CancelScope) -> Iterator[None]:
        before = self.scope
        self._local.scope = scope
        try:
            yield
        finally:
            self._local.scope = before

    def claim(self, sock: socket.socket | None) -> None:
        """Notes that the running thread is about to wait on ``sock``."""
        with self._lock:
            self.scope.check()
            if sock is not None:
                # A socket from the pool changes its owner here.
                self._owners[sock] = self.scope

    def cancel(self, scope: CancelScope) -> None:
        """Ends all waits, present and future, of the scope's threads."""
        with self._lock:
            scope.set_cancelled()
            mine = [s for s, owner in self._owners.items() if owner is scope]
        for sock in mine:
            with contextlib.suppress(OSError):  # closed by its own thread
                sock.shutdown(socket.SHUT_RDWR)


def is_certificate_error(error: object) -> bool:
    """Whether a TLS server showed what we do not take; it will again."""
    return isinstance(error, urllib3.exceptions.SSLError) and any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args
    )


class ScopedRetry(Retry):
    """urllib3's retries with our backoff, counted, and cancellable."""

    def __init__(
        self,
        *args: Any,
        backoff: Backoff,
        owners: SocketOwners,
        traffic: Traffic,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._backoff = backoff
        self._owners = owners
        self._traffic = traffic

    @classmethod
    def following(
        cls, backoff: Backoff, owners: SocketOwners, traffic: Traffic
    ) -> ScopedRetry:
        """Repeats idempotent requests; others fail at once."""
        return cls(
            total=backoff.attempts - 1,
            redirect=0,
            status_forcelist=RETRYABLE_STATUSES,
            raise_on_status=False,
            raise_on_redirect=False,
            backoff=backoff,
            owners=owners,
            traffic=traffic,
        )

    def new(self, **kw: Any) -> Self:
        return super().new(
            backoff=self._backoff,
            owners=self._owners,
            traffic=self._traffic,
            **kw,
        )

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        self._owners.scope.check()
        if is_certificate_error(kwargs.get("error")):
            raise kwargs["error"]
        following = super().increment(*args, **kwargs)
        self._traffic.add(retries=1)
        return following

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        wish = self.get_retry_after(response) if response else None
        seconds = self._backoff.delay_seconds(
            max(1, len(self.history)),
            wish,
            random.random(),  # noqa: S311
        )
        self._owners.scope.wait(seconds)


class _Adapter(HTTPAdapter):
    """requests' adapter over connections that note their owner."""

    def __init__(
        self, owners: SocketOwners, retry: Retry, num_connections: int
    ) -> None:
        self._owners = owners
        super().__init__(
            pool_connections=4,
            pool_maxsize=num_connections,
            max_retries=retry,
        )

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, blocksize=SEND_BLOCK_BYTES, **kwargs)
        owners = self._owners

        class Claims:
            """Before a thread waits: to connect, to send, to receive."""

            sock: socket.socket | None

            def connect(self) -> None:
                owners.claim(None)
                super().connect()  # type: ignore[misc]
                owners.claim(self.sock)

            def request(self, *args: Any, **kwargs: Any) -> None:
                owners.claim(self.sock)
                super().request(*args, **kwargs)  # type: ignore[misc]

            def getresponse(self) -> Any:
                owners.claim(self.sock)
                return super().getresponse()  # type: ignore[misc]

        class Connection(Claims, HTTPConnection):
            pass

        class TLSConnection(Claims, HTTPSConnection):
            pass

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        class TLSPool(HTTPSConnectionPool):
            ConnectionCls = TLSConnection

        self.poolmanager.pool_classes_by_scheme = {
            "http": Pool,
            "https": TLSPool,
        }


class Transport:
    """The HTTP sessions of one process; never shared over a fork.

    ``patient`` repeats failed idempotent requests by ``backoff``,
    ``eager`` reports the first failure.
    """

    def __init__(
        self,
        owners: SocketOwners,
        backoff: Backoff,
        traffic: Traffic,
        *,
        num_connections: int,
        tls: TLSOptions,
    ) -> None:
        self.pid = os.getpid()
        # Said of each request: what a session says is less to requests than
        # REQUESTS_CA_BUNDLE in the environment.
        self.verify = None if tls.verify is True else tls.verify
        retry = ScopedRetry.following(backoff, owners, traffic)
        self.retrying = _session(owners, retry, num_connections, tls)
        never = Retry(0, redirect=False, read=False)
        self.single_try = _session(owners, never, num_connections, tls)

    def close(self) -> None:
        self.retrying.close()
        self.single_try.close()


def _session(
    owners: SocketOwners,
    retry: Retry,
    num_connections: int,
    tls: TLSOptions,
) -> requests.Session:
    session = requests.Session()
    # Neither .netrc credentials nor surprises from the environment but
    # the proxy and CA settings that requests reads per request.
    session.auth = _no_auth
    session.cert = tls.cert
    adapter = _Adapter(owners, retry, num_connections)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def _no_auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request
