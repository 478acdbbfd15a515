"""cheroot on a unix socket: permissions, stale sockets, streaming bodies."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import Any

from cheroot import server as cheroot_server
from cheroot import wsgi

from hapi_worker.jobs.chunked_body import MAX_READ_BYTES
from hapi_worker.peer import PeerConnection
from hapi_worker.server.app import (
    ENVIRON_BROKEN_BODY,
    ENVIRON_CONNECTION,
    ENVIRON_IS_DISCONNECTED,
)

CONNECT_SECONDS = 2.0
"""Longest connect to a worker that may listen at the path: it is local."""
BACKLOG = 128
"""More than the requests that may wait; the filter repeats a refused
connect."""
MAX_HEADER_BYTES = 64 * 1024
"""An identity has names of at most 1,536 bytes, URL-encoded."""
SHUTDOWN_SECONDS = 1
"""Jobs have ended before, or are broken off."""
MESSAGE_SECONDS = 5.0
"""Longest wait for bytes of a request's header, or of a body that is one
message, because each occupies a thread.  Samples and packages, which come from
Swift, have their own threads and longer timeouts."""
MAX_DRAINED_BYTES = 1024 * 1024
"""Largest unread body of a refused request; a longer one closes the
connection."""

logger = logging.getLogger(__name__)


class SocketInUseError(Exception):
    """Another live worker listens at the path, or it is not a socket."""


class _Request(cheroot_server.HTTPRequest):
    def parse_request(self) -> None:
        self.conn.socket.settimeout(MESSAGE_SECONDS)
        super().parse_request()
        if self.ready and (self.chunked_read or self.method == b"PUT"):
            self.conn.socket.settimeout(self.server.timeout)

    def send_headers(self) -> None:
        # cheroot would read an unread rest into memory, or take it for the
        # next request.
        unread = getattr(self.rfile, "remaining", 0)
        if self.chunked_read or unread > MAX_DRAINED_BYTES:
            self.close_connection = True
        super().send_headers()


class _CherootConnection(cheroot_server.HTTPConnection):
    RequestHandlerClass = _Request
    rbufsize = MAX_READ_BYTES
    is_new = True


class _Gateway(wsgi.Gateway_10):
    def __init__(self, req: Any) -> None:
        super().__init__(req)
        connection = PeerConnection(req.conn.socket, req.conn.rfile)
        self.env[ENVIRON_IS_DISCONNECTED] = connection.is_disconnected
        if req.chunked_read:
            self.env[ENVIRON_CONNECTION] = connection

    def respond(self) -> None:
        """Sends the status at once, then the body; always closes the body.

        cheroot holds the status back until the first piece of the body.  If
        both fail because the client disconnected, it does not close the body,
        and the job would never end.
        """
        body = self.req.server.wsgi_app(self.env, self.start_response)
        try:
            if self.env.get(ENVIRON_BROKEN_BODY):
                self.req.close_connection = True
            self.req.ensure_headers_sent()
            for piece in body:
                self.write(piece)
        except TimeoutError:
            if hasattr(body, "stalled"):
                body.stalled()
            raise
        finally:
            if hasattr(body, "close"):
                body.close()


class UnixServer(wsgi.Server):
    """Serves one WSGI application on one unix socket, in threads.

    Args:
        path: path of the socket.
        mode: permission bits of the socket.
        application: the WSGI application.
        num_threads: requests served at a time.
        timeout_seconds: longest wait for one read or write.
        listener: open socket at that path, which is not removed at the end.
    """

    ConnectionClass = _CherootConnection
    max_request_header_size = MAX_HEADER_BYTES
    expiration_interval = 0.2  # also the time a stop may take

    def __init__(
        self,
        path: str,
        mode: int,
        application: Callable[..., Any],
        *,
        num_threads: int,
        timeout_seconds: float,
        listener: socket.socket | None = None,
    ) -> None:
        super().__init__(
            path,
            application,
            numthreads=num_threads,
            max=num_threads,
            server_name="hapi-worker",
            request_queue_size=BACKLOG,
            shutdown_timeout=SHUTDOWN_SECONDS,
            peercreds_enabled=True,
        )
        self.gateway = _Gateway
        self.timeout = timeout_seconds
        self._path = path
        self._mode = mode
        self._listener = listener
        self._thread = threading.Thread(
            target=self.serve, name=f"serve {path}", daemon=True
        )

    def bind_unix_socket(self, bind_addr: Any) -> socket.socket:
        """Listens, with the right permissions from the start."""
        if self._listener is not None:
            self.socket = self._listener
            return self._listener
        remove_stale_socket(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listener.fileno(), self._mode)
            # Linux gives the path the socket's own mode minus the umask.
            before = os.umask(0o777 & ~self._mode)
            try:
                listener.bind(self._path)
            finally:
                os.umask(before)
        except OSError:
            listener.close()
            raise
        self.socket = listener
        return listener

    def begin(self) -> None:
        """Listens, and serves in its own threads.

        Raises:
            SocketInUseError: the path is in use.
            OSError: the socket cannot be bound.
        """
        self.prepare()
        self._thread.start()

    def process_conn(self, conn: Any) -> None:
        """Gives a connection to a thread once there is something to read.

        cheroot gives a new one to a thread at once, so silent connections
        could occupy all threads.
        """
        if conn.is_new:
            conn.is_new = False
            self.put_conn(conn)
        else:
            super().process_conn(conn)

    def end(self) -> None:
        """Stops serving, breaks open connections, removes the socket."""
        self.stop()
        self._thread.join(SHUTDOWN_SECONDS)
        if self._listener is not None:
            return
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            logger.warning("the socket %s was removed already", self._path)

    def error_log(
        self, msg: str = "", level: int = logging.INFO, traceback: bool = False
    ) -> None:
        """Sends cheroot's messages to this module's logger."""
        logger.log(level, "%s", msg, exc_info=traceback)


def remove_stale_socket(path: str) -> None:
    """Removes a socket at which no process listens any more.

    Raises:
        SocketInUseError: a process listens, or the path is not a socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketInUseError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            logger.info("removing the stale socket %s", path)
            os.unlink(path)
            return
        except OSError as error:
            raise SocketInUseError(f"{path} is in use: {error}") from error
    raise SocketInUseError(
        f"another worker listens at {path}: stop it, or set the option "
        "socket to another path"
    )
