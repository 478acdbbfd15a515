"""Limits on cores and memory from control groups."""

import os

import pytest

from hapi_splitter import host_limits
from hapi_splitter.host_limits import allowed_cores, allowed_memory_bytes

AFFINITY = len(os.sched_getaffinity(0))


@pytest.fixture
def control_groups(tmp_path, monkeypatch):
    """Returns a function that makes the process's control groups."""
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    monkeypatch.setattr(host_limits, "_MEMBERSHIP", membership)
    monkeypatch.setattr(host_limits, "_GROUPS", groups)

    def make(line, limits):
        membership.write_text(line)
        for name, text in limits.items():
            path = groups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_quota_limits_the_cores_up_to_the_affinity(control_groups):
    line = "1:cpu:/\n0::/pod/box\n"
    for quota, cores in (("50000", 0.5), ("100000000", AFFINITY)):
        control_groups(line, {"pod/box/cpu.max": f"{quota} 100000\n"})
        assert allowed_cores() == cores


@pytest.mark.parametrize(("pod", "box"), [("20000", "max"), ("max", "20000")])
def test_lowest_limit_of_nested_groups_applies(control_groups, pod, box):
    control_groups(
        "0::/pod/box\n",
        {
            "pod/cpu.max": f"{pod} 100000\n",
            "pod/box/cpu.max": f"{box} 100000\n",
            "pod/memory.max": "3000\n",
            "pod/box/memory.max": "2000\n",
        },
    )
    assert allowed_cores() == 0.2
    assert allowed_memory_bytes() == 2000


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}),
        ("0::/missing\n", {}),
        ("3:memory:/box\n", {"box/memory.max": "2000\n"}),
        # Outside the mount point: a sibling as seen from a container.
        ("0::/../other\n", {"memory.max": "max\n"}),
    ],
)
def test_without_limits_affinity_applies(control_groups, line, limits):
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert allowed_memory_bytes() == host  # without a list of groups
    control_groups(line, limits)
    assert allowed_cores() == AFFINITY
    assert allowed_memory_bytes() == host
