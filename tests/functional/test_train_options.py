"""``hapi train`` does what the plain script with the same options does."""

import io
import json
import tarfile
import warnings

import pytest
import torch
import torchvision
import transformers
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    SequentialLR,
    StepLR,
)
from torchvision.transforms import v2

from hapi_client import FeatureDataset, split_model
from hapi_client.reports.run_report import read_reports
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from hapi_splitter.freezing.model_checks import SplitWarning
from hapi_training import loop
from jobs import upload_shards
from photos import shards_of

EPOCHS, BATCH = 3, 8
TRAIN = shards_of([8] * 4, size=120)
VAL = shards_of([6], size=120, seed=50)
SCRIPTS = {
    "SGD, warm-up and cosine": (
        "--lr 0.05 --weight-decay 1e-3 --schedule cosine --warmup 1 "
        "--label-smoothing 0.1",
        lambda tail: torch.optim.SGD(
            tail, lr=0.05, momentum=0.9, weight_decay=1e-3
        ),
        lambda optimizer, steps: SequentialLR(
            optimizer,
            [
                LinearLR(optimizer, 1 / (steps + 1), total_iters=steps),
                CosineAnnealingLR(optimizer, (EPOCHS - 1) * steps),
            ],
            [steps],
        ),
        0.1,
        None,
    ),
    "AdamW in steps": (
        "--optimizer adamw --lr 1e-3 --weight-decay 0.05 --schedule step",
        lambda tail: torch.optim.AdamW(tail, lr=1e-3, weight_decay=0.05),
        lambda optimizer, steps: StepLR(optimizer, steps),
        0.0,
        None,
    ),
    "NAdam in bfloat16": (
        "--optimizer nadam --lr 1e-3 --amp bf16",
        lambda tail: torch.optim.NAdam(tail, lr=1e-3),
        None,
        0.0,
        torch.bfloat16,
    ),
}


@pytest.fixture(scope="module")
def data(connection):
    places = {"train": TRAIN, "val": VAL}
    for name, shards in places.items():
        upload_shards(connection, Location("recipes", name), shards)
    return ("--data", "recipes/train", "--val", "recipes/val")


@pytest.fixture
def train(hapi, data, tmp_path, capsys):
    """Runs the command; returns its JSON, and what it printed."""

    def run(*words, status=0):
        given = ("--model", "resnet18", "--cut", "stream")
        options = ("--epochs", EPOCHS, "--batch-size", BATCH)
        assert status == hapi(
            *("train", *data, *given, *options, "--json", "run.json"), *words
        )
        printed = "".join(capsys.readouterr())
        if status:
            return printed
        return json.loads((tmp_path / "run.json").read_text()), printed

    return run


def images_of(shards):
    """Maps keys to images, transformed by torchvision, and labels."""
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(256),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images, labels = {}, {}
    for shard in shards.values():
        with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
            for member in archive:
                key, _, suffix = member.name.partition(".")
                content = archive.extractfile(member).read()
                if suffix == "cls":
                    labels[key] = int(content)
                else:
                    image = Image.open(io.BytesIO(content))
                    images[key] = transform(image)
    return images, labels


