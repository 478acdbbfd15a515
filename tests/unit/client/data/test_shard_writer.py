"""Packing of class folders: complete, labelled, reproducible."""

import io
import os
import struct

import numpy as np
import pytest
from PIL import Image

from hapi_client.data.shard_writer import (
    is_damaged,
    read_folder,
    split_shards,
    write_shard,
)
from hapi_client.data.upload_sources import packed_samples
from hapi_protocol.errors import ClientError
from hapi_protocol.samples import ARRAY, IMAGE
from hapi_protocol.shards import iter_samples


def fill(folder, *names):
    """Writes files that contain their names, and folders (with a slash)."""
    for name in names:
        path = folder / name
        parent = path if name.endswith("/") else path.parent
        parent.mkdir(parents=True, exist_ok=True)
        if parent != path:
            path.write_bytes(os.fsencode(name))


@pytest.fixture
def folder(tmp_path):
    cats, dogs = ("cat/0.jpg", "cat/1.jpg"), (f"dog/{n}.jpg" for n in range(3))
    fill(tmp_path, *dogs, *cats, "cat/notes.txt")
    return tmp_path


def packed(files):
    sink = io.BytesIO()
    write_shard(files, sink)
    return sink.getvalue()


def samples(data):
    return list(iter_samples(io.BytesIO(data), name="shard"))


def test_images_are_packed_with_the_number_of_their_class(folder):
    images = read_folder(folder)
    assert images.class_names == ("cat", "dog")
    assert [path.name for path in images.ignored] == ["notes.txt"]
    members = {
        (sample.key, sample.content(IMAGE), sample.label_and_meta()[0])
        for sample in samples(packed(images.files))
    }
    assert members == {
        ("cat/0", b"cat/0.jpg", 0),
        ("cat/1", b"cat/1.jpg", 0),
        ("dog/0", b"dog/0.jpg", 1),
        ("dog/1", b"dog/1.jpg", 1),
        ("dog/2", b"dog/2.jpg", 1),
    }


def test_equal_folders_give_equal_bytes(folder):
    first = packed(read_folder(folder).files)
    (folder / "cat" / "0.jpg").touch()
    assert packed(read_folder(folder).files) == first


def test_shards_mix_classes(tmp_path):
    fill(tmp_path, *(f"{name}/{n}.png" for name in "ab" for n in range(50)))
    half = read_folder(tmp_path).files[:50]
    assert 10 < sum(file.label for file in half) < 40


def test_keys_are_unique_and_contain_the_path(tmp_path):
    names = {"a/x.1.jpg", "a/x.2.jpg", "a/y.jpg", "a/y.png", "a/ü ber.JPEG"}
    nested = "a/v1.0/1.jpg"
    fill(tmp_path, *names, nested)
    files = read_folder(tmp_path).files
    stored = samples(packed(files))
    assert len(stored) == 6
    assert {sample.content(IMAGE).decode() for sample in stored} == {
        *names,
        nested,
    }
    assert "a/v1.0/1" in [file.key for file in files]


@pytest.mark.parametrize(
    ("max_samples", "max_bytes", "expected"),
    [(2, 1000, [2, 2, 1]), (100, 20, [2, 2, 1]), (100, 1, [1] * 5)],
)
def test_shards_stay_within_both_limits(
    folder, max_samples, max_bytes, expected
):
    shards = split_shards(read_folder(folder).files, max_samples, max_bytes)
    assert [len(shard) for shard in shards] == expected


def test_arrays_are_packed_like_images(tmp_path):
    fill(tmp_path, "cat/1.NPY", "dog/1.NPY", "dog/list.txt")
    folder = read_folder(tmp_path)
    assert (folder.medium, len(folder.ignored)) == (ARRAY, 1)
    packed_samples = samples(packed(folder.files))
    assert {sample.key: sample.members for sample in packed_samples} == {
        "cat/1": {"npy": b"cat/1.NPY", "cls": b"0"},
        "dog/1": {"npy": b"dog/1.NPY", "cls": b"1"},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "neither images"),
        (["cat/1.jpg", "emu/"], r"emu has no image .*; put some into it"),
        (["cat/1.npy", "dog/"], r"dog has no array \(npy\)"),
        (["cat/1.jpg", "dog/7.npy"], r"\(1.jpg\) and arrays \(7.npy\)"),
    ],
)
def test_folder_without_samples_of_one_kind_in_each_class_is_refused(
    tmp_path, files, message
):
    fill(tmp_path, *files)
    with pytest.raises(ClientError, match=message):
        read_folder(tmp_path)


