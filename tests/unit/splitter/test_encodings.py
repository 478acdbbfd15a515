"""Encodings of features and their published error bounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hapi_protocol.encodings import DTYPES, Encoding, num_groups
from hapi_splitter import encodings as encodings_module
from hapi_splitter.encodings import (
    EncodedFeatures,
    decode,
    encode,
    encoder_step,
)

LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
}
SMALLEST = 2.0**-149
SHAPES = [(), (1,), (5,), (3, 4), (3, 32), (2, 5, 7), (0, 3), (2, 0)]

SPECIAL = [0.0, -0.0, math.inf, -math.inf, SMALLEST, -100 * SMALLEST]
SPECIAL += [2.0**-126, 2.0**-14, 2.0**-25, 65504.0, 65519.0, 65520.0, -65536.0]
SPECIAL += [LARGEST["bfloat16"], LARGEST["float32"], -LARGEST["float32"]]
values = st.one_of(
    st.floats(width=32),
    st.floats(-10, 10, width=32),
    st.floats(-(2.0**-126), 2.0**-126, width=32),
    st.sampled_from(SPECIAL),
)


@st.composite
def batches(draw):
    """Draws float32 ``[B, ...]``, some with only a few distinct values."""
    shape = (draw(st.integers(0, 5)), *draw(st.sampled_from(SHAPES)))
    few = draw(st.lists(values, min_size=1, max_size=4))
    elements = draw(st.sampled_from([values, st.sampled_from(few)]))
    array = draw(hnp.arrays(np.float32, shape, elements=elements))
    return torch.from_numpy(array.copy())


def decoded(encoded, encoding, **options):
    array = encoded.array.copy()
    return decode(array, encoding, encoded.scale, encoded.zero, **options)


def round_trip(features, encoding):
    encoded = encode(features, encoding)
    assert encoded.array.flags.c_contiguous
    assert encoded.array.dtype == Encoding.parse(encoding).wire_dtype
    back = decoded(encoded, encoding)
    assert back.dtype == torch.float32
    assert back.shape == features.shape
    return back


def bits(encoded):
    arrays = (encoded.array, encoded.scale, encoded.zero)
    parts = [None if a is None else (a.shape, a.tobytes()) for a in arrays]
    return parts, encoded.saturated


def joined(parts):
    def cat(name):
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    saturated = sum(part.saturated for part in parts)
    return EncodedFeatures(cat("array"), cat("scale"), cat("zero"), saturated)


@given(batches())
def test_float32_is_bit_exact(features):
    back = round_trip(features, "float32")
    assert back.numpy().tobytes() == features.numpy().tobytes()


def half_bound(dtype, value):
    """Returns the published error bound of the 16-bit formats."""
    if dtype == "float16":
        return abs(value) * 2**-11 if abs(value) >= 2**-14 else 2**-25
    return abs(value) * 2**-8 if abs(value) >= 2**-126 else 2.0**-134


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(batches())
def test_16_bit_formats_are_within_bounds_and_saturate(dtype, features):
    back = round_trip(features, dtype).double().flatten().tolist()
    expected = features.double().flatten().tolist()
    largest = LARGEST[dtype]
    for value, actual in zip(expected, back, strict=True):
        if math.isnan(value):
            assert math.isnan(actual)
        elif abs(value) > largest:
            assert actual == math.copysign(largest, value)
        else:
            assert abs(actual - value) <= half_bound(dtype, value)
    num_larger = sum(abs(value) > largest for value in expected)
    assert encode(features, dtype).saturated == num_larger


def test_bfloat16_rounds_ties_to_even():
    ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]])
    back = round_trip(ties, "bfloat16")
    assert back.tolist() == [[1, 1 + 2**-6, -1]]


def clipped(group):
    """Replaces infinite values by the group's finite extremes."""
    finite = group[np.isfinite(group)]
    high = finite.max() if len(finite) else LARGEST["float32"]
    low = finite.min() if len(finite) else -LARGEST["float32"]
    return np.clip(group, low, high)


def assert_group_is_within_bound(group, back):
    if np.isnan(group).any():
        assert np.isnan(back).all()
        return
    expected = clipped(group)
    low, high = expected.min(), expected.max()
    bound = (high - low) / 510 + 2**-21 * max(abs(low), abs(high)) + 2.0**-142
    assert np.abs(back - expected).max() <= bound
    if low == high:
        assert (back == low).all()


@given(batches())
def test_uint8_is_within_its_bound_per_group(features):
    back = round_trip(features, "uint8").double().numpy()
    groups = (len(features) * num_groups(features.shape[1:]), -1)
    if features.numel():
        originals = features.double().numpy().reshape(groups)
        for group, result in zip(originals, back.reshape(groups), strict=True):
            assert_group_is_within_bound(group, result)
    infinite = int(features.isinf().sum())
    assert encode(features, "uint8").saturated == infinite


def test_uint8_has_one_scale_per_channel():
    channels = torch.tensor([1, 100, 1e-3])[None, :, None, None]
    features = torch.randn(2, 3, 6, 6) * channels
    encoded = encode(features, "uint8")
    assert encoded.scale.shape == encoded.zero.shape == (2, 3)
    assert encoded.zero.tolist() == features.amin((2, 3)).tolist()
    assert encoded.array.reshape(2, 3, -1).min(2).tolist() == [[0] * 3] * 2
    assert encoded.array.reshape(2, 3, -1).max(2).tolist() == [[255] * 3] * 2


