"""Export of modules to programs: in-place and refused operators."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hapi_protocol.errors import FreezeError, HapiError
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.functionalize import _InPlaceRewriter
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes
from networks import small_network, small_transform
from reference_models import randomise_statistics

SHAPE = (4, 8, 8)


class Frozen(nn.Module):
    """Applies a function that may overwrite its argument."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.function = function

    def forward(self, x):
        return self.function(self.norm(self.conv(x)))


def build(function):
    torch.manual_seed(0)
    model = Frozen(function)
    randomise_statistics(model)
    return model.eval()


def loaded(function):
    model = build(function)
    frozen = split((model, nn.Identity()), sample_shape=SHAPE).frozen
    return model, load_package(package_bytes(frozen))


def weight(*shape):
    return torch.linspace(-1, 1, math.prod(shape)).view(shape)


def read_by_a_view(x):
    flat = x.flatten(1)
    x.relu_()
    return flat * 2


def read_by_a_part(x):
    first = x[:, :2]
    x.add_(1)
    return first.sigmoid()


def read_after_a_part_is_written(x):
    x[:, 0].relu_()
    return x * 2


def read_through_dropout_and_contiguous(x):
    dropped, same = F.dropout(x, 0.5, training=False), x.contiguous()
    x.mul_(2)
    return dropped + same


def read_by_its_source(x):
    y = x * 2
    torch.relu_(y)
    return y + x


def of_another_dtype(x):
    y = x + 0
    y += torch.ones(8, dtype=torch.int64)
    return y.flatten(1)


def written_weight(x):
    ones = torch.ones(8)
    once = x + ones
    ones.add_(1)
    return once + ones


def residual(x):
    y = F.hardswish(x, inplace=True)
    z = F.relu(y * 3, inplace=True)
    z += y
    return F.dropout(F.silu(z, inplace=True), training=False, inplace=True)


def copied(x):
    turned = x.transpose(1, 2).contiguous().contiguous()
    turned.add_(1)
    return turned.permute(0, 2, 3, 1).flatten(1).unflatten(1, (4, -1))


def written_view(x):
    return x.flatten(1).relu_() * 2


def written_copy(x):
    copy = x.transpose(1, 2).reshape(-1, 8, 32)
    return copy.relu_() + x.reshape(-1, 8, 32)


def contracted(x):
    scores = torch.einsum("bchw,bcHw->bchH", x, x * 2)
    turned = torch.einsum("bchw->bhwc", scores).reshape(-1, 8, 8, 4)
    return torch.einsum("bhwc,cd->bhwd", turned, weight(4, 3)).flatten(1)


