"""Runs code blocks of the documentation in one process, each by itself.

``python run_blocks.py FOLDER…``: each has a ``block.py``, which is run there
as a script.  A line on standard output names each that has ended well; of one
that raises, standard error has the traceback.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

SCRIPT = "block.py"
DONE = "block done:"


def main(folders: list[str]) -> int:
    """Returns 1 where a block has raised."""
    failed = 0
    for folder in map(Path, folders):
        os.chdir(folder)
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except Exception:
            traceback.print_exc()
            failed = 1
        else:
            print(DONE, folder, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
