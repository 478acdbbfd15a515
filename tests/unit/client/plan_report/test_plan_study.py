"""``hapi plan`` without Swift, and the measurements behind it."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchvision.transforms._presets import ImageClassification

from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.registry import (
    ModelSource,
    imagenet_transform,
    load_region,
)
from hapi_client.plan_report import plan_study, study_inputs
from hapi_client.plan_report.plan_study import (
    advise,
    background_load,
    cached_features,
)
from hapi_client.plan_report.study_inputs import PlanRequest, train_seconds
from hapi_client.planning import device_profile
from hapi_client.planning.device_profile import measure
from hapi_client.planning.sample_probe import (
    SAMPLES_PER_SPAN,
    ProbeSamples,
    reference_samples,
)
from hapi_client.progress import SilentReporter
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import ClientError, FreezeError
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.units import bytes_text
from networks import small_network

CPU = torch.device("cpu")
REQUEST = PlanRequest(
    min_precision="lossless",
    epochs=1.0,
    batch_size=2,
    link=1e6,
    num_samples=100,
    upload=False,
    name="small",
)
SMALL = ImageTransform(resize_size=36, crop_size=32)
SCALES_COUNT_BYTES = 1000
"""Smaller features may be larger as uint8, because of scales and zeros."""


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("resnet19", None, r"no model 'resnet19'; similar names: .*resnet18"),
        ("qqqqq", None, r"no model 'qqqqq'; choose from alexnet, .*\.\.\."),
        ("resnet18", "DEFALT", r"no weights 'DEFALT' .* names: DEFAULT"),
    ],
)
def test_unknown_name_brings_similar_names(name, weights, message):
    with pytest.raises(ClientError, match=message):
        ModelSource(name, weights).build()


def load(source, freeze=None, device="cpu"):
    transform = imagenet_transform(32)
    return load_region(ModelSource(source), freeze, transform, device)


def test_own_models_are_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("own_models.py").write_text(
        "from torch import nn\n"
        "def pair():\n"
        "    return (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()),\n"
        "            nn.Linear(3600, 2))\n"
        "def whole():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(),\n"
        "        nn.Flatten(), nn.Linear(4 * 30 * 30, 2))\n"
        "number = 3\n"
    )
    assert load("own_models:whole", "0,1").num_cuts == 3
    assert load("own_models:whole").num_cuts == 3
    assert load("own_models:pair").num_cuts == 2
    for name in ("own_models:number", "own_models:nothing", "no_module_x:f"):
        with pytest.raises(ClientError, match="MODULE:FUNCTION"):
            load(name)
    # The same random weights each time.
    source = ModelSource("own_models:whole")
    first, second = (source.build().state_dict() for _ in range(2))
    assert torch.equal(first["0.weight"], second["0.weight"])
    with pytest.raises(ClientError, match="makes its own weights"):
        ModelSource("own:build", checkpoint=Path("x.pt")).build()


def test_published_weights_bring_their_transform():
    """A plan is then about the package that training stores."""

    class Published(ModelSource):
        def build_with_transform(self):
            return small_network(), ImageClassification(
                crop_size=32, resize_size=40
            )

    region = load_region(Published("x"), "body", None, "cpu")
    assert region.transform == ImageTransform(resize_size=40, crop_size=32)
    region = load_region(Published("x"), "body", imagenet_transform(28), "cpu")
    assert region.transform == ImageTransform(resize_size=32, crop_size=28)


def test_unknown_device_or_module_is_named():
    with pytest.raises(ClientError, match="device is 'tpu'"):
        load("alexnet", "features", "tpu")
    with pytest.raises(FreezeError, match="featurez"):
        load("alexnet", "featurez")


@pytest.fixture(scope="module")
def region():
    return FrozenRegion(small_network(), "body", SMALL, CPU)


def test_background_load_is_an_assumption(region, monkeypatch):
    def load_notes(cores):
        monkeypatch.setattr(
            plan_study, "background_load", lambda: lambda: cores
        )
        notes = advise(region, REQUEST, SilentReporter()).report.notes
        assert any("this machine: " in note for note in notes)
        return [note for note in notes if "other processes" in note]

    assert load_notes(0.1) == []
    (note,) = load_notes(1.5)
    assert note.startswith("assumed: ")
    assert "1.5 of " in note


class MaskedTexts(nn.Module):
    """A classifier whose head reads the mask again."""

    def __init__(self):
        super().__init__()
        self.body = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids, mask):
        return self.head((self.body(ids) * mask[:, :, None]).sum(1))


def test_texts_whose_mask_travels_are_planned_without_loss():
    array = ArrayTransform((6,), "int64")
    transform = NamedArrays.of(ids=array, mask=array)
    region = FrozenRegion(MaskedTexts(), "body", transform, CPU)
    study = advise(region, REQUEST, SilentReporter())
    assert study.other_precisions == ()
    lossy = replace(REQUEST, min_precision="half")
    with pytest.raises(ClientError, match="would change integers"):
        advise(region, lossy, SilentReporter())


def test_load_of_another_process_is_measured():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        cores = background_load()
        time.sleep(1.0)
        load = cores()
    finally:
        busy.kill()
        busy.wait()
    assert load > 0.5


def test_load_is_zero_if_the_system_does_not_report_it(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_study, "STAT", tmp_path / "none")
    cores = background_load()
    time.sleep(0.01)
    assert cores() == 0


def test_measured_cut_has_costs_of_all_encodings(region):
    facts = measure(region, reference_samples(region), lambda _: ENCODINGS)
    numbers = list(range(1, region.num_cuts + 1))
    assert [each.index for each in region.device_graph.cuts] == numbers
    assert facts.cuts[-1].shape == region.cut_shape(region.num_cuts)
    assert facts.num_probed == 8
    samples = facts.samples
    assert set(samples.wire_bytes) == set(samples.encode_seconds)
    assert set(samples.wire_bytes) == set(samples.unpack_seconds)
    measured = {cut for cut, _ in samples.wire_bytes}
    assert region.num_cuts in measured
    for cut in measured:
        values = facts.cuts[cut - 1].float32_bytes
        sent = {e: samples.wire_bytes[cut, e] for e in ENCODINGS}
        assert values < sent["float32"] < values + 400
        assert values / 2 < sent["float16"] < values / 2 + 400
        assert sent["float16"] < sent["float32"]
        if values > SCALES_COUNT_BYTES:
            assert sent["uint8"] < sent["float16"]
    assert samples.raw_bytes > 30_000
    assert samples.decode_seconds > 0


def test_copies_of_an_image_in_other_batches_do_not_compress(region):
    probed = reference_samples(region)
    some = probed.members[:SAMPLES_PER_SPAN]

    def sizes(images):
        probe = ProbeSamples(images, probed.bytes_each)
        encodings = ("float32;lz4", "float32;zstd")
        facts = measure(region, probe, lambda _: encodings)
        return dict(facts.samples.wire_bytes)

    copied = sizes(4 * some)
    for way, size in sizes(some).items():
        # The stream's header is spread over more samples. Compressed together
        # with their copies, samples would need a quarter.
        assert 0.7 * size < copied[way] <= size


def test_measuring_does_not_change_the_model(region):
    before = {n: w.clone() for n, w in region.device_graph.weights.items()}
    tail = {k: v.clone() for k, v in region.tail.state_dict().items()}

    measure(region, reference_samples(region), lambda _: ("float32",))
    train_seconds(region, batch_size=4)

    for node, weight in region.device_graph.weights.items():
        assert torch.equal(weight, before[node])
    for key, value in region.tail.state_dict().items():
        assert torch.equal(value, tail[key])
    assert all(p.grad is None for p in region.tail.parameters())


def test_undecodable_samples_are_left_out(region):
    good = reference_samples(region)
    mixed = ProbeSamples((b"no image", *good.members[:2]), good.bytes_each)
    assert measure(region, mixed, lambda _: ("float32",)).num_probed == 2
    with pytest.raises(ClientError, match="none of the samples"):
        measure(region, ProbeSamples((b"no",), 9.0), lambda _: ("float32",))


class Outputs(torch.nn.Module):
    """A tail with several outputs, one of them not trained."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Linear(4, 2)

    def forward(self, features):
        flat = features.flatten(1)
        return {"scores": self.scores(flat), "norm": flat.norm()}


