"""Export of modules to programs, and the operators that are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes

SHAPE = (4, 8, 8)


class Frozen(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.function = function

    def forward(self, x):
        return self.function(self.conv(x))


def loaded(function):
    torch.manual_seed(0)
    model = Frozen(function).eval()
    frozen = split((model, nn.Identity()), sample_shape=SHAPE).frozen
    return model, load_package(package_bytes(frozen))


def positions(x):
    """Position encodings that are rebuilt for each batch."""
    mask = torch.zeros(x.shape[0], 8, 8, dtype=torch.bool)
    rows = (~mask).cumsum(1, dtype=torch.float32)
    return x + torch.stack([rows.sin(), rows.cos()], 1).repeat(1, 2, 1, 1)


def overwritten(x):
    x = x * 2
    x[:, :, 0:, 0:] += x.mean(1, keepdim=True)
    return x


@pytest.mark.parametrize(
    "function",
    [
        positions,
        overwritten,
        lambda x: torch.einsum("bchw,bcHw->bchH", x, x),
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
    assert region.parameter_bytes < 4 * (20 + 2 * 64 * 4)


def test_views_of_one_weight_are_separate_weights():
    table = torch.randn(2, 8)
    parts = loaded(lambda x: x * table[0] + table[1] * table.sum(0))
    assert_same_features(*parts)


def numbered(x):
    return x + torch.arange(x.shape[0]).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (numbered, "aten.view.default"),
        (lambda x: x + torch.rand(x.shape[0], 1, 1, 1), "aten.rand.default"),
        (lambda x: x + torch.rand(8), "aten.rand.default"),
        (lambda x: F.adaptive_max_pool2d(x, 3), "aten.adaptive_max_pool2d"),
        (
            lambda x: F.max_pool2d_with_indices(x, 2)[1] * 1.0,
            "aten.max_pool2d_with_indices",
        ),
        (lambda x: x.cumsum(0), "aten.cumsum.default"),
        (lambda x: x.repeat(1, 2, 2, 1), "aten.repeat.default"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
    ],
)
def test_unsupported_operator_is_named(function, operator):
    with pytest.raises(FreezeError, match=operator) as caught:
        loaded(function)
    assert caught.value.code == "unknown_op"


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
