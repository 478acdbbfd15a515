"""Results of the benchmarks' suite that nobody measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.opponents.tuning import label
from benchmarks.stage_bounds import bounds
from benchmarks.suite.results import FORMAT

LINKS = (0.1, 0.25, 1.0, 2.0, 10.0)
ROUNDS = 5
BESIDE = 0.8
"""What saturates in the rounds, of what did when the link was set."""
PROCESSOR = "Some CPU (family 6, model 85)"
COMMIT = "0123456789ab"
MACHINE = {
    "processor": PROCESSOR,
    "cores": 2,
    "memory_bytes": 25_000_000_000,
    "kernel": "6.1",
    "load_at_start": 0.07,
}
RATES = {
    "auto": 1.3,
    "stream": 0.95,
    "freeze": 0.6,
    "tar-stream": 1.0,
    "webdataset": 0.92,
    "s3-tars": 0.97,
    "s3-images": 0.8,
    "mosaic": 0.99,
    "tar-stream-resized": 1.5,
    "auto-resized": 1.8,
    "again": 1.01,
}
"""Of what streaming saturates, without a limit of the link."""
KILOBYTES = {"auto": 20.0, "freeze": 8.0, "auto-resized": 12.0}
WORKLOADS = {
    "mobilenet_v3_small/backbone": 110.0,
    "mobilenet_v3_small/inner": 52.0,
    "resnet18/backbone": 23.0,
    "resnet18/inner": 14.0,
    "vit_b_16/backbone": 6.1,
    "vit_b_16/inner": 3.3,
}
"""Rates that saturate."""


def window(rate: float, kilobytes: float, number: int) -> dict[str, float]:
    """Of a round: a few percent beside the others."""
    rate *= 1 + 0.02 * ((7 * number) % 5 - 2)
    return {
        "samples": 400,
        "batches": 50,
        "seconds": 400 / rate,
        "samples_per_second": rate,
        "down_bytes": 1e3 * kilobytes,
        "up_bytes": 400.0,
        "client_seconds": 0.93 / rate,
        "storage_seconds": 0.41 / rate,
        "fallbacks": 0,
    }


def cell(
    workload: str, saturates: float, link: float, ratio: float = 1.1
) -> dict[str, Any]:
    """A complete cell of the grid."""
    model, freeze = workload.split("/")
    size = 32.5
    limit = link * saturates * size * 1e3
    rounds = {}
    for name, part in RATES.items():
        kilobytes = KILOBYTES.get(name, size)
        rate = min(part * saturates, limit / kilobytes / 1e3)
        many = 1 if name == "s3-images" else ROUNDS
        rounds[name] = [window(rate, kilobytes, each) for each in range(many)]
    if (freeze, link) == ("backbone", 0.25):
        rounds["freeze-float16"] = [
            {**window(0.5 * saturates, 1.25, 0), "fallbacks": 3}
        ]
    return {
        "name": f"{workload}/{link:g}",
        "model": model,
        "freeze": freeze,
        "link": link,
        "date": "2026-03-01T10:31:00+00:00",
        "commit": COMMIT,
        "processor": PROCESSOR,
        "complete": True,
        "calibration": {
            "samples_per_second": saturates,
            "bytes_per_sample": 1e3 * size,
            "beside": [BESIDE * saturates] * ROUNDS,
        },
        "link_bytes_per_second": limit,
        "rounds": rounds,
        "samples_per_second": {
            name: statistics.median(w["samples_per_second"] for w in windows)
            for name, windows in rounds.items()
            if name != "again"
        },
        "best_external": "tar-stream",
        "again": "tar-stream",
        "ratio": {"median": ratio, "interval": [ratio - 0.031, ratio + 0.02]},
        "ratio_resized": {"median": 1.217, "interval": [1.1, 1.3]},
        "noise": {"median": 1.004, "interval": [0.983, 1.019]},
        "plan": "83 % cut 14, 17 % stream",
    }


def opponents() -> dict[str, Any]:
    """Settings of one workload."""
    return {
        "tar-stream": {
            "options": {"decode": "loop", "channels_last": True},
            "versions": {"requests": "2.32.5", "urllib3": "2.5.0"},
            "grid": {
                label({"decode": decode, "channels_last": layout}): rate
                for decode, layout, rate in (
                    ("reader", False, 21.17),
                    ("reader", True, 21.63),
                    ("loop", False, 22.41),
                    ("loop", True, 23.08),
                )
            },
        },
        "mosaic": {
            "options": {"workers": 1},
            "versions": {"mosaicml-streaming": "0.13.0"},
            "grid": {
                label({"workers": 0}): 19.4,
                label({"workers": 1}): 20.36,
            },
            "even": {
                "options": {"workers": 0},
                "grid": {
                    label({"workers": 0}): 19.4,
                    label({"workers": 1}): 18.6,
                },
            },
            "slow": {"options": {"workers": 1}, "grid": {}},
        },
        "tar-stream-resized": {
            "options": {"channels_last": True},
            "versions": {"requests": "2.32.5"},
            "grid": {},
        },
    }


def grid(
    workloads: Sequence[str] = tuple(WORKLOADS),
    links: Sequence[float] = LINKS,
) -> dict[str, Any]:
    """The section; in it one cell is missed, and one incomplete."""
    cells = [
        cell(name, WORKLOADS[name], link)
        for name in workloads
        for link in links
    ]
    cells[0]["ratio"] = {"median": 0.913, "interval": [0.887, 0.934]}
    cells.append({"name": "x/y/9", "link": 9.0, "complete": False})
    return {
        "complete": True,
        "met": {"epoch 1 at 0.97 of the best opponent": False},
        "cells": cells,
        "opponents": {
            model: opponents()
            for model in {name.split("/")[0]: None for name in workloads}
        },
        "absent": {"s3-tars": "s3torchconnector is not installed"},
    }


def regret() -> dict[str, Any]:
    """The section; the body of benchmarks.splits in it."""
    return {
        "complete": True,
        "met": {"auto at 0.95 of the best static cut": True},
        "body": {
            "cells": [
                {
                    "name": name,
                    "processor": PROCESSOR,
                    "complete": True,
                    "link_bytes_per_second": 5.01e6,
                    "samples_per_second": {
                        "auto": 35.9,
                        "cut-14": 28.8,
                        "stream": 23.04,
                        "best_static": 28.8,
                        "hapi-2022": 11.2,
                        "hapi-sc24": None,
                    },
                    "best_static": "cut-14",
                    "regret": middle,
                    "interval": [middle - 0.16, middle + 0.107],
                    "noise": {"regret": 0.047},
                    "fallbacks": {"auto": 2, "cut-7": 4},
                    "missed": middle > 0.2,
                    "above_best_static": middle < -0.2,
                }
                for name, middle in (
                    ("resnet18/backbone/2", -0.214),
                    ("resnet18/inner/2", 0.014),
                    ("vit_b_16/inner/2", 0.231),
                )
            ]
        },
    }


def spread(middle: float) -> dict[str, float]:
    """Of rounds."""
    return {"median": middle, "least": 0.97 * middle, "most": 1.04 * middle}


def run(first: float, later: float, epochs: int, before: float) -> Any:
    """Of one round."""
    return {
        "plan": "79 % cut 4, 21 % stream" if epochs > 1 else None,
        "before": {"seconds": before},
        "epochs": [
            {"seconds": seconds, "samples": 320, "down_bytes": 1e6 * seconds}
            for seconds in [first, *([later] * (epochs - 1))]
        ],
    }


def local_features() -> dict[str, Any]:
    """Settings."""
    found = opponents()["mosaic"]
    return {**found, "versions": {"numpy": "2.3.5"}}


def runs() -> dict[str, Any]:
    """The section; features that are kept make later epochs short."""
    found = {
        "auto": run(21.5, 20.25, 5, 3.125),
        "auto-1": run(20.75, 0, 1, 2.5),
        "auto-cache": run(22.5, 2.25, 5, 3.25),
        "freeze-cache": run(35.0, 1.125, 5, 4.5),
        "stream": run(31.5, 31.25, 5, 1.5),
        "tar-stream": run(30.5, 30.0, 5, 0.5),
        "mosaic": run(31.75, 22.5, 5, 0.75),
        "local-features": run(32.5, 0.625, 5, 0.875),
    }
    sums = {
        name: [
            each["before"]["seconds"]
            + sum(e["seconds"] for e in each["epochs"][: number + 1])
            for number in range(len(each["epochs"]))
        ]
        for name, each in found.items()
    }
    entry = {
        "name": "resnet18/backbone/0.25",
        "processor": PROCESSOR,
        "complete": True,
        "rounds": [{"link_bytes_per_second": 0.625e6}],
        "one_offs": {
            "mds": {
                "seconds": 40.5,
                "down_bytes": 7.25e6,
                "up_bytes": 7.75e6,
            }
        },
        "runs": {name: [each, each] for name, each in found.items()},
        "first_seconds": {
            name: spread(each["epochs"][0]["seconds"])
            for name, each in found.items()
        },
        "later_seconds": {
            name: spread(each["epochs"][1]["seconds"])
            for name, each in found.items()
            if len(each["epochs"]) > 1
        },
        "best_first": "tar-stream",
        "speedup": {"auto-cache": {"stream": spread(14.0)}},
        "beside": {"auto-cache": {"mosaic": spread(10.0)}},
        "cumulative": {
            name: {
                "seconds": each,
                "with_one_off": [
                    sum_ + 40.5 * (name == "mosaic") for sum_ in each
                ],
            }
            for name, each in sums.items()
        },
        "auto_over_stream": {"1": spread(0.75), "5": spread(0.675)},
        "auto_over_best": {
            count: {"best": "tar-stream", **spread(middle)}
            for count, middle in (("1", 0.8), ("5", 0.725))
        },
    }
    return {
        "complete": True,
        "met": {"a second epoch 20 times as fast": False},
        "epochs": 5,
        "opponents": {"resnet18": {"local-features": local_features()}},
        "absent": {"mosaic": "boto3 is not installed"},
        "entries": [entry, {"name": "broken/off", "complete": False}],
    }


def tenants() -> dict[str, Any]:
    """The section: one, two and four alike, and a mix."""

    def entry(name: str, count: int, **more: Any) -> dict[str, Any]:
        rates = {"auto": 133.5, "freeze": 60.25, "tar-stream": 99.125}
        phases = {
            each: [
                {
                    "samples_per_second": (0.98 + 0.02 * number) * rate,
                    "each": [rate / count] * count,
                    "jain": 0.995 - 0.01 * count,
                    "client_cores": 0.875,
                    "storage_cores": 0.625,
                }
                for number in range(3)
            ]
            for each, rate in rates.items()
        }
        return {
            "name": name,
            "processor": PROCESSOR,
            "complete": True,
            "link_bytes_per_second": 3.25e6,
            "rounds": phases,
            "samples_per_second": rates,
            "jain": dict.fromkeys(rates, 0.995 - 0.01 * count),
            **more,
        }

    return {
        "complete": True,
        "met": {},
        "entries": [
            *(entry(f"same/{count}", count) for count in (1, 2, 4)),
            entry(
                "mix/4",
                4,
                relative={"auto": 1.215, "freeze": 1.1, "tar-stream": 0.98},
            ),
        ],
    }


def ratio(middle: float) -> dict[str, Any]:
    """Of rounds, by bootstrap."""
    return {"median": middle, "interval": [0.95 * middle, 1.06 * middle]}


def spread_of(middle: float) -> dict[str, float]:
    """Of rounds, as the stages have it."""
    return {"median": middle, "low": 0.9 * middle, "high": 1.2 * middle}


def stages() -> dict[str, Any]:
    """The section; its links are those of the grid's cells."""
    network = {
        "batch": 8,
        "crowding": spread_of(0.25),
        "decode_seconds": spread_of(0.0125),
        "boundaries": [
            {
                "name": "layer2",
                "float32_bytes": 400_000,
                "prefix_seconds": spread_of(0.005),
                "rest_seconds": {
                    "backbone": spread_of(0.0175),
                    "inner": spread_of(0.0),
                },
            },
            {
                "name": "layer4",
                "float32_bytes": 2_048,
                "prefix_seconds": spread_of(0.0225),
                "rest_seconds": {"backbone": spread_of(0.0)},
            },
        ],
        "freezes": {
            "backbone": {
                "boundary": "layer4",
                "train_seconds": spread_of(0.005),
            },
            "inner": {
                "boundary": "layer2",
                "train_seconds": spread_of(0.0225),
            },
        },
    }
    measured: dict[str, Any] = {
        "processor": PROCESSOR,
        "jpeg_bytes": 100_000.0,
        "receive_seconds_per_byte": spread_of(0.0),
        "serve_seconds_per_byte": 0.0,
        "networks": {"resnet18": network},
    }
    for kind, freeze in network["freezes"].items():
        freeze.update(bounds(measured, network, kind))
    return {"complete": True, "met": {}, "measured": [measured]}


