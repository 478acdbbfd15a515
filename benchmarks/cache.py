"""What a second epoch takes when its features have been kept.

    python -m benchmarks.cache --json cache.json

Two tiers of one core each (see :mod:`benchmarks.testbed`), and one job with
the whole backbone pushed, whose tail is trained.  In each round, turn by turn:
an epoch that streams the images, one that computes all features (``off``), one
that also keeps them (``store``, with nothing kept before it), and one that
finds all of them (``hit``).

The JSON file: ``settings``, ``machine``, ``versions``, ``met``, and ``cells``,
of which each has

  model            in torchvision.models, with random weights
  link_megabytes   per second; null for a link without limit
  samples          of an epoch
  kept_bytes       of all features of an epoch
  rounds           list of {stream, off, store, hit}: seconds of an epoch
  second_by_first  hit / store
  store_by_off     what keeping costs the first epoch
  hit_by_off       beside computing all features again
  hit_by_stream    beside reading all images again
  worker_moved     counters of the worker that changed while features were
                   found; the goal is none, as it is of ``fallbacks``

The quotients are each {median, interval}, of those of the rounds; 95 % by
bootstrap.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.cells import BACKBONE, NETWORKS
from benchmarks.commands import (
    add_data,
    add_rounds,
    check_rounds,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.regret import interval_of
from benchmarks.remote import Remote
from benchmarks.results import machine, versions, write_json
from benchmarks.shards import find_tars, write_shards
from benchmarks.testbed import Testbed, two_tiers

from hapi_client.model.frozen_region import FREEZE, STREAM
from hapi_protocol.headers import CACHE_READ, CACHE_READWRITE

MODELS = ("resnet18", "mobilenet_v3_small")
LINKS = (None, 12.5)
QUESTION_SECONDS = 600.0
STORED_SECONDS = 60.0
WAYS = ("stream", "off", "store", "hit")
QUOTIENTS = {
    "second_by_first": ("hit", "store"),
    "store_by_off": ("store", "off"),
    "hit_by_off": ("hit", "off"),
    "hit_by_stream": ("hit", "stream"),
}


class CacheRun:
    """Measures one model on a testbed.

    Args:
        bed: with the filter's cache turned on.
        client: of its client tier.
        model: a name in :data:`benchmarks.cells.NETWORKS`.
        rounds: how many.
    """

    def __init__(
        self, bed: Testbed, client: Remote, model: str, rounds: int
    ) -> None:
        self._bed = bed
        self._client = client
        self._model = model
        self._rounds = rounds

    def prepare(self, tars: Sequence[Path], num_samples: int) -> int:
        """Stores the data, and warms all ways up; the number of shards."""
        network = NETWORKS[self._model]
        folder = self._bed.folder / self._model
        folder.mkdir()
        shards = write_shards(tars, folder, num_samples, network.shard_samples)
        container = self._model.replace("_", "-")
        names = [str(path) for path in shards]
        self._ask("upload", shards=names, container=container)
        self._ask(
            "prepare",
            model=self._model,
            freeze=network.freeze[BACKBONE],
            container=container,
            floor="lossless",
            epochs=None,
        )
        self._open("stream", STREAM)
        self._open("off", FREEZE)
        self._open("store", FREEZE, CACHE_READWRITE)
        self._open("hit", FREEZE, CACHE_READ)
        for way in ("stream", "off"):
            self._epoch(way)
        return len(shards)

    def measure(self, link: float | None, num_shards: int) -> dict[str, Any]:
        """A cell's entry.

        Args:
            link: megabytes per second.
            num_shards: each is an entry.
        """
        if self._bed.shaped:
            self._bed.set_link(link and link * 1e6)
        rounds: list[dict[str, float]] = []
        moved: dict[str, float] = {}
        fallbacks = 0
        for number in range(self._rounds):
            found = {}
            self._ask("purge")
            first = ("stream", "off") if number % 2 else ("off", "stream")
            for way in (*first, "store"):
                found[way] = self._epoch(way)
            kept = self._wait_for(num_shards)
            before = self._bed.worker_counters()
            found["hit"] = self._epoch("hit")
            after = self._bed.worker_counters()
            moved |= {
                name: value - before.get(name, 0)
                for name, value in after.items()
                if value != before.get(name, 0)
            }
            if found["hit"]["cached"] != found["hit"]["samples"]:
                raise ValueError(
                    f"{found['hit']['cached']} of {found['hit']['samples']} "
                    "samples had been kept"
                )
            fallbacks += sum(each["fallbacks"] for each in found.values())
            rounds.append({way: found[way]["seconds"] for way in WAYS})
        return {
            "model": self._model,
            "link_megabytes": link,
            "samples": found["hit"]["samples"],
            "kept_bytes": kept,
            "rounds": rounds,
            **quotients(rounds),
            "worker_moved": moved,
            "fallbacks": fallbacks,
        }

    def _open(self, name: str, cut: str, cache: str = "off") -> None:
        self._ask("open", name=name, cut=cut, cache=cache)

    def _epoch(self, way: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._ask("run", name=way, epoch=0)
        return found

    def _wait_for(self, entries: int) -> int:
        """Until all is stored, behind the answers' end; its bytes."""
        deadline = time.monotonic() + STORED_SECONDS
        while (kept := self._ask("kept"))["entries"] != entries:
            if time.monotonic() > deadline:
                raise ValueError(f"{kept['entries']} of {entries} were kept")
            time.sleep(0.2)
        return int(kept["bytes"])

    def _ask(self, do: str, **arguments: Any) -> Any:
        return self._client.ask(do, seconds=QUESTION_SECONDS, **arguments)