def test_uint8_supports_ranges_that_overflow_float32():
    huge = LARGEST["float32"]
    features = torch.tensor([[huge, -huge, 0.0, huge / 2]])
    encoded = encode(features, "uint8")
    assert encoded.array.tolist() == [[255, 0, 128, 191]]
    back = round_trip(features, "uint8")
    assert back[0, :2].tolist() == pytest.approx([huge, -huge], rel=2**-20)


@pytest.mark.parametrize(
    ("group", "expected", "saturated"),
    [
        ([math.inf, 1.0, 3.0, -math.inf], [3, 1, 3, 1], 2),
        ([math.inf, 2.0, 2.0, 2.0], [2, 2, 2, 2], 1),
        ([math.inf] * 4, [LARGEST["float32"]] * 4, 4),
        ([-math.inf] * 4, [-LARGEST["float32"]] * 4, 4),
        ([math.nan, 1.0, 2.0, math.inf], [math.nan] * 4, 1),
        ([7.25] * 4, [7.25] * 4, 0),
    ],
)
def test_uint8_of_infinite_and_nan_values(group, expected, saturated):
    features = torch.tensor([group, [0.0, 1, 2, 3]])
    back = round_trip(features, "uint8")
    assert back[0].tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)
    torch.testing.assert_close(back[1], features[1], rtol=0, atol=4 / 510)
    assert encode(features, "uint8").saturated == saturated


@pytest.mark.parametrize("dtype", DTYPES)
@given(features=batches(), cut=st.integers(0, 5))
def test_encoding_of_a_sample_does_not_depend_on_its_batch(
    dtype, features, cut
):
    whole = encode(features, dtype)
    parts = [encode(p, dtype) for p in (features[:cut], features[cut:])]
    assert bits(joined(parts)) == bits(whole)
    pieces = torch.cat([decoded(part, dtype) for part in parts])
    assert bits_of(pieces) == bits_of(decoded(whole, dtype))


def bits_of(values):
    """Returns all bits, with one canonical NaN.

    The bits of a NaN depend on whether torch widens float16 by vectors.
    """
    nan = torch.full_like(values, math.nan)
    return torch.where(values.isnan(), nan, values).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_chunks(dtype, monkeypatch):
    features = torch.randn(7, 3, 40)
    features[2, 1, 5] = math.inf
    whole = encode(features, dtype)
    back = decoded(whole, dtype)
    monkeypatch.setattr(encodings_module, "CHUNK_BYTES", 2 * 4 * 3 * 40)
    assert bits(encode(features, dtype)) == bits(whole)
    assert torch.equal(decoded(whole, dtype), back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_strides(dtype):
    features = torch.randn(4, 6, 5, 7) * 1e3

    expected = bits(encode(features, dtype))
    strided = torch.randn(9, 6, 11, 7)
    strided[::2, :, 1::2][:4].copy_(features)
    for same in (
        features.to(memory_format=torch.channels_last),
        features.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        strided[::2, :, 1::2][:4],
    ):
        assert torch.equal(same, features)
        assert bits(encode(same, dtype)) == expected
    expanded = features[:1].expand(3, -1, -1, -1)
    assert bits(encode(expanded, dtype)) == bits(
        encode(expanded.contiguous(), dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_does_not_modify_the_features(dtype):
    features = torch.tensor([[1e6, math.inf, -3.0]])
    encode(features, dtype)
    assert features.tolist() == [[1e6, math.inf, -3.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_writes_to_out(dtype):
    features = torch.randn(5, 3, 40)
    encoded = encode(features, dtype)
    out = torch.zeros(7, 3, 40)
    decoded(encoded, dtype, out=out[1:6])
    assert torch.equal(out[1:6], round_trip(features, dtype))
    assert not out[[0, 6]].any()
    with pytest.raises(ValueError, match="expected"):
        decoded(encoded, dtype, out=out)


def test_decode_refuses_mismatched_arrays():
    encoded = encode(torch.randn(2, 3, 40), "uint8")
    short = np.zeros((2, 1), np.float32)
    for arguments, message in (
        (("uint8",), "scale of shape None"),
        (("uint8", encoded.scale, short), r"zero of shape \(2, 1\)"),
        (("float16",), "expected float16"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(encoded.array, *arguments)


@pytest.mark.parametrize("shape", [(8,), (3, 40), (64, 56, 56), (2, 3)])
def test_encoder_memory_bound_is_tight(shape):
    size = 4 * math.prod(shape)
    for dtype in DTYPES:
        constant, per_sample = encoder_step(shape, dtype)
        result = Encoding(dtype).sample_bytes(shape)
        assert constant <= 4096 + 2 * encodings_module.CHUNK_BYTES
        assert result <= per_sample <= 4 * size + 80 * num_groups(shape)


@pytest.mark.parametrize("encoding", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(features=batches())
def test_features_of_16_bits_are_encoded_as_their_float32_values(
    encoding, dtype, features
):
    features = features.to(dtype)
    before = features.clone()
    found, upcast = (
        encode(features, encoding),
        encode(features.float(), encoding),
    )
    # Of NaN only the bits differ, which mean nothing.
    if features.isnan().any():
        torch.testing.assert_close(
            decoded(found, encoding),
            decoded(upcast, encoding),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
    else:
        assert bits(found) == bits(upcast)
    assert torch.equal(features.view(torch.int16), before.view(torch.int16))
    if f"torch.{encoding}" == str(dtype) and not features.isinf().any():
        back = decoded(found, encoding).to(dtype)
        torch.testing.assert_close(
            back, features, rtol=0, atol=0, equal_nan=True
        )
