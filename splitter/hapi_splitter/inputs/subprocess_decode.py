"""Decoding of large images, each in a process of its own.

A thread cannot be ended, and a stranger's image may be made to cost seconds
and gigabytes in libraries that no limit reaches.  A process has a deadline and
a limit of memory, and if it crashes, only its image is lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hapi_protocol.errors import TooSlowError, UnavailableError
from hapi_protocol.samples import SampleError
from hapi_protocol.transforms import (
    Training,
    parse_transform,
    transform_text,
)
from hapi_splitter.fork_server import (
    ForkServer,
    Request,
    last_line,
    limit_memory,
    parse_answer,
)
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import ImageHeader
from hapi_splitter.inputs.image_transform import ImageTransform

_RETRY_SECONDS = 5.0
_SLACK_BYTES = 1 << 30
"""Address space of a child beyond its image: stacks, heaps, libraries."""


@dataclass(frozen=True)
class LargeImage:
    """An image that is decoded and transformed in a process of its own.

    Args:
        data: the file.
        header: its header.
        key: key of the sample.
        transform: from pixels to the model's input.
        training: seed and epoch of the augmentation; None for evaluation.
        max_pixels: largest image that is decoded.
        formats: formats that are allowed.
    """

    data: bytes
    header: ImageHeader
    key: str
    transform: ImageTransform
    training: Training | None
    max_pixels: int
    formats: Sequence[str]

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory of decoding and transforming it."""
        header = self.header
        # The file's copies for the process, and in it.
        return (
            header.decoding_bytes
            + self.transform.resizing_bytes(header.height, header.width)
            + 2 * len(self.data)
        )

    def decode(
        self, server: ForkServer, seconds: float
    ) -> tuple[torch.Tensor, float]:
        """Decodes and transforms it.

        Args:
            server: forks the process.
            seconds: deadline.

        Returns:
            The input of the model, and the CPU seconds that it took.

        Raises:
            SampleError: as for ``decode_image``, or its decoder crashed.
            TooSlowError: it took longer than ``seconds``.
            UnavailableError: the process had too little memory, was killed or
                could not be started; the image may be good.
        """
        with open(os.memfd_create("hapi-image"), "r+b") as file:
            file.write(self.data)
            file.flush()
            try:
                output, status = server.run(
                    file.fileno(), self._request(), seconds
                )
            except OSError as error:
                raise _unavailable(str(error)) from error
            answer = parse_answer(output)
            if answer is None:
                raise self._failure(output, status, seconds)
            if "error" in answer:
                raise SampleError(answer["error"])
            if "memory" in answer:
                raise _unavailable(answer["memory"])
            file.seek(0)
            # A bytearray, since torch warns of memory that it may not write.
            pixels = bytearray(file.read())
        shape = self.transform.output_shape
        image = torch.frombuffer(pixels, dtype=self.transform.output_dtype)
        return image.view(shape), float(answer["cpu"])

    def _request(self) -> Request:
        return {
            "image": self.key,
            "bytes": self.num_bytes,
            "transform": self.transform.to_json(),
            "training": transform_text(self.training),
            "max_pixels": self.max_pixels,
            "formats": list(self.formats),
        }

    def _failure(
        self, output: bytes, status: int, seconds: float
    ) -> Exception:
        kind = self.header.kind.upper()
        if status == -signal.SIGALRM:
            return TooSlowError(
                "too_slow",
                f"a {kind} of {len(self.data)} bytes took over {seconds:g} s "
                "to decode",
            )
        if status == -signal.SIGKILL:  # no limit of the process ends it so
            return _unavailable("its process was killed (SIGKILL)")
        if status < 0:
            return SampleError(f"damaged {kind}: it crashes its decoder")
        return _unavailable(
            f"its process ended with status {status}: {last_line(output)}"
        )


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(
        "service_unavailable",
        f"a large image could not be decoded: {reason}",
        retry_after=_RETRY_SECONDS,
    )


def answer_image(descriptor: int, request: Request) -> dict[str, Any]:
    """Decodes an image in this process, which it limits.

    The input of the model takes the place of the file's content.
    """
    limit_memory(request["bytes"] + _SLACK_BYTES)
    torch.set_num_threads(1)
    transform = ImageTransform.from_json(request["transform"])
    training = parse_transform(request["training"])
    data = Path(f"/dev/fd/{descriptor}").read_bytes()
    try:
        pixels = decode_image(
            data,
            max_pixels=request["max_pixels"],
            formats=request["formats"],
            turns=transform.turns,
        )
        image = transform.sample(pixels, request["image"], training)
    except SampleError as error:
        return {"error": str(error)}
    except (MemoryError, RuntimeError) as error:  # torch's is the latter
        return {"memory": f"it has too little memory: {error}"}
    os.ftruncate(descriptor, 0)
    with open(descriptor, "r+b", closefd=False) as file:
        file.seek(0)
        file.write(np.ascontiguousarray(image).data)
    return {"cpu": time.process_time()}
