"""Bytes of a photograph over those of its features on the wire.

Photographs run through torchvision's networks with random weights, and the
features through the encoder and the stream writer, as ``hapi plan`` measures
them; the headers of a response, a few hundred bytes per span, do not count.
Compression depends on the values, so trained weights may give other figures;
without compression the figures hold for any weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from benchmarks.networks import BACKBONE, NETWORKS, build
from benchmarks.suite.experiment import Context, Experiment
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.device_profile import measure
from hapi_client.planning.sample_probe import ProbeSamples
from hapi_protocol.samples import IMAGE, SampleError
from hapi_protocol.shards import iter_samples
from hapi_splitter.inputs.image_transform import ImageTransform

QUICK_SAMPLES = 8


class Goal(NamedTuple):
    """Minimum ratio of a JPEG's bytes to those at a cut.

    ``boundary`` is the module that ends there; None is the freeze point.
    """

    network: str
    boundary: str | None
    encoding: str
    least_ratio: float


GOALS = (
    *(Goal(name, None, "float16", 50.0) for name in NETWORKS),
    Goal("resnet18", "layer3.1.relu", "uint8;zstd", 3.0),
)


def measure_section(context: Context) -> None:
    """Measures ``samples``, ``jpeg_bytes`` (mean) and ``goals``.

    Raises:
        ValueError: the tars contain no photograph.
    """
    jpegs: list[bytes] = []
    for tar in context.tars:
        with tar.open("rb") as file:
            for sample in iter_samples(file, name=tar.name):
                with suppress(SampleError):  # it has no image
                    jpegs.append(sample.content(IMAGE))
    if context.quick:
        del jpegs[QUICK_SAMPLES:]
    if not jpegs:
        raise ValueError(
            f"no photograph in {', '.join(map(str, context.tars))}"
        )
    mean = sum(map(len, jpegs)) / len(jpegs)
    probe = ProbeSamples(tuple(jpegs), mean)
    context.section.update(
        samples=len(jpegs),
        jpeg_bytes=mean,
        goals=[
            judged
            for name in list(NETWORKS)[: 1 if context.quick else None]
            for judged in _judge(name, probe, context)
        ],
    )


def _judge(
    name: str, probe: ProbeSamples, context: Context
) -> list[dict[str, Any]]:
    """Ratios of one network, and whether they reach its goals."""
    context.note(name)
    network = NETWORKS[name]
    transform = ImageTransform(
        resize_size=network.resize_size, crop_size=network.crop_size
    )
    region = FrozenRegion(
        build(name), network.freeze[BACKBONE], transform, torch.device("cpu")
    )
    numbers = {cut.name: cut.index for cut in region.device_graph.cuts}
    last = region.device_graph.cuts[-1].name
    goals = [
        (goal, numbers[goal.boundary or last])
        for goal in GOALS
        if goal.network == name
    ]
    encodings = sorted({goal.encoding for goal, _ in goals})
    samples = measure(
        region, probe, lambda _: encodings, [cut for _, cut in goals]
    ).samples
    judged = []
    for goal, cut in goals:
        sent_bytes = samples.wire_bytes[cut, goal.encoding]
        ratio = samples.raw_bytes / sent_bytes
        judged.append(
            {
                **goal._asdict(),
                "boundary": goal.boundary or "freeze point",
                "bytes": sent_bytes,
                "ratio": ratio,
                "met": ratio >= goal.least_ratio,
            }
        )
    return judged


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """All goals, one by one."""
    return {
        f"{goal['network']} at {goal['boundary']} in {goal['encoding']}:"
        f" {goal['least_ratio']:g} times fewer bytes": goal["met"]
        for goal in section["goals"]
    }


EXPERIMENT = Experiment(
    name="bytes",
    title="Bytes of a JPEG over those of its features",
    minutes=3,
    quick_minutes=1,
    measure=measure_section,
    goals=goals,
)
