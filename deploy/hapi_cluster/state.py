"""``cluster.json``: the cluster's state, for other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE_FORMAT = 1


def write_private(path: Path, text: str) -> None:
    """Replaces a file atomically; only its owner may read it."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    partial.replace(path)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    text = json.dumps({"format": STATE_FORMAT, **state}, indent=2)
    write_private(path, text + "\n")


def read_state(path: Path) -> dict[str, Any]:
    """The last written state; empty if there is no readable one."""
    try:
        state = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return state if isinstance(state, dict) else {}
