"""Encodings keep their published bounds; numerics are named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hapi_protocol.errors import AnnotationError
from hapi_protocol.headers import ENCODINGS as PROTOCOL_ENCODINGS
from hapi_splitter.encodings import ENCODINGS, decode, encode
from hapi_splitter.numerics import enforce_exact, numerics_tag


def test_encodings_are_those_of_the_protocol() -> None:
    assert tuple(ENCODINGS) == tuple(PROTOCOL_ENCODINGS)


def test_float32_is_exact_and_contiguous() -> None:
    features = torch.randn(3, 4, 5).permute(0, 2, 1)
    array, saturated = encode(features, "float32")
    assert (array.dtype, saturated) == (np.float32, 0)
    assert array.flags.c_contiguous
    assert torch.equal(decode(array, "float32"), features)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_float16_is_within_its_bound_and_saturates(
    values: list[float],
) -> None:
    features = torch.tensor(values, dtype=torch.float32)[None]
    array, saturated = encode(features, "float16")
    decoded = decode(array, "float16")[0]
    assert array.dtype == np.float16
    assert saturated == sum(abs(v) > 65504 for v in values)
    for value, found in zip(values, decoded.tolist(), strict=True):
        if abs(value) > 65504:
            assert found == math.copysign(65504, value)
        else:
            assert abs(found - value) <= max(abs(value) * 2**-11, 2**-25)


def test_float16_keeps_nan_and_does_not_count_it() -> None:
    array, saturated = encode(torch.tensor([[math.nan, 1.0]]), "float16")
    assert (bool(np.isnan(array[0, 0])), saturated) == (True, 0)


def test_encoding_leaves_the_features_alone() -> None:
    features = torch.full((1, 2), 1e6)
    encode(features, "float16")
    assert features.tolist() == [[1e6, 1e6]]


@pytest.mark.parametrize("encoding", ["", "float64", "float16;zstd"])
def test_unknown_encoding_is_an_error(encoding: str) -> None:
    with pytest.raises(AnnotationError, match="is not one of float32"):
        encode(torch.zeros(1, 1), encoding)
    with pytest.raises(AnnotationError, match="is not one of float32"):
        decode(np.zeros((1, 1), np.float32), encoding)


def test_numerics_tag_names_class_versions_and_device() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    tag = numerics_tag("cpu")
    assert tag.startswith("exact;protocol=1;")
    assert f"torch={version};" in tag
    assert tag.endswith(";device=cpu")
    assert numerics_tag("cuda:1").endswith(";device=cuda")


def test_enforce_exact_turns_shortcuts_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        enforce_exact()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.use_deterministic_algorithms(False)
