"""Extracts features of a data set into a folder, for tests.

    python extracting.py DATA FOLDER PART_SAMPLES KILL_AT

A rank kills itself after ``KILL_AT`` samples, 0 for never.  It prints the
number of samples that it has written.
"""

import os
import signal
import sys

from hapi_client.export.extract import extract
from jobs import small_job


def main(data: str, folder: str, part_samples: str, kill_at: str) -> None:
    def check(done: int, total: int) -> None:
        if 0 < int(kill_at) <= done:
            os.kill(os.getpid(), signal.SIGKILL)

    with small_job(data, batch_size=16, cut="stream") as job:
        done = extract(
            job, folder, part_samples=int(part_samples), on_samples=check
        )
    print("computed", done.computed)


if __name__ == "__main__":
    main(*sys.argv[1:])