def wire() -> dict[str, Any]:
    """The section ``bytes``."""
    sizes = {
        "float32": 100_500.0,
        "float32;lz4": 80_250.0,
        "float32;zstd": 64_125.0,
        "int8": 25_875.0,
        "int8;zstd": 12_375.0,
    }
    return {
        "complete": True,
        "met": {"bytes": False},
        "samples": 240,
        "jpeg_bytes": 106_875.0,
        "tar_bytes": 108_625.0,
        "weights": "random",
        "networks": {
            "resnet18": {
                "freezes": {"backbone": "layer4", "inner": "layer2"},
                "boundaries": [
                    {
                        "name": name,
                        "zeros": 0.375,
                        "bytes": {e: times * b for e, b in sizes.items()},
                    }
                    for name, times in (("layer2", 4.0), ("layer4", 1.0))
                ],
            }
        },
        "goals": [
            {
                "network": "resnet18",
                "boundary": "layer4",
                "encoding": "int8;zstd",
                "least_ratio": 10.0,
                "ratio": 8.635,
                "met": False,
                "why": "25088 values, 38% of them zero",
            }
        ],
    }


def accuracy() -> dict[str, Any]:
    """The section."""

    def way(mean: float, beside: float, clipped: int) -> dict[str, Any]:
        return {
            "mean": mean,
            "low": mean - 0.0125,
            "high": mean + 0.015,
            "difference": {
                "mean": beside,
                "low": beside - 0.0025,
                "high": beside + 0.005,
            },
            "saturated": clipped,
        }

    return {
        "complete": True,
        "met": {"within a point": True},
        "train": 25_000,
        "test": 5_000,
        "pretrain_epochs": 12,
        "seeds": 3,
        "seeded": "pretraining and transfer",
        "pretrained": [0.8125, 0.825, 0.84375],
        "freezes": {
            "backbone": {
                "module": "layer4",
                "ways": {
                    "torch": way(0.7325, 0.0, 0),
                    "float32": way(0.7325, 0.0, 0),
                    "int8": way(0.7275, -0.005, 17),
                },
            }
        },
    }


