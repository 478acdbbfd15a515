"""Compares between workers all that the bits of a run depend on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

_REMEDIES = {
    "threads": "give all of them the same OMP_NUM_THREADS "
    "(torchrun sets 1, python all cores), or call torch.set_num_threads",
    "torch": "install the same torch on all of them",
    "num_nodes": "give all of them the same number of virtual nodes",
    "seed": "give all of them the same seed",
    "segments": "give all of them the same partial=PartialBackward(…)",
    "warmup_steps": "give all of them the same warmup_steps",
    "module": "give all of them the same model",
}


def numeric_facts(device: torch.device) -> dict[str, Any]:
    """Returns what sums and products depend on, fit for JSON.

    Args:
        device: device of the training.
    """
    backends = torch.backends
    is_cuda = device.type == "cuda"
    return {
        # A plain text: torch.load refuses the class of the version.
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device)
        if is_cuda
        # Kernels differ with AVX2 and AVX-512, for instance.
        else f"{device.type} {backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": bool(backends.mkldnn.enabled),
        "cudnn_tf32": is_cuda and backends.cudnn.allow_tf32,
        "cudnn_benchmark": is_cuda and backends.cudnn.benchmark,
    }


def module_digest(module: torch.nn.Module) -> str:
    """Returns a digest of the names, shapes and dtypes of a state dict."""
    text = "\n".join(
        f"{name} {tuple(value.shape)} {value.dtype}"
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_equal(
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    who: str,
    *,
    strict: bool = True,
    remedy: str = "or allow it with VirtualNodes(…, strict=False)",
) -> None:
    """Compares facts of this worker with those of another or of a state.

    Args:
        mine: facts of this worker.
        theirs: the others.
        who: their owner, for the message.
        strict: False to warn instead.
        remedy: last part of the message.

    Raises:
        ClientError: ``bad_configuration`` naming each difference, with both
            values and a remedy.
    """
    names = [name for name in mine if mine[name] != theirs.get(name)]
    if not names:
        return
    differences = "; ".join(
        f"{name} is {mine[name]!r} here and {theirs.get(name)!r} {who}"
        for name in names
    )
    remedies = [_REMEDIES[name] for name in names if name in _REMEDIES]
    message = (
        f"training would not give the same bits: {differences}; "
        + "; ".join([*remedies, remedy])
    )
    if strict:
        raise ClientError("bad_configuration", message)
    logger.warning(message)
