"""Cases of torchvision's models, with few and narrow layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, regnet, swin_transformer
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import backbone_utils
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation import deeplabv3, fcn, lraspp
from torchvision.models.vgg import make_layers
from torchvision.models.video import mvit
from torchvision.models.video import resnet as video_resnet

from model_cases.case import LARGE_IMAGE, ModelCase, accepted
from reference_models import randomise_statistics

CLIP = (3, 4, 32, 32)


def with_small_classifier(
    build: Callable[[], nn.Module], features: int
) -> nn.Module:
    """Replaces the wide classifier of a model before it takes memory."""
    with torch.device("meta"):
        model = build()
    model.classifier = nn.Sequential(
        nn.Linear(features, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)
    )
    model.features.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    for buffer in model.buffers():
        buffer.zero_()
    randomise_statistics(model)
    return model


def resnet(block=BasicBlock, layers=(1, 1, 1, 1), **options) -> nn.Module:
    return models.ResNet(block, layers, **{"num_classes": 5, **options})


def efficientnet(*settings) -> nn.Module:
    return models.EfficientNet(list(settings), 0.3, num_classes=5)


def mobilenet_v3() -> nn.Module:
    config = partial(InvertedResidualConfig, width_mult=1.0, dilation=1)
    settings = [
        config(16, 3, 16, 16, True, "RE", stride=2),
        config(16, 5, 32, 24, True, "HS", stride=2),
        config(24, 5, 48, 24, False, "HS", stride=1),
    ]
    return models.MobileNetV3(settings, 32, num_classes=5)


def swin(block, downsample) -> nn.Module:
    return models.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [2, 2],
        [4, 4],
        num_classes=5,
        block=block,
        downsample_layer=downsample,
        stochastic_depth_prob=0.2,
    )


def segmentation(head: str) -> nn.Module:
    """A segmentation model on a small body, as torchvision assembles it."""
    if head == "lraspp":
        body = IntermediateLayerGetter(
            mobilenet_v3().features, {"2": "low", "4": "high"}
        )
        return lraspp.LRASPP(body, 24, 144, 4, 16)
    layers = {"conv1": nn.Conv2d(3, 8, 3, padding=1)} | {
        f"layer{number}": BasicBlock(8, 8) for number in range(1, 5)
    }
    body = IntermediateLayerGetter(
        nn.Sequential(OrderedDict(layers)), {"layer3": "aux", "layer4": "out"}
    )
    if head == "fcn":
        return fcn.FCN(body, fcn.FCNHead(8, 4), fcn.FCNHead(8, 4))
    classifier = deeplabv3.DeepLabHead(8, 4, (1, 2))
    return deeplabv3.DeepLabV3(body, classifier, fcn.FCNHead(8, 4))


def fpn() -> nn.Module:
    body = resnet()
    return backbone_utils._resnet_fpn_extractor(body, trainable_layers=5)


def video(
    block=video_resnet.BasicBlock, convolution=video_resnet.Conv3DSimple
):
    return video_resnet.VideoResNet(
        block, [convolution] * 4, [1, 1, 1, 1], video_resnet.BasicStem, 5
    )


def mvit_small() -> nn.Module:
    config = partial(
        mvit.MSBlockConfig,
        kernel_q=[3] * 3,
        kernel_kv=[3] * 3,
        stride_kv=[1, 2, 2],
    )
    return mvit.MViT(
        (32, 32),
        4,
        [
            config(1, 16, 32, stride_q=[1, 1, 1]),
            config(2, 32, 32, stride_q=[1, 2, 2]),
        ],
        residual_pool=True,
        residual_with_cls_embed=False,
        num_classes=5,
        rel_pos_embed=True,
        proj_after_attn=True,
    )


def vgg(norm: bool) -> nn.Module:
    features = make_layers([8, "M", 16, 16, "M", 16, "M"], norm)
    return with_small_classifier(
        partial(models.VGG, features, init_weights=False), 16 * 49
    )


TORCHVISION_CASES: list[ModelCase] = [
    *accepted(
        "torchvision resnet", resnet, "default layer1 layer3 avgpool maxpool"
    ),
    *accepted(
        "torchvision resnext",
        partial(
            resnet,
            Bottleneck,
            groups=4,
            width_per_group=4,
            zero_init_residual=True,
        ),
        "layer2.0",
    ),
    *accepted(
        "torchvision resnet, dilated",
        partial(
            resnet,
            Bottleneck,
            width_per_group=4,
            replace_stride_with_dilation=[False, True, True],
        ),
        "layer3",
    ),
    *accepted(
        "torchvision alexnet",
        partial(with_small_classifier, models.AlexNet, 9216),
        "default features.5",
        sample=LARGE_IMAGE,
    ),
    *accepted("torchvision vgg", partial(vgg, False), "default features.2"),
    *accepted("torchvision vgg_bn", partial(vgg, True), "avgpool"),
    *accepted(
        "torchvision densenet",
        partial(models.DenseNet, 8, (2, 2), 16, num_classes=5),
        "default features.denseblock1 features.norm5",
    ),
    *accepted(
        "torchvision densenet, checkpointed",
        partial(
            models.DenseNet,
            8,
            (2, 2),
            16,
            num_classes=5,
            memory_efficient=True,
        ),
        "features.transition1",
    ),
    *accepted(
        "torchvision squeezenet",
        partial(models.squeezenet1_1, num_classes=5),
        "default features.7",
        sample=LARGE_IMAGE,
    ),
    *accepted(
        "torchvision googlenet",
        partial(models.GoogLeNet, 5, aux_logits=False, init_weights=False),
        "conv3",
        sample=LARGE_IMAGE,
    ),
    *accepted(
        "torchvision inception_v3",
        partial(
            models.Inception3,
            5,
            aux_logits=False,
            transform_input=True,
            init_weights=False,
        ),
        "Conv2d_3b_1x1",
        sample=(3, 80, 80),
    ),
    *accepted(
        "torchvision mnasnet", partial(models.MNASNet, 0.35, 5), "layers.8"
    ),
    *accepted(
        "torchvision mobilenet_v2",
        partial(models.MobileNetV2, 5, 0.35, [[1, 16, 1, 1], [6, 24, 2, 2]]),
        "features.1",
    ),
    *accepted(
        "torchvision mobilenet_v3",
        mobilenet_v3,
        "default features.1 features avgpool",
    ),
    *accepted(
        "torchvision shufflenet_v2",
        partial(models.ShuffleNetV2, [1, 1, 1], [8, 16, 32, 64, 64], 5),
        "stage2 conv5",
    ),
    *accepted(
        "torchvision regnet",
        partial(
            models.RegNet,
            regnet.BlockParams(
                [16, 16], [16, 32], [8, 8], [2, 2], [1, 1], 0.25
            ),
            5,
        ),
        "trunk_output.block1",
    ),
    *accepted(
        "torchvision efficientnet",
        partial(
            efficientnet,
            MBConvConfig(1, 3, 1, 16, 16, 1),
            MBConvConfig(6, 5, 2, 16, 24, 2),
        ),
        "features.1 features.2",
    ),
    *accepted(
        "torchvision efficientnet_v2",
        partial(
            efficientnet,
            FusedMBConvConfig(1, 3, 1, 16, 16, 1),
            MBConvConfig(4, 3, 2, 16, 24, 1),
        ),
        "features.1",
    ),
    *accepted(
        "torchvision convnext",
        partial(
            models.ConvNeXt,
            [
                convnext.CNBlockConfig(8, 16, 2),
                convnext.CNBlockConfig(16, None, 1),
            ],
            0.3,
            num_classes=5,
        ),
        "default features.1 features classifier.0",
    ),
    *accepted(
        "torchvision vit",
        partial(
            models.VisionTransformer, 32, 8, 2, 2, 32, 64, 0.1, num_classes=5
        ),
        "default encoder.layers.encoder_layer_0 encoder.ln conv_proj",
    ),
    *accepted(
        "torchvision swin",
        partial(
            swin,
            swin_transformer.SwinTransformerBlock,
            swin_transformer.PatchMerging,
        ),
        "default features.1",
    ),
    *accepted(
        "torchvision swin_v2",
        partial(
            swin,
            swin_transformer.SwinTransformerBlockV2,
            swin_transformer.PatchMergingV2,
        ),
        "features.2",
    ),
    *accepted(
        "torchvision maxvit",
        partial(
            models.MaxVit,
            (32, 32),
            8,
            4,
            [8, 16],
            [1, 1],
            8,
            0.2,
            num_classes=5,
        ),
        "blocks.0",
    ),
    *accepted(
        "torchvision deeplabv3",
        partial(segmentation, "deeplabv3"),
        "backbone.layer3 backbone",
    ),
    *accepted(
        "torchvision fcn",
        partial(segmentation, "fcn"),
        "backbone.layer3 backbone",
    ),
    *accepted(
        "torchvision lraspp",
        partial(segmentation, "lraspp"),
        "backbone.1 backbone",
        sample=LARGE_IMAGE,
    ),
    *accepted("torchvision resnet_fpn", fpn, "body.layer2 body.layer4"),
    *accepted("torchvision r3d", video, "layer2", sample=CLIP),
    *accepted(
        "torchvision mc3",
        partial(video, convolution=video_resnet.Conv3DNoTemporal),
        "layer3",
        sample=CLIP,
    ),
    *accepted(
        "torchvision r2plus1d",
        partial(video, convolution=video_resnet.Conv2Plus1D),
        "layer1",
        sample=CLIP,
    ),
    *accepted("torchvision mvit", mvit_small, "blocks.0", sample=CLIP),
]
