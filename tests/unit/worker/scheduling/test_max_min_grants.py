"""Shares of memory, and devices for jobs."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_worker.models.model_copies import devices_in_order
from hapi_worker.scheduling.max_min_grants import granted_bytes, max_min_level


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
def test_level(demands, capacity, level):
    assert max_min_level(demands, capacity) == level


DEMANDS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@given(DEMANDS, st.integers(0, 3000))
def test_grants_fit_and_nobody_is_cut_for_one_who_has_more(demands, capacity):
    level = max_min_level(demands, capacity)
    grants = [min(demand, level) for demand in demands]
    assert sum(grants) <= capacity + 1e-6
    if any(g < d for g, d in zip(grants, demands, strict=True)):
        assert sum(grants) == pytest.approx(capacity)
        assert max(grants) == pytest.approx(level)


@given(DEMANDS, st.integers(1, 3000), st.integers(1, 4))
def test_as_many_passes_as_run_at_a_time_fit_together(
    demands, capacity, num_at_once
):
    largest = max(demands)
    others = sorted(demands)[:-1]
    granted = granted_bytes(largest, others, capacity, num_at_once)
    assert granted <= min(largest, capacity)
    equal = granted_bytes(largest, [], capacity, num_at_once)
    assert equal * num_at_once <= capacity


def device(in_service, has_model, num_jobs, has_late_pass=False):
    return SimpleNamespace(
        in_service=in_service,
        find=lambda digest: has_model,
        leases=lambda: [None] * num_jobs,
        working_memory=SimpleNamespace(has_late_pass=has_late_pass),
    )


@pytest.mark.parametrize(
    ("devices", "order"),
    [
        ([device(True, False, 0), device(True, True, 0)], [1, 0]),
        ([device(True, False, 0), device(True, True, 1)], [1, 0]),
        ([device(True, False, 0), device(True, True, 2)], [0, 1]),
        ([device(True, False, 3), device(True, False, 2)], [1, 0]),
        ([device(False, True, 0), device(True, False, 9)], [1]),
        ([device(False, True, 0)], []),
        ([device(True, True, 1), device(True, True, 1)], [0, 1]),
        ([device(True, True, 0, True), device(True, False, 9)], [1, 0]),
    ],
)
def test_devices_to_try(devices, order):
    ordered = devices_in_order(devices, "digest")
    assert [devices.index(each) for each in ordered] == order
