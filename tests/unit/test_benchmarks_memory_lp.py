"""HAPI's rule for batch sizes, and what it does where ours is fair."""

from __future__ import annotations

import pytest
from benchmarks.memory_lp import Request, batch_sizes
from benchmarks.shares import jain_index, max_min_shares
from scipy.optimize import linprog

T4_MB = 15109.0
ALEXNET = Request(per_sample=4.1647, fixed=233.08, wanted=1000)
"""MB, as the prototype's logs have them."""


@pytest.mark.parametrize(
    ("count", "logged"),
    [
        (4, [1000, 1000, 1000, 57]),
        (5, [1000, 1000, 895, 25, 25]),
        (6, [1000, 1000, 758, 25, 25, 25]),
    ],
)
def test_batches_are_those_of_the_published_logs(
    count: int, logged: list[int]
) -> None:
    assert batch_sizes([ALEXNET] * count, T4_MB) == logged


def test_no_linear_program_uses_more_memory() -> None:
    requests = [
        Request(4.2, 230.0, 1000),
        Request(25.1, 550.0, 200),
        Request(6.7, 45.0, 1000),
        Request(17.9, 340.0, 400),
    ]
    found = batch_sizes(requests, T4_MB)
    sizes = [each.per_sample for each in requests]
    free = T4_MB - 512 - sum(2 * each.fixed for each in requests)
    best = linprog(
        [-size for size in sizes],
        A_ub=[sizes],
        b_ub=[free],
        bounds=[(25, each.wanted) for each in requests],
    )
    used = sum(s * b for s, b in zip(sizes, found, strict=True))
    assert used <= free
    # Less by what is cut off to whole samples, at most one of each.
    assert -best.fun - used <= sum(sizes)


def test_requests_that_do_not_fit_are_put_off() -> None:
    room = 512 + 2 * (2 * ALEXNET.fixed + 25 * ALEXNET.per_sample) + 1
    assert batch_sizes([ALEXNET] * 3, room) == [25, 25, 0]
    assert batch_sizes([ALEXNET] * 3, 512.0) == [0, 0, 0]
    assert batch_sizes([ALEXNET] * 3, room, allocated=570.0) == [25, 0, 0]


def test_filling_memory_is_unfair_and_past_the_knee() -> None:
    """Four alike; samples per second grow no more from 64 on."""
    knee = 64
    count = 4
    filled = batch_sizes([ALEXNET] * count, T4_MB)
    free = T4_MB - 512 - count * 2 * ALEXNET.fixed
    names = [str(number) for number in range(count)]

    def fair(most: int) -> list[int]:
        shares = max_min_shares(
            dict.fromkeys(names, most * ALEXNET.per_sample), free
        )
        return [int(shares[n] / ALEXNET.per_sample + 1e-9) for n in names]

    # To whoever asks as much, fair grants are equal; the program's are not.
    assert fair(ALEXNET.wanted) == [764] * count
    assert jain_index(filled) < 0.8 < jain_index(fair(ALEXNET.wanted)) == 1
    # The one that is starved has less than the knee; others 15 times that.
    assert min(filled) < knee < max(filled)
    assert max(filled) / knee > 15
    # Up to the knee everybody fits, with nine tenths of the memory free.
    assert fair(knee) == [knee] * count
    assert sum(fair(knee)) * ALEXNET.per_sample < 0.1 * free


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(4.0, 100.0, 24), "wants 24 samples; 25 or more"),
        (Request(0.0, 100.0, 50), "needs 0.0 for a sample; above 0"),
    ],
)
def test_requests_that_cannot_be_are_named(
    request_: Request, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        batch_sizes([request_], T4_MB)
