"""The models of the census: all of torchvision's classification models, and
diverse ones of timm and of Hugging Face transformers.

Weights are random; nothing is downloaded. Images are small where the
architecture allows it: all operations run, on fewer pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchvision import models

PIXELS = 64
"""Of models that take any size."""


@dataclass(frozen=True)
class Entry:
    """A model of the census.

    Args:
        source: the library it is from.
        name: in that library.
        pixels: height and width of the images it gets.
        options: what it is built with, beside random weights.
    """

    source: str
    name: str
    pixels: int = PIXELS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.source}/{self.name}"

    def build(self) -> nn.Module:
        """With random weights, in eval mode."""
        return _BUILDERS[self.source](self).eval()


def entries() -> Iterator[Entry]:
    """All of the census, in the order of its tables."""
    for name in sorted(models.list_models(module=models)):
        yield Entry("torchvision", name, *_torchvision_options(name))
    for name, pixels in _TIMM_ANY_SIZE.items():
        yield Entry("timm", name, pixels)
    for name, pixels in _TIMM_SIZED.items():
        yield Entry("timm", name, pixels, {"img_size": pixels})
    for name, (pixels, options) in _TRANSFORMERS.items():
        yield Entry("transformers", name, pixels, options)


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

_TIMM_ANY_SIZE = {
    "botnet26t_256": 256,
    "caformer_s18": PIXELS,
    "convmixer_768_32": PIXELS,
    "convnext_atto": PIXELS,
    "convnextv2_atto": PIXELS,
    "davit_tiny": 224,
    "densenet121": PIXELS,
    "dla34": PIXELS,
    "dm_nfnet_f0": PIXELS,
    "eca_resnet33ts": PIXELS,
    "edgenext_xx_small": PIXELS,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "efficientnet_b0": PIXELS,
    "efficientvit_b0": PIXELS,
    "efficientvit_m0": 224,
    "fastvit_t8": PIXELS,
    "focalnet_tiny_srf": PIXELS,
    "gcvit_xxtiny": 224,
    "ghostnet_050": PIXELS,
    "ghostnetv2_100": PIXELS,
    "halonet26t": 256,
    "hgnetv2_b0": PIXELS,
    "hiera_tiny_224": 224,
    "hrnet_w18_small": PIXELS,
    "inception_next_atto": PIXELS,
    "lambda_resnet26t": 256,
    "levit_128s": 224,
    "mambaout_femto": PIXELS,
    "maxvit_pico_rw_256": 256,
    "maxvit_tiny_tf_224": 224,
    "mobilenetv3_small_050": PIXELS,
    "mobilenetv4_conv_small_035": PIXELS,
    "mobilenetv4_hybrid_medium": PIXELS,
    "mobilevit_xxs": PIXELS,
    "mobilevitv2_050": PIXELS,
    "mvitv2_tiny": 224,
    "nest_tiny": 224,
    "nextvit_small": PIXELS,
    "nfnet_l0": PIXELS,
    "pit_ti_224": 224,
    "poolformer_s12": PIXELS,
    "rdnet_tiny": PIXELS,
    "regnetx_002": PIXELS,
    "regnety_002": PIXELS,
    "repvgg_a0": PIXELS,
    "repvit_m0_9": PIXELS,
    "res2net50_26w_4s": PIXELS,
    "resnest14d": PIXELS,
    "resnetv2_50": PIXELS,
    "skresnet18": PIXELS,
    "swinv2_tiny_window8_256": 256,
    "tf_efficientnetv2_b0": PIXELS,
    "tiny_vit_5m_224": 224,
    "tnt_s_patch16_224": 224,
    "twins_svt_small": 224,
    "volo_d1_224": 224,
}
_TIMM_SIZED = {
    "beit_base_patch16_224": PIXELS,
    "cait_xxs24_224": PIXELS,
    "coat_lite_tiny": PIXELS,
    "coat_tiny": PIXELS,
    "coatnet_pico_rw_224": 224,
    "convit_tiny": 224,
    "crossvit_9_240": 240,
    "deit3_small_patch16_224": PIXELS,
    "deit_tiny_distilled_patch16_224": PIXELS,
    "eva02_tiny_patch14_224": 56,
    "gmlp_ti16_224": PIXELS,
    "mixer_s16_224": PIXELS,
    "resmlp_12_224": PIXELS,
    "samvit_base_patch16_224": 224,
    "sequencer2d_s": PIXELS,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224,
    "vit_relpos_small_patch16_224": PIXELS,
    "vit_small_patch14_reg4_dinov2": 56,
    "vit_small_patch16_dinov3": PIXELS,
    "vit_tiny_patch16_224": PIXELS,
    "xcit_nano_12_p16_224": PIXELS,
}

_SMALL_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": PIXELS,
    "patch_size": 16,
}
_SMALL_DINO = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "num_labels": 7,
}
_SMALL_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_SMALL_SWIN = {
    "image_size": 224,
    "embed_dim": 24,
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 4, 8],
}
_TRANSFORMERS: dict[str, tuple[int, dict[str, Any]]] = {
    "Beit": (PIXELS, {**_SMALL_VIT, "use_relative_position_bias": True}),
    "CLIP": (PIXELS, {"vision_config": _SMALL_VIT}),
    "ConvNext": (PIXELS, _SMALL_STAGES),
    "DeiT": (PIXELS, _SMALL_VIT),
    "Dinov2": (56, _SMALL_DINO),
    "Dinov2WithRegisters": (56, _SMALL_DINO),
    "EfficientNet": (PIXELS, {"image_size": PIXELS}),
    "MobileNetV2": (PIXELS, {"image_size": PIXELS}),
    "MobileViT": (PIXELS, {"image_size": PIXELS}),
    "PoolFormer": (PIXELS, _SMALL_STAGES),
    "Pvt": (224, {}),
    "ResNet": (PIXELS, {**_SMALL_STAGES, "embedding_size": 16}),
    "Segformer": (PIXELS, {"hidden_sizes": [16, 32, 48, 64]}),
    "Siglip": (PIXELS, {"vision_config": _SMALL_VIT}),
    "Swin": (224, _SMALL_SWIN),
    "Swinv2": (224, {**_SMALL_SWIN, "window_size": 7}),
    "ViT": (PIXELS, _SMALL_VIT),
    "ViTMSN": (PIXELS, _SMALL_VIT),
}
