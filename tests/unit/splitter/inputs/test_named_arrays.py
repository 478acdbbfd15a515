"""Samples of several arrays in one archive, also hostile ones."""

import io
import zipfile

import numpy as np
import pytest
import torch

from array_networks import npy
from hapi_protocol.samples import ARCHIVE, Sample, SampleError
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.inputs.sample_format import transform_from_json

TEXT = NamedArrays.of(
    ids=ArrayTransform((2, 3), "int64"), mask=ArrayTransform((3,), "int64")
)
IDS = np.arange(6).reshape(2, 3)
MASK = np.array([1, 1, 0])


def archive(save=np.savez, **arrays):
    sink = io.BytesIO()
    save(sink, **{"ids": IDS, "mask": MASK, **arrays})
    return sink.getvalue()


def zipped(*entries):
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in entries:
            out.writestr(name, data)
    return sink.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        archive(),
        archive(np.savez_compressed),
        archive(ids=IDS.astype(np.uint8), mask=MASK.astype(">i4")),
        archive(ids=np.asfortranarray(IDS), label=np.zeros(9)),
    ],
)
def test_arrays_are_joined_and_separated(data):
    sample = TEXT.read(data)
    assert sample.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 0]
    found = TEXT.separate(torch.stack([sample, sample]))
    assert found["ids"][1].tolist() == IDS.tolist()
    assert found["mask"].shape == (2, 3)
    assert torch.equal(TEXT.join(found)[0], sample)
    assert torch.equal(TEXT.read(TEXT.encode(sample)), sample)


def test_members_of_their_own_are_an_archive():
    with np.load(io.BytesIO(archive())) as arrays:
        members = {f"{k}.npy": npy(v) for k, v in arrays.items()}
    sample = Sample(0, "key", 0, members=members | {"cls": b"1"})
    assert torch.equal(
        TEXT.read(sample.content(ARCHIVE)), TEXT.read(archive())
    )
    with pytest.raises(SampleError, match="no array archive member"):
        Sample(0, "key", 0, members={"cls": b"1"}).content(ARCHIVE)


def test_mixed_types_are_joined_as_floats():
    audio = NamedArrays.of(
        features=ArrayTransform((2, 2)), mask=ArrayTransform((2,), "int64")
    )
    values = {
        "features": torch.randn(4, 2, 2),
        "mask": torch.ones(4, 2).long(),
    }
    samples = audio.join(values)
    assert samples.dtype == audio.output_dtype == torch.float32
    assert audio.separate(samples)["mask"].dtype == torch.int64
    assert torch.equal(audio.separate(samples)["features"], values["features"])


def test_transform_survives_json():
    assert transform_from_json(TEXT.to_json()) == TEXT


@pytest.mark.parametrize(
    "document",
    [
        {"arrays": {}},
        {"arrays": []},
        {"arrays": [{"shape": [1], "dtype": "int64"}]},
        {"arrays": [{"name": "a", "shape": [1], "dtype": "int64"}] * 2},
        {"arrays": [{"name": "no name", "shape": [1], "dtype": "int64"}]},
        {"arrays": [{"name": "a", "shape": [0], "dtype": "int64"}]},
        {"arrays": [{"name": f"a{i}"} for i in range(99)]},
        {"arrays": [3], "more": 1},
    ],
)
def test_invalid_json_is_refused(document):
    with pytest.raises(ValueError, match=r"array|name|shape"):
        transform_from_json(document)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a complete archive"),
        (archive()[:-1], "not a complete archive"),
        (archive()[:80] + b"?" + archive()[81:], "array 'ids'|damaged"),
        (zipped(("mask.npy", b"")), "no array 'ids'; the model takes ids, m"),
        (archive(ids=IDS.T), r"array 'ids': an array of shape \(3, 2\)"),
        (archive(mask=MASK * 0.5), "array 'mask': an array of float64"),
        (
            zipped(("ids.npy", bytes(1 << 24)), ("mask.npy", b"")),
            "array 'ids': not a NumPy",
        ),
        (
            zipped(*((f"{i}.npy", b"") for i in range(2000))),
            "directory of more than",
        ),
    ],
)
def test_hostile_archives_are_errors_of_their_sample(data, message):
    with pytest.raises(SampleError, match=message):
        TEXT.read(data)


def test_ids_are_checked_against_their_limits():
    limits = torch.tensor([6] * 6 + [0] * 3)
    assert TEXT.read(archive(), limits).shape == (9,)
    with pytest.raises(SampleError, match="the id 6 at"):
        TEXT.read(archive(ids=IDS + 4), limits)