def quotients(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Each of :data:`QUOTIENTS`, round by round: median and interval."""
    entry = {}
    for name, (above, below) in QUOTIENTS.items():
        values = [each[above] / each[below] for each in rounds]
        entry[name] = {
            "median": statistics.median(values),
            "interval": interval_of(values, np.median),
        }
    return entry


def is_met(cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether features that had been kept cost the worker nothing."""
    return all(
        not each["worker_moved"] and not each["fallbacks"] for each in cells
    )


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The quotients, a line for each cell."""
    lines = [
        f"{'model':20} {'link':>6} {'2nd / 1st':>20} {'hit / stream':>20}"
        f" {'keeping costs':>20}"
    ]
    for cell in cells:
        link = cell["link_megabytes"]
        shown = [
            f"{cell[name]['median']:.3f} ({cell[name]['interval'][0]:.3f} …"
            f" {cell[name]['interval'][1]:.3f})"
            for name in ("second_by_first", "hit_by_stream", "store_by_off")
        ]
        lines.append(
            f"{cell['model']:20} {'none' if link is None else link:>6}"
            + "".join(f" {each:>20}" for each in shown)
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("cache", __doc__)
    add_data(parser)
    add_rounds(parser)
    parser.add_argument(
        "--samples", type=int, default=192, help="of an epoch (default 192)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        help="only these",
    )
    parser.add_argument(
        "--no-netns",
        action="store_true",
        help="no network namespaces: no root, and no link is shaped",
    )
    found = parser.parse_args(argv)
    check_rounds(parser, found)
    if found.samples < 1:
        parser.error(f"--samples is {found.samples}; one or more")
    require_data(parser, found)
    return found


def run(found: argparse.Namespace) -> int:
    links = (None,) if found.no_netns else LINKS
    body: dict[str, Any] = {
        "benchmark": "cache",
        "settings": {
            "rounds": found.rounds,
            "samples": found.samples,
            "models": found.models,
            "links": links,
        },
        "machine": machine(),
        "versions": versions(),
        "cells": [],
    }
    tars = find_tars(found.data)
    with ExitStack() as stack:
        bed = stack.enter_context(
            two_tiers(
                netns=not found.no_netns, filter_options={"cache": "true"}
            )
        )
        for model in found.models:
            client = stack.enter_context(
                bed.client.remote("benchmarks.client_tier")
            )
            each = CacheRun(bed, client, model, found.rounds)
            num_shards = each.prepare(tars, found.samples)
            for link in links:
                body["cells"].append(each.measure(link, num_shards))
                print(table(body["cells"][-1:]), flush=True)
    body["met"] = is_met(body["cells"])
    print(table(body["cells"]))
    if found.json:
        write_json(found.json, body)
    return 0 if body["met"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    found = parse(argv)
    return exit_status("cache", lambda: run(found))


if __name__ == "__main__":
    sys.exit(main())
