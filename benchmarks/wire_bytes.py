"""Bytes of a sample on the wire, by network, boundary and encoding.

    python -m benchmarks.wire_bytes --data DIR --json wire-bytes.json

Photographs go through torchvision's networks (random weights), and what comes
out at each boundary between modules, up to the freeze points of
benchmarks/workloads.py, through the encoder and the stream writer of a worker:
keys, labels, timings and the closing summary count.  What HTTP adds, a few
hundred bytes for a span, does not.  Compression depends on the values: there
may be more or fewer zeros after training, and where random weights make values
tiny, float16 tells few of them apart.  Without compression the figures hold
for any weights.

The JSON file: ``machine``, ``versions`` and ``wire_bytes``:

  samples, jpeg_bytes, tar_bytes    mean of a photograph, and of a sample in
                its tar, labels and padding included
  span_samples, batch    of a stream at most, and of one of its batches
  weights       ``random``
  networks      by name: ``freezes``, name of the boundary by kind, and
                ``boundaries``, in order: name, shape, values (their number),
                zeros (part of them), bytes (mean of a sample, by encoding)
  goals         network, boundary, encoding, least_ratio, ratio (a JPEG's bytes
                over the encoded ones), met, and why: what the bytes are
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks import alone
from benchmarks.options import add_data, add_quick, parser_of, require_data
from benchmarks.pieces import SpanSlice, built, num_frozen, pieces_of
from benchmarks.tars import find_tars
from benchmarks.workloads import BACKBONE, FREEZES, NETWORKS, Network

from hapi_protocol.encodings import COMPRESSIONS, DTYPES, ENCODINGS, Encoding
from hapi_protocol.feature_stream import STAGES, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.shards import IMAGE, Sample, iter_samples
from hapi_protocol.summary import Load
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_worker.execution.batch_items import row_of
from hapi_worker.execution.forward import encode_rows

SPAN_SAMPLES = 64
BATCH = 16
QUICK_SAMPLES = 8
ETAG = "0" * 32
"""As long as Swift's."""
LOAD = Load(share=1 / 3, streams=1, device_busy=1 / 3, cpu_busy=1 / 3)
"""With as many digits as a worker's."""


@dataclass(frozen=True)
class Goal:
    """How many times fewer bytes than a JPEG's there should be.

    Attributes:
        network: a name in :data:`NETWORKS`.
        boundary: None for the one of the backbone.
        encoding: on the wire.
        least_ratio: of a JPEG's bytes over the encoded ones.
    """

    network: str
    boundary: str | None
    encoding: str
    least_ratio: float


GOALS = (
    *(Goal(name, None, "float16", 50.0) for name in NETWORKS),
    Goal("resnet18", "layer3", "uint8;zstd", 3.0),
)


@dataclass
class Photograph:
    """A sample, with its bytes in the tar."""

    sample: Sample
    jpeg: bytes


@dataclass
class _Counter:
    """A sink that counts."""

    num_bytes: int = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)


@dataclass
class _Stream:
    """One span's answer in one encoding, as a worker writes it."""

    encoding: str
    shape: Sequence[int]
    saturated: int = 0
    num_zeros: int = 0
    sink: _Counter = field(default_factory=_Counter)

    def __post_init__(self) -> None:
        self._writer = FeatureStreamWriter(
            self.sink, feature_schema(self.shape, self.encoding)
        )

    def write(
        self, photographs: Sequence[Photograph], features: torch.Tensor
    ) -> None:
        encoded = encode_rows(features, self.encoding)
        self.saturated += encoded.saturated
        self.num_zeros += features.numel() - int(features.count_nonzero())
        self._writer.write(
            [row_of(each.sample) for each in photographs],
            encoded.array,
            dict.fromkeys(STAGES, time.thread_time() / 3),
            scale=encoded.scale,
            zero=encoded.zero,
        )

    def close(self, source_bytes: int) -> int:
        """Bytes of the whole stream."""
        self._writer.close(
            source_etag=ETAG,
            source_bytes=source_bytes,
            saturated=self.saturated,
            cpu_seconds=time.thread_time(),
            load=LOAD,
        )
        return self.sink.num_bytes


