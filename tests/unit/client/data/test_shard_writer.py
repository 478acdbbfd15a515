"""Packing class folders: complete, labelled, the same bytes each time."""

from __future__ import annotations

import io

import pytest

from hapi_client.data.shard_writer import (
    read_folder,
    split_shards,
    unreadable,
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


def test_each_image_is_packed_with_the_number_of_its_class(folder):
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


def test_classes_are_mixed_over_the_shards(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(50):
            (tmp_path / name / f"{number}.png").write_bytes(b"x")
    half = read_folder(tmp_path).files[:50]
    assert 10 < sum(file.label for file in half) < 40


def test_dots_and_equal_stems_still_give_one_key_each(tmp_path):
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


def test_images_in_deeper_folders_keep_their_path(tmp_path):
    (tmp_path / "a" / "v1.0").mkdir(parents=True)
    (tmp_path / "a" / "v1.0" / "1.jpg").write_bytes(b"x")
    (file,) = read_folder(tmp_path).files
    assert file.key == "a/v1.0/1"


def test_other_files_are_counted_and_left_out(folder):
    (folder / "cat" / "notes.txt").write_text("hello")
    images = read_folder(folder)
    assert len(images.ignored) == 1
    assert len(images.files) == 5


@pytest.mark.parametrize(
    ("max_samples", "max_bytes", "expected"),
    [(2, 1000, [2, 2, 1]), (100, 10, [2, 2, 1]), (100, 1, [1] * 5)],
)
def test_shards_stay_within_both_bounds(
    folder, max_samples, max_bytes, expected
):
    shards = split_shards(read_folder(folder).files, max_samples, max_bytes)
    assert [len(shard) for shard in shards] == expected


def test_a_class_without_images_is_named(folder):
    (folder / "emu").mkdir()
    with pytest.raises(ClientError, match="emu"):
        read_folder(folder)


def test_a_folder_without_classes_says_what_is_wanted(tmp_path):
    with pytest.raises(ClientError, match="class folders"):
        read_folder(tmp_path)


def test_arrays_are_packed_as_images_are(tmp_path):
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


def test_a_folder_of_images_and_arrays_is_refused_by_name(folder):
    (folder / "dog" / "7.npy").write_bytes(b"x")
    with pytest.raises(
        ClientError, match=r"holds images \(.*jpg\) and arrays \(7.npy\)"
    ):
        read_folder(folder)


def test_a_class_without_arrays_is_named(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    (tmp_path / "cat" / "1.npy").write_bytes(b"x")
    with pytest.raises(ClientError, match=r"dog has no array \(npy\)"):
        read_folder(tmp_path)


def test_images_that_nobody_can_read_are_found_by_their_headers(tmp_path):
    place = tmp_path / "cat"
    place.mkdir()
    (good, _), (cut, _) = jpegs(2)
    (place / "good.jpg").write_bytes(good)
    (place / "cut.jpg").write_bytes(cut[:1000])  # shows when it is decoded
    (place / "text.jpg").write_bytes(b"no image at all")
    (place / "empty.png").write_bytes(b"")
    found = {path.name for path in unreadable(read_folder(tmp_path))}
    assert {"text.jpg", "empty.png"} <= found
    assert "good.jpg" not in found
