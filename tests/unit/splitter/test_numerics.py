"""The user's own settings of torch do not reach the frozen layers."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from hapi_splitter.freezing.split_model import split
from hapi_splitter.numerics import exact_numerics, numerics_tag


def test_block_is_exact_whatever_the_user_has_set() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 256)
    samples = torch.randn(8, 256)
    expected = layer(samples)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(samples).dtype == torch.bfloat16
            with exact_numerics(torch.device("cpu")):
                found = layer(samples)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, expected)


PUT_BACK = """
import torch
from hapi_splitter.numerics import exact_numerics
backends = torch.backends
places = (
    backends.cuda.matmul, backends.cudnn.conv,
    backends.mkldnn.matmul, backends.mkldnn.conv,
)
for owner, value in (
    (backends.mkldnn.matmul, "bf16"), (backends.mkldnn.conv, "bf16"),
    (backends.cudnn.conv, "ieee"), (backends.cuda.matmul, "tf32"),
    (backends, "tf32"),
):
    owner.fp32_precision = value
    set_by_user = [place.fp32_precision for place in places]
    with exact_numerics(torch.device("cpu")):
        assert {place.fp32_precision for place in places} == {"ieee"}
    assert [place.fp32_precision for place in places] == set_by_user
"""


def test_precisions_of_the_user_are_put_back() -> None:
    # In a process of its own: torch cannot be told to forget that somebody
    # has used these settings.
    code = [sys.executable, "-c", PUT_BACK]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        code, capture_output=True, text=True, env=environ, timeout=100
    )
    assert done.returncode == 0, done.stderr


OVERLAP = """
import threading
import torch
from hapi_splitter.numerics import exact_numerics
cpu = torch.device("cpu")
torch.backends.cudnn.benchmark = True
begun, go_on = threading.Event(), threading.Event()
def first():
    with exact_numerics(cpu):
        begun.set()
        assert go_on.wait(30)
other = threading.Thread(target=first)
other.start()
assert begun.wait(30)
with exact_numerics(cpu):
    go_on.set()
    other.join(30)
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
assert torch.backends.cudnn.benchmark
assert not torch.backends.cudnn.deterministic
assert torch.backends.cudnn.allow_tf32 in (True, False)
"""


def test_blocks_of_several_threads_may_overlap() -> None:
    code = [sys.executable, "-c", OVERLAP]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        code, capture_output=True, text=True, env=environ, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_block_leaves_torch_able_to_export() -> None:
    """``torch.export`` reads a setting that a half-done change breaks."""
    with exact_numerics(torch.device("cpu")):
        pass
    assert torch.backends.cudnn.allow_tf32 in (True, False)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    parts = split(module.eval(), "1", sample_shape=(3, 8, 8))
    assert parts.frozen.num_cuts == 2


def test_tag_names_versions_and_the_kind_of_device() -> None:
    tag = numerics_tag("cuda:1")
    assert tag.startswith("exact;")
    assert tag.endswith(";device=cuda")
    assert ".".join(torch.__version__.split(".")[:2]) in tag