class ComputedFromWeights(nn.Module):
    """Packages hold none of its operators, which read weights only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))

    def forward(self, x):
        table = self.table
        standard = F.batch_norm(table[None], None, None, training=True)
        joined = torch.einsum("ij,jk->ik", table, torch.special.i0(table))
        return x * (standard + joined).flatten()[:, None, None]


def rearranged(x):
    means = x.mean(1, keepdim=True).expand_as(x).mT
    turned = means.movedim(1, 3).movedim((1, 3), (3, 1)).swapaxes(-2, -1)
    return turned.view_as(x) + x.narrow(2, 1, 1).broadcast_to(x.shape)


REWRITTEN = [
    *(residual, copied, read_by_its_source),
    *(written_weight, contracted, ComputedFromWeights(), rearranged),
    lambda x: torch.addcmul(x, x.sin(), weight(8), value=2),
    lambda x: x.float() + x.half().type_as(x),
    lambda x: x.flip(1).transpose(2, 3).reshape_as(x) * 2,
    lambda x: x + torch.stack(torch.meshgrid(*[torch.arange(8.0)] * 2)).sum(0),
]
RETRACED = [
    read_by_a_view,
    read_by_a_part,
    written_view,
    written_copy,
    of_another_dtype,
    lambda x: x.copy_(x.flip(1)) + 1,
    lambda x: x.to(memory_format=torch.channels_last) + 1,
    lambda x: torch.einsum("bchw,bcHw->bchH", x, x).relu_(),
]


def positions(x):
    """Position encodings that are rebuilt for each batch."""
    mask = torch.zeros(x.shape[0], 8, 8, dtype=torch.bool)
    rows = (~mask).cumsum(1, dtype=torch.float32)
    return x + torch.stack([rows.sin(), rows.cos()], 1).repeat(1, 2, 1, 1)


def overwritten(x):
    x = x * 2
    x[:, :, 0:, 0:] += x.mean(1, keepdim=True)
    x[:, :, 2:5, 3:] *= 3
    return x


def attended(x):
    """Two heads share keys and values; a float mask depends on samples."""
    mask = (1 - (x[:, :1, :1] > -1).to(torch.int64)) * torch.finfo().min
    shared = F.scaled_dot_product_attention(
        x, x[:, :2], x[:, :2], mask, enable_gqa=True
    )
    hidden = mask.to(torch.bool).expand(-1, 4, 8, -1)
    scores = (x @ x.mT).masked_fill(hidden, float("-inf"))
    return shared + scores.softmax(-1) @ x


def compared(x):
    mean = x.mean(1, keepdim=True)
    first = ((x > 0) & ~(x <= mean)) | (x < -1) | (x >= mean + 1)
    second = (x == mean) ^ (x.ge(1) & (x != mean))
    return torch.where(first, x, 0.5) + torch.where(second, 1.0, 2.0)


def filled(x):
    full = torch.full((x.shape[0], 4, 8, 8), 3.0)
    return full.masked_fill(x > 0, 1.0) + torch.where(x.lt(0), -1, x)


def pooled_volumes(x):
    x = F.conv3d(x.unsqueeze(1), weight(2, 1, 3, 2, 1), padding="same")
    x = F.max_pool3d(x, (2, 3, 1), (1, 2, 1), (1, 1, 0))
    return F.adaptive_avg_pool3d(F.avg_pool3d(x, 2), (1, 2, 3))


def pooled_lines(x):
    x = F.conv1d(x.flatten(2), weight(4, 4, 2), padding="same")
    return F.max_pool1d(x, 3, 2, 1)


def normalised(x):
    running = (torch.ones(4), torch.full((4,), 2.0))
    return (
        F.rms_norm(x, (8, 8), weight(8, 8), 1e-6)
        + F.instance_norm(x, weight=weight(4), bias=weight(4))
        + F.instance_norm(x, *running, use_input_stats=False)
    )


def products(x):
    images = x.flatten(0, 1)
    added = torch.baddbmm(images, images, images, beta=0.5, alpha=2)
    flat = torch.mm(x.flatten(1), weight(256, 8))
    flat = torch.addmm(weight(8), flat, weight(8, 8))
    flat = torch.addmm(weight(1, 8), flat, weight(8, 8), beta=0, alpha=3)
    return added.view(-1, 4, 8, 8).sum((1, 2)) + flat


def selected(x):
    order = torch.tensor([[2, 0], [-1, 2]])
    return x[:, order].flatten(1, 2)[:, :, torch.arange(8)][..., [7, -8, 3]]


def selected_per_sample(x):
    samples = torch.arange(x.shape[0])
    best = x.mean((2, 3)).argmax(1)
    rows = x.amax(3).argmax(2).to(torch.int32)
    largest = x.transpose(1, 2)[samples[:, None], rows].mean((1, 2))
    some = x[samples[:, None], torch.tensor([[3, 1, 0]])].sum(1)
    return x[samples, best] + largest[:, None] + some


def learned_queries(x):
    """Most CPUs round them differently in batches of different sizes."""
    latent = weight(1, 1, 256).sin().expand(x.shape[0], -1, -1)
    queries = F.linear(latent, weight(64, 256)).view(-1, 8, 8).split(4, 1)
    return x @ (queries[0] * queries[1]).mT[:, None]


@pytest.mark.parametrize(
    "function",
    [
        *REWRITTEN,
        *RETRACED,
        read_through_dropout_and_contiguous,
        *(positions, overwritten),
        *(attended, compared, filled, pooled_volumes, pooled_lines),
        *(normalised, products, selected, selected_per_sample),
        learned_queries,
        lambda x: F.glu(x, 1),
        lambda x: F.conv2d(x, weight(4, 4, 2, 4), padding="same"),
        lambda x: F.conv2d(x, weight(4, 4, 2, 4), padding="valid"),
        lambda x: x.abs().pow(torch.tensor([2.5])) ** 1.5,
        lambda x: x.erf() + x.sin() * x.cos() - x.floor() / x.reciprocal(),
        lambda x: x.max(2)[0] - x.min(-1).values,
        lambda x: x.logsumexp(1),
        lambda x: x.var((2, 3)) + x.std(-1, keepdim=True).std((2, 3)),
        lambda x: x.var((1, 2), correction=0),
        lambda x: x.unfold(2, 3, 2).relu() + x.unfold(2, 3, 2),
        # Two windows share an entry, and there are as many as before.
        lambda x: (x * 2).unfold(3, 4, 3).sin(),
        lambda x: x.index_select(3, torch.tensor([7, 0, 0])),
        lambda x: torch.cat([torch.empty(0), x], 1),
        lambda x: F.pad(x, (0, 1, 2, 0, 0, 0, 0, 0)),
        lambda x: F.pad(x, (0, 1, 2, 0), mode="reflect"),
        lambda x: F.pad(x.flatten(1, 2), (3, 0), mode="reflect"),
        lambda x: torch.multiply(x, 2) - torch.divide(x, x.exp()),
        lambda x: torch.einsum("bchw,cd->bdhw", x, torch.ones(4, 3)),
        lambda x: x.square(),
        lambda x: x.type_as(torch.ones(1)),
        lambda x: torch.addcmul(torch.ones(8), torch.full((8,), 2.0), x),
        lambda x: x + torch.arange(8.0).repeat(x.shape[0], 4, 8, 1),
        lambda x: x + x.new_ones(1, 4, 1, 1).repeat(x.shape[0], 1, 1, 1),
        lambda x: x.repeat(1, 3, 1, 1),
        lambda x: x.mean((1, 2), keepdim=True).repeat(1, 2, 5, 1),
        lambda x: x.repeat_interleave(3, dim=0).view(-1, 12, 8, 8),
        lambda x: F.adaptive_avg_pool1d(x.flatten(1, 2), 3),
        lambda x: F.avg_pool1d(x.flatten(1, 2), 2),
        lambda x: F.adaptive_max_pool2d(x, (2, 4)),
        lambda x: F.channel_shuffle(x, 2),
        lambda x: F.interpolate(x, (11, 5), mode="bicubic"),
        lambda x: F.unfold(x, (3, 2), padding=1, stride=2),
        lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1),
        lambda x: x + torch.zeros_like(x).cumsum(1),
        lambda x: x + torch.ones(x.shape[0] * 4, 8, 8).view(-1, 4, 8, 8),
    ],
)
def test_package_computes_the_same_as_the_module(function):
    assert_same_features(*loaded(function), batches=(1, 2, 5))


def assert_same_features(model, region, batches=(3,)):
    for batch in batches:
        samples = torch.randn(batch, *SHAPE)
        with torch.inference_mode():
            found = region.prefix(region.num_cuts)(samples)
            torch.testing.assert_close(found, model(samples))


def test_batch_constant_is_stored_once():
    _, region = loaded(positions)
    operators = {call.op for call in region.program.calls}
    assert not operators & {"aten.cumsum.default", "aten.sin.default"}
    assert region.parameter_bytes < 4 * (20 + 16 + 2 * 64 * 4)


def test_views_of_one_weight_are_separate_weights():
    table = torch.randn(2, 8)
    parts = loaded(lambda x: x * table[0] + table[1] * table.sum(0))
    assert_same_features(*parts)


def numbered(x):
    return x + torch.arange(x.shape[0]).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (numbered, "aten.arange.default"),
        (lambda x: x + x.max(1)[1][:, None], "aten.max.dim"),
        (lambda x: x[torch.arange(x.shape[0]).flip(0)], "aten.index.Tensor"),
        (lambda x: x[x.mean((1, 2, 3)).long()], "aten.index.Tensor"),
        (lambda x: (x.long() & x.long()) * 1.0, "and"),
        (lambda x: x.var(0), "aten.var"),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), "aten.pad"),
        (lambda x: x + torch.rand(x.shape[0], 1, 1, 1), "aten.rand.default"),
        (lambda x: x + torch.rand(8), "aten.rand.default"),
        (lambda x: F.adaptive_max_pool2d(x, 3), "aten.adaptive_max_pool2d"),
        (
            lambda x: F.max_pool2d_with_indices(x, 2)[1] * 1.0,
            "aten.max_pool2d_with_indices",
        ),
        (lambda x: x.repeat(1, 2, 2, 1), "aten.repeat.default"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
    ],
)
def test_unsupported_operator_is_named(function, operator):
    with pytest.raises(FreezeError, match=operator) as caught:
        loaded(function)
    assert caught.value.code == "unknown_op"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.long().cumsum(0) * 1.0, "would mix samples"),
        (lambda x: x.cumsum(1), "no deterministic kernel"),
        (lambda x: x.gather(1, x.sigmoid().long()), "cannot be checked"),
        (
            lambda x: x[torch.arange(x.shape[0]), x.mean((1, 2, 3)).long()],
            "be checked",
        ),
    ],
)
def test_call_that_no_package_may_make_is_refused(function, message):
    with pytest.raises(HapiError, match=message):
        loaded(function)


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_inactive_dropout_is_removed(p, training):
    parts = loaded(lambda x: F.dropout(x, p, training=training))
    assert_same_features(*parts)


def masked(x):
    """Differs only in later samples."""
    groups = torch.arange(x.shape[0]) // 3
    return x + groups.reshape(-1, 1, 1, 1).float()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: x / x.shape[0],
        masked,
    ],
    ids=["random attention", "divided by the batch", "masked"],
)
def test_calls_that_packages_cannot_hold_are_refused(function):
    with pytest.raises(FreezeError) as caught:
        loaded(function)
    assert caught.value.code in ("unknown_op", "cannot_trace")


def test_usual_model_needs_no_retrace(monkeypatch):
    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    split(small_network(), "pool", transform=small_transform())


@pytest.mark.parametrize("function", REWRITTEN)
def test_rewritten_package_equals_the_retraced_one(function, monkeypatch):
    modules = (build(function), nn.Identity())
    with monkeypatch.context() as patch:
        patch.delattr(torch.export.ExportedProgram, "run_decompositions")
        rewritten = split(modules, sample_shape=SHAPE).frozen
    monkeypatch.setattr(_InPlaceRewriter, "is_sound", lambda _: False)
    retraced = split(modules, sample_shape=SHAPE).frozen
    assert rewritten.program == retraced.program
    assert rewritten.names == retraced.names
    assert rewritten.digest == retraced.digest


@pytest.mark.parametrize("function", [*RETRACED, read_after_a_part_is_written])
def test_observable_write_needs_a_retrace(function):
    batch = torch.export.Dim("batch", min=1, max=65536)
    samples = (torch.randn(2, *SHAPE),)
    exported = torch.export.export(
        build(function), samples, dynamic_shapes=({0: batch},)
    )
    assert not _InPlaceRewriter(exported).is_sound()


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(256, 2)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x):
        return self.head(self.conv(self.relu(x)).flatten(1))


def test_model_that_overwrites_its_input_is_split():
    model = Overwriting().eval()
    parts = split(model, "conv", sample_shape=SHAPE)
    x = torch.randn(3, *SHAPE)
    features = parts.frozen.prefix(parts.frozen.num_cuts)(x.clone())
    torch.testing.assert_close(parts.tail(features), model(x))


class Counting(Overwriting):
    def forward(self, x):
        return self.conv(x) * self.count.add_(1)


class Averaging(Overwriting):
    def forward(self, x):
        entries = self.conv.weight.view(16, 1)
        arguments = self.count, self.count.clone(), None, None, True
        return self.conv(x) * F.batch_norm(entries, *arguments).mean()


@pytest.mark.parametrize("kind", [Counting, Averaging])
def test_module_that_changes_a_buffer_is_refused(kind):
    with pytest.raises(FreezeError, match="'count'") as caught:
        split((kind().eval(), nn.Identity()), sample_shape=SHAPE)
    assert caught.value.code == "cannot_freeze"
