"""A line on a terminal with the phase of a split, which may take a minute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hapi_client.progress import is_terminal, make_bar, progress_wanted


@contextmanager
def split_progress(name: str) -> Iterator[Callable[[str], None]]:
    """Shows the phases of a split, if progress is wanted.

    Args:
        name: name of the model.

    Yields:
        A function that takes the phase that begins.

    Raises:
        ClientError: ``bad_configuration`` for a bad ``HAPI_PROGRESS``.
    """
    wanted = progress_wanted(os.environ)
    if wanted is False or (wanted is None and not is_terminal(sys.stderr)):
        yield lambda phase: None
        return
    with make_bar(
        desc=f"splitting {name}", bar_format="{desc} ({elapsed})"
    ) as bar:
        yield lambda phase: bar.set_description_str(
            f"splitting {name}: {phase}"
        )