def order_of_keys(connection, frozen):
    """The order of the samples, which is the product's own."""
    with FeatureDataset(
        "recipes/train", frozen, batch_size=BATCH, connection=connection
    ) as dataset:
        for epoch in range(EPOCHS):
            dataset.set_epoch(epoch)
            yield [list(dataset.keys) for _ in dataset]


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_those_of_the_plain_script(connection, train, name):
    words, make_optimizer, make_schedule, smoothing, dtype = SCRIPTS[name]
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    model.fc = nn.Linear(512, 4)
    model.requires_grad_(False).eval()
    model.fc.requires_grad_(True)
    frozen, _ = split_model(model, "avgpool")
    epochs = list(order_of_keys(connection, frozen))
    images, labels = images_of(TRAIN)
    optimizer = make_optimizer(model.fc.parameters())
    schedule = make_schedule and make_schedule(optimizer, len(epochs[0]))
    losses = []
    for keys in (keys for epoch in epochs for keys in epoch):
        batch = torch.stack([images[key] for key in keys])
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = model(batch)
            loss = cross_entropy(
                outputs,
                torch.tensor([labels[key] for key in keys]),
                label_smoothing=smoothing,
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())

    with warnings.catch_warnings():
        warnings.simplefilter("error", SplitWarning)
        facts, _ = train(*words.split(), "--freeze", "avgpool")
    tolerance = 1e-3 if dtype is None else 2e-2
    assert facts["losses"] == pytest.approx(losses, rel=tolerance)
    last = facts["epochs"][-1]
    images, labels = images_of(VAL)
    with torch.no_grad():
        outputs = model(torch.stack([*images.values()]))
    truth = torch.tensor([labels[key] for key in images])
    pushed, _ = train(*words.split(), "--freeze", "avgpool", "--cut", "freeze")
    assert pushed["losses"] == pytest.approx(facts["losses"], rel=tolerance)
    loss = cross_entropy(outputs, truth).item()
    assert last["val_loss"] == pytest.approx(loss, rel=tolerance)
    is_right = outputs.argmax(1) == truth
    assert last["val_accuracy"] == pytest.approx(is_right.float().mean())
    assert last["val_top5"] == 1
    assert facts["classes"] == 4


def test_sweep_trains_each_combination_as_alone(train, tmp_path):
    words = ("--lr", "1e-1,0.01", "--weight-decay", "0,1e-4")
    files = ("--save", "m.pt", "--save-best", "best.pt", "--resume", "sweep")
    # Another test has features of the seed 0 in memory.
    words += ("--seed", "7")
    facts, printed = train(*words, *files, "--report", "run.html")
    names = [run["name"] for run in facts["runs"]]
    assert names == [
        f"lr={lr},weight-decay={decay}"
        for lr in (0.1, 0.01)
        for decay in (0.0, 0.0001)
    ]
    only, _ = train("--lr", "0.01", "--weight-decay", "1e-4", "--seed", "7")
    assert facts["runs"][3]["losses"] == only["losses"]
    assert facts["runs"][0]["losses"] != only["losses"]
    # Each photograph was read and computed once.
    assert facts["stats"]["samples_by_cut"] == {"0": 32 + 6}
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == (
        sorted(names)
    )
    best = max(
        epoch["val_accuracy"]
        for run in facts["runs"]
        for epoch in run["epochs"]
    )
    assert facts["epochs"][facts["best_epoch"]]["val_accuracy"] == best
    assert printed.count("best epoch") == 1
    assert "Accuracy" in (tmp_path / "run.html").read_text()
    saved = {
        name: torch.load(tmp_path / name)["fc.weight"]
        for name in ("m.pt", "best.pt")
    }

    again, printed = train(*words, *files)
    assert printed.count("trained already") == 4
    assert [r["losses"] for r in again["runs"]] == [
        r["losses"] for r in facts["runs"]
    ]
    for name, weight in saved.items():
        assert torch.equal(torch.load(tmp_path / name)["fc.weight"], weight)


def test_run_stops_early_and_keeps_its_best_epoch(train, tmp_path):
    # With a rate of 0 no epoch is better than the first one.
    words = ("--lr", "0", "--early-stop", "2", "--epochs", "9")
    files = ("--save-best", "best.pt", "--report", "report.json")
    facts, printed = train(*words, *files)
    assert "stopped after 3 epochs: none was better than epoch 0" in printed
    assert (len(facts["epochs"]), facts["best_epoch"]) == (3, 0)
    assert (tmp_path / "best.pt").exists()
    (curve,) = read_reports(tmp_path / "report.json").curves.values()
    assert [epoch["val_accuracy"] for epoch in curve] == [
        epoch["val_accuracy"] for epoch in facts["epochs"]
    ]


def test_diverged_run_is_never_the_best(train, tmp_path):
    files = ("--save-best", "best.pt", "--resume", "runs")
    facts, _ = train("--lr", "1e38,0.01", *files)
    diverged, other = facts["runs"]
    assert diverged["epochs"][-1]["loss"] is None
    assert facts["losses"] == other["losses"]
    (tmp_path / "best.pt").unlink()
    _, printed = train("--lr", "1e38,0.01", *files)
    assert "best.pt is not there, and the checkpoint has no" in printed


