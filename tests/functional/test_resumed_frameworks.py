"""A plain loop, accelerate and Lightning go on from any step, after a kill."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from as_user import environment_of, run
from children import run_family
from hapi_client.swift.swift_url import parse_location
from jobs import upload_shards
from photos import shards_of
from preloaded import python
from waiting import SECONDS

# Of two epochs of 5 steps.  Lightning counts epochs wrong, also without ours,
# in a run that goes on from the last step of one, and is resumed again.
KILLED_AT = 3, 8
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
SCRIPT = Path(__file__).parent.parent / "support" / "resumed_trainer.py"


@pytest.fixture(scope="module", autouse=True)
def data(connection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    location = parse_location("swift://frameworks/train")
    shards = shards_of((20, 16, 24, 12), size=120)
    upload_shards(connection, location, shards, folder)


@pytest.fixture(scope="module")
def expected():
    """The losses of a whole run, which are those of each way."""
    return []


@pytest.fixture
def place_of(request):
    test = request.node.name.replace("[", "-").replace("]", "")
    return lambda name: f"swift://resumed/{test}-{name}"


@pytest.fixture
def train(cluster, tmp_path, place_of):
    """Trains in some way; returns what the script has printed."""

    def train(way, name, *step, launcher=()):
        done = run_family(
            [
                python("accelerate", "lightning"),
                *launcher,
                SCRIPT,
                way,
                tmp_path / name,
                place_of(name),
                *step,
            ],
            SECONDS,
            environment={**environment_of(cluster), "OMP_NUM_THREADS": "1"},
        )
        killed = 1 if launcher else -9
        assert done.returncode == (killed if step else 0), done.stderr
        # Lightning gives hints.
        printed = [x for x in done.stdout.splitlines() if x[:1] == "{"]
        lines = [json.loads(line) for line in printed]
        return {name: value for line in lines for name, value in line.items()}

    return train


@pytest.mark.parametrize("way", ["plain", "accelerate", "lightning"])
def test_run_goes_on_where_it_was_killed(
    train, expected, place_of, cluster, tmp_path, way
):
    if not expected:
        expected += train("plain", "whole")["losses"]
    assert len(expected) == 10
    first, second = KILLED_AT
    assert train(way, "killed", str(first))["begins"] == 0
    # From the folder, and then from Swift.
    again = train(way, "killed", str(second))
    assert again["begins"] in (first - 1, first)
    shutil.rmtree(tmp_path / "killed")
    last = train(way, "killed")
    assert last["begins"] in (second - 1, second)
    assert last["losses"] == expected
    place = place_of("killed")
    done = run(cluster, tmp_path, ("hapi", "checkpoints", "verify", place))
    assert done.returncode == 0, done.stdout
    assert "10   │ whole" in done.stdout
    for path in (tmp_path / "killed").iterdir():
        if path.suffix in (".pt", ".ckpt"):
            torch.load(path, weights_only=True, mmap=True)


def test_ranks_of_lightning_go_on_from_swift(train, tmp_path):
    train = partial(train, launcher=TORCHRUN)
    last = KILLED_AT[0]
    train("lightning", "killed", str(last))
    shutil.rmtree(tmp_path / "killed")
    again = train("lightning", "killed")
    assert again["begins"] in (last - 1, last)
    assert again["digest"] == train("plain", "whole")["digest"]