def measure(
    tars: Sequence[Path], *, quick: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Mean bytes of all; see the module's text for the keys.

    Args:
        tars: of photographs.
        quick: only a few of them.
        note: told what is being measured.

    Raises:
        ValueError: when the tars hold no photograph.
    """
    spans = spans_of(tars, QUICK_SAMPLES if quick else None)
    photographs = [each for span in spans for each in span]
    count = len(photographs)
    if not count:
        raise ValueError(f"no photograph in {', '.join(map(str, tars))}")
    networks = {}
    for name in NETWORKS:
        note(name)
        networks[name] = _network(name, spans, count)
    jpeg = sum(len(each.jpeg) for each in photographs) / count
    return {
        "samples": count,
        "jpeg_bytes": jpeg,
        "tar_bytes": sum(each.sample.length for each in photographs) / count,
        "span_samples": SPAN_SAMPLES,
        "batch": BATCH,
        "weights": "random",
        "networks": networks,
        "goals": [judged(goal, networks, jpeg) for goal in GOALS],
    }


def spans_of(tars: Sequence[Path], most: int | None) -> list[list[Photograph]]:
    """The photographs of each tar in runs, as they are asked for."""
    spans = []
    for tar in tars:
        with tar.open("rb") as file:
            found = [
                Photograph(sample, data)
                for sample in iter_samples(file, name=tar.name)
                if (data := sample.member(IMAGE)) is not None
            ]
        spans += list(chunks(found, SPAN_SAMPLES))
    return [spans[0][:most]] if most is not None and spans else spans


def chunks(
    photographs: Sequence[Photograph], size: int
) -> Iterator[list[Photograph]]:
    """Runs of ``size``, the last one of what is left."""
    left = iter(photographs)
    while part := list(islice(left, size)):
        yield part


def _network(
    name: str, spans: Sequence[Sequence[Photograph]], count: int
) -> dict[str, Any]:
    pieces = pieces_of(name, built(name).eval())
    backbone = pieces[: num_frozen(name, BACKBONE, pieces)]
    totals: dict[tuple[str, str], int] = defaultdict(int)
    zeros: dict[str, int] = defaultdict(int)
    shapes: dict[str, tuple[int, ...]] = {}
    for span in spans:
        for boundary, encoding, stream in _streams(
            NETWORKS[name], backbone, span
        ):
            shapes[boundary] = tuple(stream.shape)
            zeros[boundary] += stream.num_zeros
            totals[boundary, encoding] += stream.close(
                sum(each.sample.length for each in span)
            )
    return {
        "freezes": {
            kind: pieces[num_frozen(name, kind, pieces) - 1].name
            for kind in FREEZES
        },
        "boundaries": [
            {
                "name": boundary,
                "shape": list(shape),
                "values": math.prod(shape),
                "zeros": zeros[boundary]
                / (len(ENCODINGS) * count * math.prod(shape)),
                "bytes": {e: totals[boundary, e] / count for e in ENCODINGS},
            }
            for boundary, shape in shapes.items()
        ],
    }


def _streams(
    network: Network, backbone: Sequence[SpanSlice], span: Sequence[Photograph]
) -> Iterator[tuple[str, str, _Stream]]:
    """All streams of a span: boundary, encoding, stream."""
    transform = ImageTransform(
        resize_size=network.resize_size, crop_size=network.crop_size
    )
    streams: dict[tuple[str, str], _Stream] = {}
    for part in chunks(span, BATCH):
        values = torch.stack(
            [transform(decode_image(each.jpeg)) for each in part]
        )
        for piece in backbone:
            with torch.inference_mode():
                values = piece.module(values)
            for encoding in ENCODINGS:
                key = piece.name, encoding
                if key not in streams:
                    streams[key] = _Stream(encoding, values.shape[1:])
                streams[key].write(part, values)
    for (boundary, encoding), stream in streams.items():
        yield boundary, encoding, stream


def judged(
    goal: Goal, networks: Mapping[str, Any], jpeg_bytes: float
) -> dict[str, Any]:
    """Whether a goal is met, and why."""
    network = networks[goal.network]
    name = goal.boundary or network["freezes"][BACKBONE]
    boundary = next(b for b in network["boundaries"] if b["name"] == name)
    encoded = boundary["bytes"][goal.encoding]
    encoding = Encoding.parse(goal.encoding)
    plain = encoding.sample_bytes(boundary["shape"])
    ratio = jpeg_bytes / encoded
    return {
        "network": goal.network,
        "boundary": name,
        "encoding": goal.encoding,
        "least_ratio": goal.least_ratio,
        "ratio": ratio,
        "met": ratio >= goal.least_ratio,
        "why": (
            f"{boundary['values']} values, {boundary['zeros']:.0%} of them"
            f" zero, {plain} bytes in {encoding.dtype}, {encoded:.0f} on the"
            f" wire; a JPEG has {jpeg_bytes:.0f}"
        ),
    }


def table(section: Mapping[str, Any]) -> str:
    """What :func:`measure` gave, as text."""
    return "\n".join([*_lines(section), "", *_goal_lines(section)])


def _lines(section: Mapping[str, Any]) -> Iterator[str]:
    jpeg = section["jpeg_bytes"]
    yield (
        f"times fewer bytes than a JPEG ({jpeg / 1e3:.0f} kB in the mean of"
        f" {section['samples']}); weights are random; {BACKBONE} and inner:"
        " the freeze points"
    )
    yield f"{'':44} {'float32':>9}" + "".join(
        f"{dtype:>21}" for dtype in DTYPES
    )
    yield f"{'':44} {'kB':>9}" + "".join(
        f"{name:>7}" for _ in DTYPES for name in COMPRESSIONS
    )
    for name, network in section["networks"].items():
        yield name
        for boundary in network["boundaries"]:
            yield _line(boundary, network["freezes"], jpeg)


def _line(
    boundary: Mapping[str, Any], freezes: Mapping[str, str], jpeg: float
) -> str:
    kinds = [k for k, name in freezes.items() if name == boundary["name"]]
    label = " ".join([boundary["name"], *(f"({kind})" for kind in kinds)])
    found = boundary["bytes"]
    ratios = "".join(
        f"{jpeg / found[str(Encoding(dtype, compression))]:7.2f}"
        for dtype in DTYPES
        for compression in COMPRESSIONS
    )
    return f"  {label:42} {found['float32'] / 1e3:9.1f}{ratios}"


def _goal_lines(section: Mapping[str, Any]) -> Iterator[str]:
    for goal in section["goals"]:
        yield (
            f"{goal['network']}, {goal['boundary']}, {goal['encoding']}:"
            f" {goal['ratio']:.1f} times fewer, goal"
            f" {goal['least_ratio']:g},"
            f" {'met' if goal['met'] else 'missed'} ({goal['why']})"
        )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("wire_bytes", __doc__)
    add_data(parser)
    add_quick(parser, f"only {QUICK_SAMPLES} photographs, as a try")
    found = parser.parse_args(argv)
    require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(argv)
    return alone.run(
        "wire_bytes",
        lambda: measure(
            find_tars(options.data),
            quick=options.quick,
            note=alone.note,
        ),
        table,
        settings={"quick": options.quick},
        path=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
