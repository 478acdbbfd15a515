"""``benchmarks.accuracy``: the same training, whatever features become."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import accuracy, cifar
from benchmarks.accuracy import Data, Run, sent_as, summary
from benchmarks.cifar import (
    NEW_CLASSES,
    Examples,
    accuracy_of,
    batches,
    examples_of,
    pretrained,
    with_new_head,
)
from benchmarks.pinned import one_core
from benchmarks.workloads import BACKBONE, FREEZES, INNER
from PIL import Image
from torch import nn

from hapi_protocol.encodings import DTYPES
from photos import tar_of

COUNTS = {"train": 8, "test": 4}
"""Of each class."""
BATCH = 16
QUICK = accuracy.Effort(1, 1, dict.fromkeys(FREEZES, 1), None)


def jpeg(label: int, number: int) -> bytes:
    """Noise around a grey of the class."""
    dice = np.random.default_rng(100 * label + number)
    pixels = dice.normal(20 + 22 * label, 8, (32, 32, 3)).clip(0, 255)
    sink = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(sink, "JPEG", quality=95)
    return sink.getvalue()


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """And one thread: others cost more than they bring for so little."""
    with pytest.MonkeyPatch.context() as patch, one_core():
        patch.setattr(cifar, "PRETRAIN_BATCH", BATCH)
        patch.setattr(cifar, "TAIL_BATCH", BATCH)
        yield


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cifar")
    paths = []
    for split, count in COUNTS.items():
        path = folder / f"cifar10-{split}-000.tar"
        members = []
        for number in range(count):
            for label in range(10):
                key = f"{split}_{label}_{number}"
                members.append((f"{key}.jpg", jpeg(label, number)))
                members.append((f"{key}.cls", str(label).encode()))
        path.write_bytes(tar_of(members))
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def section(tars: list[Path]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "QUICK", QUICK)
        said: list[str] = []
        found = accuracy.measure(tars, quick=True, note=said.append)
    assert len(said) == 1 + 2 * len(FREEZES)
    assert said[-1].startswith("torch ")
    return found


def test_all_formats_and_torch_are_trained(section: dict[str, Any]) -> None:
    assert json.loads(json.dumps(section)) == section
    assert section["train"] == 5 * COUNTS["train"]
    assert section["test"] == 5 * COUNTS["test"]
    assert len(section["pretrained"]) == section["seeds"] == 1
    assert list(section["freezes"]) == list(FREEZES)
    for freeze in section["freezes"].values():
        ways = freeze["ways"]
        assert list(ways) == ["torch", *DTYPES]
        assert ways["torch"]["accuracy"] == ways["float32"]["accuracy"]
        assert ways["float32"]["difference"]["mean"] == 0
    assert section["freezes"][BACKBONE]["module"] == "layer4"
    assert accuracy.table(section).count("bfloat16") == len(FREEZES)


def test_formats_start_and_go_on_alike(
    tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is rounded, all end with the weights of plain torch."""

    def weights(model: nn.Module, examples: Examples) -> float:
        found = [p.detach().double().abs().sum() for p in model.parameters()]
        return float(sum(found))

    monkeypatch.setattr(accuracy, "QUICK", QUICK)
    monkeypatch.setattr(accuracy, "FREEZES", (INNER,))
    monkeypatch.setattr(accuracy, "DTYPES", ("float32", "uint8"))
    monkeypatch.setattr(accuracy, "accuracy_of", weights)
    monkeypatch.setattr(accuracy, "sent_as", lambda _, values: (values, 0))
    found = accuracy.measure(tars, quick=True, note=print)
    ways = found["freezes"][INNER]["ways"]
    ended = [way["mean"] for way in ways.values()]
    assert ended == pytest.approx([ended[0]] * 3, rel=1e-6)


def test_data_are_the_other_classes_from_0_on(tars: list[Path]) -> None:
    data = Data.of(tars, None)
    assert sorted(set(data.new_test.labels.tolist())) == [0, 1, 2, 3, 4]
    # Classes 5 to 9 are lighter.
    lightest = data.old_train.values.mean((1, 2, 3)).max()
    assert data.new_train.values.mean((1, 2, 3)).min() > lightest
    assert len(Data.of(tars, 7).new_train) == 7


