"""The pure parts of ``benchmarks.splits``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cell_run import AGAIN, out_of_reach, rotated, stage_of
from benchmarks.cells import QUICK, all_cells, chosen_cells
from benchmarks.contenders import (
    Outlook,
    Static,
    distinct,
    more_cuts,
    who_measures,
)
from benchmarks.cpu_seconds import session_seconds
from benchmarks.regret import best_static, judge, medians, regret_of
from benchmarks.results import Results, cold_table, table
from benchmarks.shards import find_tars, write_shards
from benchmarks.splits import arguments_of

from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_protocol.shards import iter_samples
from hapi_splitter.planner.costs import Conditions, CutFacts, SampleCosts

STEADY = [10.0, 10.1, 9.9, 10.0, 10.05]


def times(factor: float) -> list[float]:
    return [factor * rate for rate in STEADY]


# -- regret -------------------------------------------------------------


def test_regret_is_paired_when_the_machine_changes_its_speed() -> None:
    slow_and_fast = [10.0, 5.0, 10.0, 2.5, 10.0]
    found = regret_of([0.9 * rate for rate in slow_and_fast], slow_and_fast)
    assert found.regret == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.1, 0.1))


def test_interval_holds_the_regret_and_widens_with_noise() -> None:
    noisy = [9.0, 11.0, 10.0, 12.0, 8.0]
    found = regret_of(noisy, [10.0] * 5)
    low, high = found.interval
    assert low < found.regret < high
    assert found == regret_of(noisy, [10.0] * 5)


@pytest.mark.parametrize(
    ("auto", "missed", "above"),
    [
        (times(1.2), False, True),
        (times(1.0), False, False),
        (times(0.97), False, False),
        (times(0.9), True, False),
        ([9.0, 11.0, 9.0, 11.0, 9.2], False, False),
    ],
)
def test_auto_is_judged_by_the_whole_interval(
    auto: list[float], missed: bool, above: bool
) -> None:
    rounds = {"auto": auto, "cut-3": STEADY, "stream": times(0.5)}
    verdict = judge(rounds, ["stream", "cut-3"])
    assert verdict is not None
    assert verdict.best == "cut-3"
    assert (verdict.missed, verdict.above_best_static) == (missed, above)


def test_a_smaller_regret_is_missed_when_it_is_against_streaming() -> None:
    rounds = {"auto": times(0.97), "stream": STEADY, "cut-3": times(0.5)}
    verdict = judge(rounds, ["stream", "cut-3"])
    assert verdict is not None
    assert verdict.best == "stream"
    assert verdict.missed


def test_there_is_no_verdict_when_auto_was_not_measured() -> None:
    assert judge({"stream": STEADY}, ["stream"]) is None


def test_streaming_that_is_left_out_early_is_judged_by_its_own_rounds() -> (
    None
):
    rounds = {"auto": STEADY, "cut-3": STEADY, "stream": times(0.3)[:2]}
    verdict = judge(rounds, ["stream", "cut-3"])
    assert verdict is not None
    assert verdict.best == "cut-3"
    assert verdict.against_stream.regret == pytest.approx(1 - 1 / 0.3)


def test_slow_streaming_is_measured_twice() -> None:
    rounds = {"stream": [2.0], "cut-1": [10.0], "auto": [11.0]}
    statics = ["stream", "cut-1"]
    assert out_of_reach(rounds, statics) == []
    rounds = {"stream": [2.0, 2.1], "cut-1": [10.0, 9.0], "auto": [11.0, 9.0]}
    assert out_of_reach(rounds, statics) == ["stream"]
    rounds["stream"] = [2.0, 5.1]
    assert out_of_reach(rounds, statics) == []


def test_a_cut_of_one_lucky_round_is_not_the_best() -> None:
    rounds = {"stream": STEADY, "cut-1": times(0.8), "cut-2": [99.0]}
    assert best_static(rounds, ["stream", "cut-1", "cut-2"]) == "stream"


@pytest.mark.parametrize("other", [[1.0], [1.0, 2.0]])
def test_regret_refuses_unpaired_or_too_few_rounds(
    other: list[float],
) -> None:
    with pytest.raises(ValueError, match="rounds against"):
        regret_of([1.0], other)


def test_medians_leave_out_who_was_never_measured() -> None:
    assert medians({"a": [3.0, 1.0, 2.0], "b": []}) == {"a": 2.0}


# -- contenders ---------------------------------------------------------


def test_dominated_and_near_cuts_are_left_out() -> None:
    uses = {
        1: {"link": 1.0, "cpu": 0.1},
        2: {"link": 0.5, "cpu": 0.5},
        3: {"link": 0.55, "cpu": 0.55},  # dominated by 2
        4: {"link": 0.45, "cpu": 0.55},  # near 2
        5: {"link": 0.1, "cpu": 1.0},
    }
    scales = {"link": 1.0, "cpu": 1.0}
    assert distinct(uses, scales, 0.15) == [1, 2, 5]
    assert distinct(uses, scales, 0.0) == [1, 2, 4, 5]


def test_one_of_equal_cuts_is_kept() -> None:
    uses = {4: {"cpu": 1.0}, 2: {"cpu": 1.0}}
    assert distinct(uses, {"cpu": 1.0}, 0.0) == [2]


def test_a_cut_where_both_tiers_take_as_long_is_worth_a_measurement() -> None:
    cuts = [
        CutFacts(n, f"block{n}", "relu", (4,), 100_000, 10 * n)
        for n in range(1, 9)
    ]
    seconds = tuple(0.001 * n for n in range(9))
    one = profile("cpu", 1, seconds)
    samples = SampleCosts(
        raw_bytes=110e3,
        decode_seconds=0.0,
        wire_bytes={(1, "float32"): 100e3, (8, "float32"): 10.0},
        # Of a few bytes the time is all overhead.
        encode_seconds={(1, "float32"): 1e-5, (8, "float32"): 1e-5},
        unpack_seconds={(1, "float32"): 1e-5, (8, "float32"): 1e-5},
    )
    assert more_cuts(cuts, one, one, samples, Conditions(1e9)) == [3, 4]


def profile(
    device: str, cores: float, seconds: tuple[float, ...]
) -> ModelProfile:
    return ModelProfile(
        digest="d" * 64,
        device=device,
        device_name=device,
        numerics_tag="t",
        cores=cores,
        num_devices=1,
        forward_threads=1,
        batches=(BatchProfile(1, seconds),),
        reference_seconds=0.01,
        load_seconds=0.0,
        parameter_bytes=0,
        memory_limit_bytes=1,
        peak_bytes=(0,) * len(seconds),
    )


def outlook(**rules: Static) -> Outlook:
    statics = [Static(3, "float32", 300.0), Static(9, "float16", 20.0)]
    return Outlook(statics, rules, {})


def test_contenders_of_one_cut_and_encoding_are_measured_once() -> None:
    jobs, shared = who_measures(
        outlook(
            old=Static(9, "float16", 20.0),
            new=Static(5, "float32", 90.0),
            other=Static(5, "float32", 90.0),
            careful=Static(0, "raw", 100.0),
        )
    )
    assert [job.name for job in jobs] == ["cut-3", "cut-5", "cut-9"]
    assert shared == {
        "old": "cut-9",
        "new": "cut-5",
        "other": "cut-5",
        "careful": "stream",
    }


def test_outlook_survives_its_way_between_processes() -> None:
    before = outlook(old=Static(9, "float16", 20.0))
    assert Outlook.from_json(json.loads(json.dumps(before.to_json()))) == (
        before
    )


def test_seconds_of_a_session_are_those_of_its_processes() -> None:
    mine = os.getsid(0)
    before = session_seconds({mine})
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert session_seconds({mine}) - before >= 0.25
    code = f"{burn}\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert session_seconds({other.pid}) >= 0.25
        other.kill()


def test_stage_is_what_one_sample_took() -> None:
    done = {"samples": 10, "cpu_seconds": 0.5, "bytes_per_sample": 7.0}
    assert stage_of(done, 2.0) == {
        "link_bytes": 7.0,
        "storage_seconds": pytest.approx(0.2),
        "client_seconds": pytest.approx(0.05),
    }


def test_each_contender_begins_a_round_in_turn() -> None:
    names = ["stream", "auto", AGAIN]
    orders = [rotated(names, number) for number in range(4)]
    assert [order[0] for order in orders] == [*names, "stream"]
    assert all(sorted(order) == sorted(names) for order in orders)


def test_far_cuts_leave_after_a_round_and_streaming_stays() -> None:
    first = {"stream": [1.0], "cut-1": [7.4], "cut-2": [7.6], "cut-3": [10.0]}
    assert out_of_reach(first, list(first)) == ["cut-1"]


# -- cells, data, command line ------------------------------------------


def test_there_are_twelve_cells_and_six_without_shaping() -> None:
    assert len(all_cells(shaped=True)) == 12
    assert {cell.link for cell in all_cells(shaped=False)} == {None}
    assert len(all_cells(shaped=False)) == 6
    assert len(chosen_cells(QUICK, shaped=True)) == 4


def test_cells_are_chosen_by_pattern() -> None:
    (cell,) = chosen_cells(["vit_b_16/inner/0.25"], shaped=True)
    assert cell.freeze_module == "encoder.layers.encoder_layer_5"
    with pytest.raises(ValueError, match=r"'alexnet/\*'.*resnet18"):
        chosen_cells(["alexnet/*"], shaped=True)


def write_tar(path: Path, keys: list[str]) -> None:
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for extension in ("jpg", "cls"):
                tar.addfile(tarfile.TarInfo(f"{key}.{extension}"))


def test_shards_repeat_samples_under_keys_of_their_own(
    tmp_path: Path,
) -> None:
    write_tar(tmp_path / "imagenet-a.tar", ["x", "y"])
    write_tar(tmp_path / "cifar.tar", ["z"])
    tars = find_tars([tmp_path])
    assert [tar.name for tar in tars] == ["imagenet-a.tar"]
    out = tmp_path / "out"
    out.mkdir()
    shards = write_shards(tars, out, samples=5, shard_samples=2)
    keys = []
    for shard in shards:
        with shard.open("rb") as file:
            keys.append([s.key for s in iter_samples(file, name="shard")])
    assert [len(each) for each in keys] == [2, 2, 1]
    assert len({key for each in keys for key in each}) == 5


def test_no_shards_are_made_when_there_is_no_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "empty.tar", [])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=r"no sample in .*empty\.tar"):
        write_shards(find_tars([tmp_path]), out, 1, 1)
    with pytest.raises(ValueError, match=r"nowhere is no tar"):
        find_tars([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "x", "--rounds", "4"], "at least 5"),
        (["--data", "x", "--resume"], "--resume needs --json"),
        (["--data", "x", "--scale", "0"], "above 0"),
        ([], "HAPI_TEST_DATA"),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HAPI_TEST_DATA", raising=False)
    with pytest.raises(SystemExit):
        arguments_of(argv)
    assert message in capsys.readouterr().err


# -- results ------------------------------------------------------------


def entry(name: str, **more: Any) -> dict[str, Any]:
    model, freeze, _ = name.split("/")
    return {
        "name": name,
        "model": model,
        "freeze": freeze,
        "complete": True,
        "calibration": {"samples_per_second": 5.0},
        "samples_per_second": {"auto": 9.0, "stream": 2.0, "cut-3": 10.0},
        "best_static": "cut-3",
        "regret": 0.1,
        "interval": [0.08, 0.12],
        "missed": True,
        "above_best_static": False,
        **more,
    }


def test_a_resumed_run_keeps_complete_cells_only(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = Results(path, {"rounds": 5})
    first.put(entry("resnet18/backbone/2"))
    first.put(entry("resnet18/inner/2", complete=False))
    again = Results(path, {"rounds": 5}, resume=True)
    assert again.done("resnet18/backbone/2")
    assert not again.done("resnet18/inner/2")
    assert again.body["calibration"]["resnet18/backbone"] == [
        {"samples_per_second": 5.0}
    ]
    assert not Results(path, {"rounds": 5}).done("resnet18/backbone/2")


def test_a_run_with_other_settings_does_not_resume(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Results(path, {"rounds": 5}).save()
    with pytest.raises(ValueError, match="rounds=5, not 7"):
        Results(path, {"rounds": 7}, resume=True)


def test_a_cell_is_replaced_when_it_is_measured_on(tmp_path: Path) -> None:
    results = Results(tmp_path / "out.json", {})
    results.put(entry("resnet18/backbone/2", complete=False, regret=None))
    results.put(entry("resnet18/backbone/2"))
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cell["regret"] == 0.1
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_tables_show_regret_and_what_was_not_run() -> None:
    cold = {
        "stream": {"seconds": 12.34},
        "cut-3": {"seconds": None, "at_least_seconds": 200.0},
    }
    cells = [entry("resnet18/backbone/2", cold=cold)]
    assert "10.0%" in table(cells)
    assert "missed" in table(cells)
    assert "stream 12.3 s, cut-3 > 200 s" in cold_table(cells)
    assert cold_table([entry("resnet18/backbone/2")]) == ""
