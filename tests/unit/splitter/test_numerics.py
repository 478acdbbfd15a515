"""Exact numerics in the user's process and in the worker."""

import os
import subprocess
import sys

import pytest
import torch

from hapi_splitter.freezing.split_model import split
from hapi_splitter.numerics import enforce_exact, exact_numerics, numerics_tag


def test_block_ignores_the_users_settings():
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
                actual = layer(samples)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(actual, expected)


RESTORE = """
import torch
from hapi_splitter.numerics import exact_numerics
backends = torch.backends
owners = (
    backends.cuda.matmul, backends.cudnn.conv,
    backends.mkldnn.matmul, backends.mkldnn.conv,
)
for owner, value in (
    (backends.mkldnn.matmul, "bf16"), (backends.mkldnn.conv, "bf16"),
    (backends.cudnn.conv, "ieee"), (backends.cuda.matmul, "tf32"),
    (backends, "tf32"),
):
    owner.fp32_precision = value
    set_by_user = [each.fp32_precision for each in owners]
    with exact_numerics(torch.device("cpu")):
        assert {each.fp32_precision for each in owners} == {"ieee"}
    assert [each.fp32_precision for each in owners] == set_by_user
"""


OVERLAP = """
import threading
import torch
from hapi_splitter.numerics import exact_numerics
cpu = torch.device("cpu")
torch.backends.cudnn.benchmark = True
started, finish = threading.Event(), threading.Event()
def first():
    with exact_numerics(cpu):
        started.set()
        assert finish.wait(300)
other = threading.Thread(target=first)
other.start()
assert started.wait(300)
with exact_numerics(cpu):
    finish.set()
    other.join(30)
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
assert torch.backends.cudnn.benchmark
assert not torch.backends.cudnn.deterministic
assert torch.backends.cudnn.allow_tf32 in (True, False)
"""


@pytest.mark.parametrize("script", [RESTORE, OVERLAP], ids=["one", "threads"])
def test_block_restores_the_users_settings(script):
    # In a new process, because torch remembers that they were used.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, env=environ, timeout=300)


def test_torch_can_export_after_a_block():
    """``torch.export`` reads a setting that a partial restore would break."""
    with exact_numerics(torch.device("cpu")):
        pass
    assert torch.backends.cudnn.allow_tf32 in (True, False)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    parts = split(module.eval(), "1", sample_shape=(3, 8, 8))
    assert parts.frozen.num_cuts == 2


def test_tag_has_class_versions_and_device_kind():
    version = ".".join(torch.__version__.split(".")[:2])
    tag = numerics_tag("cpu")
    assert tag.startswith("exact;protocol=2;")
    assert f"torch={version};" in tag
    assert tag.endswith(";device=cpu")
    assert numerics_tag("cuda:1").endswith(";device=cuda")


def test_enforce_exact_turns_optimisations_off(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    # Restored after the test.
    monkeypatch.setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", True
    )
    try:
        enforce_exact()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.use_deterministic_algorithms(False)