class Fixed(torch.nn.Module):
    """A tail whose output does not depend on its parameter."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, features):
        return features


def split_with(tail):
    frozen = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 32), torch.nn.ReLU())
    return FrozenRegion((frozen, tail), None, SMALL, CPU)


def test_step_of_a_tail_with_several_outputs_is_measured():
    assert train_seconds(split_with(Outputs()), batch_size=4) > 0
    assert train_seconds(split_with(Fixed()), batch_size=4) == 0


def test_failing_step_names_the_batch_size():
    normalised = split_with(torch.nn.BatchNorm2d(4))
    assert train_seconds(normalised, batch_size=2) > 0
    with pytest.raises(ClientError, match=r"batch size 1.*--batch-size"):
        train_seconds(normalised, batch_size=1)


def test_whole_region_is_measured_without_any_time_left(region, monkeypatch):
    monkeypatch.setattr(device_profile, "ENCODING_SECONDS", -1.0)
    facts = measure(region, reference_samples(region), lambda _: ("float32",))
    assert set(facts.samples.wire_bytes) == {(region.num_cuts, "float32")}
    assert facts.skipped
    assert region.num_cuts not in facts.skipped


def test_proxy_without_the_filter_names_the_remedy():
    error = ClientError("no_hapi", "the proxy has no hapi filter")
    connection = Mock(require_hapi=Mock(side_effect=error))
    with pytest.raises(ClientError) as caught:
        study_inputs._require_hapi(connection)
    assert str(caught.value).count("no_hapi") == 1
    assert "filter; --no-upload" in caught.value.message


def test_plan_without_data_lists_its_assumptions(hapi, capsys, tmp_path):
    status = hapi(
        "plan", "squeezenet1_1", "--freeze", "features",
        "--size", "64", "--link", "20mbit", "--epochs", "3",
        "--samples", "5000", "--json", tmp_path / "plan.json",
        "--plot", tmp_path / "plan.png",
    )  # fmt: skip
    text, errors = capsys.readouterr()
    assert status == 0, errors
    assert "assumed: images are like a photograph" in text
    assert "assumed: the storage side's worker" in text
    assert "link: 20 Mbit/s" in text
    assert "static" in text
    assert "--min-precision half" in text
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["link_bytes_per_second"] == 2.5e6
    assert (found["samples"], found["epochs"]) == (5000, 3.0)
    assert found["min_precision"] == "lossless"
    assert {
        option["encoding"].partition(";")[0]
        for cut in found["cuts"][1:]
        for option in cut["options"]
    } == {"float32"}
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_of_a_model_for_arrays(hapi, capsys, tmp_path):
    status = hapi(
        "plan", "array_networks:text_network", "--array", "16:int64",
        "--link", "20mbit", "--json", tmp_path / "plan.json",
    )  # fmt: skip
    text, errors = capsys.readouterr()
    assert status == 0, errors
    assert "assumed: arrays hold random numbers" in text
    # A header of NumPy and 16 numbers, in a tar with a label.
    assert "stream: the sample, 2.05 kB" in text
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["freeze"] == "head.0"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["resnet18", "--array", "3x-1"], "array is '3x-1': shape must be"),
        (["resnet18", "--array", "3xa:int64"], "give sizes, and a type"),
        (["resnet18", "--array", "3:int32"], "float32, int64, not 'int32'"),
        (["resnet18", "--plot", "plan.pdf"], ".png or .html"),
        (["resnet18", "--plot", "/nowhere/plan.png"], "/nowhere is not a"),
        (["resnet18", "--json", "/nowhere/plan.json"], "/nowhere is not a"),
        (["resnet18", "--measure"], "--measure reads from a data set"),
        (
            ["resnet18", "--measure", "--data", "c/p", "--link", "1gbit"],
            "exclude each other",
        ),
        (["resnet18", "--data", "http://x/y"], "'http://x/y'"),
        (["resnet18", "--min-precision", "low"], "min_precision is 'low'"),
        (["resnet18", "--link", "fast"], "link is 'fast'"),
        (["resnet18", "--epochs", "0"], "epochs"),
    ],
)
def test_wrong_options_are_refused_before_any_work(
    hapi, capsys, monkeypatch, arguments, text
):
    monkeypatch.setattr("hapi_client.model.registry.FrozenRegion", None)
    assert hapi("plan", *arguments) != 0
    assert text in " ".join(capsys.readouterr().err.split())


def test_features_that_fit_are_computed_once(region, monkeypatch):
    each = 4 * math.prod(region.cut_shape(region.num_cuts))
    for room, share in (
        (100, 1.0),
        (25, 0.25),
        (0, 0.0),
        # Samples fit, so that they are cached instead.
        (50, 0.0),
    ):
        monkeypatch.setattr(
            plan_study, "default_memory_bytes", partial(mul, room, each)
        )
        stored = each / 2 if room == 50 else each
        fraction, text = cached_features(region, 100, stored)
        assert fraction == share
        assert f"take {bytes_text(100 * each)};" in text
    plans = {}
    for room, epochs in ((0, 5), (25, 5), (100, 5), (200, 0.5)):
        monkeypatch.setattr(
            plan_study, "default_memory_bytes", partial(mul, room, each)
        )
        request = PlanRequest("lossless", epochs, 32, 1e6, 100, False, "small")
        plans[room] = advise(region, request, SilentReporter()).report
    computed = {room: plans[room].problem.epochs for room in plans}
    assert computed == {0: 5, 25: 4, 100: 1, 200: 0.5}
    without, once = (plans[room].plans["stream"] for room in (0, 100))
    assert once.total_seconds < 0.5 * without.total_seconds
