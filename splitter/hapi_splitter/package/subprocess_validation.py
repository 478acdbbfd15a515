"""Validation of a package in a process of its own.

Everything that loading does to bytes from a stranger is first done in a
fresh Python process with bounded memory, CPU time and lifetime: parsing,
the checks, the propagation of shapes through torch's own code. There the
region also runs once, on random samples alone, together and in another
order, which must agree. A crash or an endless loop costs that process.

It is a new interpreter, never a fork: the caller has threads, and maybe a
device, that do not survive one.

The same passes measure the region's working memory, for which they run it as
a worker does on a CPU: fast, and with as many threads as the caller has.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from hapi_protocol.errors import HapiError, PackageError, make_error
from hapi_splitter.cuts import CallMemory, FrozenGraph
from hapi_splitter.graph.shapes import ShapeLimits
from hapi_splitter.numerics import exact_numerics
from hapi_splitter.package.memory_measurement import MemoryMeter
from hapi_splitter.package.reader import PackageLimits, load_package

_SAMPLES = 3
_TOLERANCE = (1e-3, 1e-4)
_HALF_TOLERANCES = {
    torch.bfloat16: (2**-5, 2**-5),
    torch.float16: (2**-8,) * 2,
}
"""Tolerances relative to a value and to the largest one: kernels for other
batch sizes round differently."""
_MAX_ANSWER_BYTES = 4 << 20
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "KINETO_LOG_LEVEL": "5"}
"""Hides GPUs and the messages of torch's profiler."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of the validating process.

    Args:
        memory_bytes: address space beyond what torch itself takes.
        cpu_seconds: of all its threads.
        wall_seconds: from its start to its end.
    """

    memory_bytes: int = 8 << 30
    cpu_seconds: int = 120
    wall_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of the validation of a package.

    Args:
        digest: sha256 of the package, hexadecimal.
        memory: :attr:`~hapi_splitter.cuts.FrozenGraph.measured_memory`.
    """

    digest: str
    memory: Mapping[int, CallMemory]


def validate_package(
    data: bytes | bytearray | memoryview | Path,
    *,
    limits: PackageLimits | None = None,
    process_limits: ProcessLimits | None = None,
    digest: str | None = None,
) -> Validation:
    """Checks a package in a process of its own and measures its memory.

    Load with the digest that it returns: a file may change in between.

    Args:
        data: its bytes, or its file.
        limits: as for :func:`hapi_splitter.package.reader.load_package`.
        process_limits: of the process.
        digest: the sha256 it must have, hexadecimal.

    Raises:
        PackageError: naming what is wrong, or how the process ended.
        OSError: when the file cannot be opened or a process started.
    """
    process_limits = process_limits or ProcessLimits()
    request = {
        "limits": asdict(limits or PackageLimits()),
        "process": asdict(process_limits),
        "digest": digest,
        "threads": torch.get_num_threads(),
    }
    with _file_of(data) as file:
        answer = _run(file.fileno(), request, process_limits.wall_seconds)
    if "digest" in answer:
        memory = {
            call: CallMemory((peak, peak_each), (after, after_each))
            for call, peak, peak_each, after, after_each in answer["memory"]
        }
        return Validation(answer["digest"], memory)
    raise make_error(str(answer["code"]), str(answer["message"]))


@contextlib.contextmanager
def _file_of(
    data: bytes | bytearray | memoryview | Path,
) -> Iterator[IO[bytes]]:
    if isinstance(data, Path):
        with data.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file


def _run(
    descriptor: int, request: dict[str, Any], seconds: float
) -> dict[str, Any]:
    # -P would do, but is newer than our oldest Python; -I drops the path.
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", __name__, str(descriptor)]
    try:
        process = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            pass_fds=(descriptor,),
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": paths, **_ENVIRONMENT},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(
            "bad_package",
            f"the package is refused: validating it took over {seconds} s",
        ) from None
    answer = _parse_answer(process.stdout)
    if answer is None:
        reason = process.stderr[-300:].decode("utf-8", "replace").strip()
        raise PackageError(
            "bad_package",
            "the package is refused: validating it ended the process with "
            f"status {process.returncode}: {reason.rpartition(chr(10))[2]}",
        )
    return answer


def _parse_answer(output: bytes) -> dict[str, Any] | None:
    line = output.rstrip(b"\n").rpartition(b"\n")[2][:_MAX_ANSWER_BYTES]
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if isinstance(answer, dict) and ("digest" in answer or "code" in answer):
        return answer
    return None


def probe_batchwise(frozen: FrozenGraph) -> dict[int, CallMemory]:
    """Runs random samples alone, together and in another order.

    The rules of :mod:`hapi_splitter.graph.batch_independence` prove that a
    program treats its samples one by one; this observes it, on the CPU.

    Returns:
        The working memory of each call, measured in the same passes.

    Raises:
        PackageError: when a sample's features depend on its batch.
    """
    meter = MemoryMeter(frozen)
    samples = frozen.examples(_SAMPLES)
    with exact_numerics(samples.device), torch.inference_mode():
        alone = torch.cat([meter.run(sample[None]) for sample in samples])
        swapped = meter.run(samples[[1, 0]])[[1, 0]]
        together = meter.run(samples)
        for batch in meter.large_batches():
            meter.run(samples[torch.arange(batch) % _SAMPLES])
    others = {
        "alone": alone,
        "in another order": torch.cat([swapped, alone[2:]]),
    }
    rtol, of_largest = _HALF_TOLERANCES.get(together.dtype, _TOLERANCE)
    atol = of_largest * together.abs().max().item()
    for how, features in others.items():
        if not torch.allclose(
            together, features, rtol=rtol, atol=atol, equal_nan=True
        ):
            raise PackageError(
                "bad_package",
                f"the package is refused: its samples give other features "
                f"{how} than together",
            )
    return meter.calls()


def _main(descriptor: int) -> int:
    """The validating process: request on stdin, answer on stdout."""
    request = json.load(sys.stdin)
    _limit_process(ProcessLimits(**request["process"]))
    torch.set_num_threads(request["threads"])
    try:
        path = Path(f"/dev/fd/{descriptor}")
        frozen = load_package(
            path,
            limits=_limits_from(request["limits"]),
            digest=request["digest"],
        ).to("cpu", fast=True)
        memory = [
            [call, *found.peak, *found.after]
            for call, found in probe_batchwise(frozen).items()
        ]
        answer = {"digest": frozen.digest, "memory": memory}
    except HapiError as error:
        answer = {"code": error.code, "message": error.message}
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:200]
        answer = {
            "code": "bad_package",
            "message": f"the package is refused: it does not run: {reason}",
        }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def _limits_from(document: dict[str, Any]) -> PackageLimits:
    shapes = ShapeLimits(**document.pop("shapes"))
    return PackageLimits(**document, shapes=shapes)


def _limit_process(limits: ProcessLimits) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    taken = pages * resource.getpagesize()
    memory = taken + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    seconds = limits.cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
