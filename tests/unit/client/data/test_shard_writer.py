"""Packing of class folders: complete, labelled, reproducible."""

import io

import pytest

from hapi_client.data.shard_writer import (
    find_unreadable,
    read_folder,
    split_shards,
    write_shard,
)
from hapi_protocol.errors import ClientError
from hapi_protocol.shards import ARRAY, IMAGE, iter_samples
from photos import jpegs


@pytest.fixture
def folder(tmp_path):
    for name, count in (("dog", 3), ("cat", 2)):
        (tmp_path / name).mkdir()
        for number in range(count):
            path = tmp_path / name / f"{number}.jpg"
            path.write_bytes(f"{name} {number}".encode())
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
    found = {
        (sample.key, sample.member(IMAGE), sample.label_and_meta()[0])
        for sample in samples(packed(images.files))
    }
    assert found == {
        ("cat/0", b"cat 0", 0),
        ("cat/1", b"cat 1", 0),
        ("dog/0", b"dog 0", 1),
        ("dog/1", b"dog 1", 1),
        ("dog/2", b"dog 2", 1),
    }


def test_equal_folders_give_equal_bytes(folder):
    first = packed(read_folder(folder).files)
    (folder / "cat" / "0.jpg").touch()
    assert packed(read_folder(folder).files) == first


def test_shards_mix_classes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(50):
            (tmp_path / name / f"{number}.png").write_bytes(b"x")
    half = read_folder(tmp_path).files[:50]
    assert 10 < sum(file.label for file in half) < 40


def test_names_with_dots_or_equal_stems_get_unique_keys(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("x.1.jpg", "x.2.jpg", "y.jpg", "y.png", "ü ber.JPEG"):
        (tmp_path / "a" / name).write_bytes(name.encode())
    found = samples(packed(read_folder(tmp_path).files))
    assert len(found) == 5
    assert {sample.member(IMAGE).decode() for sample in found} == {
        "x.1.jpg",
        "x.2.jpg",
        "y.jpg",
        "y.png",
        "ü ber.JPEG",
    }


def test_keys_of_nested_images_contain_their_path(tmp_path):
    (tmp_path / "a" / "v1.0").mkdir(parents=True)
    (tmp_path / "a" / "v1.0" / "1.jpg").write_bytes(b"x")
    (file,) = read_folder(tmp_path).files
    assert file.key == "a/v1.0/1"


def test_other_files_are_ignored(folder):
    (folder / "cat" / "notes.txt").write_text("hello")
    images = read_folder(folder)
    assert len(images.ignored) == 1
    assert len(images.files) == 5


@pytest.mark.parametrize(
    ("max_samples", "max_bytes", "expected"),
    [(2, 1000, [2, 2, 1]), (100, 10, [2, 2, 1]), (100, 1, [1] * 5)],
)
def test_shards_stay_within_both_limits(
    folder, max_samples, max_bytes, expected
):
    shards = split_shards(read_folder(folder).files, max_samples, max_bytes)
    assert [len(shard) for shard in shards] == expected


def test_arrays_are_packed_like_images(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.NPY").write_bytes(name.encode())
    (tmp_path / "dog" / "list.txt").write_text("1")
    found = read_folder(tmp_path)
    assert (found.medium, len(found.ignored)) == (ARRAY, 1)
    packed_samples = samples(packed(found.files))
    assert {each.key: each.members for each in packed_samples} == {
        "cat/1": {"npy": b"cat", "cls": b"0"},
        "dog/1": {"npy": b"dog", "cls": b"1"},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "neither class folders"),
        (["cat/1.jpg", "emu/"], r"emu has no image"),
        (["cat/1.npy", "dog/"], r"dog has no array \(npy\)"),
        (
            ["cat/1.jpg", "dog/7.npy"],
            r"contains images \(1.jpg\) and arrays \(7.npy\)",
        ),
    ],
)
def test_folder_without_samples_of_one_kind_in_each_class_is_refused(
    tmp_path, files, message
):
    for name in files:
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir()
        if not name.endswith("/"):
            path.write_bytes(b"x")
    with pytest.raises(ClientError, match=message):
        read_folder(tmp_path)


def test_images_with_unreadable_headers_are_found(tmp_path):
    folder = tmp_path / "cat"
    folder.mkdir()
    (good, _), (cut, _) = jpegs(2)
    (folder / "good.jpg").write_bytes(good)
    (folder / "cut.jpg").write_bytes(cut[:1000])  # found when it is decoded
    (folder / "text.jpg").write_bytes(b"no image at all")
    (folder / "empty.png").write_bytes(b"")
    found = {path.name for path in find_unreadable(read_folder(tmp_path))}
    assert {"text.jpg", "empty.png"} <= found
    assert "good.jpg" not in found
