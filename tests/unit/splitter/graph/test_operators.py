"""The table of operators against torch's own schemas."""

from typing import Any

import pytest
import torch

from hapi_splitter.graph.operators import operators

KINDS = {
    "tensor": {"Tensor"},
    "tensor?": {"Optional[Tensor]", "Tensor"},
    "tensors": {"List[Tensor]"},
    "int": {"int", "Optional[int]", "SymInt", "Optional[SymInt]"},
    "int?": {"Optional[int]"},
    "ints": {"List[int]", "Optional[List[int]]", "List[SymInt]"},
    "size": {"List[int]", "List[SymInt]"},
    "float": {"float"},
    "number": {"number", "float"},
    "number?": {"Optional[number]", "Optional[float]"},
    "bool": {"bool"},
    "dtype?": {"Optional[int]", "Optional[ScalarType]"},
    "zero": {"float"},
    "tanh": {"str"},
}


@pytest.mark.parametrize("operator", operators().values(), ids=operators())
def test_row_matches_a_functional_operator(operator):
    schema = operator.overload()._schema
    assert not schema.is_mutable
    assert (
        torch.Tag.nondeterministic_seeded not in operator.overload().tags
        or (any(p.kind == "zero" for p in operator.parameters))
    )
    arguments = {argument.name: argument for argument in schema.arguments}
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    listed = [p.name for p in operator.parameters if not p.by_name]
    assert listed == positional[: len(listed)]
    for parameter in operator.parameters:
        argument = arguments.pop(parameter.name)
        assert (
            argument.kwarg_only
            or not parameter.by_name
            or (parameter.name == "value")
        )
        assert str(argument.type) in KINDS[parameter.kind], parameter.name
    for left in arguments.values():
        assert left.has_default_value(), left.name


@pytest.mark.parametrize(
    "operator",
    [row for row in operators().values() if row.inplace_name],
    ids=lambda row: row.name,
)
def test_in_place_variant_has_the_same_arguments_and_writes_to_self(operator):
    ours = operator.overload()._schema.arguments
    in_place = operator.inplace_overload()._schema.arguments
    assert [a.name for a in ours] == [a.name for a in in_place]
    written = [
        a.name for a in in_place if a.alias_info and a.alias_info.is_write
    ]
    assert written == ["self"]


IMAGES = torch.linspace(-1, 1, 2 * 4 * 7 * 5).reshape(2, 4, 7, 5)
VOLUMES = IMAGES.unsqueeze(2).expand(-1, -1, 6, -1, -1)
THRICE = ([4, 4, 4], [3, 9, 3])
NOTHING = torch.empty(2, 3, 0)
WITH_GAPS: list[tuple[str, tuple[Any, ...]]] = [
    ("cat.default", ([NOTHING, IMAGES[:, 0, :3], NOTHING], 2)),
    ("pad.default", (IMAGES, [3, 0, 2, 9])),
    ("reflection_pad2d.default", (IMAGES, [3, 0, 2, 6])),
    ("max_pool1d.default", (IMAGES[0], [2], [4], [1], [1], True)),
    ("roll.default", (IMAGES, [3, 1], [2, 0])),
    ("sum.dim_IntList", (NOTHING, [2], False)),
    ("linalg_vector_norm.default", (NOTHING, 2, [2])),
    ("matmul.default", (NOTHING, NOTHING.mT)),
    ("bmm.default", (NOTHING, NOTHING.mT)),
    ("linear.default", (NOTHING, torch.empty(4, 0), torch.ones(4))),
    (
        "conv2d.default",
        (IMAGES, torch.ones(6, 2, 1, 1), None, [4, 4], [3, 9], [1, 1], 2),
    ),
    (
        "conv_transpose2d.input",
        (IMAGES, torch.ones(4, 2, 1, 1), None, [4, 4], [0, 0], [3, 3], 1),
    ),
    (
        "conv_transpose2d.input",
        (IMAGES, torch.ones(4, 2, 2, 2), None, [9, 9], [1, 1], [3, 3], 2),
    ),
    ("max_pool2d.default", (IMAGES, [2, 2], [4, 4], [1, 1], [1, 1], True)),
    ("avg_pool2d.default", (IMAGES, [2, 2], [4, 4], [1, 1], True)),
    ("adaptive_avg_pool2d.default", (IMAGES, [9, 11])),
    (
        "conv3d.default",
        (VOLUMES, torch.ones(6, 2, 1, 1, 1), None, *THRICE, [1, 1, 1], 2),
    ),
    ("max_pool3d.default", (VOLUMES, *THRICE[:1] * 2, [1, 1, 1], [2], True)),
    ("avg_pool3d.default", (VOLUMES, *THRICE[:1] * 2, [1, 1, 1], True)),
    ("adaptive_avg_pool3d.default", (VOLUMES, [9, 9, 11])),
    ("index_select.default", (NOTHING, 1, torch.tensor([0, 2]))),
    ("gather.default", (NOTHING, 1, torch.zeros(2, 1, 0).long())),
    ("rms_norm.default", (NOTHING, [0])),
    ("upsample_nearest2d.default", (IMAGES, [15, 3])),
    ("upsample_bilinear2d.default", (IMAGES, [15, 3], False)),
    ("im2col.default", (IMAGES, [2, 2], [3, 3], [4, 4], [5, 5])),
    (
        "col2im.default",
        (torch.ones(2, 4, 4), [9, 9], [1, 1], [1, 1], [0, 0], [8, 8]),
    ),
]
"""Operators with arguments for which no input reaches some results."""


@pytest.fixture
def nan_in_new_tensors():
    """Makes torch fill allocated memory with NaN, unlike in the worker."""
    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


@pytest.mark.parametrize(
    ("name", "arguments"), WITH_GAPS, ids=[name for name, _ in WITH_GAPS]
)
@pytest.mark.usefixtures("nan_in_new_tensors")
def test_result_has_no_uninitialised_entries(name, arguments):
    """Uninitialised memory could hold another account's features."""
    run = operators()[f"aten.{name}"].overload()
    images, *others = arguments
    if isinstance(images, torch.Tensor) and images.ndim > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = images.contiguous(memory_format=formats[images.ndim])
        assert run(last, *others).isfinite().all()
    assert run(images, *others).isfinite().all()
