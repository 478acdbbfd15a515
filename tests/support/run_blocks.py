"""Follows pages of the documentation, block by block, in one process.

``python run_blocks.py STEPS OUTCOMES``: the first is a JSON list of steps,
each with ``block``, its name, ``folder``, where it is taken, and ``python``,
its code, or ``words``, those of a command.  Code of one folder shares its
names, as in a notebook.  The second gets a line of JSON for each step: its
``block``, and ``problem``: what went wrong, or null.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from hapi_client.cli import main as hapi
from hapi_worker import main as worker
from waiting import SECONDS


def main(steps: str, outcomes: str) -> None:
    names: dict[str, dict[str, Any]] = {}
    with open(outcomes, "w") as file:
        for step in json.loads(Path(steps).read_text()):
            os.chdir(step["folder"])
            mine = names.setdefault(step["folder"], {"__name__": "__main__"})
            outcome = {"block": step["block"], "problem": _taken(step, mine)}
            file.write(json.dumps(outcome) + "\n")


def _taken(step: dict[str, Any], names: dict[str, Any]) -> str | None:
    """Error of a step; None if it succeeded."""
    try:
        if "python" in step:
            exec(compile(step["python"], step["block"], "exec"), names)
            return None
        status = _run(step["words"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except Exception:
        return traceback.format_exc()
    return f"{step['words']} ended with status {status}" if status else None


def _run(words: list[str]) -> int:
    program = Path(words[0]).name
    sys.argv = words
    if program == "hapi":
        hapi.main()
        return 0
    if program == "hapi-worker":
        return worker.main(words[1:])
    if program == "python" and words[1] == "-c":
        exec(words[2], {})
        return 0
    if program in ("python", "swift-proxy-server"):
        words = [str(Path(sys.prefix, "bin", program)), *words[1:]]
    return subprocess.run(words, timeout=SECONDS).returncode


if __name__ == "__main__":
    main(*sys.argv[1:])
