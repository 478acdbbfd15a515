"""What each stage of transfer learning takes here, and the bound it sets.

    python -m benchmarks.stages --data DIR --json stages.json

With eager torchvision modules (random weights, float32), ``http.client`` and
plain loops, on one thread that keeps to one core: none of HAPI is imported.
From the seconds of the stages a linear program (benchmarks/bound.py) gives the
most samples per second of a storage tier and a client tier of one such core
each, with a link between; the storage tier may run any part of the frozen
layers.  Encoding and sending features, and what a tar adds to a JPEG, count as
nothing, features travel as float32, and all stages overlap, so that the bound
is high; eager modules are what it is a bound of, and what runs faster than
those (layers folded together) or sends fewer bytes (compressed) may pass it.

``--serve-seconds-per-byte``, or ``--url`` with ``--token``, is what the
storage tier takes to serve a byte of a JPEG, to whoever reads it; else that
counts as nothing too, which only makes the bound higher.

The JSON file: ``machine``, ``versions`` and ``stages``; a spread is
``median``, ``low`` and ``high`` of the rounds, seconds are CPU seconds of a
sample.

  core, rounds, photographs, jpeg_bytes    how it was measured; mean bytes
  receive_seconds_per_byte    a spread, of the client, tar parsed
  serve_seconds_per_byte      of the storage tier; 0: not counted
  networks      by name:
    batch, decode_seconds
    crowding    a spread: by how much longer decoding and a forward pass take
                while another core does the same (0.1: ten per cent); null
                where there is one core
    boundaries  in order: name, shape, float32_bytes (of a sample);
                prefix_seconds, of the forward pass up to there; rest_seconds,
                from there to the freeze point, by kind of freeze
    freezes     by kind, ``backbone`` and ``inner``: module, boundary,
                train_seconds (of a training step of the tail), and
      saturating_bytes_per_second    with which streaming keeps a core busy
      one_core_per_second            samples of streaming on that core
      links     factor (of saturating_bytes_per_second), bytes_per_second,
                bound (samples_per_second, streaming, speedup, mix: part of
                the samples by boundary), goal: least speed-up, where there
                is one; crowded: the bound where each second of work on one
                core takes ``crowding`` of one from the other
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.crowding import crowding
from benchmarks.options import add_data, add_quick, parser_of, require_data
from benchmarks.pinned import one_core
from benchmarks.remote import RemoteError
from benchmarks.results import machine, versions, write_json
from benchmarks.stage_bounds import bounds
from benchmarks.stage_rates import Stages, describe
from benchmarks.tars import find_tars
from benchmarks.tight_loop import jpegs_of
from benchmarks.transfer_cost import (
    ServerError,
    receive_seconds_per_byte,
    serve_seconds_per_byte,
)
from benchmarks.workloads import NETWORKS


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: that count.
        steps: batches of a stage in a round.
        photographs: at most; None for all.
    """

    rounds: int
    steps: int
    photographs: int | None


FULL = Effort(rounds=7, steps=3, photographs=None)
QUICK = Effort(rounds=2, steps=1, photographs=16)


def measure(
    tars: Sequence[Path],
    *,
    quick: bool,
    note: Callable[[str], None],
    serve: float = 0.0,
) -> dict[str, Any]:
    """Rates of all stages, and bounds; see the module's text for the keys.

    Args:
        tars: of photographs.
        quick: few rounds, as a try.
        note: told what is being measured.
        serve: seconds per byte that the storage tier takes; 0 for not
            counted.

    Raises:
        ValueError: when the tars hold no JPEG.
        ServerError: when the local server does not start.
        RemoteError: when the process beside ends, or does not answer.
    """
    effort = QUICK if quick else FULL
    jpegs = [jpeg for tar in tars for jpeg in jpegs_of(str(tar))]
    if not jpegs:
        raise ValueError(f"no JPEG in {', '.join(map(str, tars))}")
    jpegs = jpegs[: effort.photographs]
    with one_core() as core:
        note("receiving over HTTP")
        found: dict[str, Any] = {
            "core": core,
            "rounds": effort.rounds,
            "photographs": len(jpegs),
            "jpeg_bytes": sum(map(len, jpegs)) / len(jpegs),
            "receive_seconds_per_byte": receive_seconds_per_byte(
                tars, effort.rounds
            ),
            "serve_seconds_per_byte": serve,
            "networks": {},
        }
        for name in NETWORKS:
            note(name)
            stages = Stages(name, jpegs, effort.steps)
            found["networks"][name] = describe(
                stages, stages.measure(effort.rounds)
            )
    for name, network in found["networks"].items():
        note(f"{name}, beside another core")
        network["crowding"] = crowding(
            name, Path(tars[0]), rounds=effort.rounds, steps=effort.steps
        )
        for kind, freeze in network["freezes"].items():
            freeze.update(bounds(found, network, kind))
    return found


