"""Data sets made by other people's tools, from upload to training."""

import gzip
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from hapi_client import FeatureDataset, JsonLabels, split_model
from hapi_client.data import indexing
from hapi_client.data.catalog import list_data_sets
from hapi_client.data.index import find_index, load_index
from hapi_client.data.indexing import IndexOptions, update_index
from hapi_client.data.upload import upload
from hapi_client.plan_report.plan_study import advise
from hapi_client.plan_report.study_inputs import PlanRequest
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    LabelError,
    SourceChangedError,
    UnsupportedError,
)
from jobs import connected, small_job, upload_shards
from networks import small_network, small_transform
from photos import jpegs, shard, tar_of

CONTAINER = "foreign"


class Notes(SilentReporter):
    """Notes of an upload."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture(scope="module", autouse=True)
def container(connection):
    connection.put_container(CONTAINER)


@pytest.fixture
def place(request):
    return Location(CONTAINER, request.node.name.replace("[", "-").strip("]"))


def put(connection, place, name, data):
    """Stores a shard without ``hapi upload``."""
    connection.put(
        place.container, place.object_name(name), io.BytesIO(data), len(data)
    )


def images(count, seed=0):
    return [data for data, _ in jpegs(count, size=64, seed=seed)]


def delivered(job):
    features, labels = zip(*job.pipeline.loader(), strict=True)
    return torch.cat(features), torch.cat(labels)


def read(connection, data, cut, **options):
    """Features and labels of an epoch of a job of its own."""
    with small_job(data, connection=connection, cut=cut, **options) as job:
        return delivered(job)


@pytest.mark.parametrize("route", ["upload", "index"])
def test_image_is_the_exact_extension_or_named(
    connection, place, tmp_path, route
):
    """A mask before the photograph was trained on, silently."""
    photo, mask = images(2)
    data = tar_of([("k.depth.png", mask), ("k.cls", b"1"), ("k.jpg", photo)])
    two = tar_of([("k.depth.jpg", mask), ("k.cls", b"1"), ("k.in.jpg", photo)])
    plain = tar_of([("k.jpg", photo), ("k.cls", b"1")])

    def store(folder, shard, **options):
        there = Location(CONTAINER, f"{place.prefix}/{folder}")
        (tmp_path / f"{folder}.tar").write_bytes(shard)
        if route == "upload":
            source = [tmp_path / f"{folder}.tar"]
            given = IndexOptions(**options)
            upload(connection, there, source, SilentReporter(), options=given)
        else:
            put(connection, there, f"{folder}.tar", shard)
            update_index(connection, there, options=IndexOptions(**options))
        return there

    places = [store("plain", plain), store("mask", data)]
    with pytest.raises(UnsupportedError, match=r"k\.depth\.jpg and k\.in\.j"):
        store("two", two)
    computed = []
    for cut in ("freeze", "stream"):
        computed += [read(connection, data, cut)[0] for data in places]
        there = store("two", two, image="in.jpg")
        computed.append(read(connection, there, cut, image="IN.jpg")[0])
        frozen, _ = split_model(
            small_network(),
            "body",
            transform=small_transform(),
            image="in.jpg",
        )
        with FeatureDataset(
            str(there), frozen, cut=cut, connection=connection
        ) as set_:
            computed += [features for features, _ in set_]
        with pytest.raises(HapiError, match="has several image members"):
            read(connection, there, cut)
    for features in computed[1:]:
        torch.testing.assert_close(features, computed[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", ["upload", "index"])
def test_labels_have_one_rule(connection, place, route):
    """``0`` and ``other`` were both 0, and JSON labels could not be chosen."""
    texts = [b"0", b"other", b"0"]
    facts = [{"cls": 9, "a": {"b": name}} for name in ("x", "y", "y")]
    members = []
    for number, (text, fact) in enumerate(zip(texts, facts, strict=True)):
        members += [
            (f"k{number}.jpg", images(3)[number]),
            (f"k{number}.cls", text),
            (f"k{number}.json", json.dumps(fact).encode()),
        ]
    if route == "upload":
        upload_shards(connection, place, {"a.tar": tar_of(members)})
    else:
        put(connection, place, "a.tar", tar_of(members))
        update_index(connection, place)
    index = load_index(connection, place)
    assert index.class_names == ("0", "other")

    def labels_of(labels=None):
        return read(connection, place, "stream", labels=labels)[1].tolist()

    assert labels_of() == [0, 1, 0]
    assert labels_of("json:a.b") == [0, 1, 1]
    function = JsonLabels(lambda fact: 7 if fact["a"]["b"] == "x" else 3)
    assert labels_of(function) == [7, 3, 3]
    with pytest.raises(LabelError, match="has no label"):
        labels_of("json:missing")
    options = IndexOptions(labels="json:a.b")
    assert update_index(connection, place, options=options).indexed == 1
    assert load_index(connection, place).class_names == ("x", "y")
    assert update_index(connection, place).skipped == 1
    assert labels_of() == [0, 1, 1]


def test_data_sets_inside_are_left_out(connection, place):
    inside = Location(CONTAINER, f"{place.prefix}/val")
    put(connection, place, "a.tar", shard(2, size=64))
    put(connection, place, "._a.tar", b"resource fork")
    upload_shards(connection, inside, {"v.tar": shard(3, size=64)})
    report = update_index(connection, place)
    assert (report.samples, report.inner) == (2, (str(inside),))
    assert update_index(connection, inside).samples == 3
    states = [
        (entry.num_samples, entry.index)
        for entry in list_data_sets(connection, place)
    ]
    assert states == [(2, "there"), (3, "there")]


def test_interrupted_index_goes_on(connection, place, monkeypatch):
    for number in range(4):
        data = shard(2, size=64, seed=number)
        put(connection, place, f"{number}.tar", data)
    put(connection, place, "3.tar", b"no tar" * 500)
    monkeypatch.setattr(indexing, "SAVE_SECONDS", 0.0)
    read = []
    with pytest.raises(UnsupportedError, match=r"3\.tar"):
        update_index(connection, place, read.append)
    assert len(read) == 4
    assert find_index(connection, place) is None
    put(connection, place, "3.tar", shard(2, size=64, seed=3))
    read.clear()
    report = update_index(connection, place, read.append)
    assert [name.rpartition("/")[2] for name in read] == ["3.tar"]
    assert (report.indexed, report.samples) == (1, 8)
    assert find_index(connection, place, indexing.PARTIAL_SUFFIX) is None


def test_empty_shard_has_no_rows(connection, place, tmp_path):
    """webdataset's own writer leaves such shards."""
    notes = Notes()
    (tmp_path / "a.tar").write_bytes(shard(2, size=64))
    (tmp_path / "b.tar").write_bytes(tar_of([]))
    upload(connection, place, [tmp_path], notes)
    assert "b.tar: no sample" in notes.said
    assert len(load_index(connection, place)) == 2
    assert update_index(connection, place).skipped == 2
    connection.delete(place.container, place.index_name)
    report = update_index(connection, place)
    assert report.empty == (place.object_name("b.tar"),)
    assert (report.indexed, report.samples) == (2, 2)
    assert update_index(connection, place).skipped == 2
    assert len(read(connection, place, "freeze")[1]) == 2


