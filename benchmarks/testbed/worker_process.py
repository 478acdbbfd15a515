"""A worker process without Swift, and client processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision

from benchmarks.testbed.folders import new_folder, remove_folder, remove_stale
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import ROOT
from hapi_cluster.process_control import die_with
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.writer import write_package

START_SECONDS = 60.0
IMAGES = ImageTransform(resize_size=256, crop_size=224)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in memory; also removes folders of killed runs."""
    remove_stale()
    folder = new_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


@contextmanager
def running_worker(
    folder: Path, device: str, options: Sequence[str]
) -> Iterator[Path]:
    """Runs a worker; yields its socket.

    ``options`` are further lines of its configuration.

    Raises:
        ValueError: it does not start.
    """
    path = folder / "worker.sock"
    config = folder / "hapi-worker.conf"
    lines = [f"socket = {path}", f"device = {device}", "log_level = WARNING"]
    config.write_text("\n".join(["[hapi-worker]", *lines, *options, ""]))
    process = subprocess.Popen(
        [sys.executable, "-m", "hapi_worker.main", "--config", str(config)],
        preexec_fn=die_with(os.getpid()),
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"hapi-worker did not start (status {process.poll()});"
                    " see its error output above"
                )
            time.sleep(0.1)
        yield path
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def stream_client(name: str) -> Remote:
    """Starts a process of :mod:`benchmarks.testbed.stream_client`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed.stream_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    return Remote(process, name)


def ask_all(
    clients: Sequence[Remote], ask: Callable[[Remote], Any]
) -> list[Any]:
    """Asks all clients at the same time; returns their answers.

    If one fails or this process is interrupted, all clients end.
    """
    with ThreadPoolExecutor(len(clients)) as pool:
        pending = [pool.submit(ask, client) for client in clients]
        try:
            return [process.result() for process in pending]
        except BaseException:
            with ThreadPoolExecutor(len(clients)) as closers:
                list(closers.map(Remote.close, clients))
            raise


def package_model(folder: Path, name: str, freeze: str) -> tuple[Path, int]:
    """Packages a torchvision model with random weights.

    Returns:
        The package and its number of cuts.
    """
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    frozen = split(model.eval(), freeze, transform=IMAGES).frozen
    path = folder / f"{name}.hapi"
    write_package(frozen, path)
    return path, frozen.num_cuts
