"""HTTP sessions with connection pools, retries and cancellation.

Python cannot stop a thread that waits on a socket.  Each connection therefore
records, before it sends and before it waits, which :class:`CancelScope` its
thread works for.  Cancelling a scope shuts the sockets of its threads down,
so that Ctrl-C and ``close()`` take effect at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

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

SEND_BLOCK_BYTES = 64 * 1024
_PASSWORD = re.compile("//[^/@]*@")


def proxy_text(url: str) -> str:
    """Names the HTTP proxy of the environment that a URL is reached by.

    Returns:
        What to append to an error of connecting; empty without a proxy.
    """
    proxy = requests.utils.select_proxy(
        url, requests.utils.get_environ_proxies(url, no_proxy=None)
    )
    if not proxy:
        return ""
    parts = urlsplit(url)
    hidden = _PASSWORD.sub("//", proxy)
    return (
        f"; the environment sends it through the proxy {hidden} "
        f"({parts.scheme}_proxy): if that is wrong, unset the variable or add "
        f"{parts.hostname} to no_proxy"
    )


class CancelScope:
    """Work of one or more threads that is cancelled together."""

    def __init__(self) -> None:
        # Not an Event, whose lock is not reentrant: the garbage collector
        # may cancel from the thread that waits here.
        self._changed = threading.Condition(threading.RLock())
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """True if the work has to end."""
        return self._cancelled

    def set_cancelled(self) -> None:
        """Marks the scope as cancelled and wakes its waiting threads."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises ``not_connected`` if the scope is cancelled."""
        if self.cancelled:
            raise ClientError("not_connected", "the loader was closed")

    def sleep(self, seconds: float) -> bool:
        """Sleeps until it is cancelled; returns True if it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._cancelled, seconds)

    def wait(self, seconds: float) -> None:
        """Sleeps; raises ``not_connected`` if cancelled meanwhile."""
        self.sleep(seconds)
        self.check()


class SocketOwners:
    """Maps each socket to the scope whose thread waits on it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owners: weakref.WeakKeyDictionary[socket.socket, CancelScope] = (
            weakref.WeakKeyDictionary()
        )
        self._local = threading.local()
        self._default = CancelScope()

    @property
    def scope(self) -> CancelScope:
        """The scope of the current thread."""
        scope: CancelScope = getattr(self._local, "scope", self._default)
        return scope

    @contextlib.contextmanager
    def working_for(self, scope: CancelScope) -> Iterator[None]:
        """Makes ``scope`` the scope of the current thread."""
        previous = self.scope
        self._local.scope = scope
        try:
            yield
        finally:
            self._local.scope = previous

    def claim(self, sock: socket.socket | None) -> None:
        """Records that the current thread is about to wait on ``sock``."""
        with self._lock:
            self.scope.check()
            if sock is not None:
                # A pooled socket changes its owner here.
                self._owners[sock] = self.scope

    def cancel(self, scope: CancelScope) -> None:
        """Ends all current and future waits of the scope's threads."""
        with self._lock:
            scope.set_cancelled()
            owned = [s for s, owner in self._owners.items() if owner is scope]
        for sock in owned:
            with contextlib.suppress(OSError):  # closed by its own thread
                sock.shutdown(socket.SHUT_RDWR)


def is_certificate_error(error: object) -> bool:
    """True if a server's certificate was rejected; a retry cannot help."""
    return isinstance(error, urllib3.exceptions.SSLError) and any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args
    )


class ScopedRetry(Retry):
    """urllib3's Retry with our backoff, counted and cancellable.

    It repeats idempotent requests only, which is the default of urllib3.
    """

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
        next_retry = super().increment(*args, **kwargs)
        self._traffic.add(retries=1)
        return next_retry

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        retry_after = self.get_retry_after(response) if response else None
        seconds = self._backoff.delay_seconds(
            max(1, len(self.history)),
            retry_after,
            random.random(),  # noqa: S311
        )
        self._owners.scope.wait(seconds)


class _Adapter(HTTPAdapter):
    """A requests adapter whose connections record their owner."""

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
            """Claims the socket before each wait on it."""

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

        class PlainConnection(Claims, HTTPConnection):
            pass

        class TLSConnection(Claims, HTTPSConnection):
            pass

        class Pool(HTTPConnectionPool):
            ConnectionCls = PlainConnection

        class TLSPool(HTTPSConnectionPool):
            ConnectionCls = TLSConnection

        self.poolmanager.pool_classes_by_scheme = {
            "http": Pool,
            "https": TLSPool,
        }


class Transport:
    """The HTTP sessions of one process; never shared over a fork.

    ``retrying`` repeats failed idempotent requests with ``backoff``;
    ``single_try`` reports the first failure.
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
        # Passed with each request, because for requests REQUESTS_CA_BUNDLE
        # overrides a session's setting.
        self.verify = None if tls.verify is True else tls.verify
        retry = ScopedRetry(
            total=backoff.attempts - 1,
            redirect=0,
            status_forcelist=RETRYABLE_STATUSES,
            raise_on_status=False,
            raise_on_redirect=False,
            backoff=backoff,
            owners=owners,
            traffic=traffic,
        )
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
    # Keeps requests from adding credentials of ~/.netrc.
    session.auth = lambda request: request
    session.cert = tls.cert
    adapter = _Adapter(owners, retry, num_connections)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session