def table(section: Mapping[str, Any]) -> str:
    """What :func:`measure` gave, as text."""
    return "\n".join([*_stage_lines(section), "", *_bound_lines(section)])


def _stage_lines(section: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "milliseconds of one core for a sample (JPEG of"
        f" {section['jpeg_bytes'] / 1e3:.0f} kB; receiving"
        f" {section['receive_seconds_per_byte']['median'] * 1e9:.2f} ns a"
        " byte, serving"
        f" {section['serve_seconds_per_byte'] * 1e9:.2f}; random weights)"
    )
    for name, network in section["networks"].items():
        yield f"{name}, batch {network['batch']}{_crowding(network)}"
        seconds = _ms(network["decode_seconds"])
        yield f"  {'decode and transform':44} {seconds}".rstrip()
        for boundary in network["boundaries"]:
            yield (
                f"  up to {boundary['name']:38}"
                f" {_ms(boundary['prefix_seconds'])}"
                f"  {boundary['float32_bytes'] / 1e3:8.1f} kB"
            )
        for kind, freeze in network["freezes"].items():
            label = f"step behind {freeze['boundary']}"
            yield f"  {label:44} {_ms(freeze['train_seconds'])}  {kind}"


def _crowding(network: Mapping[str, Any]) -> str:
    found = network.get("crowding")
    if found is None:
        return ""
    low, high = found["low"], found["high"]
    return (
        f"; {found['median']:.0%} ({low:.0%} to {high:.0%}) longer while"
        " another core does the same"
    )


def _ms(found: Mapping[str, float]) -> str:
    low, high = found["low"] * 1e3, found["high"] * 1e3
    around = f"({low:.2f} to {high:.2f})"
    return f"{found['median'] * 1e3:7.2f} {around:18}"


def _bound_lines(section: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'bound, two cores and a link':28} {'link':>5} {'MB/s':>7}"
        f" {'bound/s':>8} {'stream/s':>8} {'speed-up':>8} {'goal':>6}"
        f" {'crowded':>7}  mix"
    )
    for name, network in section["networks"].items():
        for kind, freeze in network["freezes"].items():
            for link in freeze["links"]:
                yield _bound_line(f"{name}/{kind}", link)


def _bound_line(workload: str, link: Mapping[str, Any]) -> str:
    bound = link["bound"]
    goal = "-" if link["goal"] is None else f"{link['goal']:.2f}"
    crowded = link.get("crowded")
    shown = "-" if crowded is None else f"{crowded['speedup']:.2f}"
    mix = ", ".join(f"{p:.0%} {name}" for name, p in bound["mix"].items())
    return (
        f"{workload:28} {link['factor']:5g}"
        f" {link['bytes_per_second'] / 1e6:7.2f}"
        f" {bound['samples_per_second']:8.1f} {bound['streaming']:8.1f}"
        f" {bound['speedup']:8.2f} {goal:>6} {shown:>7}  {mix}"
    )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("stages", __doc__)
    add_data(parser)
    add_quick(parser, "few rounds and photographs, as a try")
    parser.add_argument(
        "--serve-seconds-per-byte",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of the storage tier (default 0, not counted)",
    )
    parser.add_argument(
        "--url",
        help="measure that with GETs of this object, of a server that has one"
        " core, by the clock",
    )
    parser.add_argument(
        "--token", default="", help="X-Auth-Token for --url; default: none"
    )
    found = parser.parse_args(argv)
    if found.serve_seconds_per_byte < 0:
        parser.error(
            f"--serve-seconds-per-byte is {found.serve_seconds_per_byte:g};"
            " 0 or more"
        )
    if found.url and found.serve_seconds_per_byte:
        parser.error("give --url or --serve-seconds-per-byte")
    require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(argv)
    try:
        return _run(options)
    except (RemoteError, ServerError, OSError, ValueError) as error:
        print(f"benchmarks.stages: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    body: dict[str, Any] = {
        "benchmark": "stages",
        "settings": {"quick": options.quick, "url": options.url},
        "machine": machine(),
        "versions": versions(),
    }
    serve = options.serve_seconds_per_byte
    if options.url:
        measured = serve_seconds_per_byte(
            options.url, options.token, FULL.rounds
        )
        body["serve_seconds_per_byte"] = measured
        serve = measured["median"]
    body["stages"] = measure(
        find_tars(options.data),
        quick=options.quick,
        note=lambda text: print(f"… {text}", file=sys.stderr, flush=True),
        serve=serve,
    )
    print(table(body["stages"]))
    if options.json is not None:
        write_json(options.json, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
