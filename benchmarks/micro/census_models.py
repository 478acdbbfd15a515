"""Models of the census, of torchvision, timm and Hugging Face transformers.

All classification models of torchvision, and those of ``census_models.json``:
``timm`` by name with the pixels of their images, ``timm_sized`` also built for
that size, ``transformers`` with options of their configuration.  Weights are
random; nothing is downloaded.  Images are small if the architecture allows it,
which changes no operator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torchvision import models

MODELS = Path(__file__).with_suffix(".json")
PIXELS = 64
"""Image size of torchvision models that accept any size."""


@dataclass(frozen=True)
class Entry:
    """A model of the census.

    Args:
        source: its library.
        name: in that library.
        pixels: height and width of its images.
        options: arguments of its constructor.
    """

    source: str
    name: str
    pixels: int = PIXELS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.source}/{self.name}"

    def build(self) -> nn.Module:
        """Builds it with random weights, in eval mode."""
        return _BUILDERS[self.source](self).eval()


def entries() -> Iterator[Entry]:
    """All models of the census, in the order of its table."""
    for name in sorted(models.list_models(module=models)):
        yield Entry("torchvision", name, *_torchvision_options(name))
    listed = json.loads(MODELS.read_text())
    for name, pixels in listed["timm"].items():
        yield Entry("timm", name, pixels)
    for name, pixels in listed["timm_sized"].items():
        yield Entry("timm", name, pixels, {"img_size": pixels})
    for name, each in listed["transformers"].items():
        options = each.get("options", {})
        yield Entry("transformers", name, each["pixels"], options)


def _torchvision_options(name: str) -> tuple[int, dict[str, Any]]:
    if name.startswith("vit_"):
        pixels = 56 if name == "vit_h_14" else PIXELS
        return pixels, {"image_size": pixels}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
        return (96 if name == "inception_v3" else PIXELS), options
    return (224 if name == "maxvit_t" else PIXELS), {}


def _torchvision(entry: Entry) -> nn.Module:
    return models.get_model(entry.name, weights=None, **entry.options)


def _timm(entry: Entry) -> nn.Module:
    import timm

    return timm.create_model(entry.name, pretrained=False, **entry.options)


def _transformers(entry: Entry) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{entry.name}Config")
    model: Callable[..., nn.Module] = getattr(
        transformers, f"{entry.name}ForImageClassification"
    )
    return model(config(**entry.options))


_BUILDERS: dict[str, Callable[[Entry], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
