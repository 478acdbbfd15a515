"""What ``benchmarks.cache`` makes of its rounds."""

from __future__ import annotations

import pytest
from benchmarks.cache import is_met, parse, quotients, table

ROUNDS = [
    {"stream": 8.0, "off": 4.0, "store": 5.0, "hit": 1.0},
    {"stream": 8.0, "off": 4.0, "store": 4.0, "hit": 1.0},
    {"stream": 8.0, "off": 5.0, "store": 5.0, "hit": 2.0},
]


def test_quotients_are_those_of_the_rounds() -> None:
    found = quotients(ROUNDS)
    assert found["second_by_first"]["median"] == pytest.approx(0.25)
    assert found["store_by_off"]["median"] == pytest.approx(1.0)
    assert found["hit_by_off"]["median"] == pytest.approx(0.25)
    assert found["hit_by_stream"]["median"] == pytest.approx(0.125)
    low, high = found["second_by_first"]["interval"]
    assert 0.2 <= low <= 0.25 <= high <= 0.4


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ({"worker_moved": {}, "fallbacks": 0}, True),
        ({"worker_moved": {"jobs": 1.0}, "fallbacks": 0}, False),
        ({"worker_moved": {}, "fallbacks": 2}, False),
    ],
)
def test_goal_is_a_worker_at_rest(cell, expected) -> None:
    good = {"worker_moved": {}, "fallbacks": 0}
    assert is_met([good, cell]) is expected


def test_table_has_a_line_for_each_cell() -> None:
    cells = [
        {"model": "resnet18", "link_megabytes": link, **quotients(ROUNDS)}
        for link in (None, 12.5)
    ]
    lines = table(cells).splitlines()
    assert len(lines) == 3
    assert "none" in lines[1]
    assert "12.5" in lines[2]
    assert "0.250 (0.200 … 0.400)" in lines[1]


@pytest.mark.parametrize(
    "arguments",
    [["--rounds", "1"], ["--samples", "0"], ["--models", "unknown"]],
)
def test_bad_arguments_are_refused(arguments, capsys, tmp_path) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*arguments, "--data", str(tmp_path)])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
