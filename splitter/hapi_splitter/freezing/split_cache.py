"""Caches splits, so that the next one of an equal model needs no export.

An entry has the graph, the plan of the tail, the constants that the export
has computed, and the features of one sample.  The model's own weights are
taken from the model; the key (:mod:`hapi_splitter.freezing.model_key`)
contains their digests.  It is the same container as a package, and its reader
checks every byte.  The caller compares an entry with the model before use.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import PackageError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.model_key import UncacheableError, split_key
from hapi_splitter.freezing.plan_json import plan_from_json, plan_to_json
from hapi_splitter.freezing.split_store import (
    DiskStore,
    SplitStore,
    memory_store,
)
from hapi_splitter.freezing.tail_call import TailPlan
from hapi_splitter.graph.batch_independence import BatchPosition, Value
from hapi_splitter.graph.operators import DTYPE_NAMES, DTYPES
from hapi_splitter.graph.program import program_from_json
from hapi_splitter.inputs.sample_format import InputTransform
from hapi_splitter.package import zip_container
from hapi_splitter.package.strict_json import parse_json
from hapi_splitter.package.weights import WeightsFile, read_weights

logger = logging.getLogger(__name__)

_VERSION = 1
_MAX_CALLS = 1 << 20
_MAX_JSON_BYTES = 64 << 20
_DAMAGE = (PackageError, ValueError, LookupError, TypeError, AttributeError)


class SplitCacheWarning(UserWarning):
    """The cache of splits is unusable, or an entry of it; a split is made."""


@dataclass(frozen=True)
class CachedSplit:
    """A split, and what it is compared with.

    Args:
        frozen: the frozen region.
        plan: of the tail; None for two modules.
        freeze: the requested freeze, for people.
        features: that the region computes from one sample, ``[1, *shape]``.
    """

    frozen: FrozenGraph
    plan: TailPlan | None
    freeze: str
    features: torch.Tensor


class SplitCache:
    """The entry of one split in the cache.

    Args:
        module: the model, or the frozen one of two modules.
        transform: input transform of the region.
        facts: the other arguments of the split, as JSON.
        disk: None for the memory of this process.
    """

    def __init__(
        self,
        module: nn.Module,
        transform: InputTransform | None,
        facts: Mapping[str, Any],
        disk: DiskStore | None,
    ) -> None:
        self._module = module
        self.transform = transform
        self._name = type(module).__name__
        self._store: SplitStore = disk or memory_store()
        self._folder = disk and disk.folder
        self._key: str | None = None
        document = transform and transform.to_json()
        try:
            self._key = split_key(module, {**facts, "transform": document})
        except UncacheableError as error:
            logger.info("the split of %s is not cached: %s", self._name, error)

    def found_or_made(
        self,
        agrees: Callable[[CachedSplit], bool],
        make: Callable[[], tuple[CachedSplit, Mapping[int, torch.Tensor]]],
        exporting: Callable[[], None],
    ) -> CachedSplit:
        """Returns the entry, or makes and stores it.

        If another process makes the same one, its entry is taken.

        Args:
            agrees: compares an entry with the model, and discards it if it
                differs.
            make: returns a split that was compared with the model, and the
                weights of its region, by id, where the model has them.
            exporting: called before waiting or making, which take seconds.
        """
        found = self.load()
        if found is not None and agrees(found):
            return found
        exporting()
        making = self._key and self._store.making(self._key)
        with making or nullcontext(False) as has_waited:
            found = self.load() if has_waited else None
            if found is None or not agrees(found):
                found, weights = make()
                self._write(found, weights)
        return found

    def load(self) -> CachedSplit | None:
        """Returns the entry, None without a valid one."""
        if self._key is None:
            return None
        try:
            data = self._store.read(self._key)
        except OSError as error:
            self._disable(error)
            data = self._store.read(self._key)
        if data is None:
            return None
        try:
            return self._parsed(memoryview(bytearray(data)))
        except _DAMAGE as error:
            self.discard(f"is damaged ({error})")
            return None

    def discard(self, problem: str) -> None:
        """Removes the entry with a warning."""
        assert self._key is not None, "it was loaded"
        _warn(f"the cached split of {self._name} {problem}; it is made again")
        try:
            self._store.remove(self._key)
        except OSError as error:
            self._disable(error)

    def _write(
        self, split: CachedSplit, weights: Mapping[int, torch.Tensor]
    ) -> None:
        if self._key is None:
            return
        try:
            pieces = self._pieces(split, weights)
        except ValueError as error:
            logger.info("the split of %s is not cached: %s", self._name, error)
            return
        try:
            self._store.write(self._key, pieces)
        except OSError as error:
            self._disable(error)
            self._store.write(self._key, pieces)

    def _disable(self, error: OSError) -> None:
        _warn(
            f"splits are not cached in {self._folder}: "
            f"{error.strerror or error}; set HAPI_CACHE_DIR to a folder of "
            "your own, or to nothing"
        )
        self._store = memory_store()

    def _pieces(
        self, split: CachedSplit, weights: Mapping[int, torch.Tensor]
    ) -> list[bytes | memoryview]:
        frozen, plan = split.frozen, split.plan
        names = {
            _place_in_memory(tensor): name
            for name, tensor in self._tensors().items()
            if tensor.numel()
        }
        sources = [
            names.get(_place_in_memory(weights[node]))
            for node in range(1, len(weights) + 1)
        ]
        stored = [
            frozen.weights[node]
            for node, source in enumerate(sources, 1)
            if source is None
        ]
        document = {
            "version": _VERSION,
            "key": self._key,
            "freeze": split.freeze,
            "digest": frozen.digest,
            "names": frozen.names,
            "values": [_value_json(each) for each in frozen.values],
            "weights": sources,
            "plan": plan and plan_to_json(plan),
        }
        if plan is not None and plan_from_json(document["plan"]) != plan:
            raise ValueError("the plan of its tail has no JSON")
        constants = dict(enumerate([*stored, split.features], 1))
        return list(
            zip_container.pack(
                {
                    "hapi.json": _dump(document),
                    "graph.json": _dump(frozen.program.to_json()),
                    "weights.safetensors": WeightsFile(constants),
                }
            )
        )

    def _parsed(self, data: memoryview) -> CachedSplit:
        """Reads an entry; raises one of ``_DAMAGE``."""
        members = zip_container.unpack(data)
        document, graph = (
            parse_json(bytes(members[name]), name, _MAX_JSON_BYTES)
            for name in ("hapi.json", "graph.json")
        )
        if (document["version"], document["key"]) != (_VERSION, self._key):
            raise ValueError("it is the entry of another split")
        sources, program = (
            document["weights"],
            program_from_json(graph, _MAX_CALLS),
        )
        values = [_value(*each) for each in document["values"]]
        counts = (len(values), len(document["names"]), len(sources))
        num_calls, num_weights = len(program.calls), program.num_weights
        if counts != (1 + num_weights + num_calls, num_calls, num_weights):
            raise ValueError("its counts do not match")
        num_stored = sources.count(None) + 1
        constants = read_weights(members["weights.safetensors"], num_stored)
        # Copies are aligned, unlike the file.
        *stored, features = (constants[n].clone() for n in sorted(constants))
        live, rest = self._tensors(), iter(stored)
        weights = {
            node: next(rest) if source is None else live[source].detach().cpu()
            for node, source in enumerate(sources, 1)
        }
        frozen = FrozenGraph(
            program,
            weights,
            values,
            document["names"],
            self.transform,
            document["digest"],
        )
        plan = document["plan"] and plan_from_json(document["plan"])
        return CachedSplit(frozen, plan, document["freeze"], features)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            **dict(self._module.named_parameters(remove_duplicate=False)),
            **dict(self._module.named_buffers(remove_duplicate=False)),
        }


def _place_in_memory(tensor: torch.Tensor) -> Any:
    pointer, device = tensor.data_ptr(), tensor.device
    return pointer, device, tensor.shape, tensor.stride(), tensor.dtype


def _value_json(value: Value) -> Any:
    batch = value.batch and [
        value.batch.dim,
        value.batch.outer,
        value.batch.inner,
    ]
    dtype = DTYPE_NAMES[value.dtype]
    return [value.shape, dtype, batch, value.data, value.bounds]


def _value(
    shape: Any, dtype: str, batch: Any, data: bool, bounds: Any
) -> Value:
    return Value(
        tuple(shape),
        DTYPES[dtype],
        batch and BatchPosition(*batch),
        data,
        bounds and tuple(bounds),
    )


def _dump(document: Any) -> bytes:
    return json.dumps(
        document, allow_nan=False, separators=(",", ":")
    ).encode()


def _warn(message: str) -> None:
    warnings.warn(message, SplitCacheWarning, stacklevel=2)
