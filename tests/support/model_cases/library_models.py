"""Cases of models of torchvision, timm and transformers, with narrow layers.

They differ in how code runs around the freeze point.  ``benchmarks.census``
splits all models of these libraries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from torch import nn
from torchvision import models
from torchvision.models import swin_transformer
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation import lraspp
from torchvision.models.video import resnet as video_resnet

from hapi_splitter.inputs.array_transform import ArrayTransform
from model_cases.case import (
    IDS,
    IMAGE,
    LARGE_IMAGE,
    NUM_IDS,
    ModelCase,
    accepted,
    refused,
)

CLIP = (3, 4, 32, 32)
WAVE = ArrayTransform((1600,))
MELS = ArrayTransform((16, 32))
SPECTROGRAM = ArrayTransform((32, 16))


def resnet(block=BasicBlock, **options) -> nn.Module:
    return models.ResNet(block, (1, 1, 1, 1), num_classes=5, **options)


def mobilenet_v3() -> nn.Module:
    config = partial(InvertedResidualConfig, width_mult=1.0, dilation=1)
    settings = [
        config(16, 3, 16, 16, True, "RE", stride=2),
        config(16, 5, 32, 24, True, "HS", stride=2),
        config(24, 5, 48, 24, False, "HS", stride=1),
    ]
    return models.MobileNetV3(settings, 32, num_classes=5)


def segmentation() -> nn.Module:
    body = IntermediateLayerGetter(
        mobilenet_v3().features, {"2": "low", "4": "high"}
    )
    return lraspp.LRASPP(body, 24, 144, 4, 16)


TORCHVISION: list[tuple[str, Any, str, tuple[int, ...]]] = [
    ("resnet", resnet, "default", IMAGE),
    (
        "dilated resnet",
        partial(
            resnet,
            Bottleneck,
            width_per_group=4,
            replace_stride_with_dilation=[False, True, True],
        ),
        "layer3",
        IMAGE,
    ),
    (
        "densenet",
        partial(models.DenseNet, 8, (2, 2), 16, num_classes=5),
        "default",
        IMAGE,
    ),
    (
        "googlenet",
        partial(models.GoogLeNet, 5, aux_logits=False, init_weights=False),
        "conv3",
        LARGE_IMAGE,
    ),
    ("mobilenet_v3", mobilenet_v3, "features", IMAGE),
    (
        "efficientnet",
        partial(
            models.EfficientNet,
            [
                MBConvConfig(1, 3, 1, 16, 16, 1),
                MBConvConfig(6, 5, 2, 16, 24, 2),
            ],
            0.3,
            num_classes=5,
        ),
        "features.2",
        IMAGE,
    ),
    (
        "vit",
        partial(
            models.VisionTransformer, 32, 8, 2, 2, 32, 64, 0.1, num_classes=5
        ),
        "default",
        IMAGE,
    ),
    (
        "swin_v2",
        partial(
            models.SwinTransformer,
            *([4, 4], 16, [2, 2], [2, 2], [4, 4]),
            num_classes=5,
            block=swin_transformer.SwinTransformerBlockV2,
            downsample_layer=swin_transformer.PatchMergingV2,
            stochastic_depth_prob=0.2,
        ),
        "features.2",
        IMAGE,
    ),
    ("lraspp", segmentation, "backbone.1", LARGE_IMAGE),
    (
        "r2plus1d",
        partial(
            video_resnet.VideoResNet,
            video_resnet.BasicBlock,
            [video_resnet.Conv2Plus1D] * 4,
            [1, 1, 1, 1],
            video_resnet.BasicStem,
            5,
        ),
        "layer1",
        CLIP,
    ),
]

VIT = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}
TIMM: list[tuple[str, dict[str, Any], str]] = [
    ("vit_tiny_patch16_224", VIT, "patch_embed"),
    ("vit_small_patch14_dinov2", VIT, "blocks"),
    ("vit_small_patch16_dinov3", VIT, "norm"),
    ("vit_base_patch16_clip_224", VIT, "blocks.0"),
    ("beit_base_patch16_224", VIT, "blocks"),
    (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "embed_dim": 16,
            "depths": (2, 1),
            "num_heads": (2, 2),
        },
        "layers.0.blocks.0",
    ),
    (
        "convnextv2_nano",
        {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
        "stages.0",
    ),
    ("regnetx_002", {}, "s2"),
    ("seresnet18", {"layers": (1, 1, 1, 1)}, "layer1"),
    (
        "hiera_tiny_224",
        {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)},
        "blocks.2",
    ),
    ("convit_tiny", {**VIT, "embed_dim": 16, "local_up_to_layer": 1}, "norm"),
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
        "transformers.0",
    ),
    ("rexnet_100", {"width_mult": 0.3, "depth_mult": 0.4}, "features.2"),
    ("ConvMixer", {"dim": 16, "depth": 2, "kernel_size": 3}, "blocks.0"),
]

LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VISION = {**LAYERS, "image_size": 32, "patch_size": 8}
TEXT = {
    **LAYERS,
    "vocab_size": NUM_IDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
SPEECH = {
    **LAYERS,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 16,
    "layerdrop": 0.2,
    "num_labels": 5,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "vocab_size": NUM_IDS,
    "pad_token_id": 0,
    "num_labels": 5,
}
TRANSFORMERS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("ViTForImageClassification", VISION, "default", IMAGE),
    ("Dinov2ForImageClassification", VISION, "default", IMAGE),
    (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 2],
        },
        "swin.encoder.layers.0",
        IMAGE,
    ),
    (
        "SiglipForImageClassification",
        {"vision_config": VISION},
        "vision_model.encoder.layers.0",
        IMAGE,
    ),
    (
        "PoolFormerForImageClassification",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
        "poolformer.encoder.block.1",
        IMAGE,
    ),
    (
        "HieraForImageClassification",
        {
            "image_size": [64, 64],
            "embed_dim": 16,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 2],
            "num_query_pool": 2,
            "masked_unit_size": [4, 4],
            "patch_stride": [4, 4],
        },
        "hiera.encoder.stages.0",
        LARGE_IMAGE,
    ),
    (
        "BertForMaskedLM",
        {**TEXT, "tie_word_embeddings": False},
        "bert.encoder.layer.0",
        IDS,
    ),
    (
        "ElectraForSequenceClassification",
        {**TEXT, "embedding_size": 16},
        "default",
        IDS,
    ),
    (
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "vocab_size": NUM_IDS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "use_cache": False,
        },
        "transformer.h.0",
        IDS,
    ),
    ("LlamaForSequenceClassification", DECODER, "model.layers.0", IDS),
    ("MistralForCausalLM", DECODER, "model.layers.0", IDS),
    ("WhisperForAudioClassification", WHISPER, "encoder.conv2", MELS),
    (
        "ASTForAudioClassification",
        {
            **LAYERS,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "time_stride": 8,
            "frequency_stride": 8,
        },
        "default",
        SPECTROGRAM,
    ),
]
BOTH_SIDES = "used before and after"
SKIPS = "did not do there when the model was split"
"""In training, such models skip frozen layers at random."""
REFUSED: list[tuple[str, dict[str, Any], str, str, str, Any]] = [
    (
        "BertForMaskedLM",
        TEXT,
        "bert.encoder.layer.0",
        *("cannot_freeze", BOTH_SIDES, IDS),
    ),
    (
        "DebertaV2ForSequenceClassification",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c"]},
        "deberta.encoder.layer.0",
        *("cannot_freeze", f"rel_embeddings.weight' is {BOTH_SIDES}", IDS),
    ),
    (
        "Wav2Vec2ForSequenceClassification",
        SPEECH,
        "wav2vec2.encoder.layers.0",
        *("cannot_freeze", SKIPS, WAVE),
    ),
    (
        "WhisperForAudioClassification",
        {**WHISPER, "encoder_layerdrop": 0.1},
        "encoder.layers.0",
        *("cannot_freeze", SKIPS, MELS),
    ),
    # It masks patches at random.
    ("ViTMAEModel", VISION, "layers.0", "unknown_op", "aten.rand", IMAGE),
]


def timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    """Builds a registered model, or a class of ``timm.models``."""
    if not name.islower():
        return getattr(timm.models, name)(num_classes=5, **options)
    return timm.create_model(name, num_classes=5, **options)


def transformers_model(name: str, options: dict[str, Any]) -> nn.Module:
    """Builds a model from options of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


LIBRARY_CASES: list[ModelCase] = [
    case
    for cases in (
        *(
            accepted(f"torchvision {name}", build, freeze, sample)
            for name, build, freeze, sample in TORCHVISION
        ),
        *(
            accepted(
                f"timm {name}",
                partial(timm_model, name, options),
                freeze,
                LARGE_IMAGE if name == "hiera_tiny_224" else IMAGE,
            )
            for name, options, freeze in TIMM
        ),
        *(
            accepted(
                f"transformers {name}",
                partial(transformers_model, name, options),
                freeze,
                sample,
            )
            for name, options, freeze, sample in TRANSFORMERS
        ),
        *(
            refused(
                f"transformers {name}, refused",
                partial(transformers_model, name, options),
                *answer,
            )
            for name, options, *answer in REFUSED
        ),
    )
    for case in cases
]
