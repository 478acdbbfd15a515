"""Bytes of a sample on the wire, by network, boundary and encoding.

Photographs run through torchvision's networks with random weights.  The output
of each block up to the freeze points (benchmarks/networks.py) runs through the
encoder and the stream writer of a worker: keys, labels, timings and the
closing summary count; HTTP headers, a few hundred bytes per span, do not.
Compression depends on the values, so trained weights may give other figures;
without compression the figures hold for any weights.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.networks import (
    BACKBONE,
    FREEZES,
    NETWORKS,
    Block,
    blocks_of,
    build,
    num_frozen,
)
from benchmarks.suite.experiment import Context, Experiment
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.feature_stream import STAGES, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.shards import IMAGE, Sample, iter_samples
from hapi_protocol.summary import Load
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_worker.execution.batch_items import row_of
from hapi_worker.execution.forward import encode_rows

SPAN_SAMPLES = 64
BATCH_SAMPLES = 16
QUICK_SAMPLES = 8
ETAG = "0" * 32
"""ETag with the length of Swift's."""
LOAD = Load(share=1 / 3, streams=1, device_busy=1 / 3, cpu_busy=1 / 3)
"""With as many digits as a worker's."""


class Goal(NamedTuple):
    """Minimum ratio of a JPEG's bytes to those at a boundary.

    ``boundary`` None is that of the backbone.
    """

    network: str
    boundary: str | None
    encoding: str
    least_ratio: float


GOALS = (
    *(Goal(name, None, "float16", 50.0) for name in NETWORKS),
    Goal("resnet18", "layer3", "uint8;zstd", 3.0),
)


class Photograph(NamedTuple):
    """A sample of a tar, and its JPEG."""

    sample: Sample
    jpeg: bytes


@dataclass
class _Counter:
    num_bytes: int = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)


@dataclass
class _Stream:
    """The response for one span in one encoding, as a worker writes it."""

    encoding: str
    shape: Sequence[int]
    saturated: int = 0
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
        self._writer.write(
            [row_of(each.sample) for each in photographs],
            encoded.array,
            dict.fromkeys(STAGES, time.thread_time() / 3),
            scale=encoded.scale,
            zero=encoded.zero,
        )

    def close(self, source_bytes: int) -> int:
        """Ends the stream; returns its bytes."""
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
    """Measures all networks.

    Returns:
        ``samples``, ``jpeg_bytes`` and ``tar_bytes`` (means), ``networks``:
        the boundary of each freeze, and each boundary's mean ``bytes`` by
        encoding; ``goals``.

    Raises:
        ValueError: the tars contain no photograph.
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
        "networks": networks,
        "goals": [judge(goal, networks, jpeg) for goal in GOALS],
    }


def spans_of(tars: Sequence[Path], most: int | None) -> list[list[Photograph]]:
    """The photographs of each tar, by span."""
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
    """Consecutive parts of at most ``size``."""
    left = iter(photographs)
    while part := list(islice(left, size)):
        yield part


def _network(
    name: str, spans: Sequence[Sequence[Photograph]], count: int
) -> dict[str, Any]:
    blocks = blocks_of(name, build(name))
    backbone = blocks[: num_frozen(name, BACKBONE, blocks)]
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for span in spans:
        source_bytes = sum(each.sample.length for each in span)
        for (boundary, encoding), stream in _streams(
            name, backbone, span
        ).items():
            totals[boundary, encoding] += stream.close(source_bytes)
    return {
        "freezes": {
            kind: blocks[num_frozen(name, kind, blocks) - 1].name
            for kind in FREEZES
        },
        "boundaries": [
            {
                "name": block.name,
                "bytes": {e: totals[block.name, e] / count for e in ENCODINGS},
            }
            for block in backbone
        ],
    }


def _streams(
    name: str, backbone: Sequence[Block], span: Sequence[Photograph]
) -> dict[tuple[str, str], _Stream]:
    """Streams of a span, by boundary and encoding."""
    network = NETWORKS[name]
    transform = ImageTransform(
        resize_size=network.resize_size, crop_size=network.crop_size
    )
    streams: dict[tuple[str, str], _Stream] = {}
    for part in chunks(span, BATCH_SAMPLES):
        values = torch.stack(
            [transform(decode_image(each.jpeg)) for each in part]
        )
        for block in backbone:
            with torch.inference_mode():
                values = block.module(values)
            for encoding in ENCODINGS:
                key = block.name, encoding
                if key not in streams:
                    streams[key] = _Stream(encoding, values.shape[1:])
                streams[key].write(part, values)
    return streams


def judge(
    goal: Goal, networks: Mapping[str, Any], jpeg_bytes: float
) -> dict[str, Any]:
    """The ratio that a goal is about, and whether it is met."""
    network = networks[goal.network]
    name = goal.boundary or network["freezes"][BACKBONE]
    boundary = next(b for b in network["boundaries"] if b["name"] == name)
    encoded = boundary["bytes"][goal.encoding]
    ratio = jpeg_bytes / encoded
    return {
        "network": goal.network,
        "boundary": name,
        "encoding": goal.encoding,
        "least_ratio": goal.least_ratio,
        "ratio": ratio,
        "met": ratio >= goal.least_ratio,
    }


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """All goals, one by one."""
    return {
        f"{each['network']} at {each['boundary']} in {each['encoding']}:"
        f" {each['least_ratio']:g} times fewer bytes": each["met"]
        for each in section["goals"]
    }


def _measure_section(context: Context) -> None:
    context.section.update(
        measure(context.tars, quick=context.quick, note=context.note)
    )


EXPERIMENT = Experiment(
    name="bytes",
    title="Bytes of a JPEG over those of its features",
    minutes=3,
    quick_minutes=1,
    measure=_measure_section,
    goals=goals,
)
