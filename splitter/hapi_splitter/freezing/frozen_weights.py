"""Notices when frozen weights change after a split.

Features are computed from the weights that the model had when it was split,
here and, from a package, next to the data. Other weights would give other
features from then on, in one place before the other.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.package.weights import tensor_bytes

_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_MAX_NAMES = 3


class FrozenWeights:
    """The frozen parameters and buffers of a model, as they are now.

    Of writes through ``tensor.data`` those are seen that change the middle of
    a tensor, on the CPU.

    Args:
        model: the module that has them.
        names: names of the parameters and buffers.
        attributes: attributes of the module, to be checked, too; None if the
            caller does.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        attributes: FrozenAttributes | None = None,
    ) -> None:
        self._attributes = attributes
        self._names: list[str] = []
        self._owners: list[dict[str, Any]] = []
        self._keys: list[str] = []
        for name in names:
            path, _, key = name.rpartition(".")
            owner = model.get_submodule(path)
            for held in (owner._parameters, owner._buffers):
                tensor = held.get(key)
                # Tensors of inference mode have no version, those of other
                # classes, as of quantised weights, no bytes.
                if (
                    tensor is not None
                    and type(tensor) in (torch.Tensor, nn.Parameter)
                    and not tensor.is_inference()
                ):
                    self._names.append(name)
                    self._owners.append(held)
                    self._keys.append(key)
        self._tensors: list[torch.Tensor] = self._held()
        self._note()

    def _note(self) -> None:
        self._before = [tensor.detach() for tensor in self._tensors]
        self._sum = sum(map(_version, self._tensors))
        self._addresses = [*map(torch.Tensor.data_ptr, self._tensors)]
        self._fixed = [e for e in self._tensors if not e.requires_grad]
        # A checkpoint may write what is there already.
        self._checksums = [*map(_checksum, self._before)]
        self._middles = _middles(self._before)
        self._middle = [torch.cat(views) for views in self._middles]

    def _held(self) -> list[Any]:
        return [*map(dict.get, self._owners, self._keys)]

    def check(self) -> None:
        """Raises if a frozen tensor has changed, or is to be trained.

        Raises:
            FreezeError: ``cannot_freeze`` naming the tensors.
        """
        if self._attributes is not None:
            self._attributes.check()
            self._attributes.check_all()
        # Once a step, so in C: 30 us for 120 tensors. A deleted one has no
        # address, and one that takes its place another.
        held = self._held()
        if (
            NoneType in map(type, held)
            or [*map(torch.Tensor.data_ptr, held)] != self._addresses
            or sum(map(_version, held)) != self._sum
            or not all(
                map(torch.equal, map(torch.cat, self._middles), self._middle)
            )
        ):
            self._check_values()
        if any(map(_requires_grad, self._fixed)):
            names = [
                name
                for name, held in zip(self._names, self._tensors, strict=True)
                if any(held is fixed for fixed in self._fixed)
                and held.requires_grad
            ]
            raise cannot_freeze(
                f"{_listed(names)}: requires_grad was set after the split, "
                "but the layer is frozen and would not be trained; split the "
                "model again with an earlier freeze point",
            )

    def _check_values(self) -> None:
        weights = zip(
            self._names,
            self._held(),
            self._before,
            self._checksums,
            strict=True,
        )
        changed = [
            name
            for name, now, before, checksum in weights
            if not _is_same(now, before, checksum)
        ]
        if changed:
            raise cannot_freeze(
                f"{_listed(changed)}: written to after the split, but "
                "features are computed from the weights that the model had "
                "then; load weights first, then split the model (again)",
            )
        self._tensors = self._held()
        self._note()


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor_bytes(tensor))


def _middles(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns one number of each tensor on the CPU, by dtype."""
    middles: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            middle = tensor[tuple(size // 2 for size in tensor.shape)]
            middles.setdefault(tensor.dtype, []).append(middle.reshape(1))
    return list(middles.values())


def _is_same(now: Any, before: torch.Tensor, checksum: int) -> bool:
    """Returns True for the same values, also on another device or in another
    dtype."""
    if now is None or now.shape != before.shape or now.is_meta:
        return False
    if now.data_ptr() == before.data_ptr():
        return _checksum(now.detach()) == checksum
    return torch.equal(before.to(now.device, now.dtype), now.detach())


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_NAMES]))
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
