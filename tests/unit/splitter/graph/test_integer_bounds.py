"""Bounds of integers against the results of torch."""

import pytest
import torch

from hapi_splitter.graph.batch_independence import Value, tensors_of
from hapi_splitter.graph.integer_bounds import (
    dtype_bounds,
    result_bounds,
    weight_bounds,
)
from hapi_splitter.graph.operators import operators
from hapi_splitter.graph.program import Call, Ref
from hapi_splitter.graph.shapes import bind, run_call

A, B, C = Ref(0), Ref(1), Ref(2)
DIM = (A, 1)
CALLS = [
    ("add.Tensor", (A, B, 3)),
    ("add.Scalar", (A, 200, -2)),
    ("sub.Tensor", (A, B, -2)),
    ("sub.Scalar", (A, 7, 2)),
    ("rsub.Scalar", (A, 7, 3)),
    ("mul.Tensor", (A, B)),
    ("mul.Scalar", (A, -3)),
    ("neg.default", (A,)),
    ("abs.default", (A,)),
    ("clamp.default", (A, -2, 3)),
    ("clamp.default", (A, 4, 1)),
    ("clamp_min.default", (A, 2)),
    ("maximum.default", (A, B)),
    ("minimum.default", (A, C)),
    ("where.self", (Ref(3), A, B)),
    ("where.self", (Ref(3), A, C)),
    ("cumsum.default", (*DIM, None)),
    ("cumsum.default", (*DIM, torch.int32)),
    ("sum.dim_IntList", (A, (1,), False, None)),
    ("sum.dim_IntList", (A, (), False, None)),
    ("amax.default", (A, (0,), False)),
    ("argmax.default", (*DIM, False)),
    ("cat.default", ((A, B), 0)),
    ("pad.default", (A, (0, 1), 9)),
    ("pad.default", (A, (0, 1), None)),
    ("flip.default", (A, (0, 1))),
    ("gather.default", (*DIM, Ref(4))),
    ("index_select.default", (*DIM, Ref(5))),
    ("gt.Scalar", (A, 1)),
    ("_to_copy.default", (A, torch.int32)),
    ("_to_copy.default", (A, torch.uint8)),
    ("_to_copy.default", (A, torch.bool)),
]
RANGES = [(0, 1), (-3, 5), (2, 4), (250, 255), (-(2**31), 2**31 - 1)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(("op", "args"), CALLS)
def test_results_are_within_the_bounds(op, args, dtype):
    generator = torch.Generator().manual_seed(0)
    low, high = dtype_bounds(dtype)

    def entries(ends, shape):
        ends = [min(max(end, low), high) for end in ends]
        values = torch.randint(
            ends[0], ends[1] + 1, shape, generator=generator
        )
        values.view(-1)[:2] = torch.tensor(ends)
        return values.to(dtype)

    for first in RANGES:
        for second in RANGES:
            tensors = {
                0: entries(first, (4, 6)),
                1: entries(second, (4, 6)),
                # Wraps to another number in a narrower dtype.
                2: torch.tensor(2**32 - 5),
                3: torch.rand(4, 6, generator=generator) > 0.5,
                4: torch.randint(6, (4, 6), generator=generator),
                5: torch.tensor([0, 5]),
            }
            assert_bounded(Call(f"aten.{op}", args), tensors)


def assert_bounded(call, tensors):
    values = {
        node: Value(
            tuple(tensor.shape),
            tensor.dtype,
            None,
            False,
            weight_bounds(tensor),
        )
        for node, tensor in tensors.items()
    }
    bound = bind(operators()[call.op], call.args, values)
    assert tensors_of(bound)
    try:
        result = run_call(call, tensors, 1)
    except RuntimeError:
        return  # a number does not fit its dtype
    low, high = result_bounds(call.op, bound, result.dtype)
    assert low <= int(result.min())
    assert int(result.max()) <= high


def test_floats_have_no_bounds():
    assert weight_bounds(torch.ones(2)) is None
    float_to_int = {"self": Value((2,), torch.float32, None, False)}
    every = dtype_bounds(torch.int32)
    found = result_bounds("aten._to_copy.default", float_to_int, torch.int32)
    assert found == every