def test_best_epoch_that_cannot_be_saved_is_trained_again(
    train, monkeypatch, tmp_path
):
    """The checkpoint had the epoch, and the file never got it."""
    words = ("--resume", "run", "--save-best", "best.pt", "--epochs", "1")
    with monkeypatch.context() as patch:

        def fail(content, path):
            raise ClientError("bad_configuration", "the disk is full")

        patch.setattr("hapi_client.cli.train_run.save_atomically", fail)
        assert "the disk is full" in train(*words, status=1)
    facts, _ = train(*words)
    assert len(facts["epochs"]) == 1
    assert (tmp_path / "best.pt").exists()


def test_models_of_other_libraries_train_by_name(train, tmp_path):
    facts, printed = train("--model", "timm/resnet18", "--epochs", "1")
    assert facts["freeze"] == "layer4"
    assert "weights are random" in printed
    folder = tmp_path / "vit"
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=64,
        patch_size=16,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    size = {"height": 64, "width": 64}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    facts, printed = train("--model", "vit", "--save", "vit.pt")
    assert "weights are random" not in printed
    assert len(torch.load(tmp_path / "vit.pt")["classifier.bias"]) == 4
    assert facts["losses"][-1] < facts["losses"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--classes 3", "(--classes) is 3, but the data has labels up to 3"),
        ("--optimizer lamb", "'lamb' is none of sgd, adam"),
        ("--lr 0.1,fast", "'0.1,fast' is no number"),
        ("--lr 0.1,0.1", "0.1 is given twice"),
        ("--lr -1", "--lr is -1.0; give a number of at least 0"),
        ("--warmup 3", "--warmup is 3, but the run has 3 epochs"),
        ("--model ./none", "'./none'; there is no such folder"),
        ("--save-best /dev/null", "/dev/null is no regular file"),
        ("--label-smoothing 2", "--label-smoothing is 2.0"),
        ("--amp fp8", "--amp is 'fp8'; give bf16"),
        ("--model timm/resnet19", "timm has no model 'resnet19'; similar"),
        ("--model nobody/nothing-here", "'nobody/nothing-here' cannot be"),
        ("--lr 1,2 --resume run.pt", "--resume is run.pt, but a sweep"),
        ("--save m.pt --save-best m.pt", "--save and --save-best are both"),
        ("--val recipes/none", "recipes/none"),
    ],
)
def test_wrong_option_is_told_before_the_split(
    train, monkeypatch, words, message
):
    # Else it tries for a while.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hapi_client.cli.train_run.TransferJob", None)
    status = 2 if "none of" in message or "number" in message else 1
    status = 2 if "twice" in message else status
    printed = train(*words.split(), status=1 if "-1" in words else status)
    assert message in " ".join(printed.replace("│", " ").split())


def test_checkpoint_of_another_optimizer_is_refused(train):
    train("--resume", "run.pt", "--epochs", "1")
    printed = train("--resume", "run.pt", "--optimizer", "adam", status=1)
    assert "is of the optimizer 'sgd', but this run uses 'adam'" in printed


def test_code_of_a_models_folder_is_never_run(train, tmp_path, monkeypatch):
    """transformers would ask on the terminal."""
    folder = tmp_path / "vit"
    folder.mkdir()
    classes = dict.fromkeys(
        ("AutoConfig", "AutoModelForImageClassification"), "evil.Model"
    )
    config = {"model_type": "evil", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("open('run', 'w').close()")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    printed = train("--model", "./vit", status=1)
    assert "model './vit' cannot be built" in printed
    assert not (tmp_path / "run").exists()


def test_report_of_an_interrupted_run_has_its_curves(train, tmp_path):
    """Only those of finished runs were there."""

    def interrupt(self, *_):
        if len(self.history.epochs) == 2:
            raise KeyboardInterrupt
        return validate(self, *_)

    validate = loop._Run._validate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_validate", interrupt)
        train("--report", "report.json", status=130)
    (curve,) = read_reports(tmp_path / "report.json").curves.values()
    assert len(curve) == 2
