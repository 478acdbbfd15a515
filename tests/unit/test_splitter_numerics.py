"""The user's own settings of torch do not reach the frozen layers."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("owner", "value"),
    [
        (torch.backends, "tf32"),
        (torch.backends.cuda.matmul, "tf32"),
        (torch.backends.cudnn.conv, "ieee"),
        (torch.backends.mkldnn.matmul, "bf16"),
        (torch.backends.mkldnn.conv, "bf16"),
    ],
)
def test_precisions_of_the_user_are_put_back(owner: Any, value: str) -> None:
    places = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
    )
    before = owner.fp32_precision
    owner.fp32_precision = value
    try:
        set_by_user = [place.fp32_precision for place in places]
        with exact_numerics(torch.device("cpu")):
            inside = {place.fp32_precision for place in places}
        assert inside == {"ieee"}
        assert [place.fp32_precision for place in places] == set_by_user
    finally:
        owner.fp32_precision = before


def test_tag_names_versions_and_the_kind_of_device() -> None:
    tag = numerics_tag("cuda:1")
    assert tag.startswith("exact;")
    assert tag.endswith(";device=cuda")
    assert ".".join(torch.__version__.split(".")[:2]) in tag