def test_dynamic_large_object_is_a_shard(connection, place, owner):
    """Its listing states the ETag of an empty object."""
    data = shard(4, size=64)
    parts = Location(CONTAINER, f"{place.prefix}/parts")
    middle = len(data) // 2
    for number, part in enumerate((data[:middle], data[middle:])):
        put(connection, parts, f"part-{number}", part)
    owner.put(
        f"/{connection.account}/{CONTAINER}/{place.object_name('a.tar')}",
        b"",
        {"X-Object-Manifest": f"{CONTAINER}/{parts.object_name('part-')}"},
    )
    assert update_index(connection, place).samples == 4
    assert update_index(connection, place).skipped == 1
    for cut in ("freeze", "stream"):
        assert len(read(connection, place, cut)[1]) == 4


def test_containers_of_two_accounts_are_one_data_set(
    connection, cluster, owner, place
):
    user = {"user": "test2:tester2", "key": "testing2"}
    with connected(cluster, **user) as reader:
        shared = Location("shared-with-others", place.prefix)
        own = Location("own", place.prefix)
        upload_shards(connection, shared, {"a.tar": shard(5, size=64)})
        upload_shards(reader, own, {"a.tar": shard(4, seed=1, size=64)})
        readers = {"X-Container-Read": "test2:tester2,.rlistings"}
        account = connection.account
        owner.request("POST", f"/{account}/{shared.container}", readers)
        theirs = f"swift:///{account}/{shared.container}/{shared.prefix}"
        by_cut = {}
        for cut in ("freeze", "stream", "auto"):
            with small_job(
                {"train": [str(own), theirs]}, connection=reader, cut=cut
            ) as job:
                by_cut[cut] = delivered(job)
                labels = sorted(by_cut[cut][1].tolist())
                assert labels == [0, 0, 0, 1, 1, 2, 2, 3, 3]
                assert job.stats.fallbacks == 0
        for cut in ("stream", "auto"):
            torch.testing.assert_close(
                by_cut[cut], by_cut["freeze"], rtol=1e-4, atol=1e-5
            )
        assert len(load_index(reader, parse_location(theirs))) == 5


