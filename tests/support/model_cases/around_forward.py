"""Cases of hooks, wrappers and frameworks around a forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from model_cases.case import S, a, r
from model_cases.nets import Net, Tokens
from model_cases.tail_state import double


def replaced(replace: Any) -> Any:
    """Returns a builder of a model whose instance has another forward."""

    def build() -> nn.Module:
        model = Net()
        model.forward = replace(model)
        return model

    return build


class Flagged(Net):
    def forward(self, x, scale=1.0, tuple_result=False):
        out = self.logits(self.features(x)) * scale
        return (out,) if tuple_result else out


class Checkpointed(Tokens):
    def forward(self, x):
        x = self.embedded(x)
        for layer in self.blocks:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x).mean(1))


class Twice(Net):
    def forward(self, x):
        return self.logits(self.body(self.body(self.stem(x))))


class Fails(Net):
    def forward(self, x):
        if x.shape[-1] != 32:
            raise ValueError("images must have 32 pixels")
        return self.logits(self.features(x))


def shift(module: Any, args: Any) -> Any:
    return (args[0] + 1, *args[1:])


def keep(module: Any, args: Any, result: Any) -> None:
    module.seen = result.detach()


def scale_gradient(module: Any, given: Any, gradient: Any) -> Any:
    return (gradient[0] * 2,)


def hook(path: str, kind: str, function: Any) -> Any:

    def build() -> nn.Module:
        model = Net()
        getattr(model.get_submodule(path), f"register_{kind}")(function)
        return model

    return build


def wrapped(model: Any) -> Any:
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return {"logits": original(*args, **kwargs)}

    return forward


def flagged() -> nn.Module:
    model = Flagged()
    model.forward = partial(model.forward, scale=3.0, tuple_result=True)
    return model


def checkpointed_vit() -> nn.Module:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
        num_classes=5,
    )
    model.set_grad_checkpointing()
    return model


def checkpointed_transformers() -> nn.Module:
    import transformers

    from model_cases.library_models import VISION

    config = transformers.ViTConfig(**VISION)
    model = transformers.ViTForImageClassification(config)
    model.gradient_checkpointing_enable()
    return model


def features_only() -> nn.Module:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
        num_classes=5,
    )
    model.forward = model.forward_features
    return model


def compiled(name: str) -> Any:

    def build() -> nn.Module:
        model = Net()
        setattr(
            model,
            name,
            torch.compile(model.get_submodule(name), backend="eager"),
        )
        return model

    return build


def scripted(name: str) -> Any:

    def build() -> nn.Module:
        model = Net().eval()
        if not name:
            return torch.jit.trace(model, torch.randn(2, *S))
        setattr(model, name, torch.jit.script(model.get_submodule(name)))
        return model

    return build


def exported() -> nn.Module:
    return torch.export.export(Net().eval(), (torch.randn(2, *S),)).module()


def offloaded() -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(Net(), torch.device("cpu"))


def peft(*layers_to_transform: int) -> nn.Module:
    import transformers
    from peft import LoraConfig, get_peft_model

    from model_cases.library_models import VISION

    config = transformers.ViTConfig(**VISION, num_labels=5)
    return get_peft_model(
        transformers.ViTForImageClassification(config),
        LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["classifier"],
            layers_to_transform=list(layers_to_transform),
            init_lora_weights=False,
            lora_dropout=0.1,
        ),
    )


def open_clip_vit() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(32, 8, 32, 2, 2, 2.0, output_dim=16)


def open_clip_pooled() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(
        32,
        8,
        32,
        2,
        2,
        2.0,
        attentional_pool=True,
        attn_pooler_queries=4,
        attn_pooler_heads=2,
        output_dim=16,
    )


def open_clip_resnet() -> nn.Module:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet((1, 1, 1, 1), 16, 2, 32, 8)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def wrapped_chain() -> nn.Module:
    return nn.Sequential(Net(), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


AROUND = [
    *a("chain of modules", wrapped_chain, "default 0 0.body 2"),
    *a(
        "forward hook on the root",
        hook("", "forward_hook", double),
        "body neck",
    ),
    *a("pre-hook on the root", hook("", "forward_pre_hook", shift), "body"),
    *a(
        "forward hook on a frozen module",
        hook("stem", "forward_hook", double),
        "body stem",
    ),
    *a(
        "pre-hook on a frozen module",
        hook("body", "forward_pre_hook", shift),
        "stem body",
    ),
    *a(
        "forward hook on the freeze point",
        hook("body", "forward_hook", double),
        "body neck",
    ),
    *a(
        "hook that keeps results",
        hook("neck", "forward_hook", keep),
        "body",
    ),
    *r(
        "hook that keeps results, frozen",
        hook("neck", "forward_hook", keep),
        "neck",
        "cannot_freeze",
        "'neck' computes is kept after the forward",
    ),
    *a("hook in the tail", hook("neck", "forward_hook", double), "body"),
    *a(
        "backward hook in the tail",
        hook("neck.1", "full_backward_hook", scale_gradient),
        "body",
    ),
    *a("another forward", replaced(lambda m: m.features), "stem body.0"),
    *a(
        "a function as forward",
        replaced(lambda m: lambda x: m.logits(m.features(2 * x))),
        "body",
    ),
    *a("wrapped forward", replaced(wrapped), "body"),
    *a("partial forward", flagged, "body neck"),
    *a(
        "forward_features of timm",
        features_only,
        "blocks.0",
        sample=(3, 32, 32),
    ),
    *a("checkpointed", Checkpointed, "embed blocks.0"),
    *a(
        "checkpointed transformers",
        checkpointed_transformers,
        "vit.layers.0",
        sample=(3, 32, 32),
    ),
    *a("checkpointed timm", checkpointed_vit, "norm", sample=(3, 32, 32)),
    *r(
        "checkpointed timm",
        checkpointed_vit,
        "blocks.0",
        "cannot_freeze",
        "checkpointing",
        later=True,
        sample=(3, 32, 32),
    ),
    *a("compiled frozen module", compiled("body"), "body neck"),
    *a("compiled tail module", compiled("neck"), "body"),
    *r(
        "traced by jit",
        scripted(""),
        "body",
        "cannot_freeze",
        "result of torch.jit or torch.export",
    ),
    *r(
        "scripted frozen module",
        scripted("body"),
        "body",
        "unknown_freeze",
        "compiled by torch.jit",
    ),
    *a("scripted tail module", scripted("neck"), "body"),
    *r(
        "exported",
        exported,
        "body",
        "cannot_freeze",
        "result of torch.jit or torch.export",
    ),
    *r(
        "offloaded to the CPU",
        offloaded,
        "body",
        "cannot_freeze",
        "cpu_offload",
    ),
    *r("on the meta device", on_meta, "body", "cannot_freeze", "no data"),
    *a(
        "PEFT in the last block",
        partial(peft, 1),
        "auto base_model.model.vit.layers.0",
        sample=(3, 32, 32),
    ),
    *a(
        "open_clip ViT",
        open_clip_vit,
        "transformer.resblocks.0 transformer ln_post",
        sample=(3, 32, 32),
    ),
    *a(
        "open_clip pooled ViT",
        open_clip_pooled,
        "transformer.resblocks.0 attn_pool",
        sample=(3, 32, 32),
    ),
    *a(
        "open_clip ResNet",
        open_clip_resnet,
        "layer2 layer4",
        sample=(3, 32, 32),
    ),
    *r(
        "PEFT before",
        partial(peft, 0, 1),
        "base_model.model.vit.layers.0",
        "cannot_freeze",
        "trainable parameters",
        sample=(3, 32, 32),
    ),
    *r(
        "module that runs twice",
        Twice,
        "body",
        "cannot_freeze",
        "runs 2 times",
    ),
    *r(
        "forward that fails",
        Fails,
        "body",
        "cannot_trace",
        "\\(3, 8, 8\\).*images must have 32 pixels",
    ),
]
