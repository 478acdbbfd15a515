"""What receiving a byte over HTTP takes; imports nothing of HAPI.

The client is Python's own ``http.client`` and ``tarfile``; the server that it
is measured with, ``python -m http.server``, is not.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from benchmarks.spread import Spread, spread

TIMEOUT_SECONDS = 60.0
PIECE_BYTES = 64 * 1024


class ServerError(Exception):
    """A server that does not start, or does not answer as it should."""


def receive_seconds_per_byte(tars: Sequence[Path], rounds: int) -> Spread:
    """CPU seconds of a client that streams tars and reads all members.

    Args:
        tars: that the local server has.
        rounds: each reads all tars once, after a round to warm up.
    """
    with local_server(tars) as urls:

        def round_() -> float:
            started = time.thread_time()
            length = sum(get(url, read_members) for url in urls)
            return (time.thread_time() - started) / length

        round_()
        return spread([round_() for _ in range(rounds)])


def serve_seconds_per_byte(url: str, token: str, rounds: int) -> Spread:
    """Seconds of the clock that a GET takes, its bytes thrown away.

    They are the server's CPU seconds where it has one core, and that is what
    limits; of a server with more cores, or behind a narrow link, they are not.

    Args:
        url: of an object.
        token: for ``X-Auth-Token``; empty for none.
        rounds: GETs that count, after one to warm up.

    Raises:
        ServerError: for an answer other than 200.
    """
    headers = {"X-Auth-Token": token} if token else {}

    def round_() -> float:
        started = time.perf_counter()
        length = get(url, discard, headers)
        return (time.perf_counter() - started) / length

    round_()
    return spread([round_() for _ in range(rounds)])


def read_members(body: IO[bytes]) -> None:
    """Reads each member of a tar as it comes, and its padding."""
    with tarfile.open(fileobj=body, mode="r|") as opened:
        for member in opened:
            file = opened.extractfile(member)
            if file is not None:
                file.read()
    discard(body)


def discard(body: IO[bytes]) -> None:
    """Reads all there is."""
    while body.read(PIECE_BYTES):
        pass


def get(
    url: str,
    take: Callable[[IO[bytes]], None],
    headers: Mapping[str, str] | None = None,
) -> int:
    """Lets ``take`` read an object; its bytes.

    Raises:
        ServerError: for an answer other than 200, or one of unknown length.
    """
    parts = urlsplit(url)
    kind = (
        http.client.HTTPSConnection
        if parts.scheme == "https"
        else http.client.HTTPConnection
    )
    connection = kind(parts.netloc, timeout=TIMEOUT_SECONDS)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    with contextlib.closing(connection):
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        length = response.length
        if response.status != 200 or not length:
            raise ServerError(
                f"GET {url}: {response.status} {response.reason}, length"
                f" {length}; 200 and a length are needed"
            )
        take(response)
        if response.length:
            raise ServerError(f"GET {url}: {response.length} bytes unread")
        return length


@contextlib.contextmanager
def local_server(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Serves files on this machine; yields their URLs.

    Raises:
        ServerError: it does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="hapi-stages-")
            )
        )
        names = [f"{number:05d}.tar" for number in range(len(paths))]
        for name, path in zip(names, paths, strict=True):
            (folder / name).symlink_to(path.resolve())
        process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "http.server", "0"),
                *("--bind", "127.0.0.1", "--directory", str(folder)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        port = _port(process)
        yield [f"http://127.0.0.1:{port}/{name}" for name in names]


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    words = line.partition(" port ")[2].split()
    if not words:
        raise ServerError(f"http.server did not start; it said {line!r}")
    return int(words[0])
