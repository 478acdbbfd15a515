"""Speed of loaded packages against the eager modules they came from.

Both run the whole model on the same batch with the same threads, in turn, so
that whatever else the machine does hits both alike; counted are the CPU
seconds of the process. Printed is the median of eager seconds over package
seconds: 1 is as fast, the promise is 0.9 or more.

    python benchmarks/package_speed.py --rounds 15 --json speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torchvision import models

from hapi_splitter.freezing.split_model import default_freeze, split
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes

MODELS = (
    "alexnet",
    "resnet18",
    "resnet50",
    "vgg11",
    "vgg19",
    "densenet121",
    "vit_b_16",
    "mobilenet_v3_small",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="of torchvision"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="samples of a pass"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each form")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.models:
        results[name] = measure(name, options.batch, options.rounds)
        print(f"{name:20} {json.dumps(results[name])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(name: str, batch: int, rounds: int) -> dict[str, float]:
    """Medians over interleaved rounds of one model."""
    model = getattr(models, name)(weights=None).eval()
    parts = split(model, default_freeze(model))
    data = bytearray(package_bytes(parts.frozen))
    start = time.perf_counter()
    loaded = load_package(data)
    load_seconds = time.perf_counter() - start
    region = nn.Sequential(loaded.suffix(0), parts.tail)
    samples = torch.randn(batch, *loaded.input_shape)
    eager_times, package_times = [], []
    with torch.inference_mode():
        timed(model, samples)
        timed(region, samples)
        for turn in range(rounds):
            pair = [(model, eager_times), (region, package_times)]
            for module, times in pair if turn % 2 else reversed(pair):
                times.append(timed(module, samples))
    ratios = [e / p for e, p in zip(eager_times, package_times, strict=True)]
    return {
        "eager_seconds": round(statistics.median(eager_times), 4),
        "package_seconds": round(statistics.median(package_times), 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_best": round(min(eager_times) / min(package_times), 3),
        "load_seconds": round(load_seconds, 3),
    }


def timed(
    module: Callable[[torch.Tensor], torch.Tensor], samples: torch.Tensor
) -> float:
    start = time.process_time()
    module(samples)
    return time.process_time() - start


if __name__ == "__main__":
    main()
