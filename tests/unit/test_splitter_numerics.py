"""The user's own settings of torch do not reach the frozen layers."""

from __future__ import annotations

import torch

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


def test_tag_names_versions_and_the_kind_of_device() -> None:
    tag = numerics_tag("cuda:1")
    assert tag.startswith("exact;")
    assert tag.endswith(";device=cuda")
    assert ".".join(torch.__version__.split(".")[:2]) in tag
