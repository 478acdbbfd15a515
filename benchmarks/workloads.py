"""Networks and freeze points that are measured; imports nothing of HAPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BACKBONE = "backbone"
INNER = "inner"
FREEZES = (BACKBONE, INNER)


@dataclass(frozen=True)
class Network:
    """A torchvision network with random weights.

    Attributes:
        resize_size: pixels of the shorter side.
        crop_size: pixels of both sides of what the network sees.
        freeze: module to freeze, by ``backbone`` (all but the head) and
            ``inner`` (about half of it).
        samples: of one pass with ``backbone``; so many that filling and
            emptying the pipeline counts little.
        inner_samples: with ``inner``, where the client computes more.
        slow_samples: with ``inner`` and a slow link. Where float32 features
            are larger than the images, all is streamed at the link's rate,
            evenly, and few samples are enough to measure it.
        shard_samples: of one shard; each is one span.
        batch_size: of one training step.
    """

    resize_size: int
    crop_size: int
    freeze: Mapping[str, str]
    samples: int
    inner_samples: int
    slow_samples: int
    shard_samples: int
    batch_size: int


NETWORKS: Mapping[str, Network] = {
    "resnet18": Network(
        256, 224, {BACKBONE: "layer4", INNER: "layer2"}, 192, 192, 40, 8, 8
    ),
    "mobilenet_v3_small": Network(
        256,
        224,
        {BACKBONE: "features", INNER: "features.6"},
        960,
        960,
        960,
        16,
        16,
    ),
    "vit_b_16": Network(
        128,
        112,
        {
            BACKBONE: "encoder",
            INNER: "encoder.layers.encoder_layer_5",
        },
        128,
        128,
        20,
        4,
        8,
    ),
}
