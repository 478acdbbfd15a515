"""What a request takes a worker, beside the work on its samples.

    python -m benchmarks.requests --json requests.json

Jobs of one tiny image on a tiny convolution that is resident already, one
after the other through the worker's socket, from one client.  From the time of
a job go the seconds of decoding, forward pass and encoding that its stream
tells; what is left is for two requests, threads, queues, Arrow, and the client
itself.

The JSON file: ``settings``, ``machine``, ``versions``, ``goal_seconds``,
``met`` and ``found``, of which each is {median, percentile_95, interval}: the
medians of the rounds, and 95 % of the first by bootstrap, in seconds

  request       both requests, less the samples' own seconds; the goal is of
                its median
  grant         POST /jobs
  stream        POST /jobs/<id>, less the samples' own seconds
  own           decoding, forward pass and encoding

and, with no percentile, for each job

  worker_cpu    CPU seconds of the worker's process
  worker_cpu_besides    less those of decoding, forward pass and encoding
  client_cpu    CPU seconds of the client

``rounds`` has the same of each round.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.commands import (
    add_rounds,
    add_worker_options,
    check_rounds,
    check_worker_options,
    exit_status,
    parser_of,
)
from benchmarks.contention import ENCODING
from benchmarks.folders import new_folder, remove_folder, remove_stale
from benchmarks.regret import interval_of
from benchmarks.remote import Remote
from benchmarks.results import machine, versions, write_json
from benchmarks.worker_process import (
    client_process,
    process_seconds,
    running_worker,
    worker_pid,
)
from PIL import Image
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.writer import write_package

GOAL_SECONDS = 0.005
ACCOUNT = "AUTH_bench"
IMAGE_PIXELS = 32
WARM_REQUESTS = 50
ASK_SECONDS = 600.0
QUICK = {"rounds": 2, "requests": 100}

Round = dict[str, dict[str, float]]


def trivial_package(folder: Path) -> Path:
    """A convolution of four channels on tiny images, as a package."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    transform = ImageTransform(
        resize_size=IMAGE_PIXELS, crop_size=IMAGE_PIXELS
    )
    path = folder / "trivial.hapi"
    write_package(split(model.eval(), "0", transform=transform).frozen, path)
    return path


def trivial_shard(folder: Path) -> Path:
    """A tar of one tiny photograph."""
    pixels = np.random.default_rng(0).integers(
        0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), np.uint8
    )
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "JPEG")
    path = folder / "trivial.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("0.jpg")
        member.size = len(sink.getvalue())
        tar.addfile(member, io.BytesIO(sink.getvalue()))
    return path


def measured(
    folder: Path, options: Sequence[str], rounds: int, requests: int
) -> list[Round]:
    """The rounds.

    Args:
        folder: of package, shard and worker.
        options: of the worker.
        rounds, requests: how many, the requests of each round.
    """
    with ExitStack() as stack:
        path = stack.enter_context(running_worker(folder, "cpu", options))
        pid = worker_pid(path)
        client = stack.enter_context(
            client_process("the client", "request_client")
        )
        client.ask(
            "open",
            seconds=ASK_SECONDS,
            path=str(path),
            account=ACCOUNT,
            package=str(trivial_package(folder)),
            shard=str(trivial_shard(folder)),
            cut=1,
            encoding=ENCODING,
        )
        _measure(client, WARM_REQUESTS)
        found = []
        for _ in range(rounds):
            before = process_seconds(pid)
            done = _measure(client, requests)
            found.append(round_of(done, process_seconds(pid) - before))
            print(describe(found[-1]), flush=True)
    return found


def _measure(client: Remote, requests: int) -> Any:
    return client.ask("measure", seconds=ASK_SECONDS, requests=requests)


def round_of(done: Mapping[str, Any], worker_seconds: float) -> Round:
    """What one round says; see the module's text.

    Args:
        done: of the client.
        worker_seconds: CPU seconds of the worker meanwhile.
    """
    grant, stream, own, own_cpu = (
        np.array(done[name]) for name in ("grant", "stream", "own", "own_cpu")
    )
    worker = worker_seconds / len(grant)
    return {
        "request": _spread(grant + stream - own),
        "grant": _spread(grant),
        "stream": _spread(stream - own),
        "own": _spread(own),
        "worker_cpu": {"median": worker},
        "worker_cpu_besides": {"median": worker - float(own_cpu.mean())},
        "client_cpu": {"median": done["cpu_seconds"] / len(grant)},
    }


def _spread(seconds: Any) -> dict[str, float]:
    return {
        "median": float(np.median(seconds)),
        "percentile_95": float(np.percentile(seconds, 95)),
    }


def judge(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds say together."""
    found: dict[str, dict[str, Any]] = {
        name: {
            **{
                key: statistics.median(each[name][key] for each in rounds)
                for key in rounds[0][name]
            },
            "interval": interval_of(
                [each[name]["median"] for each in rounds], np.median
            ),
        }
        for name in rounds[0]
    }
    return {
        "goal_seconds": GOAL_SECONDS,
        "met": found["request"]["median"] <= GOAL_SECONDS,
        "found": found,
        "rounds": list(rounds),
    }


def describe(found: Mapping[str, Mapping[str, float]]) -> str:
    """One line."""
    shown = ", ".join(
        f"{name} {1e3 * found[name]['median']:.2f} ms"
        f" ({1e3 * found[name]['percentile_95']:.2f})"
        for name in ("request", "grant", "stream", "own")
    )
    return (
        f"median (95th percentile): {shown}; CPU of the worker"
        f" {1e3 * found['worker_cpu']['median']:.2f} ms, of which"
        f" {1e3 * found['worker_cpu_besides']['median']:.2f} beside the"
        f" samples; of the client {1e3 * found['client_cpu']['median']:.2f} ms"
    )


def report(verdict: Mapping[str, Any]) -> str:
    """Two lines."""
    low, high = verdict["found"]["request"]["interval"]
    return (
        f"{describe(verdict['found'])}\n"
        f"request: {1e3 * low:.2f} to {1e3 * high:.2f} ms, goal at most"
        f" {1e3 * verdict['goal_seconds']:g} ms;"
        f" {'met' if verdict['met'] else 'missed'}"
    )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("requests", __doc__)
    add = parser.add_argument
    add_worker_options(parser)
    add_rounds(parser)
    add(
        "--requests",
        type=int,
        default=1000,
        help="jobs of each round (default 1000)",
    )
    add(
        "--quick",
        action="store_true",
        help="try out: two rounds of 100 jobs",
    )
    found = parser.parse_args(argv)
    if found.quick:
        vars(found).update(QUICK)
    check_rounds(parser, found)
    if found.requests < 1:
        parser.error(f"--requests is {found.requests}; 1 or more")
    check_worker_options(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("requests", lambda: _run(arguments))


def _run(options: argparse.Namespace) -> int:
    about = {"machine": machine(), "versions": versions()}
    remove_stale()
    folder = new_folder()
    try:
        rounds = measured(
            folder, options.options, options.rounds, options.requests
        )
    finally:
        remove_folder(folder)
    verdict = judge(rounds)
    if options.json is not None:
        settings = {
            "options": options.options,
            "rounds": options.rounds,
            "requests": options.requests,
            "warm_requests": WARM_REQUESTS,
            "image_pixels": IMAGE_PIXELS,
            "encoding": ENCODING,
        }
        write_json(
            options.json,
            {
                "benchmark": "requests",
                "settings": settings,
                **about,
                **verdict,
            },
        )
    print(report(verdict), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
