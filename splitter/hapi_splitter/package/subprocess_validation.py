"""Validation of a package in a process of its own.

Everything that loading does to bytes from a stranger is first done in
another process with bounded memory, CPU time and lifetime: parsing,
the checks, the propagation of shapes through torch's own code. There the
region also runs once, on random samples alone, together and in another
order, which must agree. A crash or an endless loop costs that process.

It is never a fork of the caller, which has threads, and maybe a device, that
do not survive one, but of a server with a single thread
(:mod:`hapi_splitter.fork_server`).

The same passes measure the region's working memory, for which they run it as
a worker does on a CPU: fast, and with as many threads as the caller has.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from hapi_protocol.errors import (
    DoesNotFitError,
    HapiError,
    UnavailableError,
    bad_package,
    make_error,
)
from hapi_splitter.cuts import CallMemory, FrozenGraph
from hapi_splitter.fork_server import (
    ForkServer,
    Request,
    last_line,
    limit_memory,
    parse_answer,
    serve,
)
from hapi_splitter.graph.shapes import ShapeLimits, warm_up
from hapi_splitter.inputs.image_decode import preload_decoders
from hapi_splitter.inputs.subprocess_decode import answer_image
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
_TRIES = 2
_RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of the validating process.

    Args:
        memory_bytes: address space beyond what torch itself takes.
        cpu_seconds: CPU seconds of all its threads.
        wall_seconds: from its fork to its end.
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
    server: ForkServer | None = None,
) -> Validation:
    """Checks a package in a process of its own and measures its memory.

    Load with the digest that it returns: a file may change in between.

    Args:
        data: its bytes, or its file.
        limits: as for :func:`hapi_splitter.package.reader.load_package`.
        process_limits: limits of the process.
        digest: the sha256 it must have, hexadecimal.
        server: forks the process; None starts one for this package, which
            takes seconds.

    Raises:
        PackageError: naming what is wrong, or how the process ended.
        DoesNotFitError: its weights are larger than ``loaded_bytes``.
        UnavailableError: the process was killed from outside or could not
            be started, twice, or there is no space for a temporary file; the
            package may be good.
        OSError: the file cannot be opened.
    """
    process_limits = process_limits or ProcessLimits()
    request = {
        "limits": asdict(limits or PackageLimits()),
        "process": asdict(process_limits),
        "digest": digest,
        "threads": torch.get_num_threads(),
    }
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file_of(data))
        if server is None:
            server = stack.enter_context(ForkServer())
        answer = _run(
            server, file.fileno(), request, process_limits.wall_seconds
        )
    if "digest" in answer:
        memory = {
            call: CallMemory((peak, peak_each), (after, after_each))
            for call, peak, peak_each, after, after_each in answer["memory"]
        }
        return Validation(answer["digest"], memory)
    raise make_error(
        str(answer["code"]),
        str(answer["message"]),
        details=answer.get("details", {}),
    )


@contextlib.contextmanager
def _file_of(
    data: bytes | bytearray | memoryview | Path,
) -> Iterator[IO[bytes]]:
    if isinstance(data, Path):
        with data.open("rb") as file:
            yield file
        return
    try:
        stored = _temporary_file(data)
    except OSError as error:
        raise UnavailableError(
            "worker_unavailable",
            "the package cannot be validated, because its "
            f"{memoryview(data).nbytes} bytes cannot be written to a "
            f"temporary file: {error}; free space in TMPDIR",
            retry_after=_RETRY_SECONDS,
        ) from error
    with stored:
        yield stored


def _temporary_file(data: bytes | bytearray | memoryview) -> IO[bytes]:
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(tempfile.TemporaryFile())
        file.write(data)
        file.flush()
        on_error.pop_all()
    return file


def _run(
    server: ForkServer, package: int, request: Request, seconds: float
) -> dict[str, Any]:
    reason: object = None
    for _ in range(_TRIES):
        try:
            output, status = server.run(package, request, seconds)
        except OSError as error:
            reason = error
            continue
        answer = parse_answer(output)
        if answer and answer.keys() & {"digest", "code"}:
            return answer
        if status != -signal.SIGKILL:
            raise bad_package(_refusal(output, status, seconds))
        # No limit of the process ends it so.
        reason = "its process was killed (SIGKILL), maybe for lack of memory"
    raise UnavailableError(
        "worker_unavailable",
        f"the package could not be validated, in {_TRIES} tries: {reason}; "
        "try again later",
        retry_after=_RETRY_SECONDS,
    )


def _refusal(output: bytes, status: int, seconds: float) -> str:
    how = (
        f"took over {seconds} s"
        if status == -signal.SIGALRM
        else f"ended the process with status {status}: {last_line(output)}"
    )
    return f"the package is refused: validating it {how}"


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
            raise bad_package(
                f"the package is refused: its samples give other features "
                f"{how} than together",
            )
    return meter.calls()


def answer_request(descriptor: int, request: Request) -> dict[str, Any]:
    """Validates a package, or decodes an image, in this process.

    Both limit it.
    """
    if "image" in request:
        return answer_image(descriptor, request)
    _limit_process(ProcessLimits(**request["process"]))
    torch.set_num_threads(request["threads"])
    try:
        path = Path(f"/dev/fd/{descriptor}")
        limits = _limits_from(request["limits"])
        frozen = load_package(
            path, limits=limits, digest=request["digest"]
        ).to("cpu", fast=True)
        _check_size(frozen.parameter_bytes, limits.loaded_bytes)
        memory = [
            [call, *memory.peak, *memory.after]
            for call, memory in probe_batchwise(frozen).items()
        ]
    except HapiError as error:
        return {
            "code": error.code,
            "message": error.message,
            "details": dict(error.details),
        }
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:200]
        return {
            "code": "bad_package",
            "message": f"the package is refused: it does not run: {reason}",
        }
    return {"digest": frozen.digest, "memory": memory}


def _check_size(needed: int, available: int) -> None:
    if needed > available:
        raise DoesNotFitError(
            "does_not_fit",
            f"the weights of the package take {needed} bytes in memory, and "
            f"{available} are available",
            details={"needed_bytes": needed, "available_bytes": available},
        )


def _limits_from(document: dict[str, Any]) -> PackageLimits:
    shapes = ShapeLimits(**document.pop("shapes"))
    return PackageLimits(**document, shapes=shapes)


def _limit_process(limits: ProcessLimits) -> None:
    limit_memory(limits.memory_bytes)
    seconds = limits.cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


if __name__ == "__main__":
    warm_up()
    preload_decoders()
    serve(answer_request)
