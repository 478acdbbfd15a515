"""Cut 0 against the loop one would write by hand; both on this machine.

The hand-written loop is what a careful user has without HAPI: one thread
streams tar shards from Swift, decodes and transforms, a bounded queue, and
the main thread stacks batches and runs the frozen backbone.  Both loops read
the same shards from the same Swift, decode with the same torchvision calls,
and run ResNet-18 up to its global pooling under ``inference_mode``.  Rounds
are interleaved, so that a change of the machine's speed meets both.

    python benchmarks/streaming_baseline.py --samples 640 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests
import torch
import torchvision
from benchmarks.preset import Preset
from torchvision.io import ImageReadMode, decode_jpeg

from hapi_client.cli.demo.data import write_shards
from hapi_client.data.index import load_index
from hapi_client.data.upload import upload
from hapi_client.job.transfer_job import TransferJob
from hapi_client.progress import SilentReporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_cluster import Cluster

LOCATION = Location("benchmark", "photos")
BATCH_SIZE = 32
QUEUE_SAMPLES = 256
WAIT_SECONDS = 120.0
RATIO_WANTED = 0.95


def handwritten_samples(
    connection: Connection, token: str, shards: list[str]
) -> Iterator[tuple[torch.Tensor, int]]:
    transform = Preset()
    for shard in shards:
        url = f"{connection.storage_url}/{LOCATION.container}/{shard}"
        with requests.get(
            url, headers={"X-Auth-Token": token}, stream=True, timeout=60
        ) as response:
            response.raise_for_status()
            with tarfile.open(fileobj=response.raw, mode="r|") as tar:
                image = None
                for member in tar:
                    data = tar.extractfile(member).read()
                    if member.name.endswith(".jpg"):
                        raw = torch.frombuffer(
                            bytearray(data), dtype=torch.uint8
                        )
                        pixels = decode_jpeg(raw, mode=ImageReadMode.RGB)
                        image = transform(pixels)
                    else:
                        yield image, int(data)


def handwritten(
    connection: Connection,
    token: str,
    shards: list[str],
    backbone: torch.nn.Module,
) -> int:
    samples: queue.Queue[Any] = queue.Queue(QUEUE_SAMPLES)

    def produce() -> None:
        for sample in handwritten_samples(connection, token, shards):
            samples.put(sample, timeout=WAIT_SECONDS)
        samples.put(None, timeout=WAIT_SECONDS)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    count = 0
    checksum = 0.0
    images: list[torch.Tensor] = []
    ended = False
    while not ended:
        sample = samples.get(timeout=WAIT_SECONDS)
        ended = sample is None
        if not ended:
            images.append(sample[0])
        if images and (ended or len(images) == BATCH_SIZE):
            with torch.inference_mode():
                features = backbone(torch.stack(images)).flatten(1)
            checksum += float(features.sum())
            count += len(images)
            images = []
    thread.join(WAIT_SECONDS)
    return count


def ours(job: TransferJob) -> int:
    count = 0
    checksum = 0.0
    for features, _labels in job.loader():
        checksum += float(features.sum())
        count += len(features)
    return count


def token_of(cluster: Cluster) -> str:
    answer = requests.get(
        cluster.auth_url,
        headers={"X-Auth-User": cluster.user, "X-Auth-Key": cluster.key},
        timeout=30,
    )
    answer.raise_for_status()
    return answer.headers["X-Auth-Token"]


def measure(samples: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    backbone = torch.nn.Sequential(*list(model.children())[:-1])
    measured: dict[str, list[tuple[float, float]]] = {
        "handwritten": [],
        "hapi": [],
    }
    with Cluster.temporary(worker=False, hapi_filter=False) as cluster:
        login = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
        with (
            Connection(login) as connection,
            tempfile.TemporaryDirectory() as folder,
        ):
            upload(
                connection,
                LOCATION,
                write_shards(Path(folder), samples),
                SilentReporter(),
            )
            shards = list(load_index(connection, LOCATION).etags)
            token = token_of(cluster)
            with TransferJob(
                model,
                freeze="layer4",
                data=str(LOCATION),
                batch_size=BATCH_SIZE,
                cut="stream",
                connection=connection,
            ) as job:
                loops = {
                    "handwritten": lambda: handwritten(
                        connection, token, shards, backbone
                    ),
                    "hapi": lambda: ours(job),
                }
                for number in range(rounds + 1):
                    took = {
                        name: timed(loop, samples)
                        for name, loop in loops.items()
                    }
                    if number:  # the first round warms caches up
                        for name, each in took.items():
                            measured[name].append(each)
    return report(samples, measured)


def timed(loop: Callable[[], int], samples: int) -> tuple[float, float]:
    """Wall and CPU seconds of this process, all threads."""
    cpu, wall = time.process_time(), time.perf_counter()
    count = loop()
    if count != samples:
        raise RuntimeError(f"{count} samples of {samples} came")
    return time.perf_counter() - wall, time.process_time() - cpu


def report(
    samples: int, measured: dict[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    """``ratio`` is our throughput over that of the hand-written loop.

    On a machine with other work, ``cpu_ratio`` (CPU seconds of this
    process) and ``best_ratio`` (the best rounds) are the steadier figures.
    """
    wall = {name: [w for w, _ in each] for name, each in measured.items()}
    cpu = {name: [c for _, c in each] for name, each in measured.items()}
    return {
        "samples": samples,
        "threads": torch.get_num_threads(),
        "samples_per_second": {
            name: samples / statistics.median(each)
            for name, each in wall.items()
        },
        "ratio": statistics.median(ratios(wall)),
        "cpu_ratio": statistics.median(ratios(cpu)),
        "best_ratio": min(wall["handwritten"]) / min(wall["hapi"]),
        "seconds": wall,
        "cpu_seconds": cpu,
    }


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    pairs = zip(seconds["handwritten"], seconds["hapi"], strict=True)
    return [by_hand / ours for by_hand, ours in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=640, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=5, help="of both ways")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the figures there"
    )
    arguments = parser.parse_args()
    result = measure(arguments.samples, arguments.rounds)
    rates = result["samples_per_second"]
    print(f"by hand  {rates['handwritten']:7.1f} samples/s")
    print(f"cut 0    {rates['hapi']:7.1f} samples/s")
    print(f"ratio    {result['ratio']:7.3f}  (wanted: {RATIO_WANTED})")
    print(f"  by CPU seconds {result['cpu_ratio']:7.3f}")
    print(f"  of best rounds {result['best_ratio']:7.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
