"""Refusals of a split: their reasons, and the lines that they name."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import batch_norm
from torch.utils.checkpoint import checkpoint

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import split

SHAPE = (3, 8, 8)
HERE = Path(__file__).name


class Net(nn.Module):
    """A network that changes its samples, features and results."""

    def __init__(self, before=None, after=None, around=None, middle=None):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.neck, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.before, self.after = before, after
        self.around, self.middle = around, middle

    def whole(self, x):
        x = self.body(x if self.before is None else self.before(x))
        if self.middle is not None:
            self.middle(x, self.training)
        x = self.neck(x.mean((2, 3)))
        return self.head(x if self.after is None else self.after(x))

    def forward(self, x):
        if self.around is None:
            return self.whole(x)
        return self.around(self, x)


def more(x, size):
    return x * 2 if size > 8 else x


def checked(x, size):
    assert size < 99
    return x * 1


def penalty(net, x):
    x = x.detach().requires_grad_()
    z = net.whole(x)
    if net.training:
        z = z + torch.autograd.grad(z.sum(), x, create_graph=True)[0].mean()
    return z


def own_backward(net, x):
    x = x.detach().requires_grad_()
    z = net.whole(x)
    if net.training and z.requires_grad:
        z.sum().backward(retain_graph=True)
        z = z + x.grad.mean()
    return z


def weight_penalty(net, x):
    z = net.whole(x)
    if net.training:
        weight = net.body[0].weight
        z = (
            z
            + torch.autograd.grad(z.sum(), weight, create_graph=True)[0].sum()
        )
    return z


def hooked(net, x):
    x = x.detach().requires_grad_()
    x.register_hook(lambda gradient: gradient)
    return net.whole(x)


def retained(x, training):
    if training:
        x.retain_grad()


def set_later(net, x):
    return net.whole(x.requires_grad_() if net.training else x)


COUNTS = "computes with the number of samples in a batch"
MIXES = "mix(es the)? samples.*features would depend on the batch"
NUMBER = "depends on the number of samples in a batch"
GRADIENTS = "gradients through the frozen part do not exist"


def counting(size):
    return lambda x: x * size(x)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"before": lambda x: x / x.shape[0]}, COUNTS),
        ({"before": lambda x: x / x.numel()}, COUNTS),
        ({"before": counting(lambda x: x.shape[0] // 2)}, COUNTS),
        ({"before": counting(lambda x: x.size(0) ** -0.5)}, COUNTS),
        ({"before": counting(lambda x: torch.tensor(x.shape[0]))}, COUNTS),
        ({"before": counting(lambda x: torch.full((1,), len(x)))}, NUMBER),
        ({"before": lambda x: x + torch.arange(len(x.flip(0)))[0]}, NUMBER),
        ({"before": counting(lambda x: min(x.shape[0], 8))}, COUNTS),
        ({"before": lambda x: x.sum() / x.shape[0] - x}, MIXES),
        ({"before": lambda x: x - x.mean(0)}, MIXES),
        ({"before": lambda x: x / x.var(0).add(1)}, MIXES),
        ({"before": lambda x: x.softmax(0)}, MIXES),
        ({"before": lambda x: batch_norm(x, None, None, training=True)}, HERE),
        ({"before": lambda x: x / len(x)}, NUMBER),
        ({"before": lambda x: more(x, x.shape[0])}, NUMBER),
        ({"before": lambda x: checked(x, x.shape[0])}, NUMBER),
        ({"before": lambda x: torch.stack([e * 2 for e in x])}, NUMBER),
        (
            {"before": lambda x: x.reshape(2, *SHAPE)},
            "runs on 2 samples, so that its code depends on their number",
        ),
        (
            {"before": lambda x: x.view(-1, 7)},
            r"samples that the split makes up .*torch.float32, shape "
            r"\(3, 8, 8\).*NamedArrays",
        ),
        ({"around": penalty}, GRADIENTS),
        ({"around": own_backward}, GRADIENTS),
        ({"around": weight_penalty}, GRADIENTS),
        ({"around": hooked}, GRADIENTS),
        ({"middle": retained}, GRADIENTS),
        ({"around": set_later}, GRADIENTS),
        (
            {
                "before": lambda x: torch.cond(
                    x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)
                )
            },
            "do not support operator cond",
        ),
        (
            {"before": lambda x: flex_attention(x, x, x)[:, :, :8]},
            "do not support operator flex_attention",
        ),
    ],
)
def test_reason_and_line_are_named(parts, message):
    line = rf"{HERE}, line \d+, in "
    with pytest.raises(FreezeError, match=message) as caught:
        split(Net(**parts), "body", sample_shape=SHAPE)
    assert caught.match(line)


def inference_net():
    with torch.inference_mode():
        return Net()


@pytest.mark.parametrize("is_one", [True, False])
def test_parameters_of_inference_mode_are_refused_by_name(is_one):
    net = inference_net()
    model, freeze = (net, "body") if is_one else ((net.body, net.head), None)
    with pytest.raises(FreezeError, match=r"0\.weight'.*inference_mode"):
        split(model, freeze, sample_shape=SHAPE)


@pytest.mark.parametrize("sharded", ["body", "head", "", "pair"])
def test_sharded_model_is_refused(sharded, tmp_path, monkeypatch):
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        net = Net()
        is_pair = sharded == "pair"
        fully_shard(
            net.get_submodule("head" if is_pair else sharded), mesh=mesh
        )
        model = (nn.Flatten(), net.head) if is_pair else net
        with pytest.raises(FreezeError, match=r"distributed.*split the model"):
            split(model, None if is_pair else "body", sample_shape=SHAPE)
    finally:
        distributed.destroy_process_group()


class Resnet(nn.Module):
    """A network by the names that people expect and mistype."""

    def __init__(self):
        super().__init__()
        self.stem, self.vit = nn.Conv2d(3, 4, 3), nn.Module()
        self.vit.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)])
        self.layer4, self.classifier = nn.Linear(6, 2), nn.Linear(2, 99)

    def forward(self, x):
        return self.classifier(self.layer4(self.vit.layers(self.stem(x))))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("layer 4", "layer4"),
        ("Layer4", "layer4"),
        ("backbone", "vit"),
        ("encoder", "vit"),
        ("vit.layer.11", "vit.layers.11"),
        ("layers.11", "vit.layers.11"),
        ("vit.layers.-1", "vit.layers.11"),
        ("vit.layers[-2]", "vit.layers.10"),
    ],
)
def test_unknown_name_suggests_what_is_meant(name, first):
    with pytest.raises(FreezeError, match=f"similar names: {first},"):
        split(Resnet(), name, sample_shape=SHAPE)


@pytest.mark.parametrize(
    "after",
    [
        lambda x: flex_attention(*[x.view(-1, 2, 1, 4)] * 3).flatten(1),
        lambda x: torch.cond(
            x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)
        ),
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    ],
)
def test_operators_of_functions_are_accepted_in_the_tail(after):
    model = Net(after=after).eval()
    parts = split(model, "body", sample_shape=SHAPE)
    samples = torch.randn(4, *SHAPE)
    with torch.no_grad():
        tail = parts.tail(parts.frozen.suffix(0)(samples))
        torch.testing.assert_close(tail, model(samples))


@pytest.mark.parametrize("quantised", ["body", "neck"])
def test_quantised_weights_are_accepted_and_can_move(quantised):
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential()
    model.body, model.neck = nn.Linear(16, 16), nn.Linear(16, 16)
    model.head = nn.Linear(16, 4)
    quantization.quantize_(
        model.get_submodule(quantised),
        quantization.Int8WeightOnlyConfig(),
    )
    model.eval().requires_grad_(False)
    model.head.requires_grad_(True)
    parts = split(model, "body", sample_shape=(16,))
    samples = torch.randn(4, 16)
    with torch.no_grad():
        tail = parts.tail.to("cpu")(parts.frozen.suffix(0)(samples))
        torch.testing.assert_close(tail, model(samples))


def test_hooks_that_the_first_forward_adds_are_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config.update({"intermediate_size": 32, "image_size": 8, "patch_size": 4})
    config.output_hidden_states = True
    model = transformers.ViTForImageClassification(config)
    with pytest.raises(FreezeError, match="output_hidden_states"):
        split(model, "vit.layers.0", sample_shape=SHAPE)
    config.output_hidden_states = False
    split(model, "vit.layers.0", sample_shape=SHAPE)
