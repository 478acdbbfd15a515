"""Damaged input for parsers, from seeds, with a limit of time for each."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

CASES = int(os.environ.get("HAPI_FUZZ_CASES", "2000"))
MAX_SECONDS = 1.0
"""Longest CPU time of one case."""
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
NUMBERS += (2**63 - 1, 2**63, 2**64 - 1)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Changes bits, numbers, digits and pieces of some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        place = chance.randrange(len(changed))
        kind = chance.randrange(7)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place] = chance.choice(b'\0\xff 09-{["\n\x1b')
        elif kind == 2:
            size = chance.choice((1, 2, 4, 8))
            number = chance.choice(NUMBERS) % 256**size
            order = chance.choice(("little", "big"))
            changed[place : place + size] = number.to_bytes(size, order)
        elif kind == 3:
            del changed[place : place + chance.choice((1, 4, 64, 512))]
        elif kind == 4:
            piece = changed[place : place + chance.choice((1, 4, 64, 512))]
            changed[place:place] = piece * chance.choice((1, 2, 50))
        elif kind == 5:
            del changed[place:]
        else:
            digits = b"9" * chance.choice((1, 20, 400, 60_000))
            changed[place:place] = digits
    return bytes(changed)


def fuzz(
    name: str,
    make: Callable[[random.Random], Any],
    read: Callable[[Any], object],
    allowed: type[Exception] | tuple[type[Exception], ...],
) -> None:
    """Reads damaged input, each case within the limit of time."""
    chance = random.Random(name)
    refused = 0
    for number in range(CASES):
        data = make(chance)
        # A collection of garbage may fall into one reading, not into two.
        for _ in range(2):
            started = time.thread_time()
            try:
                read(data)
            except allowed:
                refused += 1
            except Exception as error:
                raise AssertionError(f"case {number} of {name}") from error
            seconds = time.thread_time() - started
            if seconds < MAX_SECONDS:
                break
        else:
            raise AssertionError((name, number, seconds))
    # Else nothing was damaged.
    assert refused > CASES / 20, (name, refused)