@pytest.fixture(scope="module")
def loose(connection):
    """Loose images: two classes, and files that are no samples."""
    place = Location(CONTAINER, "loose/images")
    for number, data in enumerate(images(100)):
        name = f"{'cat' if number % 3 else 'dog'}/{number:03d}.x.jpg"
        put(connection, place, name, data)
    put(connection, place, "cat/.DS_Store", b"mac")
    put(connection, place, "README.txt", b"text")
    return place


def test_loose_images_are_a_data_set(connection, loose):
    report = update_index(connection, loose)
    assert (report.indexed, report.samples) == (2, 100)
    assert update_index(connection, loose).skipped == 2
    [entry] = list_data_sets(connection, loose)
    assert (entry.index, entry.num_samples) == ("there", 100)
    index = load_index(connection, loose)
    assert index.class_names == ("cat", "dog")
    by_cut = {}
    for cut in ("freeze", "stream", "auto"):
        with small_job(
            loose, connection=connection, cut=cut, batch_size=32
        ) as job:
            by_cut[cut] = delivered(job)
            assert job.stats.fallbacks == 0
            if cut != "auto":
                pushed = sum(
                    count for c, count in job.stats.samples_by_cut.items() if c
                )
                assert pushed == (100 if cut == "freeze" else 0)
            if cut == "freeze":
                # One request for each group.
                shuffled = [labels for _, labels in job.pipeline.loader(0)]
                assert len(torch.cat(shuffled)) == 100
    labels = by_cut["freeze"][1]
    assert labels.sum() == 34
    for cut in ("stream", "auto"):
        assert torch.equal(by_cut[cut][1], labels)
        torch.testing.assert_close(
            by_cut[cut][0], by_cut["freeze"][0], rtol=1e-4, atol=1e-5
        )
    with small_job(
        loose, connection=connection, cut="stream", memory_bytes=1 << 26
    ) as job:
        for _ in range(2):
            again = delivered(job)
            torch.testing.assert_close(again[0], by_cut["stream"][0])


@pytest.mark.parametrize("link", [None, 1e6])
def test_plan_says_what_packing_loose_images_gains(connection, loose, link):
    update_index(connection, loose)
    region, _ = split_model(
        small_network(), freeze="body", transform=small_transform()
    )
    request = PlanRequest("lossless", 1.0, 8, link, None, False, "small")
    study = advise(region, request, Notes(), connection, loose)
    gain = study.packing
    assert gain.read_seconds >= gain.request_seconds > 0
    assert gain.times_faster > 1
    assert gain.text in study.report.notes
    if link is not None:
        # A link for the bytes of an object, and its request.
        size = np.mean([len(image) for image in images(100)])
        transfer = gain.read_seconds - gain.request_seconds
        assert transfer == pytest.approx(size / link)


