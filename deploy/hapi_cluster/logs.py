"""Sends Swift's log lines to stderr instead of syslog; reads log files."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAIL_BYTES = 4096
"""More than the fifteen lines that are shown, unless they are very long."""


def to_stderr(
    conf: Mapping[str, str],
    name: str,
    log_to_console: bool,
    log_route: str,
    fmt: str,
    logger: logging.Logger,
    adapted_logger: Any,
) -> None:
    """Hook for ``log_custom_handlers``: one handler, with time stamps.

    Swift always adds a syslog handler, which sends each line to UDP port 514
    if there is no ``/dev/log``, and its console format has no time.
    """
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        if isinstance(handler, logging.handlers.SysLogHandler):
            handler.close()
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {fmt}"))
    logger.addHandler(handler)


def tail(path: Path, num_lines: int = 15, *, since: int = 0) -> str:
    """The last lines of a log, indented; empty if there is no log.

    Args:
        path: path of the log.
        num_lines: maximum number of lines.
        since: offset in bytes before which nothing is read.
    """
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(since, log.tell() - TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-num_lines:])
