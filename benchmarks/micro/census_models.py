"""Models of the census, of torchvision, timm and Hugging Face transformers.

All classification models of torchvision, at their default freeze point, and
those of ``census_models.json``, there and at a block.  Weights are random;
nothing is downloaded.  Images are small if the architecture allows it, which
changes no operator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torchvision import models

from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.named_arrays import NamedArrays

MODELS = Path(__file__).with_suffix(".json")
PIXELS = 64
"""Image size of torchvision models that accept any size."""


@dataclass(frozen=True)
class Entry:
    """A model of the census, and where to freeze it.

    Args:
        source: its library.
        name: in that library.
        pixels: height and width of its images; 0 for text and audio.
        options: arguments of its constructor.
        freeze: name of a module; None is the default freeze point.
        integers: shapes of its arrays of integers, by name of the argument.
        floats: shapes of its arrays of floating-point numbers.
    """

    source: str
    name: str
    pixels: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    freeze: str | None = None
    integers: dict[str, list[int]] = field(default_factory=dict)
    floats: dict[str, list[int]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.source}/{self.name}"

    @property
    def input(self) -> dict[str, Any]:
        """Returns the arguments of ``split`` that describe its samples."""
        if self.pixels:
            return {"sample_shape": (3, self.pixels, self.pixels)}
        arrays = {
            name: ArrayTransform(tuple(shape), dtype)
            for shapes, dtype in (
                (self.integers, "int64"),
                (self.floats, "float32"),
            )
            for name, shape in shapes.items()
        }
        return {"transform": NamedArrays.of(**arrays)}

    def build(self) -> nn.Module:
        """Builds it with random weights, in eval mode."""
        return _BUILDERS[self.source](self).eval()


def entries() -> Iterator[Entry]:
    """All models of the census, in the order of its table."""
    for name in sorted(models.list_models(module=models)):
        yield Entry("torchvision", name, *_torchvision_options(name))
    for source, listed in json.loads(MODELS.read_text()).items():
        for name, listing in listed.items():
            block = listing.pop("at")
            yield Entry(source, name, **listing)
            yield Entry(source, name, freeze=block, **listing)


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

    model = getattr(transformers, entry.name)
    built: nn.Module = model(model.config_class(**entry.options))
    return built


_BUILDERS: dict[str, Callable[[Entry], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
