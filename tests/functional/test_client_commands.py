"""``hapi ls``, ``hapi info`` and ``hapi models`` on a real Swift."""

import io
import json

import pytest

from hapi_client.data.index import load_index
from hapi_client.swift.swift_url import Location
from hapi_splitter.freezing.split_model import split
from jobs import store_package
from networks import small_network, small_parts, small_transform
from photos import shard

MODELS = "packages"


@pytest.fixture
def hapi(hapi, tmp_path):
    """Runs a command; returns its exit status and its JSON."""
    path = tmp_path / "result.json"

    def run(*arguments):
        path.unlink(missing_ok=True)
        status = hapi(*arguments, "--json", path)
        facts = json.loads(path.read_text()) if path.exists() else None
        return status, facts

    return run


@pytest.fixture(scope="module")
def data(owner):
    owner.put("/AUTH_test/sets")
    for name in ("train/a.tar", "train/b.tar", "raw/c.tar"):
        owner.put(f"/AUTH_test/sets/{name}", shard(3))


def test_ls_lists_containers_data_sets_and_shards(hapi, data, owner, capsys):
    assert hapi("index", "sets/train")[0] == 0
    status, facts = hapi("ls")
    assert status == 0
    # Swift updates the counts of containers later.
    assert "sets" in [each["name"] for each in facts["containers"]]

    _, facts = hapi("ls", "swift://sets")
    [raw, train] = facts["data_sets"]
    assert (raw["name"], raw["index"]) == ("swift://sets/raw", "missing")
    assert (train["index"], train["samples"]) == ("there", 6)
    assert (train["shards"], raw["shards"]) == (2, 1)

    _, facts = hapi("ls", "sets/train")
    assert [e["name"] for e in facts["shards"]] == [
        "train/a.tar",
        "train/b.tar",
    ]
    _, facts = hapi("ls", "sets/raw")
    [only] = facts["shards"]
    assert (only["name"], only["samples"]) == ("raw/c.tar", None)
    assert "hapi index swift://sets/raw" in capsys.readouterr().err

    owner.put("/AUTH_test/sets/train/a.tar", shard(4))
    _, facts = hapi("ls", "sets")
    assert [e["index"] for e in facts["data_sets"]] == ["missing", "stale"]


def test_info_describes_the_cluster(hapi, data, capsys):
    status, facts = hapi("info")
    assert status == 0
    assert facts["account"]["name"] == "AUTH_test"
    assert facts["info"]["hapi"]["cache"] is True
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        f"Swift │ {facts['info']['swift']['version']} ",
        "largest object │ 5.37 GB",
        "largest object computed on │ 5.37 GB",
        "objects of one request │ up to 1000, each of 16.8 MB at most",
        "features travel as │ float32, float16, bfloat16, uint8; each also "
        "lz4, zstd",
        "feature cache │ on: ",
        "numerics │ exact",
        "protocol │ 1; this client's 1",
    ):
        assert words in shown


