"""``hapi device-queue`` in a process, for tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hapi_protocol.errors import ClientError
from hapi_training.device_queue import status_of
from waiting import SECONDS, until


def start_queue(
    environment: Mapping[str, str], path: Path, *options: object
) -> subprocess.Popen[str]:
    """Starts a queue, and waits until it answers."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "hapi_client.cli.main"),
            *("device-queue", str(path), *map(str, options)),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def answers() -> bool:
        with suppress(ClientError):
            return bool(status_of(path))
        assert process.poll() is None
        return False

    until(answers, SECONDS)
    return process
