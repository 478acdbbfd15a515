"""Cases of torchvision's models, with few and narrow layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, regnet, swin_transformer
from torchvision.models.detection import backbone_utils
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.video import mvit, resnet as video_resnet

from model_cases import LARGE_IMAGE, ModelCase, accepted

CLIP = (3, 4, 32, 32)
NARROW = {"width_per_group": 16, "num_classes": 5}


def allocated(build: partial[nn.Module], classifier: str) -> nn.Module:
    """Builds a model and replaces its wide classifier before it has memory."""
    with torch.device("meta"):
        model = build()
    width = next(
        m for m in model.get_submodule(classifier).modules()
        if isinstance(m, nn.Linear)
    ).in_features
    model.set_submodule(
        classifier,
        nn.Sequential(
            nn.Linear(width, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)
        ),
    )
    for name, module in model.named_children():
        if name != classifier:
            module.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
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
        [4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=5, block=block,
        downsample_layer=downsample, stochastic_depth_prob=0.2,
    )


def segmentation(name: str, **options) -> nn.Module:
    return getattr(models.segmentation, name)(
        weights=None, weights_backbone=None, num_classes=4, **options
    )


def small_segmentation(head: str) -> nn.Module:
    """DeepLab or FCN on a small ResNet, as their constructors assemble it."""
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation import deeplabv3, fcn

    body = resnet(Bottleneck, width_per_group=4)
    body = IntermediateLayerGetter(body, {"layer3": "aux", "layer4": "out"})
    heads = {
        "deeplabv3": (deeplabv3.DeepLabV3, deeplabv3.DeepLabHead),
        "fcn": (fcn.FCN, fcn.FCNHead),
    }
    kind, classifier = heads[head]
    options = {"atrous_rates": (2, 4)} if head == "deeplabv3" else {}
    classifier = classifier(2048, 4, **options)
    return kind(body, classifier, fcn.FCNHead(1024, 4))


def fpn() -> nn.Module:
    body = resnet()
    return backbone_utils._resnet_fpn_extractor(body, trainable_layers=5)


def video(block=video_resnet.BasicBlock, convolution=video_resnet.Conv3DSimple):
    return video_resnet.VideoResNet(
        block, [convolution] * 4, [1, 1, 1, 1], video_resnet.BasicStem, 5
    )


def mvit_small() -> nn.Module:
    config = partial(
        mvit.MSBlockConfig, kernel_q=[3] * 3, kernel_kv=[3] * 3,
        stride_kv=[1, 2, 2],
    )
    return mvit.MViT(
        (32, 32), 4,
        [
            config(1, 16, 32, stride_q=[1, 1, 1]),
            config(2, 32, 32, stride_q=[1, 2, 2]),
        ],
        residual_pool=True, residual_with_cls_embed=False, num_classes=5,
        rel_pos_embed=True, proj_after_attn=True,
    )


def vgg(norm: bool) -> nn.Module:
    config = [8, "M", 16, 16, "M", 16, "M"]
    from torchvision.models.vgg import make_layers

    return allocated(
        partial(models.VGG, make_layers(config, norm), init_weights=False),
        "classifier",
    )


TORCHVISION_CASES: list[ModelCase] = [
    *accepted("torchvision resnet", resnet, None, "layer1", "layer3", "avgpool", "maxpool"),
    *accepted(
        "torchvision resnext",
        partial(resnet, Bottleneck, groups=4, width_per_group=4, zero_init_residual=True),
        None, "layer2.0",
    ),
    *accepted("torchvision resnet, dilated", partial(resnet, Bottleneck, width_per_group=4, replace_stride_with_dilation=[False, True, True]), "layer3"),
    *accepted("torchvision alexnet", lambda: allocated(models.AlexNet, "classifier"), None, "features", "features.5", sample=LARGE_IMAGE),
    *accepted("torchvision vgg", partial(vgg, False), None, "features.2"),
    *accepted("torchvision vgg_bn", partial(vgg, True), None, "avgpool"),
    *accepted("torchvision densenet", partial(models.DenseNet, 8, (2, 2), 16, num_classes=5), None, "features.denseblock1", "features.norm5"),
    *accepted("torchvision densenet, checkpointed", partial(models.DenseNet, 8, (2, 2), 16, num_classes=5, memory_efficient=True), "features.transition1"),
    *accepted("torchvision squeezenet", partial(models.squeezenet1_1, num_classes=5), None, "features.7", sample=LARGE_IMAGE),
    *accepted("torchvision googlenet", partial(models.GoogLeNet, 5, aux_logits=False, init_weights=False), "inception4a", sample=LARGE_IMAGE),
    *accepted("torchvision inception_v3", partial(models.Inception3, 5, aux_logits=False, transform_input=True, init_weights=False), "Mixed_5b", sample=(3, 80, 80)),
    *accepted("torchvision mnasnet", partial(models.MNASNet, 0.35, 5), "layers.8"),
    *accepted("torchvision mobilenet_v2", partial(models.MobileNetV2, 5, 0.35, [[1, 16, 1, 1], [6, 24, 2, 2]]), None, "features.1"),
    *accepted("torchvision mobilenet_v3", mobilenet_v3, None, "features.1", "features", "avgpool"),
    *accepted("torchvision shufflenet_v2", partial(models.ShuffleNetV2, [1, 1, 1], [8, 16, 32, 64, 64], 5), None, "stage2", "conv5"),
    *accepted("torchvision regnet", partial(models.RegNet, regnet.BlockParams([16, 16], [16, 32], [8, 8], [2, 2], [1, 1], 0.25), 5), None, "trunk_output.block1"),
    *accepted("torchvision efficientnet", partial(efficientnet, MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(6, 5, 2, 16, 24, 2)), None, "features.1", "features.2"),
    *accepted("torchvision efficientnet_v2", partial(efficientnet, FusedMBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 1)), None, "features.1"),
    *accepted("torchvision convnext", partial(models.ConvNeXt, [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)], 0.3, num_classes=5), None, "features.1", "features", "classifier.0"),
    *accepted("torchvision vit", partial(models.VisionTransformer, 32, 8, 2, 2, 32, 64, 0.1, num_classes=5), None, "encoder.layers.encoder_layer_0", "encoder.ln", "conv_proj"),
    *accepted("torchvision swin", partial(swin, swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging), None, "features.1", "permute"),
    *accepted("torchvision swin_v2", partial(swin, swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2), None, "features.2"),
    *accepted("torchvision maxvit", partial(models.MaxVit, (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.2, num_classes=5), None, "blocks.0"),
    *accepted("torchvision deeplabv3", partial(small_segmentation, "deeplabv3"), "backbone.layer2", "backbone.layer3", "backbone", ["backbone.layer3", "backbone.layer4"]),
    *accepted("torchvision fcn", partial(small_segmentation, "fcn"), "backbone.layer3", "backbone", "classifier.3"),
    *accepted("torchvision lraspp", partial(segmentation, "lraspp_mobilenet_v3_large"), "backbone.4", "backbone", sample=LARGE_IMAGE),
    *accepted("torchvision resnet_fpn", fpn, "body.layer2", "body.layer3", "body.layer4"),
    *accepted("torchvision r3d", video, None, "layer2", sample=CLIP),
    *accepted("torchvision mc3", partial(video, convolution=video_resnet.Conv3DNoTemporal), "layer3", sample=CLIP),
    *accepted("torchvision r2plus1d", partial(video, convolution=video_resnet.Conv2Plus1D), "layer1", sample=CLIP),
    *accepted("torchvision mvit", mvit_small, None, "blocks.0", sample=CLIP),
]