def test_files_and_folders_without_classes_are_packed(tmp_path):
    fill(tmp_path, "a/1.jpg", "a/notes.txt", "b/1.jpg", "b/c/2.png", "3.jpg")
    listed = packed_samples(
        [tmp_path / "a", tmp_path / "b", tmp_path / "3.jpg"],
        has_classes=False,
    )
    assert listed.class_names == ()
    assert [path.name for path in listed.ignored] == ["notes.txt"]
    found = {s.key: s.members for s in samples(packed(listed.files))}
    assert found == {
        "1": {"jpg": b"a/1.jpg"},
        "1-2": {"jpg": b"b/1.jpg"},
        "c/2": {"png": b"b/c/2.png"},
        "3": {"jpg": b"3.jpg"},
    }
    assert packed_samples([tmp_path]).class_names == ("a", "b")
    assert packed_samples([tmp_path / "a"]).class_names == ()
    fill(tmp_path, "a/x.tar")
    with pytest.raises(ClientError, match=r"x\.tar is a shard, but other"):
        packed_samples([tmp_path / "a"])


def test_stray_files_next_to_class_folders_are_told(folder):
    fill(folder, "labels.csv", "0.jpg", ".hidden")
    listed = read_folder(folder)
    assert [path.name for path in listed.ignored] == [
        "0.jpg",
        "labels.csv",
        "notes.txt",
    ]


def encoded(kind, size=(40, 40)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, kind)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
def test_images_whose_end_is_missing_are_found(kind):
    image = encoded(kind)
    assert not is_damaged(image)
    assert not is_damaged(image + bytes(100))
    for share in (0.5, 0.9, 0.99):
        assert is_damaged(image[: int(share * len(image))])


def test_other_formats_are_readable_and_other_files_are_damaged():
    assert not is_damaged(encoded("TIFF"))
    # Phones add a film to photographs.
    assert not is_damaged(encoded("JPEG") + b"ftypmp42 film")
    sides = struct.pack(">II", 9000, 9000)
    huge = encoded("PNG").replace(struct.pack(">II", 40, 40), sides)
    for data in (b"", b"text", encoded("PPM"), huge):
        assert is_damaged(data)


def test_linked_folders_are_followed_and_loops_end(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, "more/2.jpg")
    folder = tmp_path / "data"
    fill(folder, "cat/1.jpg", "cat/._1.jpg", "cat/.hidden/3.jpg")
    (folder / "cat" / "linked").symlink_to(elsewhere / "more")
    (folder / "cat" / "loop").symlink_to(folder)
    (folder / "cat" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (folder / "dog").symlink_to(elsewhere)
    listed = read_folder(folder)
    assert sorted(file.key for file in listed.files) == [
        "cat/1",
        "cat/linked/2",
        "cat/loop/dog/more/2",
        "dog/more/2",
    ]
    assert {path.name for path in listed.dangling} == {"cat", "gone.jpg"}


def test_names_of_other_encodings_are_packed_under_escaped_keys(tmp_path):
    for name in (b"caf\xe9.jpg", b"caf\xe8.jpg"):
        fill(tmp_path, f"cat/{os.fsdecode(name)}")
    files = read_folder(tmp_path).files
    keys = {sample.key for sample in samples(packed(files))}
    assert keys == {r"cat/caf\xe9", r"cat/caf\xe8"}


def test_path_that_is_too_long_names_the_file(tmp_path):
    fill(tmp_path, "cat/" + "/".join(["n" * 200] * 6) + "/1.jpg")
    with pytest.raises(ClientError, match=r"1\.jpg gives a key of 1[0-9]+ by"):
        read_folder(tmp_path)
