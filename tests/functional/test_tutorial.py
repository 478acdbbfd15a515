"""The tutorial, step by step: both of its scripts train the same model."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.models import ResNet18_Weights, resnet18

from as_user import run
from hapi_cluster import USERS
from photos import jpegs

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "tutorial" / "finetune.rst"
CLASSES = ("astronaut", "cat", "coffee")
NUM_TRAIN = 36
NUM_VAL = 18
EPOCHS = 4
MAX_CHANGED_LINES = 12
ELSEWHERE = ("python3 -m venv", "pip install", "hapi cluster", "eval ")
"""The cluster is there already, and so are the packages."""
TOLERANCE = 1e-4
USER = "test2:tester2"
"""User whose account is empty."""


def commands():
    text = PAGE.read_text()
    blocks = re.findall(r"\.\. code-block:: sh\n\n((?:(?:    .*)?\n)+)", text)
    lines = [line.strip() for line in "".join(blocks).splitlines()]
    return [line for line in lines if line]


def write_photos(folder):
    images = jpegs(4 * (NUM_TRAIN + NUM_VAL) // 3)
    for number, (data, label) in enumerate(images):
        if label == len(CLASSES):
            continue
        split = "val" if number // 4 % 3 == 2 else "train"
        place = folder / split / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.jpg").write_bytes(data)


def write_weights(photos, torch_home):
    """Writes weights into torchvision's download folder.

    They are random, with batch norms that have seen photographs, which keeps
    the features in a usual range.
    """
    weights = ResNet18_Weights.DEFAULT
    torch.manual_seed(7)
    model = resnet18()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.momentum = None  # the mean of all batches
    read = partial(decode_image, mode="RGB")
    data = ImageFolder(str(photos), weights.transforms(), loader=read)
    with torch.no_grad():
        for images, _ in DataLoader(data, batch_size=24):
            model(images)
    place = torch_home / "hub" / "checkpoints"
    place.mkdir(parents=True)
    torch.save(model.state_dict(), place / weights.url.rpartition("/")[2])


@pytest.fixture
def reader(cluster, tmp_path):
    """Runs a command of the page, and gives what it prints."""
    folder = tmp_path
    write_photos(folder / "photos")
    write_weights(folder / "photos" / "train", folder / "torch")
    for path in (DOCS / "examples").glob("*.py"):
        code = path.read_text().replace("EPOCHS = 10", f"EPOCHS = {EPOCHS}")
        (folder / path.name).write_text(code)

    environment = {
        "TORCH_HOME": str(folder / "torch"),
        # Other pages have containers of the same names in theirs.
        "ST_USER": USER,
        "ST_KEY": USERS[USER][0],
    }

    def follow(command):
        words: list[str] = []
        for word in shlex.split(command):
            found = sorted(folder.glob(word)) if "*" in word else []
            words += [str(f.relative_to(folder)) for f in found] or [word]
        done = run(cluster, folder, words, environment)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        model = folder / "model.pt"
        if words[1].startswith("finetune"):
            shutil.copy(model, folder / f"{words[1]}.pt")
        return done.stdout

    return follow


def curve(output):
    """Loss, and how many of how many were right, of each epoch."""
    lines = re.findall(
        r"epoch \d+: loss ([\d.]+), (\d+) of (\d+) right", output
    )
    return [(float(x), int(y), int(z)) for x, y, z in lines]


def test_page_works_and_both_scripts_train_the_same_model(reader, tmp_path):
    output = {
        line: reader(line)
        for line in commands()
        if not line.startswith(ELSEWHERE)
    }
    assert list(output) == [
        "python finetune.py",
        "hapi upload photos/train photos/train",
        "hapi upload photos/val photos/val",
        "hapi ls photos",
        "hapi plan resnet18 --freeze avgpool --data swift://photos/train "
        "--epochs 10",
        "python finetune_hapi.py",
        "python predict.py photos/val/cat/*.jpg",
        "hapi train --data photos/train --val photos/val --weights DEFAULT "
        "--epochs 10 --save new.pt",
        "hapi models ls",
        "swift delete photos --prefix train/",
        "swift delete photos --prefix val/",
    ]
    mine = curve(output["python finetune.py"])
    theirs = curve(output["python finetune_hapi.py"])
    assert len(mine) == len(theirs) == EPOCHS
    for (loss, *right), (other, *others) in zip(mine, theirs, strict=True):
        # An epoch is one step here, so that its order does not matter.
        assert other == pytest.approx(loss, rel=TOLERANCE, abs=2e-4)
        assert others == right
    assert mine[-1][0] < mine[0][0]
    assert mine[-1][1:] == (NUM_VAL, NUM_VAL)

    predictions = output["python predict.py photos/val/cat/*.jpg"].splitlines()
    assert len(predictions) == NUM_VAL // len(CLASSES)
    assert all(": cat (" in line for line in predictions)

    mine = torch.load(tmp_path / "finetune.py.pt")
    theirs = torch.load(tmp_path / "finetune_hapi.py.pt")
    torch.testing.assert_close(theirs, mine, rtol=TOLERANCE, atol=TOLERANCE)


def test_few_lines_of_the_script_change():
    before, after = (
        (DOCS / "examples" / name).read_text().splitlines()
        for name in ("finetune.py", "finetune_hapi.py")
    )
    compared = list(difflib.ndiff(before, after))
    kinds = [line[0] for line in compared]
    assert 0 < kinds.count("+") <= MAX_CHANGED_LINES
    assert 0 < kinds.count("-") <= MAX_CHANGED_LINES
    there = [kind for kind in kinds if kind in " +"]
    new = [n for n, kind in enumerate(there, 1) if kind == "+"]
    marked = re.search(r":emphasize-lines: ([\d, ]+)", PAGE.read_text())
    assert marked is not None
    assert [int(n) for n in marked[1].split(",")] == new
