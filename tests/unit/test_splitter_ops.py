"""The table of operators against torch's own schemas."""

from __future__ import annotations

import pytest
import torch

from hapi_splitter.ops import Operator, operators

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
def test_row_is_a_functional_operator_with_these_arguments(
    operator: Operator,
) -> None:
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
def test_inplace_twin_takes_the_same_and_writes_to_self(
    operator: Operator,
) -> None:
    ours = operator.overload()._schema.arguments
    twins = operator.inplace_overload()._schema.arguments
    assert [a.name for a in ours] == [a.name for a in twins]
    written = [a.name for a in twins if a.alias_info and a.alias_info.is_write]
    assert written == ["self"]
