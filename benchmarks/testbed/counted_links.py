"""Links to object servers that count bytes, and rings that name them."""

from __future__ import annotations

import shutil
import socket
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swift.common.ring import RingBuilder

from hapi_cluster import Cluster
from hapi_cluster.configs import BACKEND_HOST

NUM_DEVICES = 6
_READ_BYTES = 1 << 16


class CountedLink(socketserver.ThreadingTCPServer):
    """Passes connections on to ``far_port``; counts bytes both ways."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__((BACKEND_HOST, 0), _Relay)
        self.port: int = self.server_address[1]
        self.far_port = 0
        self.num_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_READ_BYTES):
                with self._lock:
                    self.num_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # an end was closed: so is the other
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        link, near = self.server, self.request
        assert isinstance(link, CountedLink)
        with socket.create_connection((BACKEND_HOST, link.far_port)) as far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=link.copy, args=(far, near))
            back.start()
            link.copy(near, far)
            back.join()


def place_devices(
    cluster: Cluster, folder: Path, ports: Sequence[int]
) -> Path:
    """Copies the configuration, with the devices on servers at three ports.

    All servers have all devices.  In the cluster's own rings, the replicas of
    an object are on two servers; in these, on three.
    """
    shutil.copytree(cluster.directory / "etc", folder / "etc")
    for path in (folder / "etc").glob("object*.builder"):
        builder = RingBuilder.load(str(path))
        for device in builder.devs:
            device["port"] = ports[device["id"] * len(ports) // NUM_DEVICES]
        for devices in zip(*builder._replica2part2dev, strict=True):
            used = {builder.devs[index]["port"] for index in devices}
            if used != {*ports}:
                raise ValueError(f"{path}: replicas are on {used} only")
        builder.get_ring().save(str(path.with_suffix(".ring.gz")))
    return folder
