"""Batch positions, and the refusal of programs that mix samples."""

import pytest
import torch

from hapi_protocol.errors import PackageError
from hapi_splitter.graph.batch_independence import BatchPosition
from hapi_splitter.graph.lowering import lower
from hapi_splitter.graph.program import Affine, Call, Program, Ref
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.sample_format import SampleForm

B = Affine(1)
X, W = Ref(0), Ref(1)
SAMPLE = (4, 6)
FORM = SampleForm(SAMPLE)


def batch_after(*calls):
    """Returns the batch position after calls on tensor 0, ``[B, 4, 6]``.

    Tensor 1 is a weight ``[6, 6]``; calls yield tensors 2, 3, …
    """
    program = Program(1, tuple(Call(f"aten.{op}", a) for op, a in calls))
    return infer(program, {1: torch.randn(6, 6)}, FORM)[-1].batch


FLAT = [
    ("permute.default", (X, (1, 0, 2))),
    ("reshape.default", (Ref(2), (Affine(4), 6))),
]
TABLE = [
    ("slice.Tensor", (W, 0, 0, 4, 1)),
    ("unsqueeze.default", (Ref(2), 0)),
    ("expand.default", (Ref(3), (3, 4, 6))),
]
GATHER = ("gather.default", (X, 2, Ref(5)))
GATHER_CONSTANTS = ("gather.default", (Ref(4), 1, Ref(5)))
ATTENTION = "scaled_dot_product_attention.default"
WINDOWS = ((2, 2), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("relu.default", (X,))], BatchPosition(0)),
        ([("permute.default", (X, (1, 0, 2)))], BatchPosition(1)),
        ([("transpose.int", (X, 0, -1))], BatchPosition(2)),
        ([("unsqueeze.default", (X, 0))], BatchPosition(1)),
        ([("reshape.default", (X, (Affine(4), 6)))], BatchPosition(0, 1, 4)),
        ([("reshape.default", (X, (Affine(24),)))], BatchPosition(0, 1, 24)),
        ([("reshape.default", (X, (B, 2, 12)))], BatchPosition(0)),
        (FLAT, BatchPosition(0, 4, 1)),
        (
            [
                *FLAT,
                ("linear.default", (Ref(3), W, None)),
                ("reshape.default", (Ref(4), (4, B, 6))),
            ],
            BatchPosition(1),
        ),
        ([("mean.dim", (X, (1,), False, None))], BatchPosition(0)),
        ([("select.int", (X, 1, 0))], BatchPosition(0)),
        ([("linear.default", (X, W, None))], BatchPosition(0)),
        ([("matmul.default", (X, W))], BatchPosition(0)),
        ([("expand.default", (W, (B, 6, 6)))], BatchPosition(0)),
        ([("softmax.int", (X, -1, None))], BatchPosition(0)),
        ([("cat.default", ((X, X), 1))], BatchPosition(0)),
        (
            [
                ("unsqueeze.default", (X, 1)),
                ("im2col.default", (Ref(2), *WINDOWS)),
                ("col2im.default", (Ref(3), (4, 6), *WINDOWS)),
            ],
            BatchPosition(0),
        ),
        ([("stack.default", ((X, X), 0))], BatchPosition(1)),
        ([("argmax.default", (X, 1, False))], BatchPosition(0)),
        ([("argmax.default", (X, 2, True))], BatchPosition(0)),
        ([("unfold.default", (X, 1, 2, 1))], BatchPosition(0)),
        ([("rms_norm.default", (X, (6,), None, None))], BatchPosition(0)),
        (
            [
                *FLAT,
                ("argmax.default", (Ref(3), 1, True)),
                ("gather.default", (Ref(3), 1, Ref(4))),
            ],
            BatchPosition(0, 4, 1),
        ),
        (
            [
                ("gt.Scalar", (X, 0)),
                ("select.int", (W, 0, 0)),
                ("where.self", (Ref(2), X, Ref(3))),
            ],
            BatchPosition(0),
        ),
    ],
)
def test_batch_position_is_tracked(calls, expected):
    assert batch_after(*calls) == expected


