"""Compares two models, and two results of models, in all that they hold."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

_RTOL = 1e-4
_IDENTITIES = {"_torchdynamo_wrapper_id"}
"""Attributes that differ for each object."""
_UNCOMPARED = fx.Graph | RemovableHandle


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    """Compares attributes, hooks, modes, parameters and checkpoints.

    Raises:
        AssertionError: naming the first attribute that differs.
    """
    _Comparison().compare(actual, expected, "model")
    state = _saved(actual.state_dict())
    _Comparison().compare(state, expected.state_dict(), "state_dict")


def _saved(state: Mapping[str, Any]) -> Any:
    """Returns what ``torch.load`` reads from a saved state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class _Comparison:
    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Any] = {}

    def compare(self, actual: Any, expected: Any, path: str) -> None:
        key = id(actual), id(expected)
        if key in self._seen or actual is expected:
            return
        self._seen[key] = actual, expected
        # Parametrised modules have a class of their own.
        assert type(actual).__qualname__ == type(expected).__qualname__, path
        if isinstance(expected, torch.Tensor):
            self._compare_tensors(actual, expected, path)
        elif isinstance(expected, dict):
            self._compare_mappings(actual, expected, path)
        elif isinstance(expected, list | tuple | deque):
            assert len(actual) == len(expected), path
            for index, pair in enumerate(zip(actual, expected, strict=True)):
                self.compare(*pair, f"{path}[{index}]")
        elif isinstance(expected, FunctionType):
            assert actual.__qualname__ == expected.__qualname__, path
            self.compare(_closure(actual), _closure(expected), path)
        elif isinstance(expected, MethodType):
            assert actual.__name__ == expected.__name__, path
            self.compare(actual.__self__, expected.__self__, path)
        elif isinstance(expected, partial):
            self.compare(actual.func, expected.func, path)
        elif isinstance(expected, type | ModuleType | _UNCOMPARED):
            pass
        elif hasattr(expected, "__dict__"):
            self.compare(vars(actual), vars(expected), path)
        elif isinstance(expected, int | float | str | bool | bytes):
            assert actual == expected, f"{path}: {actual!r} != {expected!r}"

    def _compare_tensors(self, actual: Any, expected: Any, path: str) -> None:
        if is_lazy(expected):
            assert is_lazy(actual), path
            return
        for name in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
            is_same = getattr(actual, name) == getattr(expected, name)
            assert is_same, f"{path}.{name}"
        assert (actual.grad is None) == (expected.grad is None), path
        if not expected.is_meta:
            same = torch.equal(
                torch.nan_to_num(actual), torch.nan_to_num(expected)
            )
            assert same, f"{path}: other values"

    def _compare_mappings(self, actual: Any, expected: Any, path: str) -> None:
        if "_hooks" in path.rpartition(".")[2]:
            # The keys are numbers of a counter.
            actual = dict(enumerate(actual.values()))
            expected = dict(enumerate(expected.values()))
        assert list(actual) == list(expected), path
        for key in expected.keys() - _IDENTITIES:
            self.compare(actual[key], expected[key], f"{path}.{key}")


def _closure(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a result of any structure, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def assert_same_result(actual: Any, expected: Any, what: str) -> None:
    """Compares structures and tensors with the documented error bound."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), what
    assert type(actual) is type(expected), what
    found, wanted = list(tensors(actual)), list(tensors(expected))
    assert len(found) == len(wanted) > 0, what
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, what)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, atol: float = 0.0
) -> None:
    """Compares two tensors with the documented error bound.

    Args:
        actual: from the split model.
        expected: from the whole model.
        what: for the message.
        atol: lowest absolute difference.
    """
    if expected.is_floating_point() and expected.numel():
        largest = expected.detach().abs().max().item()
        atol = max(atol, 0.1 * _RTOL * largest)
    torch.testing.assert_close(
        actual,
        expected,
        rtol=_RTOL,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )
