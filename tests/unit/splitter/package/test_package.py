"""Writing and loading packages."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from hapi_protocol.errors import PackageError, UnsupportedError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.program import Call, Program, Ref
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.sample_format import SampleForm
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.subprocess_validation import probe_batchwise
from hapi_splitter.package.weights import file_pieces
from hapi_splitter.package.writer import package_bytes, write_package
from reference_models import BranchedNet

SHAPE = (3, 16, 16)


@pytest.fixture(scope="module")
def frozen():
    torch.manual_seed(0)
    transform = ImageTransform(18, 16)
    return split(BranchedNet().eval(), "mix", transform=transform).frozen


def test_package_is_an_aligned_safetensors_file(frozen, tmp_path):
    info = write_package(frozen, tmp_path / "p")
    with safetensors.safe_open(info.path, "pt") as file:
        assert file.metadata().keys() == {"hapi.json", "graph.json"}
        assert set(file.keys()) == {str(node) for node in frozen.weights}
        for node, weight in frozen.weights.items():
            assert torch.equal(file.get_tensor(str(node)), weight)
    data = info.path.read_bytes()
    assert info.digest == frozen.digest == hashlib.sha256(data).hexdigest()
    assert info.length_bytes == len(data)
    pointers = [w.data_ptr() for w in load_package(info.path).weights.values()]
    assert min(pointers) % 64 == 0
    assert all(pointer % 4 == 0 for pointer in pointers)


def test_same_model_gives_the_same_bytes_in_another_process(tmp_path):
    path = tmp_path / "other"
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from hapi_splitter.freezing.split_model import split\n"
        "from hapi_splitter.package.writer import write_package\n"
        "torch.manual_seed(3)\n"
        "m = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU())\n"
        "f = split(m, '0', sample_shape=(3, 8, 8)).frozen\n"
        "print(write_package(f, Path(sys.argv[1])).digest)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    path_variable = ":".join(p for p in sys.path if p)
    environ = {"PYTHONPATH": path_variable, "HAPI_CACHE_DIR": ""}
    digest = subprocess.check_output(command, text=True, env=environ).strip()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU())
    here = split(model, "0", sample_shape=(3, 8, 8)).frozen
    assert here.digest == load_package(path).digest == digest


def test_tensors_are_those_that_safetensors_reads():
    dtypes = ["float32", "int64", "int32", "uint8", "bool"]
    dtypes += ["bfloat16", "float16"]
    weights = {
        node: torch.randint(0, 2, (node % 4, 3)).to(getattr(torch, dtype))
        for node, dtype in enumerate(3 * dtypes, 1)
    }
    weights[22] = torch.randn(2, 3, 4).transpose(0, 2)
    weights[23] = torch.tensor(2.5)
    tensors = safetensors.torch.load(b"".join(file_pieces({}, weights)))
    assert tensors.keys() == {str(node) for node in weights}
    for node, weight in weights.items():
        assert tensors[str(node)].dtype == weight.dtype
        assert torch.equal(tensors[str(node)], weight)
    assert safetensors.torch.load(b"".join(file_pieces({}, {}))) == {}


def test_weights_are_written_from_their_own_memory(frozen):
    pieces = [*file_pieces({}, frozen.weights)][1:]
    addresses = {np.frombuffer(p, np.uint8).ctypes.data for p in pieces}
    pointers = {weight.data_ptr() for weight in frozen.weights.values()}
    assert addresses == pointers


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, Path])
@pytest.mark.filterwarnings("error")
def test_package_loads_from_any_buffer_or_file(frozen, kind, tmp_path):
    data = package_bytes(frozen)
    path = tmp_path / "p"
    path.write_bytes(data)
    loaded = load_package(path if kind is Path else kind(data))
    assert loaded.cuts == frozen.cuts
    assert loaded.transform == frozen.transform
    assert loaded.input_shape == SHAPE
    samples = torch.randn(2, *SHAPE)
    assert torch.equal(loaded.suffix(0)(samples), frozen.suffix(0)(samples))


def test_package_contains_the_augmentation():
    model = BranchedNet().eval()
    digests = set()
    for augmentation in (None, Augmentation(), Augmentation(vertical_flip=1)):
        transform = ImageTransform(18, 16, augmentation=augmentation)
        frozen = split(model, "mix", transform=transform).frozen
        package = package_bytes(frozen)
        assert load_package(package).transform == transform
        assert (b"augmentation" in package) == (augmentation is not None)
        digests.add(frozen.digest)
    assert len(digests) == 3


def test_modules_share_their_weights(frozen):
    pointers = {weight.data_ptr() for weight in frozen.weights.values()}
    for cut in frozen.cuts:
        for module in (frozen.prefix(cut.index), frozen.suffix(cut.index)):
            assert {b.data_ptr() for b in module.buffers()} <= pointers
            assert not list(module.parameters())


def test_cuts_have_module_names_and_increasing_flops(frozen):
    names = [cut.name for cut in frozen.cuts]
    assert names[0] == "stem"
    assert "mix" in names
    indices = [cut.index for cut in frozen.cuts]
    assert indices == list(range(1, frozen.num_cuts + 1))
    flops = [cut.flops for cut in frozen.cuts]
    assert flops == sorted(flops)
    assert flops[0] == 2 * 8 * 16 * 16 * 27
    for cut in (-1, 1000):
        with pytest.raises(UnsupportedError, match=f"cut {cut} is") as caught:
            frozen.prefix(cut)
        assert caught.value.code == "cut_out_of_range"


def test_moved_region_differs_only_in_its_device(frozen):
    moved = frozen.to("meta")
    assert (moved.digest, moved.cuts) == (frozen.digest, frozen.cuts)
    assert {w.device.type for w in moved.weights.values()} == {"meta"}
    assert {w.device.type for w in frozen.weights.values()} == {"cpu"}


def test_probe_detects_samples_that_influence_one_another():
    # The batch rules refuse this program, so they are bypassed.
    program = Program(0, (Call("aten.roll.default", (Ref(0), (1,), (0,))),))
    independent = Program(0, (Call("aten.relu.default", (Ref(0),)),))
    values = infer(independent, {}, SampleForm((4,)))
    with pytest.raises(PackageError, match="other features"):
        probe_batchwise(FrozenGraph(program, {}, values, ["x"], None, ""))
    probe_batchwise(FrozenGraph(independent, {}, values, ["x"], None, ""))
