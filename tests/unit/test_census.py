"""The census of models: one small run, and its comparison."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("timm")
pytest.importorskip("transformers")

from benchmarks import census
from benchmarks.micro.census_models import entries

TABLE = Path(census.__file__).parent / "results" / "models.csv"


def test_published_table_has_all_models():
    with TABLE.open(newline="") as file:
        listed = [
            (row["model"], row["freeze"]) for row in csv.DictReader(file)
        ]
    every = list(entries())
    assert [model for model, _ in listed] == [entry.key for entry in every]
    for (_, freeze), entry in zip(listed, every, strict=True):
        assert freeze == (entry.freeze or freeze)


def test_small_census_writes_its_table(tmp_path):
    results, table = tmp_path / "census.json", tmp_path / "models.csv"
    paths = ["--json", str(results), "--csv", str(table)]
    names = ["squeezenet1_1", "transformers/ViTForImageClassification"]
    assert census.main([*paths, "--only", *names]) == 0
    rows = json.loads(results.read_text())["rows"]
    assert [row["reason"] for row in rows] == ["", "", ""]
    freezes = [row["freeze"] for row in rows]
    assert freezes == ["features", "vit", "vit.layers.0"]
    assert all(len(row["checked"]) == census.NUM_CUTS for row in rows)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["result"] for row in rows] == ["equal", "equal", "equal"]


def test_part_that_differs_from_the_model_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    parts = census.split(model, "0", sample_shape=(4,))
    loaded = census.written_and_loaded(parts.frozen)
    census.compare(model, parts, loaded, [1, 2])
    with torch.no_grad():
        loaded.weights[1].add_(0.01)
    with pytest.raises(census.CensusError, match="cut 1 is off by"):
        census.compare(model, parts, loaded, [1, 2])


def test_model_with_constant_output_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    parts = census.split(model, "0", sample_shape=(4,))
    with pytest.raises(census.CensusError, match="constant"):
        census.compare(model, parts, parts.frozen, [1])
    census.perturb(model)
    census.compare(model, parts, parts.frozen, [1])
