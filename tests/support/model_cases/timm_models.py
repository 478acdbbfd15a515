"""Cases of timm's models, with few and narrow layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.layers import GroupNormAct, StdConv2d
from timm.models import metaformer
from torch import nn

from model_cases.case import IMAGE, LARGE_IMAGE, ModelCase, accepted

SMALL = {"img_size": 32, "patch_size": 8}
NARROW = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = {**SMALL, **NARROW}
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 2),
}
CAFORMER = {
    "depths": (1, 1, 1, 1),
    "dims": (8, 16, 32, 32),
    "token_mixers": [metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
    "norm_layers": [metaformer.LayerNorm2dNoBias] * 2
    + [metaformer.LayerNormNoBias] * 2,
}
BIT = {
    "layers": (1, 1, 1, 1),
    "channels": (32, 32, 64, 64),
    "stem_type": "fixed",
    "stem_chs": 16,
    "conv_layer": partial(StdConv2d, eps=1e-08),
    "norm_layer": partial(GroupNormAct, num_groups=8),
}
PATCH_MLP = {**SMALL, "embed_dim": 32, "num_blocks": 2}
MAXVIT = {"embed_dim": (32, 32), "depths": (1, 1), "block_type": ("M", "M")}


def timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    """Builds a registered model, or a class of ``timm.models``."""
    if not name.islower():
        return getattr(timm.models, name)(num_classes=5, **options)
    return timm.create_model(name, num_classes=5, **options)


_MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("vit_tiny_patch16_224", VIT, "default blocks.0 blocks norm patch_embed"),
    (
        "vit_tiny_patch16_224",
        {**VIT, "drop_path_rate": 0.3, "proj_drop_rate": 0.1},
        "blocks.0.attn norm_pre",
    ),
    (
        "vit_small_patch16_224",
        {**VIT, "global_pool": "avg", "reg_tokens": 2},
        "blocks.0",
    ),
    ("vit_small_patch14_dinov2", VIT, "default blocks.0 blocks norm"),
    ("vit_small_patch14_reg4_dinov2", VIT, "blocks.0"),
    ("vit_small_patch16_dinov3", VIT, "default blocks.0 blocks norm"),
    ("vit_base_patch16_siglip_224", VIT, "default blocks.0 norm attn_pool"),
    ("vit_base_patch16_clip_224", VIT, "default blocks.0 norm_pre"),
    ("eva02_tiny_patch14_224", VIT, "blocks.0 blocks"),
    ("beit_base_patch16_224", VIT, "default blocks.0 blocks"),
    ("deit3_small_patch16_224", VIT, "blocks.0"),
    ("flexivit_small", VIT, "blocks.0"),
    ("vit_relpos_small_patch16_224", VIT, "blocks.0"),
    (
        "naflexvit_base_patch16_gap",
        {"embed_dim": 32, "depth": 2, "num_heads": 2},
        "blocks.0",
    ),
    (
        "samvit_base_patch16",
        {**VIT, "window_size": 2, "global_attn_indexes": (1,)},
        "blocks.0",
    ),
    ("swin_tiny_patch4_window7_224", SWIN, "layers.0.blocks.0"),
    ("swinv2_tiny_window8_256", SWIN, "layers.0"),
    ("swinv2_cr_tiny_224", SWIN, "stages.0"),
    ("convnext_tiny", STAGES, "default stages.1 stages.2.blocks.0"),
    ("convnextv2_nano", STAGES, "stages.0"),
    ("test_efficientnet", {}, "default blocks.1 conv_head"),
    ("mobilenetv3_small_050", {}, "blocks.1"),
    ("mobilenetv4_conv_small_050", {}, "blocks.1"),
    ("regnetx_002", {}, "s2"),
    ("resnet18", {"layers": (1, 1, 1, 1)}, "default layer2 act1"),
    ("resnet26t", {"layers": (1, 1, 1, 1), "base_width": 8}, "layer1"),
    (
        "resnetv2_50",
        {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)},
        "stages.1",
    ),
    ("seresnet18", {"layers": (1, 1, 1, 1)}, "layer1"),
    ("test_nfnet", {}, "stages.2"),
    ("test_byobnet", {}, "stages.1"),
    ("test_mambaout", {}, "stages.1"),
    ("maxvit_pico_rw_256", {**MAXVIT, "img_size": 32}, "stages.0"),
    (
        "coatnet_pico_rw_224",
        {
            "embed_dim": (32, 32),
            "depths": (1, 1),
            "block_type": ("C", "T"),
            "img_size": 32,
        },
        "stages.0",
    ),
    (
        "hiera_tiny_224",
        {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)},
        "blocks.2",
    ),
    (
        "xcit_nano_12_p8_224",
        {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "blocks.0",
    ),
    ("cait_xxs24_224", VIT, "default blocks.0 blocks"),
    (
        "convit_tiny",
        {
            **SMALL,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "local_up_to_layer": 1,
        },
        "blocks.0 norm",
    ),
    (
        "levit_128s",
        {
            "img_size": 64,
            "embed_dim": (16, 32, 48),
            "depth": (1, 1, 1),
            "num_heads": (2, 2, 2),
            "key_dim": 8,
        },
        "stages.0",
    ),
    (
        "pvt_v2_b0",
        {
            "depths": (1, 1, 1, 1),
            "embed_dims": (8, 16, 24, 32),
            "num_heads": (1, 2, 2, 2),
        },
        "stages.1",
    ),
    ("edgenext_xx_small", {"depths": (1, 1, 1, 1)}, "stages.1"),
    ("mobilevit_xxs", {}, "stages.2.1"),
    (
        "pit_ti_224",
        {
            "img_size": 32,
            "patch_size": 8,
            "stride": 4,
            "base_dims": (16, 16, 16),
            "depth": (1, 1, 1),
            "heads": (1, 2, 2),
        },
        "default transformers.0",
    ),
    (
        "tnt_s_legacy_patch16_224",
        {
            "img_size": 32,
            "embed_dim": 32,
            "inner_dim": 8,
            "depth": 2,
            "num_heads_outer": 2,
            "num_heads_inner": 2,
        },
        "norm",
    ),
    (
        "twins_pcpvt_small",
        {
            "img_size": 64,
            "depths": (1, 1, 1, 1),
            "embed_dims": (8, 16, 24, 32),
            "num_heads": (1, 1, 2, 2),
        },
        "norm",
    ),
    (
        "visformer_tiny",
        {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2},
        "stage1",
    ),
    (
        "repvit_m0_9",
        {"depth": (1, 1, 1, 1), "embed_dim": (8, 16, 24, 32)},
        "stages.1",
    ),
    ("inception_next_tiny", STAGES, "stages.1"),
    ("rexnet_100", {"width_mult": 0.3, "depth_mult": 0.4}, "features.2"),
    ("ResNetV2", BIT, "stages.0 norm"),
    ("MlpMixer", PATCH_MLP, "default blocks.0"),
    (
        "ConvMixer",
        {"dim": 16, "depth": 2, "kernel_size": 3},
        "default blocks.0",
    ),
    ("MetaFormer", CAFORMER, "stages.2"),
    ("MetaFormer", STAGES, "stages.1"),
    (
        "FastVit",
        {
            "layers": (1, 1, 1, 1),
            "embed_dims": (16, 32, 32, 64),
            "token_mixers": ("repmixer", "repmixer", "repmixer", "attention"),
        },
        "stages.1 stages.3",
    ),
    (
        "GlobalContextVit",
        {
            "img_size": 32,
            "window_ratio": (8, 16),
            "embed_dim": 8,
            "depths": (1, 1),
            "num_heads": (2, 2),
        },
        "stages.0",
    ),
]

_LARGE = [
    "edgenext_xx_small",
    "hiera_tiny_224",
    "levit_128s",
    "mobilevit_xxs",
    "repvit_m0_9",
    "twins_pcpvt_small",
    "visformer_tiny",
]
"""Models that need images of 64 pixels."""


def _label(index: int) -> str:
    name = _MODELS[index][0]
    repeated = sum(each[0] == name for each in _MODELS[:index])
    return f"timm {name}" + (f" #{repeated + 1}" if repeated else "")


TIMM_CASES: list[ModelCase] = [
    case
    for index, (name, options, freezes) in enumerate(_MODELS)
    for case in accepted(
        _label(index),
        partial(timm_model, name, options),
        freezes,
        LARGE_IMAGE if name in _LARGE else IMAGE,
    )
]
