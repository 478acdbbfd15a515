"""Caches splits, so that the next one of an equal model needs no export.

An entry has the graph, the plan of the tail, the constants that the export
has computed, and the features of one sample.  The model's own weights are
taken from the model; the key (:mod:`hapi_splitter.freezing.model_key`)
contains their digests.  An entry begins with its own digest, so that damage
is noticed.  The caller compares an entry with the model before use.
"""

from __future__ import annotations

import hashlib
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
from hapi_splitter.freezing.split_json import from_json, to_json
from hapi_splitter.freezing.split_store import (
    DiskStore,
    MemoryStore,
    memory_store,
)
from hapi_splitter.freezing.tail_call import TailPlan
from hapi_splitter.graph.program import program_from_json
from hapi_splitter.inputs.sample_format import InputTransform
from hapi_splitter.package.header import parse_header
from hapi_splitter.package.weights import file_pieces, read_weights

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_CALLS = 1 << 20
_MAX_HEADER_BYTES = 128 << 20
"""Larger than those of packages: an entry is the user's own, and whole by its
digest."""


class SplitCacheWarning(UserWarning):
    """The cache of splits is unusable, or an entry of it; a split is made."""


@dataclass(frozen=True)
class CachedSplit:
    """A split, and what it is compared with.

    Args:
        frozen: the frozen region.
        plan: plan of the tail; None for two modules.
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
        self._store: DiskStore | MemoryStore = disk or memory_store()
        self._folder = disk and disk.path
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
        split = self.load()
        if split is not None and agrees(split):
            return split
        exporting()
        making = self._key and self._store.making(self._key)
        with making or nullcontext(False) as has_waited:
            split = self.load() if has_waited else None
            if split is None or not agrees(split):
                split, weights = make()
                self._write(split, weights)
        return split

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
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != self._digest(content):
            self.discard("is damaged")
            return None
        try:
            return self._parsed(content)
        except (PackageError, ValueError) as error:
            self.discard(f"cannot be used: {error}")
            return None

    def discard(self, problem: str) -> None:
        """Removes the entry with a warning."""
        assert self._key is not None, "it was loaded"
        _warn(f"the cached split of {self._name} {problem}; splitting again")
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
            content = self._content(split, weights)
        except ValueError as error:
            logger.info("the split of %s is not cached: %s", self._name, error)
            return
        pieces = [self._digest(content), content]
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

    def _digest(self, content: bytes) -> bytes:
        return hashlib.sha256(f"{self._key}".encode() + content).digest()

    def _content(
        self, split: CachedSplit, weights: Mapping[int, torch.Tensor]
    ) -> bytes:
        """Returns an entry in the container of packages."""
        frozen, plan = split.frozen, split.plan
        if from_json(to_json(plan)) != plan:
            raise ValueError("the plan of its tail has no JSON")
        names = {
            _place_in_memory(tensor): name
            for name, tensor in self._tensors().items()
            if tensor.numel()
        }
        sources = tuple(
            names.get(_place_in_memory(weights[node]))
            for node in range(1, len(weights) + 1)
        )
        stored = [
            frozen.weights[node]
            for node, source in enumerate(sources, 1)
            if source is None
        ]
        facts = (frozen.values, frozen.names, frozen.digest)
        document = to_json((*facts, sources, plan, split.freeze))
        documents = {
            # A text, because the documents of packages have no infinity.
            "hapi.json": json.dumps(document, separators=(",", ":")),
            "graph.json": frozen.program.to_json(),
        }
        constants = dict(enumerate([*stored, split.features], 1))
        return b"".join(file_pieces(documents, constants))

    def _parsed(self, content: bytes) -> CachedSplit:
        """Reads what :meth:`_content` has returned.

        Raises:
            ValueError: if a class that it names is not imported.
            PackageError: if it is over a limit.
        """
        data = memoryview(bytearray(content))
        header = parse_header(data, _MAX_HEADER_BYTES)
        program = program_from_json(header.graph, _MAX_CALLS)
        document = from_json(json.loads(header.hapi))
        values, names, digest, sources, plan, freeze = document
        constants = read_weights(
            header.tensors, data[header.end :], sources.count(None) + 1
        )
        # Clones, because a view would hold the memory of the whole entry.
        *stored, features = (constants[n].clone() for n in sorted(constants))
        live, rest = self._tensors(), iter(stored)
        weights = {
            node: next(rest) if source is None else live[source].detach().cpu()
            for node, source in enumerate(sources, 1)
        }
        frozen = FrozenGraph(
            program, weights, values, names, self.transform, digest
        )
        return CachedSplit(frozen, plan, freeze, features)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            **dict(self._module.named_parameters(remove_duplicate=False)),
            **dict(self._module.named_buffers(remove_duplicate=False)),
        }


def _place_in_memory(tensor: torch.Tensor) -> Any:
    pointer, device = tensor.data_ptr(), tensor.device
    return pointer, device, tensor.shape, tensor.stride(), tensor.dtype


def _warn(message: str) -> None:
    warnings.warn(message, SplitCacheWarning, stacklevel=2)
