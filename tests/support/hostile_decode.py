"""Servers of processes that decode, whose children pause or crash.

``ForkServer("hostile_decode")`` does what the environment says: its children
wait while a file exists, or abort.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hapi_splitter.fork_server import Request, serve
from hapi_splitter.inputs.image_decode import preload_decoders
from hapi_splitter.inputs.subprocess_decode import answer_image
from waiting import SECONDS, until

PAUSED = "HOSTILE_DECODE_PAUSED"


def _answer(descriptor: int, request: Request) -> dict[str, Any]:
    paused = os.environ.get(PAUSED)
    if paused is None:
        os.abort()
    until(lambda: not Path(paused).exists(), SECONDS)
    return answer_image(descriptor, request)


if __name__ == "__main__":
    preload_decoders()
    serve(_answer)
