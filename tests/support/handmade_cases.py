"""Cases of models that users write, and of ways of using a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import handmade_models as hm
from model_cases import IDS, ModelCase, accepted, refused

S = (3, 8, 8)
W = hm.WIDTH


def anneal(model: Any) -> None:
    model.temperature = 0.25


def replace_head(model: Any) -> None:
    torch.manual_seed(7)
    model.head = nn.Linear(W, 3)


def hook_neck(model: Any) -> None:
    model.neck.register_forward_hook(double)


def freeze_neck(model: Any) -> None:
    model.neck.requires_grad_(False)


def double(module: Any, args: Any, result: Any = None) -> Any:
    return 2 * result


def a(name: str, build: Any, *freezes: Any, **options: Any) -> list[ModelCase]:
    return accepted(f"own {name}", build, *freezes, **{"sample": S, **options})


def r(
    name: str,
    build: Any,
    freeze: Any,
    error: str,
    message: str,
    **options: Any,
) -> list[ModelCase]:
    return refused(
        f"own {name}",
        build,
        freeze,
        error,
        message,
        **{"sample": S, **options},
    )


LIVE = [
    *a("plain", hm.Net, "default stem body body.1 neck stem+body"),
    *a(
        "plain, function",
        hm.Net,
        lambda name, module: name.startswith(("stem", "body")),
    ),
    *a("residual in the root", hm.RootResidual, "stem body body.0"),
    *a("late skip", hm.LateSkip, "stem body neck default"),
    *a("skip from the input", hm.InputSkip, "neck"),
    *a("deep supervision", hm.DeepSupervision, "stem body stem+body"),
    *r(
        "auxiliary output in training",
        hm.AuxiliaryInTraining,
        "body",
        "cannot_freeze",
        "in training mode the tail also needs",
    ),
    *a("pyramid", hm.Pyramid, "stages.0 stages stages.1"),
    *a("last n layers", hm.LastLayers, "blocks.0 blocks.1 blocks"),
    *r(
        "norm of all layers",
        hm.NormedLayers,
        "blocks.1",
        "cannot_freeze",
        "used before and after",
    ),
    *r(
        "norm that runs three times",
        hm.NormedLayers,
        "norm",
        "cannot_freeze",
        "runs 3 times",
    ),
    *a("mix of all layers", hm.ScalarMix, "blocks.0 embed"),
    *a("U-Net", hm.UNet, "down deep bottom up"),
    *a(
        "tokens",
        hm.Tokens,
        "default blocks.0 blocks.1 blocks norm embed embed+token+position",
    ),
    *a("shared activation", hm.SharedActivation, "body neck"),
    *r(
        "shared trained layer",
        partial(hm.SharedLayer, True),
        "body",
        "cannot_freeze",
        "used before and after",
    ),
    *a("shared frozen layer", partial(hm.SharedLayer, False), "body"),
    *a("module list and dictionary", hm.Listed, "steps steps.1 stem default"),
    *a("dictionary of blocks", hm.Named, "parts.one parts parts.two.1"),
    *a("made in forward", hm.MadeInForward, "stem body default"),
    *a("reads the input", hm.ReadsInput, "stem body neck"),
]


def chain(*modules: Any) -> Any:
    return lambda: hm.Layers(nn.Sequential(*(m() for m in modules)))


LAYER_KINDS: dict[str, Any] = {
    "conv1d": chain(lambda: nn.Flatten(2), lambda: nn.Conv1d(W, W, 3)),
    "max_pool1d": chain(lambda: nn.Flatten(2), lambda: nn.MaxPool1d(2)),
    "group norm": chain(lambda: nn.GroupNorm(2, W)),
    "instance norm": chain(lambda: nn.InstanceNorm2d(W, affine=True)),
    "rms norm": chain(lambda: nn.RMSNorm(8)),
    "local response norm": chain(lambda: nn.LocalResponseNorm(3)),
    "transposed convolution": chain(lambda: nn.ConvTranspose2d(W, W, 2, 2)),
    "pixel shuffle": chain(
        lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2)
    ),
    "upsample": chain(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "adaptive max pool": chain(lambda: nn.AdaptiveMaxPool2d(2)),
    "lp pool": chain(lambda: nn.LPPool2d(2, 2)),
    "channel shuffle": chain(lambda: nn.ChannelShuffle(2)),
    "fold": chain(
        lambda: nn.Unfold(2, stride=2), lambda: nn.Fold((8, 8), 2, stride=2)
    ),
    "prelu, selu, hardshrink": chain(
        lambda: nn.PReLU(W), nn.SELU, nn.Hardshrink
    ),
    "celu, softsign, tanhshrink": chain(nn.CELU, nn.Softsign, nn.Tanhshrink),
    "threshold": chain(lambda: nn.Threshold(0.1, 0.0)),
    "reflection pad": chain(
        lambda: nn.ReflectionPad2d(1), lambda: nn.ZeroPad2d(1)
    ),
    "squeeze-excite": chain(hm.Squeeze),
    "alpha dropout": chain(nn.AlphaDropout, nn.FeatureAlphaDropout),
}
FUNCTIONS: dict[str, Any] = {
    "glu": lambda m, x: torch.cat([F.glu(x, 1)] * 2, 1),
    "masked_fill": lambda m, x: x.masked_fill(torch.arange(8) > 5, -1.0),
    "where": lambda m, x: torch.where(x > 0, x, 0.1 * x),
    "index by a buffer": lambda m, x: x[:, m.order],
    "einsum": lambda m, x: torch.einsum("bchw,bcvw->bchv", x, x),
    "top-k": lambda m, x: x.topk(4, 1).values.repeat(1, 2, 1, 1),
    "sort": lambda m, x: x.sort(1).values,
    "norm": lambda m, x: F.normalize(x, dim=1),
    "variance": lambda m, x: x - x.var(1, keepdim=True),
    "power of a tensor": lambda m, x: (
        x.clamp(min=0.1) ** x.abs().mean(1, True)
    ),
    "logsumexp": lambda m, x: x - x.logsumexp(1, keepdim=True),
    "outer product": lambda m, x: x * x.flatten(2).mean(2)[:, :, None, None],
    "round, sign, floor": lambda m, x: x.round() + x.sign() + x.floor(),
    "sin, cos": lambda m, x: x.sin() + x.cos(),
    "matrix product": lambda m, x: x @ x.mT,
    "gather": lambda m, x: x.gather(1, m.order.view(1, -1, 1, 1).expand_as(x)),
    "grid_sample": lambda m, x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "antialiased resize": lambda m, x: F.interpolate(
        x, (4, 4), mode="bilinear", antialias=True
    ),
    "vmap": lambda m, x: torch.vmap(lambda y: y * 2)(x),
    "attention": lambda m, x: F.scaled_dot_product_attention(
        x, x, x, is_causal=True
    ),
    "in-place slices": lambda m, x: hm.set_items(x.clone()),
}
UNHELD = {
    "max_pool1d",
    "instance norm",
    "rms norm",
    "local response norm",
    "pixel shuffle",
    "lp pool",
    "prelu, selu, hardshrink",
    "celu, softsign, tanhshrink",
    "threshold",
    "reflection pad",
    "glu",
    "masked_fill",
    "where",
    "index by a buffer",
    "top-k",
    "sort",
    "variance",
    "power of a tensor",
    "logsumexp",
    "round, sign, floor",
    "sin, cos",
    "gather",
    "grid_sample",
    "antialiased resize",
    "in-place slices",
}
"Cases with operators that packages may not hold."


def held(kind: str, name: str, build: Any, **options: Any) -> list[ModelCase]:
    """Returns a case that may end in ``unknown_op``."""
    if name in UNHELD:
        return unheld(f"{kind}: {name}", build, "layer", **options)
    return a(f"{kind}: {name}", build, "layer", **options)


def unheld(
    name: str, build: Any, freeze: Any, **options: Any
) -> list[ModelCase]:
    return r(
        name,
        build,
        freeze,
        "unknown_op",
        "operator aten\\..* in ",
        later=True,
        **options,
    )


KINDS = [
    *(
        case
        for name, build in LAYER_KINDS.items()
        for case in held("layer", name, build)
    ),
    *(
        case
        for name, function in FUNCTIONS.items()
        for case in held("function", name, partial(hm.Layers.of, function))
    ),
    *a(
        "layer: encoder",
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
            ),
            nn.Linear(8, 2),
        ),
        "1 0",
        sample=(6, 4),
    ),
    *a(
        "layer: unflatten",
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.Unflatten(1, (2, 4)),
            nn.Softmax(-1),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        "2",
        sample=(4,),
    ),
    *unheld(
        "layer: embedding bag",
        lambda: nn.Sequential(
            nn.EmbeddingBag(64, 8), nn.ReLU(), nn.Linear(8, 2)
        ),
        "0",
        sample=IDS,
    ),
    *unheld("GeM pooling", hm.GeMNet, "pool"),
    *unheld("attention pooling", hm.QueryNet, "pool"),
    *unheld("attention pooling", hm.QueryNet, "default"),
    *unheld("frozen LSTM", hm.Recurrent, "memory"),
    *unheld("items in place", partial(hm.InPlace, hm.set_items), "body"),
    *a("GeM pooling", hm.GeMNet, "body neck"),
    *a("attention pooling", hm.QueryNet, "body"),
    *a("squeeze-excite", hm.SqueezeNet, "body excite"),
    *a("FiLM", hm.FiLM, "body condition neck"),
    *a("LSTM tail", hm.Recurrent, "body"),
    *a("GRU tail", partial(hm.Recurrent, nn.GRU), "body"),
]
RESULTS = [
    *a(
        "dictionary",
        partial(hm.Results, lambda x, y: {"a": x, "b": y}),
        "body",
    ),
    *a("dataclass", partial(hm.Results, hm.Output), "body neck"),
    *a("named tuple", partial(hm.Results, hm.Pair), "body"),
    *a(
        "list in a tuple",
        partial(hm.Results, lambda x, y: (x, [y, {"y": y}])),
        "body",
    ),
    *a(
        "encoder of a tuple",
        partial(hm.Encoded, lambda x, y: (x, y), lambda o: (o[0], None)),
        "encoder encoder.stem",
    ),
    *a(
        "encoder of two tensors",
        partial(hm.Encoded, lambda x, y: (x, y), lambda o: o),
        "encoder",
    ),
    *a(
        "encoder of a dictionary",
        partial(
            hm.Encoded,
            lambda x, y: {"x": x, "y": y},
            lambda o: (o["x"], o["y"]),
        ),
        "encoder",
    ),
    *a(
        "encoder of a dataclass",
        partial(hm.Encoded, hm.Output, lambda o: (o.logits, None)),
        "encoder encoder.body",
    ),
    *a(
        "encoder of a dataclass, two used",
        partial(hm.Encoded, hm.Output, lambda o: (o.logits, o.hidden)),
        "encoder",
    ),
    *a("keyword arguments", hm.Keywords, "stem body neck"),
    *a("addition in place", partial(hm.InPlace, hm.add_in_place), "stem body"),
    *a("items in place", partial(hm.InPlace, hm.set_items), "stem"),
    *a("relu in place", partial(hm.InPlace, hm.relu_in_place), "stem body"),
    *a("copy into", partial(hm.InPlace, hm.copy_into), "stem body"),
]
PARAMETERS = [
    *a("parametrisation", hm.doubled, "stem body neck"),
    *a("weight norm", hm.weight_norm, "stem body"),
    *a("old weight norm", hm.old_weight_norm, "body"),
    *a("spectral norm", hm.spectral_norm, "body"),
    *a("old spectral norm", hm.old_spectral_norm, "body"),
    *a("orthogonal", hm.orthogonal, "body"),
    *r(
        "tied embedding",
        hm.Tied,
        "layers.0",
        "cannot_freeze",
        "used before and after",
        sample=IDS,
    ),
    *a(
        "tied frozen embedding",
        partial(hm.Tied, False),
        "layers.0",
        sample=IDS,
    ),
    *a("tied in the tail", hm.TiedTail, "body"),
    *a("LoRA after", partial(hm.lora, [1, 2]), "auto blocks.0"),
    *r(
        "LoRA before",
        partial(hm.lora, [0, 1, 2]),
        "blocks.1",
        "cannot_freeze",
        "trainable parameters",
    ),
    *a("LoRA everywhere", partial(hm.lora, [0, 1, 2]), "auto"),
    *a("prompts after", partial(hm.Prompted, 2), "auto blocks.1"),
    *r(
        "prompts before",
        partial(hm.Prompted, 0),
        "blocks.1",
        "cannot_freeze",
        "trainable",
    ),
    *r(
        "nothing to train",
        lambda: hm.Net().requires_grad_(False),
        "auto",
        "cannot_freeze",
        "nothing to train",
    ),
    *a(
        "partly frozen by the user",
        lambda: freeze_first(hm.Net()),
        "auto stem",
    ),
    *a("frozen batch norms", hm.FrozenNorms, "body stem"),
    *a("frozen batch norms inside", hm.InnerFrozenNorms, "net.body"),
]


def freeze_first(model: nn.Module) -> nn.Module:
    model.stem.requires_grad_(False)
    return model


STATE = [
    *a("teacher without gradients", hm.Teacher, "body stem"),
    *a("EMA branch", hm.Ema, "body"),
    *a("noise of torch", partial(hm.Gated, hm.torch_noise), "body"),
    *a("noise of Python", partial(hm.Gated, hm.python_noise), "body"),
    *a("noise of NumPy", partial(hm.Gated, hm.numpy_noise), "body"),
    *a("noise like a tensor", partial(hm.Gated, hm.like_noise), "body"),
    *a("Gumbel", partial(hm.Gated, hm.gumbel), "body"),
    *a("LayerDrop", hm.LayerDrop, "embed"),
    *a("stochastic depth", hm.StochasticDepth, "body"),
    *a("annealed attribute", hm.Annealed, "body stem", change=anneal),
    *a("head replaced later", hm.Net, "body", change=replace_head),
    *a("hook added later", hm.Net, "body", change=hook_neck),
    *a("neck frozen later", hm.Net, "body", change=freeze_neck),
    *a("counters", hm.Counted, "body neck"),
    *a("caches", hm.Cached, "body stem"),
    *a("stashed tensor", hm.Stashed, "stem body"),
    *a("own running mean", hm.Moving, "body neck"),
    *a("autocast tail with an island", hm.Island, "body"),
    *r(
        "autocast inside forward",
        hm.AutocastInside,
        "body",
        "unknown_op",
        "",
        later=True,
    ),
    *a("contrastive tail", hm.Contrastive, "body"),
    *a("experts in the tail", hm.Experts, "body"),
    *a("autograd function in the tail", partial(hm.Custom, False), "body"),
    *a("frozen autograd function", partial(hm.Custom, True), "body"),
    *a("NumPy in the tail", partial(hm.Numpy, False), "body"),
    *r(
        "frozen NumPy",
        partial(hm.Numpy, True),
        "body",
        "cannot_trace",
        "numpy",
    ),
    *a("Fourier transform in the tail", hm.Fourier, "body"),
    *r("frozen Fourier transform", hm.Fourier, "neck", "unknown_op", "fft"),
    *r(
        "branch on values before",
        hm.DependsBefore,
        "body",
        "cannot_trace",
        "control flow depends on values.*|handmade_models.py, line \\d+",
    ),
    *a("branch on values after", hm.DependsAfter, "body"),
    *r(
        "mean over the batch",
        hm.AcrossBatch,
        "body",
        "cannot_freeze",
        "would mix samples.*freeze before it",
    ),
    *r(
        "cumulative sum",
        partial(hm.Layers.of, lambda m, x: x.cumsum(-1)),
        "layer",
        "cannot_freeze",
        "cumulative sums of torch.float32 are not supported",
    ),
]


def shift(module: Any, args: Any) -> Any:
    return (args[0] + 1, *args[1:])


def keep(module: Any, args: Any, result: Any) -> None:
    module.seen = result.detach()


def scale_gradient(module: Any, given: Any, gradient: Any) -> Any:
    return (gradient[0] * 2,)


def hook(path: str, kind: str, function: Any) -> Any:

    def build() -> nn.Module:
        model = hm.Net()
        getattr(model.get_submodule(path), f"register_{kind}")(function)
        return model

    return build


def replaced(replace: Any) -> Any:
    return lambda: hm.replaced(replace)


def wrapped(model: Any) -> Any:
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return {"logits": original(*args, **kwargs)}

    return forward


def flagged() -> nn.Module:
    model = hm.Flagged()
    model.forward = partial(model.forward, scale=3.0, tuple_result=True)
    return model


def autocast_forward() -> nn.Module:
    from accelerate.utils import convert_outputs_to_fp32

    model = hm.Net()
    context = torch.autocast("cpu", torch.bfloat16)
    model.forward = convert_outputs_to_fp32(context(model.forward))
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

    import transformers_cases as tc

    config = transformers.ViTConfig(**tc.VISION)
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
        model = hm.Net()
        setattr(
            model,
            name,
            torch.compile(model.get_submodule(name), backend="eager"),
        )
        return model

    return build


def scripted(name: str) -> Any:

    def build() -> nn.Module:
        model = hm.Net().eval()
        if not name:
            return torch.jit.trace(model, torch.randn(2, *S))
        setattr(model, name, torch.jit.script(model.get_submodule(name)))
        return model

    return build


def exported() -> nn.Module:
    return torch.export.export(hm.Net().eval(), (torch.randn(2, *S),)).module()


def offloaded() -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(hm.Net(), torch.device("cpu"))


def peft(*layers_to_transform: int) -> nn.Module:
    import transformers
    from peft import LoraConfig, get_peft_model

    import transformers_cases as tc

    config = transformers.ViTConfig(**tc.VISION, num_labels=5)
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


def lazy() -> nn.Module:
    model = hm.Net()
    model.head = nn.LazyLinear(5)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return hm.Net()


def wrapped_chain() -> nn.Module:
    return nn.Sequential(
        hm.Net(), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    )


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
        "body neck",
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
    *r(
        "forward in autocast",
        autocast_forward,
        "body",
        "unknown_op",
        "",
        later=True,
    ),
    *a("checkpointed", hm.Checkpointed, "embed blocks.0"),
    *a(
        "checkpointed transformers",
        checkpointed_transformers,
        "vit.layers.0",
        sample=(3, 32, 32),
    ),
    *a(
        "checkpointed timm",
        checkpointed_vit,
        "blocks.0 norm",
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
    *r("lazy layer", lazy, "body", "cannot_freeze", "no shape yet"),
    *r("on the meta device", on_meta, "body", "cannot_freeze", "no data"),
    *r(
        "data parallel",
        lambda: nn.DataParallel(hm.Net()),
        "body",
        "cannot_freeze",
        "give its \\.module",
    ),
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
        "transformer.resblocks.0",
        sample=(3, 32, 32),
    ),
    *unheld(
        "open_clip pooled ViT",
        open_clip_pooled,
        "attn_pool",
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
        "module that never runs",
        hm.NeverRuns,
        "unused",
        "unknown_freeze",
        "is never called",
    ),
    *r("unknown name", hm.Net, "bodi", "unknown_freeze", "body"),
    *r(
        "parameter's name",
        hm.Net,
        "stem.weight",
        "unknown_freeze",
        "belongs to 'stem'",
    ),
    *r(
        "module that runs twice",
        hm.Twice,
        "body",
        "cannot_freeze",
        "runs 2 times",
    ),
    *r(
        "forward that fails",
        hm.Fails,
        "body",
        "cannot_trace",
        "\\(3, 8, 8\\).*images must have 32 pixels",
    ),
    *r(
        "two inputs",
        hm.TwoInputs,
        "body",
        "cannot_trace",
        "takes 2 tensors",
        later=True,
    ),
    *r(
        "bfloat16 model",
        lambda: hm.Net().bfloat16(),
        "body",
        "cannot_trace",
        "",
        later=True,
    ),
    *r(
        "float16 model",
        lambda: hm.Net().half(),
        "body",
        "cannot_trace",
        "",
        later=True,
    ),
    *r(
        "list without a module between",
        hm.Net,
        "stem+neck",
        "cannot_freeze",
        "'body'",
    ),
    *r("empty list", hm.Net, [], "unknown_freeze", "at least one name"),
]
HANDMADE_CASES: list[ModelCase] = [
    *LIVE,
    *KINDS,
    *RESULTS,
    *PARAMETERS,
    *STATE,
    *AROUND,
]
