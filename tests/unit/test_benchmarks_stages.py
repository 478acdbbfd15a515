"""``benchmarks.stages``: rates of torch's own, and nothing of HAPI in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks import crowding, stage_bounds, stages
from benchmarks.pieces import built, num_frozen, pieces_of
from benchmarks.pinned import one_core
from benchmarks.spread import spread
from benchmarks.stage_rates import timed_pass
from benchmarks.transfer_cost import (
    ServerError,
    discard,
    get,
    local_server,
    read_members,
    serve_seconds_per_byte,
)
from benchmarks.workloads import BACKBONE, FREEZES, INNER, NETWORKS

from photos import shard

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages") / "a.tar"
    path.write_bytes(shard(2, size=64))
    return path


def test_importing_it_loads_nothing_of_ours() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, benchmarks.stages, benchmarks.cifar\n"
            "print([n for n in sys.modules if n.startswith('hapi')])",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_in_order_are_the_network(name: str) -> None:
    model = built(name).eval()
    size = NETWORKS[name].crop_size
    images = torch.rand(1, 3, size, size)
    pieces = pieces_of(name, model)
    marks, values = timed_pass(pieces, images)
    with torch.no_grad():
        assert torch.equal(values[-1], model(images))
    assert marks == sorted(marks)
    names = [piece.name for piece in pieces]
    assert num_frozen(name, BACKBONE, pieces) == len(names) - 1
    inner = names[num_frozen(name, INNER, pieces) - 1]
    assert inner == NETWORKS[name].freeze[INNER]


@pytest.fixture(scope="module")
def section(tar: Path) -> dict[str, Any]:
    """Of one network, measured once."""
    said: list[str] = []
    only = {"mobilenet_v3_small": NETWORKS["mobilenet_v3_small"]}
    effort = stages.Effort(rounds=1, steps=1, photographs=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "NETWORKS", only)
        patch.setattr(stages, "QUICK", effort)
        found = stages.measure([tar], quick=True, note=said.append)
    assert said == [
        "receiving over HTTP",
        "mobilenet_v3_small",
        "mobilenet_v3_small, beside another core",
    ]
    return found


def test_every_stage_is_measured(section: dict[str, Any]) -> None:
    assert json.loads(json.dumps(section)) == section
    assert section["photographs"] == 2
    assert section["receive_seconds_per_byte"]["median"] > 0
    network = section["networks"]["mobilenet_v3_small"]
    assert network["decode_seconds"]["median"] > 0
    if len(os.sched_getaffinity(0)) > 1:
        assert network["crowding"]["median"] > -1
        assert "while another core does the same" in stages.table(section)
    else:
        assert network["crowding"] is None
    boundaries = network["boundaries"]
    assert [b["name"] for b in boundaries][-2:] == ["features.12", "avgpool"]
    assert boundaries[-1]["shape"] == [576]
    assert boundaries[-1]["float32_bytes"] == 4 * 576
    prefix = [b["prefix_seconds"]["median"] for b in boundaries]
    assert prefix == sorted(prefix)
    assert prefix[0] > 0
    # Behind the inner freeze point nothing is forwarded without gradients.
    assert [INNER in b["rest_seconds"] for b in boundaries] == [True] * 7 + [
        False
    ] * 7
    for b in boundaries:
        rest = b["rest_seconds"][BACKBONE]["median"]
        assert rest == pytest.approx(
            prefix[-1] - b["prefix_seconds"]["median"]
        )
    freezes = network["freezes"]
    assert freezes[BACKBONE]["boundary"] == "avgpool"
    assert freezes[INNER]["boundary"] == "features.6"
    steps = [freezes[kind]["train_seconds"]["median"] for kind in FREEZES]
    assert 0 < steps[0] < steps[1]


def test_table_has_each_stage_and_each_bound(section: dict[str, Any]) -> None:
    text = stages.table(section)
    assert text.count("mobilenet_v3_small/") == len(FREEZES) * len(
        stage_bounds.LINKS
    )
    assert "up to features.12" in text
    assert "step behind avgpool" in text


def number(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value}


def network_of(*boundaries: dict[str, Any]) -> dict[str, Any]:
    return {
        "decode_seconds": number(0.004),
        "boundaries": list(boundaries),
        "freezes": {BACKBONE: {"train_seconds": number(0.001)}},
    }


SECTION = {
    "jpeg_bytes": 1000.0,
    "receive_seconds_per_byte": number(1e-6),
    "serve_seconds_per_byte": 2e-6,
}
NETWORK = network_of(
    {
        "name": "early",
        "float32_bytes": 5000,
        "prefix_seconds": number(0.003),
        "rest_seconds": {BACKBONE: number(0.007)},
    },
    {
        "name": "last",
        "float32_bytes": 100,
        "prefix_seconds": number(0.010),
        "rest_seconds": {BACKBONE: number(0.0)},
    },
    {
        "name": "behind the freeze point",
        "float32_bytes": 10,
        "prefix_seconds": number(0.020),
        "rest_seconds": {},
    },
)


def test_ways_add_up_the_stages_of_each_tier() -> None:
    stream, early, last = stage_bounds.ways_of(SECTION, NETWORK, BACKBONE)
    assert stream.storage_seconds == pytest.approx(0.002)
    assert stream.client_seconds == pytest.approx(
        0.001 + 0.004 + 0.010 + 0.001
    )
    assert stream.link_bytes == 1000
    assert early.name == "early"
    assert early.storage_seconds == pytest.approx(0.002 + 0.004 + 0.003)
    assert early.client_seconds == pytest.approx(0.005 + 0.007 + 0.001)
    assert early.link_bytes == 5000
    assert last.storage_seconds == pytest.approx(0.002 + 0.004 + 0.010)
    assert last.client_seconds == pytest.approx(0.0001 + 0.001)


def test_links_are_multiples_of_what_streaming_can_use() -> None:
    found = stage_bounds.bounds(SECTION, NETWORK, BACKBONE)
    assert found["one_core_per_second"] == pytest.approx(1 / 0.016)
    assert found["saturating_bytes_per_second"] == pytest.approx(1000 / 0.016)
    assert [link["factor"] for link in found["links"]] == list(
        stage_bounds.LINKS
    )
    for link in found["links"]:
        bound = link["bound"]
        assert bound["streaming"] == pytest.approx(
            min(1.0, link["factor"]) / 0.016
        )
        assert sum(bound["mix"].values()) == pytest.approx(1)
        assert bound["speedup"] >= 1.2
        assert link["goal"] == pytest.approx(0.85 * bound["speedup"])


def test_goal_is_for_bounds_that_are_worth_it() -> None:
    """All that can be pushed is far larger than an image."""
    large = dict(NETWORK["boundaries"][1], float32_bytes=100_000)
    narrow = stage_bounds.bounds(SECTION, network_of(large), BACKBONE)[
        "links"
    ][0]
    assert narrow["bound"]["speedup"] == pytest.approx(1)
    assert narrow["goal"] is None


def test_bound_of_cores_that_disturb_each_other_is_lower() -> None:
    crowded = {**NETWORK, "crowding": number(0.25)}
    *_, fast = stage_bounds.bounds(SECTION, crowded, BACKBONE)["links"]
    assert fast["crowded"]["speedup"] < fast["bound"]["speedup"]
    *_, apart = stage_bounds.bounds(SECTION, NETWORK, BACKBONE)["links"]
    assert apart["crowded"] is None
    # Work that happens to be faster beside another core is noise.
    faster = {**NETWORK, "crowding": number(-0.05)}
    assert stage_bounds.crowding_of(faster) == 0.0


def test_a_neighbour_works_until_it_is_to_rest() -> None:
    done: list[int] = []

    class Counted:
        def run(self) -> None:
            done.append(1)
            time.sleep(0.001)

    neighbour = crowding.Neighbour(cast("crowding.Batches", Counted()))
    neighbour.rest()
    assert not done
    neighbour.work()
    deadline = time.monotonic() + 10.0
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    neighbour.rest()
    count = len(done)
    assert count >= 3
    time.sleep(0.01)
    assert len(done) == count


def test_one_core_has_no_neighbour(
    tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert crowding.crowding("resnet18", tar, rounds=1, steps=1) is None


def test_thread_has_one_core_and_gets_the_others_back() -> None:
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with one_core() as core:
        assert os.sched_getaffinity(0) == {core}
        assert torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_spread_is_median_and_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_whole_tar_is_received(tar: Path) -> None:
    with local_server([tar, tar]) as urls:
        assert len(urls) == 2
        found = get(urls[1], read_members)
        assert found == tar.stat().st_size
        assert get(urls[0], discard) == tar.stat().st_size
        with pytest.raises(ServerError, match="10239 bytes unread"):
            get(urls[0], lambda body: body.read(1))
        assert serve_seconds_per_byte(urls[0], "token", 1)["median"] > 0
        with pytest.raises(ServerError, match="no-such: 404"):
            serve_seconds_per_byte(f"{urls[0]}/../no-such", "", 1)


def test_long_padding_of_a_tar_is_received(tar: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded.tar"
    padded.write_bytes(tar.read_bytes() + bytes(100_000))
    with local_server([padded]) as (url,):
        assert get(url, read_members) == padded.stat().st_size


def test_tars_without_photographs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.tar"
    with tarfile.open(path, "w"):
        pass
    with pytest.raises(ValueError, match="no JPEG in"):
        stages.measure([path], quick=True, note=print)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--serve-seconds-per-byte", "-1"], "is -1; 0 or more"),
        (
            ["--url", "http://h/o", "--serve-seconds-per-byte", "1e-9"],
            "give --url or --serve-seconds-per-byte",
        ),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stages.arguments_of(["--data", "x", *arguments])
    assert said in capsys.readouterr().err


def test_folder_without_tars_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stages.main(["--data", str(tmp_path)]) == 1
    assert "is no tar and no folder of tars" in capsys.readouterr().err


def test_results_are_written_and_shown(
    tar: Path,
    tmp_path: Path,
    section: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {}

    def measured(tars: list[Path], **settings: Any) -> dict[str, Any]:
        asked.update(settings, tars=tars)
        return section

    monkeypatch.setattr(stages, "measure", measured)
    path = tmp_path / "stages.json"
    with local_server([tar]) as urls:
        arguments = ["--data", str(tar), "--json", str(path), "--url", urls[0]]
        assert stages.main(arguments) == 0
    body = json.loads(path.read_text())
    assert body["stages"] == section
    assert asked["tars"] == [tar]
    assert asked["serve"] == body["serve_seconds_per_byte"]["median"] > 0
    assert capsys.readouterr().out.strip() == stages.table(section).strip()
