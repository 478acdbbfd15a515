"""Validation of a package in a process of its own.

Everything that loading does to bytes from a stranger is first done in a
fresh Python process with bounded memory, CPU time and lifetime: parsing,
the checks, the propagation of shapes through torch's own code. There the
region also runs once, on random samples alone, together and in another
order, which must agree. A crash or an endless loop costs that process.

It is a new interpreter, never a fork: the caller has threads, and maybe a
device, that do not survive one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from hapi_protocol.errors import HapiError, PackageError, make_error
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.graph.shapes import ShapeLimits
from hapi_splitter.package.reader import PackageLimits, load_package

_SAMPLES = 3
_MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What the validating process may use.

    Args:
        memory_bytes: address space beyond what torch itself takes.
        cpu_seconds: of all its threads.
        wall_seconds: from its start to its end.
    """

    memory_bytes: int = 8 << 30
    cpu_seconds: int = 120
    wall_seconds: float = 300.0


def validate_package(
    data: bytes | bytearray | memoryview | Path,
    *,
    limits: PackageLimits | None = None,
    process_limits: ProcessLimits | None = None,
    digest: str | None = None,
) -> str:
    """Checks a package in a process of its own; returns its digest.

    Load with that digest: a file may have changed in between.

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
    }
    with _file_of(data) as file:
        answer = _run(file.fileno(), request, process_limits.wall_seconds)
    if "digest" in answer:
        return str(answer["digest"])
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
            env={**os.environ, "PYTHONPATH": paths},
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


def probe_batchwise(frozen: FrozenGraph) -> None:
    """Runs random samples alone, together and in another order.

    The rules of :mod:`hapi_splitter.graph.batch_independence` prove that a
    program treats its samples one by one; this observes it, on the CPU.

    Raises:
        PackageError: when a sample's features depend on its batch.
    """
    region = frozen.prefix(frozen.num_cuts)
    samples = frozen.examples(_SAMPLES)
    order = list(reversed(range(_SAMPLES)))
    with torch.inference_mode():
        together = region(samples)
        others = {
            "alone": torch.cat([region(s[None]) for s in samples]),
            "in another order": region(samples[order])[order],
        }
    scale = together.abs().max().item()
    for how, features in others.items():
        if not torch.allclose(
            together, features, rtol=1e-3, atol=1e-4 * scale, equal_nan=True
        ):
            raise PackageError(
                "bad_package",
                f"the package is refused: its samples give other features "
                f"{how} than together",
            )


def _main(descriptor: int) -> int:
    """The validating process: request on stdin, answer on stdout."""
    request = json.load(sys.stdin)
    _limit_process(ProcessLimits(**request["process"]))
    torch.set_num_threads(1)
    try:
        path = Path(f"/dev/fd/{descriptor}")
        frozen = load_package(
            path,
            limits=_limits_from(request["limits"]),
            digest=request["digest"],
        )
        probe_batchwise(frozen)
        answer = {"digest": frozen.digest}
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
