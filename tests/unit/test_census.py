"""The census of models: two small runs, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("timm")
pytest.importorskip("transformers")

from benchmarks import census
from benchmarks.census_models import Entry, entries
from benchmarks.census_table import write_rst


def test_entries_are_unique_and_hold_all_classification_models() -> None:
    keys = [entry.key for entry in entries()]
    assert len(set(keys)) == len(keys)
    for source, count in (
        ("torchvision", 75),
        ("timm", 25),
        ("transformers", 4),
    ):
        assert sum(key.startswith(f"{source}/") for key in keys) >= count


def test_unknown_model_is_an_error_naming_it() -> None:
    with pytest.raises(SystemExit, match="not in the census: resnet17"):
        census.choose(["resnet18", "resnet17"])


@pytest.mark.timeout(600)
def test_small_census_writes_rows_and_resumes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, page = tmp_path / "census.json", tmp_path / "models.rst"
    arguments = ["--json", str(results), "--rst", str(page), "--only"]
    names = ["squeezenet1_1", "transformers/ViT"]
    census.main([*arguments, *names])
    rows = json.loads(results.read_text())
    assert [row["key"] for row in rows] == [
        "torchvision/squeezenet1_1",
        "transformers/ViT",
    ]
    assert [row["reason"] for row in rows] == ["", ""]
    assert [row["freeze"] for row in rows] == ["features", "vit"]
    assert all(len(row["checked"]) == census.CUTS for row in rows)
    text = page.read_text()
    assert "2 of 2 models can be split" in text
    assert "* - ``squeezenet1_1``" in text

    monkeypatch.setattr(census, "in_process", None)
    census.main([*arguments, *names, "--resume"])
    assert page.read_text() == text
    assert "2/2] transformers/ViT" in capsys.readouterr().out


def test_process_that_takes_too_long_is_a_row_with_the_reason() -> None:
    row = census.in_process(Entry("torchvision", "alexnet"), 16.0, 0.01)
    assert row.reason == "took over 0.01 s"


def test_part_that_differs_from_the_model_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    parts = census.split(model, "0", sample_shape=(4,))
    loaded = census.written_and_loaded(parts.frozen)
    census.compare(model, parts, loaded, [1, 2])
    with torch.no_grad():
        loaded.weights[1].add_(0.01)
    with pytest.raises(census.CensusError, match="cut 1 is off by"):
        census.compare(model, parts, loaded, [1, 2])


def test_model_whose_output_is_constant_proves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    parts = census.split(model, "0", sample_shape=(4,))
    with pytest.raises(census.CensusError, match="tells nothing apart"):
        census.compare(model, parts, parts.frozen, [1])
    census.disturb(model)
    census.compare(model, parts, parts.frozen, [1])


def test_table_names_what_fails_and_leaves_nothing_out() -> None:
    rows = [
        census.Row("torchvision/a", 1_500_000, 64, "body", 7, (1, 2)),
        census.Row("timm/b", 10, 96, reason="operator aten.lstm.input"),
    ]
    text = write_rst(rows)
    assert "1 of 2 models can be split" in text
    assert (
        "   * - ``a``\n     - 1.5 M\n     - 64\n     - ``body``\n"
        "     - 7\n     - yes\n"
    ) in text
    assert "     - no: ``operator aten.lstm.input``\n" in text
    assert text.index("torchvision\n---") < text.index("timm\n---")


def test_page_in_the_documentation_is_what_the_census_writes() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.rst"
    head = write_rst([]).partition("0 of 0 models")[0]
    assert page.read_text().startswith(head)


def test_no_model_is_missing_on_that_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.rst").read_text()
    for entry in entries():
        name = entry.key.partition("/")[2]
        assert f"* - ``{name}``\n" in page, entry.key