@pytest.mark.parametrize("cut", ["freeze", "stream"])
def test_changed_loose_image_is_named(connection, place, cut):
    for number, data in enumerate(images(5)):
        put(connection, place, f"cat/{number}.jpg", data)
    update_index(connection, place)
    put(connection, place, "cat/3.jpg", images(1, seed=9)[0])
    [entry] = list_data_sets(connection, place)
    assert entry.index == "stale"
    with pytest.raises(SourceChangedError, match=r"cat/3\.jpg"):
        read(connection, place, cut)
    assert update_index(connection, place).indexed == 1
    assert len(read(connection, place, cut)[1]) == 5


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("labels.csv", "file_name,label,kind\n0.jpg,3,b\n1.jpg,1,a\n"),
        (
            "labels.jsonl",
            '{"file_name": "1.jpg", "label": 1, "kind": "a"}\n\n'
            '{"file_name": "0.jpg", "label": 3, "kind": "b"}\n',
        ),
    ],
    ids=["csv", "jsonl"],
)
def test_table_labels_loose_images(connection, place, name, table):
    for number, data in enumerate(images(2)):
        put(connection, place, f"{number}.jpg", data)
    put(connection, place, name, table.encode())

    def labels_of(source):
        update_index(connection, place, options=IndexOptions(labels=source))
        index = load_index(connection, place)
        rows = {row.key: row for shard in index.shards for row in shard.rows}
        names = sorted(rows)
        return [rows[name].label for name in names], index.class_names

    assert labels_of(name) == ([3, 1], ())
    put(connection, place, name, table.replace("3", "8").encode())
    assert labels_of(name) == ([8, 1], ())
    _, labels = read(connection, place, "stream", labels=f"{name}:kind")
    assert sorted(labels.tolist()) == [0, 1]
    assert labels_of(f"{name}:kind") == ([1, 0], ("a", "b"))
    with pytest.raises(LabelError, match="has no field 'colour'"):
        labels_of(f"{name}:colour")
    with pytest.raises(ClientError, match=r"samples of .* are loose objects"):
        labels_of("json:a")


def test_large_object_is_a_loose_image(connection, place, owner):
    """Its ETag is made of those of its segments, and no MD5 of its bytes."""
    (data,) = images(1)
    segment = Location(CONTAINER, f"{place.prefix}-segments")
    put(connection, segment, "1", data)
    parts = [{"path": f"/{CONTAINER}/{segment.object_name('1')}"}]
    name = place.object_name("cat/1.jpg")
    owner.put(
        f"/{connection.account}/{CONTAINER}/{name}?multipart-manifest=put",
        json.dumps(parts).encode(),
    )
    update_index(connection, place)
    for cut in ("freeze", "stream"):
        assert len(read(connection, place, cut)[1]) == 1


def test_labels_are_read_of_samples_with_several_images(
    connection, place, tmp_path
):
    first, second = images(2)
    members = [("k.a.jpg", first), ("k.b.jpg", second)]
    members.append(("k.json", b'{"kind": 5}'))
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    options = IndexOptions(image="a.jpg")
    upload(
        connection,
        place,
        [tmp_path / "a.tar"],
        SilentReporter(),
        options=options,
    )
    chosen = {"image": "a.jpg", "labels": "json:kind"}
    assert read(connection, place, "stream", **chosen)[1].tolist() == [5]
    for labels in ("labels.csv", "labels.jsonl:x"):
        with pytest.raises(ClientError, match="only loose objects take lab"):
            update_index(
                connection, place, options=IndexOptions(labels=labels)
            )
        with pytest.raises(ClientError, match="only loose objects take lab"):
            small_job(place, connection=connection, labels=labels)


def test_members_that_are_not_together_are_named(connection, place):
    photos = images(2)
    members = [("a.jpg", photos[0]), ("b.jpg", photos[1]), ("a.cls", b"1")]
    with pytest.raises(UnsupportedError, match=r"'a' are not together"):
        upload_shards(connection, place, {"a.tar": tar_of(members)})
    put(connection, place, "a.tar", tar_of(members))
    with pytest.raises(UnsupportedError, match=r"'a' are not together"):
        update_index(connection, place)