def test_info_describes_a_data_set(hapi, owner, connection, capsys):
    owner.put("/AUTH_test/described")
    for name, count in (("a", 5), ("b", 2)):
        owner.put(f"/AUTH_test/described/{name}.tar", shard(count))
    owner.put("/AUTH_test/described/c.tar", shard(3, seed=1, labels=False))
    assert hapi("index", "described")[0] == 0
    index = load_index(connection, Location("described"))
    status, facts = hapi("info", "swift://described")
    assert status == 0
    found = facts["data_set"]
    assert (found["shards"], found["samples"], found["spans"]) == (3, 10, 3)
    assert (found["index"], found["index_version"]) == ("there", 2)
    assert found["stored"].startswith("20")
    assert found["classes"] == {"0": 3, "1": 2, "2": 1, "3": 1}
    assert found["unlabelled"] == 3
    assert (found["kinds"], found["looked_at"]) == ({"cls": 2, "jpg": 3}, 3)
    lengths = [row.length for each in index.shards for row in each.rows]
    assert found["mean_sample_bytes"] == sum(lengths) / 10
    listed = connection.list("described")
    assert found["shard_bytes"] == sum(
        each.length_bytes for each in listed if each.name.endswith(".tar")
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "without a label │ 3 samples" in shown

    owner.put("/AUTH_test/described/b.tar", shard(1))
    found = hapi("info", "described")[1]["data_set"]
    assert (found["index"], found["looked_at"]) == ("stale", 2)
    assert hapi("info", "sets/raw")[0] == 1
    assert "hapi index swift://sets/raw" in capsys.readouterr().err


def test_info_describes_a_package(hapi, connection, tmp_path, capsys):
    frozen = small_parts().frozen
    model = store_package(connection, tmp_path, frozen, "told")
    status, facts = hapi("info", f"swift://told/{model.object}")
    assert status == 0
    found = facts["package"]
    cuts = frozen.cuts
    assert [(each["module"], each["shape"]) for each in found["cuts"]] == [
        (cut.name, list(cut.shape)) for cut in cuts
    ]
    assert found["bytes"] == (tmp_path / "model.hapi").stat().st_size
    assert found["transform"]["crop_size"] == 64
    shown = " ".join(capsys.readouterr().out.split())
    assert f"cuts │ {len(cuts)} │" in shown
    assert "sample │ 3x64x64" in shown

    assert hapi("info", "told/nothing.hapi") == (1, None)
    assert "hapi models ls" in capsys.readouterr().err
    connection.put("told", "x.hapi", io.BytesIO(b"PK"), 2)
    assert hapi("info", "told/x.hapi") == (1, None)
    assert "not a model package" in capsys.readouterr().err


def test_packages_are_listed_and_deleted(
    hapi, connection, owner, tmp_path, capsys
):
    digests = []
    for freeze in ("body", "body.2"):
        parts = split(small_network(), freeze, transform=small_transform())
        model = store_package(connection, tmp_path, parts.frozen, MODELS)
        digests.append(model.object.removesuffix(".hapi"))
    owner.put(f"/AUTH_test/{MODELS}/{'0' * 64}.hapi", b"no package")
    owner.put(f"/AUTH_test/{MODELS}/README", b"kept")
    where = ("--container", MODELS)

    status, facts = hapi("models", "ls", *where)
    assert status == 0
    by_digest = {each["digest"]: each for each in facts["packages"]}
    assert set(by_digest) == {*digests, "0" * 64}
    first = by_digest[digests[0]]
    assert (first["sample"], first["problem"]) == ([3, 64, 64], None)
    assert first["cuts"] > by_digest[digests[1]]["cuts"]
    assert first["bytes"] > 0
    assert "torch" in first["producer"]
    assert "not a model package" in by_digest["0" * 64]["problem"]
    assert digests[0][:12] in capsys.readouterr().out

    assert hapi("models", "rm", "f" * 64, "--yes", *where) == (1, None)
    assert "no package 'ffff" in capsys.readouterr().err
    assert hapi("models", "rm", digests[0], *where) == (1, None)
    assert "--yes" in capsys.readouterr().err  # there is no terminal
    _, facts = hapi("models", "rm", "--older-than", "1d", "--yes", *where)
    assert facts["deleted"] == []
    _, facts = hapi("models", "rm", digests[0][:20], "-y", *where)
    assert facts["deleted"] == [digests[0]]
    _, facts = hapi("models", "rm", "--all", "-y", *where)
    assert set(facts["deleted"]) == {digests[1], "0" * 64}
    left = [each.name for each in connection.list(MODELS)]
    assert left == ["README"]


@pytest.mark.parametrize(
    "words", [(), ("--all", "ab"), ("ab", "--older-than", "1d")]
)
def test_rm_takes_one_choice(hapi, words):
    assert hapi("models", "rm", *words) == (2, None)
