"""Shares of memory, and devices for jobs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_worker.models.placement import Place, places_in_order
from hapi_worker.scheduling.max_min_grants import granted_bytes, water_level


@pytest.mark.parametrize(
    ("demands", "capacity", "level"),
    [
        ([], 10, math.inf),
        ([3, 4], 10, math.inf),
        ([5, 5], 10, math.inf),
        ([8, 8], 10, 5),
        ([2, 9, 9], 10, 4),
        ([1, 2, 9], 10, 7),
        ([4], 0, 0),
    ],
)
def test_level(demands: list[int], capacity: int, level: float) -> None:
    assert water_level(demands, capacity) == level


DEMANDS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@given(DEMANDS, st.integers(0, 3000))
def test_grants_fit_and_nobody_is_cut_for_one_who_has_more(
    demands: list[int], capacity: int
) -> None:
    level = water_level(demands, capacity)
    grants = [min(demand, level) for demand in demands]
    assert sum(grants) <= capacity + 1e-6
    if any(g < d for g, d in zip(grants, demands, strict=True)):
        assert sum(grants) == pytest.approx(capacity)
        assert max(grants) == pytest.approx(level)


@given(DEMANDS, st.integers(1, 3000), st.integers(1, 4))
def test_as_many_passes_as_run_at_a_time_fit_together(
    demands: list[int], capacity: int, num_at_once: int
) -> None:
    largest = max(demands)
    others = sorted(demands)[:-1]
    granted = granted_bytes(largest, others, capacity, num_at_once)
    assert granted <= min(largest, capacity)
    equal = granted_bytes(largest, [], capacity, num_at_once)
    assert equal * num_at_once <= capacity


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ([Place(True, False, 0), Place(True, True, 0)], [1, 0]),
        ([Place(True, False, 0), Place(True, True, 1)], [1, 0]),
        ([Place(True, False, 0), Place(True, True, 2)], [0, 1]),
        ([Place(True, False, 3), Place(True, False, 2)], [1, 0]),
        ([Place(False, True, 0), Place(True, False, 9)], [1]),
        ([Place(False, True, 0)], []),
        ([Place(True, True, 1), Place(True, True, 1)], [0, 1]),
        ([Place(True, True, 0, is_late=True), Place(True, False, 9)], [1, 0]),
    ],
)
def test_devices_to_try(places: list[Place], order: list[int]) -> None:
    assert places_in_order(places) == order