def test_members_of_no_sample_are_told_once(connection, place, tmp_path):
    (photo,) = images(1)
    members = [("._k.jpg", b"fork"), ("k.jpg", photo), (".DS_Store", b"mac")]
    members += [("k.cls", b"1"), ("README", b"text")]
    notes = Notes()
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    (tmp_path / "._a.tar").write_bytes(b"fork")
    assert upload(connection, place, [tmp_path], notes).samples == 1
    [said] = [note for note in notes.said if "left out" in note]
    assert "3 members left out, because they belong to no sample" in said
    uploaded = load_index(connection, place)
    connection.delete(place.container, place.index_name)
    update_index(connection, place)
    assert load_index(connection, place) == uploaded


def test_two_tars_in_one_file_are_refused(connection, place):
    data = shard(2, size=64) + shard(2, size=64, seed=1)
    message = "bytes follow the tar's end"
    with pytest.raises(UnsupportedError, match=message):
        upload_shards(connection, place, {"a.tar": data})
    put(connection, place, "a.tar", data)
    with pytest.raises(UnsupportedError, match=message):
        update_index(connection, place)


def test_compressed_tar_is_named_with_the_remedy(connection, place, tmp_path):
    data = gzip.compress(shard(2, size=64))
    for name in ("a.tar", "a.tar.gz"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(HapiError, match=r"compressed with gzip: .*gunzip"):
            upload(connection, place, [tmp_path / name], SilentReporter())
    put(connection, place, "a.tar", data)
    with pytest.raises(UnsupportedError, match="compressed with gzip"):
        update_index(connection, place)


def test_shards_next_to_class_folders_are_refused(connection, place, tmp_path):
    (tmp_path / "a.tar").write_bytes(shard(2, size=64))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(images(1)[0])
    with pytest.raises(ClientError, match=r"\(a\.tar\) and class folders \(c"):
        upload(connection, place, [tmp_path], SilentReporter())


def test_other_formats_give_equal_features_on_both_tiers(connection, place):
    colours = np.random.default_rng(0).integers(0, 255, (6, 6, 3), np.uint8)
    image = Image.fromarray(colours).resize((80, 60), Image.Resampling.BICUBIC)
    kinds = ("webp", "gif", "bmp", "tiff", "png", "jpe")
    members = []
    for number, kind in enumerate(kinds):
        sink = io.BytesIO()
        image.save(sink, "JPEG" if kind == "jpe" else kind.upper())
        members += [
            (f"k{number}.{kind}", sink.getvalue()),
            (f"k{number}.cls", str(number).encode()),
        ]
    upload_shards(connection, place, {"a.tar": tar_of(members)})
    computed = []
    for cut in ("freeze", "stream"):
        with small_job(place, connection=connection, cut=cut) as job:
            features, labels = delivered(job)
            assert labels.tolist() == list(range(len(kinds)))
            assert job.stats.fallbacks == 0
            computed.append(features)
    torch.testing.assert_close(*computed, rtol=1e-4, atol=1e-5)


def test_photographs_are_turned_alike_on_both_tiers(connection, place):
    """Either seen by people, or read by ImageFolder."""
    members = []
    for number in range(8):
        exif = Image.Exif()
        exif[0x0112] = number + 1
        image = Image.open(io.BytesIO(images(1, seed=number)[0]))
        image = image.crop((0, 0, 64, 40))
        kind = ("JPEG", "PNG", "WEBP", "TIFF")[number % 4]
        image.save(sink := io.BytesIO(), kind, exif=exif)
        members += [
            (f"{number}.{kind.lower()}", sink.getvalue()),
            (f"{number}.cls", b"1"),
        ]
    upload_shards(connection, place, {"s.tar": tar_of(members)})
    rows = {}
    for exif in ("ignore", "turn"):
        for cut in ("stream", "freeze"):
            rows[exif, cut] = read(connection, place, cut, exif=exif)[0]
        torch.testing.assert_close(
            rows[exif, "stream"], rows[exif, "freeze"], rtol=1e-4, atol=1e-5
        )
    # The first is upright, and the last a TIFF.
    same = [
        torch.equal(*pair)
        for pair in zip(
            rows["ignore", "stream"], rows["turn", "stream"], strict=True
        )
    ]
    assert sum(same) == 3  # number 0, and the TIFFs 3 and 7
    with pytest.raises(ClientError, match="exif must be 'ignore' or 'turn'"):
        small_job(place, connection=connection, exif="yes")