def test_missing_tars_and_labels_are_named(
    tars: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no tar is named \*test\*"):
        Data.of(tars[:1], None)
    path = tmp_path / "train.tar"
    path.write_bytes(tar_of([("a.jpg", jpeg(0, 0))]))
    with pytest.raises(ValueError, match=r"a\.jpg has no \.cls beside it"):
        examples_of([path])


def test_tars_without_images_of_all_classes_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train-and-test.tar"
    path.write_bytes(tar_of([]))
    with pytest.raises(ValueError, match="no JPEG in"):
        Data.of([path], None)
    path.write_bytes(tar_of([("a.jpg", jpeg(0, 0)), ("a.cls", b"0")]))
    with pytest.raises(ValueError, match="no image of the classes 5 to 9"):
        Data.of([path], None)


def test_epochs_have_an_order_of_their_seed() -> None:
    examples = Examples(torch.arange(10.0), torch.arange(10))

    def order(seed: int) -> list[int]:
        dice = torch.Generator().manual_seed(seed)
        found = list(batches(examples, 4, dice))
        assert [len(batch) for batch in found] == [4, 4]
        for batch in found:
            assert torch.equal(batch.values, batch.labels.float())
        return [label for batch in found for label in batch.labels.tolist()]

    assert order(1) == order(1) != order(2)


def test_pretraining_learns_and_the_new_head_does_not_know(
    tars: list[Path],
) -> None:
    data = Data.of(tars, None)
    model = pretrained(data.old_train, 6, seed=0)
    assert accuracy_of(model, data.old_train) > 0.5
    again = pretrained(data.old_train, 1, seed=0)
    other = pretrained(data.old_train, 1, seed=1)
    assert not torch.equal(again.fc.weight, other.fc.weight)
    body = model.conv1.weight.clone()
    assert with_new_head(model, 0).fc.out_features == len(NEW_CLASSES)
    assert torch.equal(model.conv1.weight, body)


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)],
)
def test_features_are_rounded_as_their_format_rounds(
    dtype: str, most: float
) -> None:
    features = torch.rand(4, 3, 8, 8) + 0.5
    values, clipped = sent_as(dtype, features)
    assert clipped == 0
    difference = (values - features).abs() / features
    assert difference.max() <= most
    assert bool(difference.max() > 0) is bool(most)


def test_values_that_do_not_fit_are_counted() -> None:
    values, clipped = sent_as("float16", torch.tensor([[1.0, 1e6]]))
    assert clipped == 1
    assert values.tolist() == [[1.0, 65504.0]]


def test_difference_is_to_float32_of_the_same_seed() -> None:
    found = summary(
        [
            {"float32": Run(0.50), "uint8": Run(0.49, saturated=2)},
            {"float32": Run(0.70), "uint8": Run(0.72, saturated=3)},
        ]
    )
    assert found["uint8"]["accuracy"] == [0.49, 0.72]
    assert found["uint8"]["mean"] == pytest.approx(0.605)
    assert found["uint8"]["low"] == 0.49
    beside = found["uint8"]["difference"]
    assert beside["mean"] == pytest.approx(0.005)
    assert beside["low"] == pytest.approx(-0.01)
    assert beside["high"] == pytest.approx(0.02)
    assert found["uint8"]["saturated"] == 5


def test_results_are_written_and_shown(
    tars: list[Path],
    tmp_path: Path,
    section: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = []

    def measured(tars: list[Path], **_: Any) -> dict[str, Any]:
        given.extend(tars)
        return section

    monkeypatch.setattr(accuracy, "measure", measured)
    path = tmp_path / "accuracy.json"
    folder = str(tars[0].parent)
    assert accuracy.main(["--data", folder, "--json", str(path)]) == 0
    assert sorted(given) == sorted(tars)
    assert json.loads(path.read_text())["accuracy"] == section
    assert "inner      uint8" in capsys.readouterr().out


def test_folder_of_other_tars_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "imagenet-0.tar").write_bytes(tar_of([]))
    assert accuracy.main(["--data", str(tmp_path)]) == 1
    assert "no tar is named *train*" in capsys.readouterr().err