@pytest.mark.parametrize(
    "calls",
    [
        [("softmax.int", (X, 0, None))],
        [("log_softmax.int", (X, -3, None))],
        [("roll.default", (X, (1,), (0,)))],
        [("roll.default", (X, (1,), ()))],
        [("flip.default", (X, (0,)))],
        [("mean.dim", (X, (0,), False, None))],
        [("sum.dim_IntList", (X, (), False, None))],
        [("amax.default", (X, (0, 1), True))],
        [("select.int", (X, 0, 0))],
        [("slice.Tensor", (X, 0, 0, 1, 1))],
        [("cat.default", ((X, X), 0))],
        [("pad.default", (X, (0, 0, 0, 0, 1, 0), None))],
        [("reshape.default", (X, (4, B, 6)))],
        [("reshape.default", (X, (2, Affine(2), 6)))],
        [("expand.default", (W, (Affine(2), 6, 6)))],
        [("layer_norm.default", (X, (2, 4, 6), None, None, 1e-5, False))],
        # The batch is in the rows of one operand and columns of the other.
        [
            ("permute.default", (X, (1, 0, 2))),
            ("transpose.int", (Ref(2), 1, 2)),
            ("matmul.default", (Ref(2), Ref(3))),
        ],
        [
            ("permute.default", (X, (1, 0, 2))),
            (ATTENTION, (Ref(2), Ref(2), Ref(2), None, 0.0, False, None)),
        ],
        # The batches are in two dimensions: [B, B, ...].
        [
            ("unsqueeze.default", (X, 0)),
            ("unsqueeze.default", (X, 1)),
            ("add.Tensor", (Ref(2), Ref(3), 1)),
        ],
        # A four-dimensional view whose channels are the samples.
        [
            ("unsqueeze.default", (X, 0)),
            (
                "max_pool2d.default",
                (Ref(2), (1, 1), (1, 1), (0, 0), (1, 1), False),
            ),
        ],
        [
            ("unsqueeze.default", (X, 0)),
            ("im2col.default", (Ref(2), *WINDOWS)),
        ],
        # Three dimensions mean one image whose channels are the samples.
        [("im2col.default", (X, *WINDOWS))],
        [
            ("permute.default", (X, (1, 0, 2))),
            (
                "col2im.default",
                (Ref(2), (2, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
            ),
        ],
        [("argmax.default", (X, 0, False))],
        # Three dimensions mean one image whose channels are the samples.
        [
            ("permute.default", (X, (1, 0, 2))),
            ("reflection_pad2d.default", (Ref(2), (1, 1, 1, 1))),
        ],
        [("logsumexp.default", (X, (), False))],
        [("unfold.default", (X, 0, 1, 1))],
        [("rms_norm.default", (X, (1, 4, 6), None, None))],
        [("gt.Scalar", (X, 0)), ("cumsum.default", (Ref(2), 0, None))],
        # Each sample's own index reads another sample, or one of two.
        [
            ("argmax.default", (X, 0, True)),
            ("gather.default", (X, 0, Ref(2))),
        ],
        [
            ("argmax.default", (X, 1, True)),
            ("permute.default", (X, (1, 0, 2))),
            ("gather.default", (Ref(3), 2, Ref(2))),
        ],
        [*TABLE, ("argmax.default", (Ref(4), 2, True)), GATHER],
        [*TABLE, ("argmax.default", (X, 1, True)), GATHER_CONSTANTS],
        [
            ("argmax.default", (X, 1, False)),
            ("select.int", (Ref(2), 1, 0)),
            ("index_select.default", (X, 2, Ref(3))),
        ],
        # Five dimensions, but those of one volume whose channels are samples.
        [
            ("unsqueeze.default", (X, 0)),
            ("unsqueeze.default", (Ref(2), 0)),
            ("adaptive_avg_pool3d.default", (Ref(3), (1, 1, 1))),
        ],
        # Samples are the weights of a product.
        [
            ("reshape.default", (X, (Affine(4), 6))),
            ("linear.default", (W, Ref(2), None)),
        ],
    ],
)
def test_program_that_mixes_samples_is_refused(calls):
    with pytest.raises(PackageError, match=r"would mix samples|cannot run"):
        batch_after(*calls)


def lowered(*calls, weights):
    count = len(weights)
    program = Program(count, tuple(Call(f"aten.{op}", a) for op, a in calls))
    values = infer(program, weights, FORM)
    module = lower(program, values, weights, 0, count + len(calls))
    called = [n for n in module.graph.nodes if n.op.startswith("call")]
    return module, [str(node.target) for node in called]


def test_dead_buffers_are_reused_but_not_the_input():
    module, called = lowered(
        ("relu.default", (X,)),
        ("exp.default", (Ref(1),)),
        ("add.Tensor", (X, Ref(2), 1)),
        weights={},
    )
    assert called == [
        "aten.relu.default",
        "aten.exp_.default",
        "aten.add_.Tensor",
    ]
    samples = torch.randn(2, *SAMPLE)
    original = samples.clone()
    expected = samples + samples.relu().exp()
    assert torch.equal(module(samples), expected)
    assert torch.equal(samples, original)


def test_buffer_read_through_a_view_is_not_reused():
    module, called = lowered(
        ("exp.default", (X,)),
        ("permute.default", (Ref(1), (0, 2, 1))),
        ("relu.default", (Ref(1),)),
        ("matmul.default", (Ref(2), Ref(3))),
        weights={},
    )
    assert "aten.relu_.default" not in called
    samples = torch.randn(2, *SAMPLE)
    expected = samples.exp().permute(0, 2, 1) @ samples.exp().relu()
    assert torch.equal(module(samples), expected)


def test_constant_repeated_per_sample_is_not_overwritten():
    weight = torch.randn(1, 4, 6)
    original = weight.clone()
    module, _ = lowered(
        ("expand.default", (Ref(1), (B, 4, 6))),
        ("add.Tensor", (Ref(2), X, 1)),
        weights={1: weight},
    )
    samples = torch.randn(3, *SAMPLE)
    assert torch.equal(module(samples), weight + samples)
    assert torch.equal(weight, original)
