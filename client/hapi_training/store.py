"""The store of a rendezvous, with time limits that torch's does not have."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hapi_protocol.errors import ClientError

RENDEZVOUS_VARIABLE = "HAPI_RENDEZVOUS"
# Chosen: nothing next to a step, and a request each to a store that answers
# thousands in a second.
POLL_SECONDS = 0.05


def open_store(address: str) -> TCPStore:
    """Returns a store that listens on an address.

    Raises:
        ClientError: ``bad_configuration`` if that is not possible.
    """
    host, port = _host_and_port(address)
    try:
        # torch listens on all addresses, and then waits for this one.
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        socket.create_server((host, port), family=infos[0][0]).close()
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (OSError, dist.DistError, RuntimeError) as error:
        raise ClientError(
            "bad_configuration",
            f"cannot listen on {address}: {str(error).splitlines()[0]}; give "
            "an address of this machine and a free port",
        ) from error


class Store:
    """Texts by key, which all workers of a rendezvous read and write.

    Args:
        address: ``HOST:PORT`` of ``hapi rendezvous``.
        timeout_seconds: longest wait for it.

    Attributes:
        host: host of the store.
        port: its port.
        torch: torch's connection.

    Raises:
        ClientError: from every method; ``worker_lost`` if it does not answer,
            ``bad_configuration`` for a wrong address.
    """

    def __init__(self, address: str, timeout_seconds: float) -> None:
        self._address = address
        self.host, self.port = _host_and_port(address)
        with self._naming_it():
            self.torch = _connected(self.host, self.port, timeout_seconds)

    def get(self, key: str) -> str:
        """Returns a text that was set; waits for one that was not."""
        with self._naming_it():
            return str(self.torch.get(key), "utf-8")

    def has(self, key: str) -> bool:
        with self._naming_it():
            return self.torch.check([key])

    def set(self, key: str, text: str) -> None:
        with self._naming_it():
            self.torch.set(key, text)

    def set_first(self, key: str, text: str) -> str:
        """Sets a text unless there is one; returns the one there is."""
        with self._naming_it():
            return str(self.torch.compare_set(key, "", text), "utf-8")

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, and returns it."""
        with self._naming_it():
            return self.torch.add(key, number)

    @contextmanager
    def _naming_it(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise ClientError(
                "worker_lost",
                f"the rendezvous at {self._address} does not answer: "
                f"{str(error).splitlines()[0]}; start it with 'hapi "
                "rendezvous', or check HAPI_RENDEZVOUS (one that was started "
                "again is another run)",
            ) from error


def _connected(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """Connects to a store.

    Raises:
        RuntimeError: there is none, or it does not answer in time.
    """
    _wait_for_listener(host, port, timeout_seconds)
    made: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout_seconds)
            made.set_result(
                TCPStore(host, port, is_master=False, timeout=limit)
            )
        except BaseException as error:
            made.set_exception(error)

    # In a thread, as torch waits for ever for a server of another kind.
    thread = threading.Thread(target=connect, name="hapi-store", daemon=True)
    thread.start()
    try:
        return made.result(timeout_seconds)
    except FutureTimeoutError as error:
        # A thread that is left in torch aborts the process at its end.
        _shut_down(host, port)
        thread.join(timeout_seconds)
        raise RuntimeError(
            f"no answer of a store in {timeout_seconds:g} s"
        ) from error


def _wait_for_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Waits until something listens: torch waits for twice its limit."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout_seconds).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(str(error)) from error
            time.sleep(POLL_SECONDS)


def _shut_down(host: str, port: int) -> None:
    """Ends this process's connections to an address, torch's included."""
    addresses = {
        info[4][:2]
        for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as ours:
                if ours.getpeername()[:2] in addresses:
                    ours.shutdown(socket.SHUT_RDWR)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ClientError(
            "bad_configuration",
            f"the rendezvous is {address!r}; give HOST:PORT of 'hapi "
            "rendezvous', as in HAPI_RENDEZVOUS=trainer-1:29400",
        )
    return host.strip("[]"), int(port)
