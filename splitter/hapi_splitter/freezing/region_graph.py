"""The frozen graph of an exported region."""

from __future__ import annotations

from collections.abc import (
    MutableMapping,
)

import torch

from hapi_protocol.errors import PackageError, cannot_freeze
from hapi_splitter.cuts import FrozenGraph, cuttable
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.graph.export import ExportedRegion
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.package.writer import digest_of
from hapi_splitter.user_code import traced_line


def own_changed(
    weights: MutableMapping[int, torch.Tensor], state: SavedState
) -> bool:
    """Copies weights that the model has only in eval mode, as merged ones.

    Returns:
        True if there are such weights.
    """
    changed = [n for n, weight in weights.items() if state.is_changed(weight)]
    weights.update({node: weights[node].clone() for node in changed})
    return bool(changed)


def frozen_graph(
    exported: ExportedRegion,
    form: SampleForm,
    transform: InputTransform | None,
    freeze: str,
) -> FrozenGraph:
    try:
        values = infer(
            exported.program, exported.weights, form, names=exported.names
        )
    except PackageError as error:
        lines = [
            traced_line(trace)
            for name, trace in zip(
                exported.names, exported.traces, strict=True
            )
            if f" in {name}: " in error.message
        ]
        if "would mix samples" in error.message:
            lines.append(", so that features would depend on the batch")
        raise cannot_freeze(
            f"freeze {freeze!r}: packages cannot hold {error.message}"
            f"{''.join(lines)}; freeze before it, or use other operators",
        ) from error
    if not cuttable(values[-1]):
        raise cannot_freeze(
            f"freeze {freeze!r}: the tensor after {exported.names[-1]!r} is "
            "not a batch of floating-point samples and cannot be sent",
        )
    frozen = FrozenGraph(
        exported.program,
        {i: weight.cpu() for i, weight in exported.weights.items()},
        values,
        exported.names,
        transform,
        "",
    )
    frozen.digest = digest_of(frozen)
    return frozen