def scaling() -> dict[str, Any]:
    """The section."""

    def entry(name: str, one: float, times: float) -> dict[str, Any]:
        rates = {"one": one, "two": times * one}
        more = {}
        if name.startswith("ranks"):
            rates["halved"] = 0.8 * one
            more["halved_ratio"] = ratio(0.8)
        return {
            "name": name,
            "processor": PROCESSOR,
            "complete": True,
            "rounds": {
                each: [
                    {
                        "samples_per_second": rate,
                        "storage_cores": 0.75,
                        "client_cores": 0.375,
                        "worker_batch": 8.0 if "proxies" in name else None,
                    }
                ]
                for each, rate in rates.items()
            },
            "samples_per_second": rates,
            "ratio": ratio(times),
            **more,
        }

    return {
        "complete": True,
        "met": {},
        "cores": {"storage": 1, "client": 1},
        "entries": [
            entry("proxies/freeze", 120.5, 0.96),
            entry("ranks/auto", 130.5, 1.25),
        ],
    }


def ablations() -> dict[str, Any]:
    """The section."""
    return {
        "complete": True,
        "met": {},
        "lp_batch": {"resnet18/backbone": 4},
        "entries": [
            {
                "name": "resnet18/backbone/0.25",
                "processor": PROCESSOR,
                "complete": True,
                "samples_per_second": {"auto": 40.5, "auto-float32": 20.25},
                "parts": {
                    "encodings": ratio(2.0),
                    "re-planning": ratio(1.024),
                    "kept features": ratio(14.0),
                },
            },
        ],
    }


def worker_alone() -> dict[str, Any]:
    """The file of benchmarks.worker."""
    return {
        "benchmark": "worker",
        "settings": {"goal": 0.8},
        "cells": [
            {
                "model": "resnet50",
                "clients": 4,
                "engine_samples_per_second": 1510.0,
                "loop_samples_per_second": 1760.0,
                "efficiency": 0.858,
                "interval": [0.841, 0.872],
            }
        ],
    }


def body(**sections: Any) -> dict[str, Any]:
    """A file with these sections."""
    return {
        "benchmark": "suite",
        "format": FORMAT,
        "settings": {
            "quick": False,
            "rounds": ROUNDS,
            "shaped": True,
            "cores": None,
            "tars": ["photos-000.tar", "photos-001.tar"],
        },
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "begun": [
            {
                "date": "2026-03-01T10:30:00+00:00",
                "commit": COMMIT,
                **MACHINE,
                "experiments": ["grid"],
                "only": ["resnet18/*"],
            },
            {
                "date": "2026-03-02T08:00:00+00:00",
                "commit": None,
                **MACHINE,
                "experiments": [],
                "only": [],
            },
        ],
        "experiments": sections,
    }
