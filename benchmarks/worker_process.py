"""A worker in a process of its own, and processes that are its clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision
from benchmarks.remote import Remote

from hapi_cluster.process_control import die_with
from hapi_protocol.unix_http import UnixConnection
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.writer import write_package

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0
ASK_SECONDS = 5.0
IMAGES = ImageTransform(resize_size=256, crop_size=224)


@contextmanager
def running_worker(
    folder: Path,
    device: str,
    options: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A worker with default options but for those given; its socket.

    Args:
        folder: of socket and configuration.
        device: an option of the worker.
        options: further ones, as they stand in its file.
        variables: of its environment, beside those of this process.

    Raises:
        ValueError: it does not start.
    """
    path = folder / "worker.sock"
    config = folder / "hapi-worker.conf"
    config.write_text(
        "\n".join(
            [
                "[hapi-worker]",
                f"socket = {path}",
                f"device = {device}",
                "log_level = WARNING",
                *options,
                "",
            ]
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hapi_worker.main", "--config", str(config)],
        preexec_fn=die_with(os.getpid()),
        env={**os.environ, **(variables or {})},
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"hapi-worker did not start (status {process.poll()});"
                    " its error output stands above"
                )
            time.sleep(0.1)
        yield path
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def worker_pid(path: Path) -> int:
    """Of the worker that listens at a socket, as it says itself."""
    connection = UnixConnection(path, ASK_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return int(json.loads(connection.getresponse().read())["pid"])
    finally:
        connection.close()


def process_seconds(pid: int) -> float:
    """CPU seconds of a process and its threads so far, as of proc(5)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name, in parentheses, may hold blanks.
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def client_process(name: str, module: str = "stream_client") -> Remote:
    """A client; its end is the end of its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    return Remote(process, name)


def at_once(
    clients: Sequence[Remote], ask: Callable[[Remote], Any]
) -> list[Any]:
    """What each answers to a question that is put to all at the same time.

    When one fails, or this process is to end, all clients end at once.
    """
    with ThreadPoolExecutor(len(clients)) as pool:
        pending = [pool.submit(ask, client) for client in clients]
        try:
            return [each.result() for each in pending]
        except BaseException:
            with ThreadPoolExecutor(len(clients)) as closers:
                list(closers.map(Remote.close, clients))
            raise


def package_model(folder: Path, name: str, freeze: str) -> tuple[Path, int]:
    """A torchvision model with random weights as a package, and its cuts."""
    frozen = frozen_model(name, freeze)
    path = folder / f"{name}.hapi"
    write_package(frozen, path)
    return path, frozen.num_cuts


def frozen_model(name: str, freeze: str) -> FrozenGraph:
    """A torchvision model with random weights, up to a module of it."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    return split(model.eval(), freeze, transform=IMAGES).frozen
