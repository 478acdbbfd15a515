"""Features that are kept: found again, for those who may, and only whole."""

import json
import os
import time
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from cached_features import files_of_entries
from caller import Caller, metrics
from hapi_client.cli.main import app
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.swift.swift_url import Location
from hapi_protocol.feature_reader import read_features
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from hapi_training.loop import train_tail
from hapi_training.recipe import Recipe
from jobs import connected, small_job, store_package, upload_shards
from networks import small_parts
from photos import shard, shards_of, with_corrupt_member
from slow_link import slow_link
from waiting import until

OWNER = "AUTH_test"
DATA = f"/{OWNER}/kept"
MODELS = "kept-models"
NUM_SAMPLES = 12
LINK_BYTES_PER_SECOND = 300e3
SAMPLES_BEYOND_BUFFERS = 400
"""Their features, 13 MB, exceed the buffers of a loopback connection."""


@pytest.fixture(scope="module")
def model(connection, owner, tmp_path_factory):
    """The package's path; the container of the data is there too."""
    frozen = small_parts(seed=3).frozen
    folder = tmp_path_factory.mktemp("package")
    owner.put(DATA)
    return store_package(connection, folder, frozen, MODELS).quoted()


@pytest.fixture
def empty(owner, model):
    """Nothing is kept, and nobody but the owner may read anything."""
    cache(owner, "DELETE")
    for container in (DATA, f"/{OWNER}/{MODELS}"):
        allow(owner, container, "")


def asked(model, mode="readwrite", **others):
    named = {f"X-Hapi-{k.title()}": v for k, v in others.items()}
    return {
        "X-Hapi-Model": model,
        "X-Hapi-Cut": "1",
        "X-Hapi-Cache": mode,
        **named,
    }


def put_shard(owner, name, data=None):
    path = f"{DATA}/{quote(name)}"
    owner.put(path, shard(NUM_SAMPLES) if data is None else data)
    return path


def allow(owner, container, acl):
    headers = {"X-Container-Read": acl}
    owner.request("POST", container, headers).raise_for_status()


def cache(owner, method="GET", query=""):
    answer = owner.request(method, f"/{OWNER}?hapi-cache{query}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def kept(owner):
    return [entry["source"] for entry in cache(owner)["listed"]]


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    batches = list(read_features(answer.content))
    rows = [row for batch in batches for row in batch.rows]
    return rows, np.concatenate([b.features for b in batches if b.rows])


def assert_same_rows(one, other):
    rows, features = rows_of(one)
    other_rows, other_features = rows_of(other)
    assert rows == other_rows
    assert len(rows) > 0
    np.testing.assert_array_equal(features, other_features)


def warm(owner, path, model):
    """The answer that was computed, and is kept by now."""
    before = len(kept(owner))
    answer = owner.get(path, asked(model))
    assert answer.headers["X-Hapi-Cache"] == "store", answer.text
    until(lambda: len(kept(owner)) > before)
    return answer


def num_jobs(cluster, outcome):
    return sum(
        value
        for name, value in metrics(cluster).items()
        if name.startswith("hapi_worker_jobs_total")
        and f'outcome="{outcome}"' in name
    )


def jobs_done(cluster):
    counted = ("hapi_worker_jobs_total", "hapi_worker_samples_total")
    return {
        name: value
        for name, value in metrics(cluster).items()
        if name.startswith(counted)
    }


@pytest.mark.usefixtures("empty")
def test_features_are_computed_once(cluster, owner, model):
    path = put_shard(owner, "once.tar")
    first = warm(owner, path, model)
    before = jobs_done(cluster)
    again = owner.get(path, asked(model, "read"))

    assert again.headers["X-Hapi-Cache"] == "hit"
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers["X-Hapi-Source-Etag"]
    assert jobs_done(cluster) == before
    assert_same_rows(first, again)
    plain = owner.get(path, asked(model, "off"))
    assert plain.headers["X-Hapi-Cache"] == "off"
    assert_same_rows(plain, again)


@pytest.mark.usefixtures("empty")
def test_what_one_request_took_is_not_told_to_the_next(owner, model):
    path = put_shard(owner, "timings.tar")
    first = warm(owner, path, model)
    again = owner.get(path, asked(model))

    readers = [read_features(each.content) for each in (first, again)]
    told = [[b.timings for b in each if b.timings] for each in readers]
    assert sum(each["forward"] for each in told[0]) > 0
    assert told[1] == []
    assert readers[0].summary.cpu_seconds > 0
    assert readers[0].summary.load is not None
    assert readers[1].summary.cpu_seconds == 0
    assert readers[1].summary.load is None


@pytest.mark.usefixtures("empty")
def test_other_features_are_other_entries(owner, model):
    path = put_shard(owner, "others.tar")
    warm(owner, path, model)
    for other in ({"encoding": "float16"}, {"samples": "0-3"}, {"cut": "2"}):
        answer = owner.get(path, asked(model, **other))
        assert answer.headers["X-Hapi-Cache"] == "store", other
    until(lambda: len(kept(owner)) == 4)


@pytest.mark.usefixtures("empty")
def test_replaced_source_is_computed_anew(owner, model):
    path = put_shard(owner, "replaced.tar")
    warm(owner, path, model)
    put_shard(owner, "replaced.tar", shard(NUM_SAMPLES, seed=5))
    answer = owner.get(path, asked(model, "read"))
    assert answer.headers["X-Hapi-Cache"] == "miss"
    assert rows_of(answer)[0][0].key.startswith("s5")


@pytest.mark.usefixtures("empty")
def test_rows_with_errors_are_not_kept(owner, model):
    data = with_corrupt_member(shard(NUM_SAMPLES), "s0-0003")
    path = put_shard(owner, "broken.tar", data)
    answer = owner.get(path, asked(model))
    assert sum(row.error is not None for row in rows_of(answer)[0]) == 1
    good = put_shard(owner, "good.tar")
    warm(owner, good, model)
    assert kept(owner) == ["kept/good.tar"]


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("kind", ["slo", "dlo"])
def test_large_objects_are_not_kept(owner, model, kind):
    path = put_shard(owner, f"part-{kind}.tar")
    large = f"{DATA}/{kind}"
    if kind == "slo":
        parts = json.dumps([{"path": f"/kept/part-{kind}.tar"}]).encode()
        owner.put(f"{large}?multipart-manifest=put", parts)
    else:
        owner.put(large, b"", {"X-Object-Manifest": f"kept/part-{kind}"})
    answer = owner.get(large, asked(model))
    assert answer.headers["X-Hapi-Cache"] == "off"
    assert_same_rows(answer, owner.get(path, asked(model, "off")))
    warm(owner, path, model)
    assert kept(owner) == [f"kept/part-{kind}.tar"]


@pytest.mark.usefixtures("empty")
def test_client_that_disconnects_leaves_no_entry(cluster, owner, model):
    # More than the sockets on the way can hold: the answer cannot be
    # complete before the client has closed.
    path = put_shard(owner, "gone.tar", shard(SAMPLES_BEYOND_BUFFERS))
    before = num_jobs(cluster, "gone")
    answer = owner.stream(path, asked(model))
    assert answer.status_code == 200
    assert answer.headers["X-Hapi-Cache"] == "store"
    answer.raw.read(100)
    answer.close()
    until(lambda: num_jobs(cluster, "gone") > before)
    warm(owner, put_shard(owner, "whole.tar"), model)
    assert kept(owner) == ["kept/whole.tar"]


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("user", ["test:tester3", "test2:tester2", None])
@pytest.mark.parametrize("private", ["source", "model", "both"])
def test_warm_cache_opens_nothing(cluster, owner, model, user, private):
    path = put_shard(owner, "private.tar")
    warm(owner, path, model)
    readers = "test:tester3,test2:tester2,.r:*"
    if private == "model":
        allow(owner, DATA, readers)
    if private == "source":
        allow(owner, f"/{OWNER}/{MODELS}", readers)
    caller = Caller(cluster, user)
    plain = caller.get(model if private == "model" else path)
    answers = [caller.get(path, asked(model, m)) for m in ("read", "off")]
    caller.close()
    assert plain.status_code in (401, 403)
    for answer in answers:
        assert answer.status_code == plain.status_code
        assert "X-Hapi-Cache" not in answer.headers
    told = [
        {k: v for k, v in each.json().items() if k != "trans_id"}
        if each.headers["Content-Type"].startswith("application/json")
        else each.text
        for each in answers
    ]
    assert told[0] == told[1]


@pytest.mark.usefixtures("empty")
def test_reader_finds_what_is_kept_and_keeps_nothing(cluster, owner, model):
    path = put_shard(owner, "shared.tar")
    other = put_shard(owner, "other.tar", shard(NUM_SAMPLES, seed=9))
    first = warm(owner, path, model)
    for container in (DATA, f"/{OWNER}/{MODELS}"):
        allow(owner, container, "test2:tester2,test:tester3")
    for user in ("test2:tester2", "test:tester3"):
        caller = Caller(cluster, user)
        hit = caller.get(path, asked(model))
        miss = caller.get(other, asked(model))
        caller.close()
        assert hit.headers["X-Hapi-Cache"] == "hit"
        assert_same_rows(first, hit)
        assert miss.headers["X-Hapi-Cache"] == "miss"
    assert kept(owner) == ["kept/shared.tar"]


@pytest.mark.usefixtures("empty")
def test_entries_are_out_of_clients_reach(owner, model):
    warm(owner, put_shard(owner, "hidden.tar"), model)
    listing = owner.get(f"/{OWNER}?format=json").json()
    assert not [e["name"] for e in listing if "features" in e["name"]]
    container = quote("\x00hapi\x00features")
    for method in ("GET", "HEAD", "DELETE", "PUT", "POST"):
        answer = owner.request(method, f"/{OWNER}/{container}")
        assert answer.status_code in (400, 404, 412), method
    assert kept(owner) == ["kept/hidden.tar"]


def data_file(cluster):
    """Path of the newest cached entry."""
    files = files_of_entries(cluster)
    return max(files, key=lambda path: path.stat().st_mtime)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("damage", ["flipped", "cut off", "emptied"])
def test_damaged_entry_is_computed_again(cluster, owner, model, damage):
    path = put_shard(owner, "damaged.tar")
    first = warm(owner, path, model)
    file = data_file(cluster)
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    else:
        os.truncate(file, len(content) // 2 if damage == "cut off" else 0)
    again = owner.get(path, asked(model, "read"))
    assert again.headers["X-Hapi-Cache"] == "miss"
    assert_same_rows(first, again)

    # Nothing of it is left, and it can be cached again.
    assert owner.get(path, asked(model)).headers["X-Hapi-Cache"] == "store"
    until(lambda: file.parent != data_file(cluster).parent or kept(owner))
    until(
        lambda: (
            owner.get(path, asked(model, "read")).headers["X-Hapi-Cache"]
            == "hit"
        )
    )


@pytest.mark.usefixtures("empty")
def test_cache_is_listed_page_by_page_and_purged_by_source(owner, model):
    for name in ("a/1.tar", "a/2.tar", "b ü.tar"):
        warm(owner, put_shard(owner, name), model)
    page = cache(owner, query="&limit=2")
    assert [entry["source"] for entry in page["listed"]] == [
        "kept/a/1.tar",
        "kept/a/2.tar",
    ]
    assert page["listed"][0]["bytes"] > 1000
    rest = cache(owner, query=f"&limit=2&marker={page['marker']}")
    assert [entry["source"] for entry in rest["listed"]] == ["kept/b ü.tar"]
    assert rest["marker"] is None
    gone = cache(owner, "DELETE", "&source=kept/a/1.tar")
    assert gone == {"deleted": 1, "marker": None}
    assert cache(owner, "DELETE", "&source=kep")["deleted"] == 0
    assert kept(owner) == ["kept/a/2.tar", "kept/b ü.tar"]
    assert cache(owner, "DELETE")["deleted"] == 2
    assert cache(owner)["listed"] == []


def uploaded(connection, name, num_shards):
    """Shards of eight photos each."""
    shards = shards_of([8] * num_shards)
    return upload_shards(connection, Location("kept", name), shards)


def job_of(connection, place, **options):
    base = {"connection": connection, "batch_size": 8, "store": "readwrite"}
    return small_job(place, **{**base, **options})


@pytest.mark.usefixtures("empty")
def test_second_epoch_needs_no_worker(cluster, connection, owner):
    place = uploaded(connection, "epochs", 5)
    with job_of(connection, place, cut="freeze") as job:
        first = train_tail(job, epochs=1, recipe=Recipe(0.0))
        spans = len(job.pipeline.data.split("train").spans)
        until(lambda: len(kept(owner)) == spans)
        assert job.stats.cached == 0
        before = jobs_done(cluster)
        second = train_tail(job, epochs=1, recipe=Recipe(0.0))
        assert job.stats.cached == 40
        assert job.stats.fallbacks == 0
    assert jobs_done(cluster) == before
    assert first.losses == second.losses


def tracker_of(job, connection):
    """The tracker of a job with a fixed cut, as of one that plans."""
    sources = job.pipeline._factory.sources
    assert sources.model is not None
    profile = connection.get_profile(
        sources.model.container, sources.model.object, seconds=60.0
    )
    sources.tracker.identify(profile.digest, profile.numerics_tag)
    return sources.tracker


@pytest.mark.usefixtures("empty")
def test_a_listing_finds_what_another_job_has_stored(
    cluster, connection, owner
):
    place = uploaded(connection, "listed", 3)
    with job_of(connection, place, cut="freeze") as job:
        sum(len(y) for _, y in job.pipeline.loader(0))
    until(lambda: len(kept(owner)) == 3)
    user = {"user": "test:tester3", "key": "testing3"}
    with (
        connected(cluster, **user) as reader,
        job_of(connection, place, cut="freeze") as job,
    ):
        way, spans = (
            Route(job.num_cuts, "float32"),
            job.pipeline.data.split("train").spans,
        )
        tracker = tracker_of(job, connection)
        tracker.use([way])
        for each, found in ((reader, None), (connection, way)):
            CacheListing(each, [spans], tracker).read()
            for span in spans:
                assert tracker.cached_route(span, None) == found
        # Gone between the listing and the read: computed, as if never there.
        cache(owner, "DELETE")
        job.pipeline._factory.scheduler.change({RAW_ROUTE: 1.0})
        assert sum(len(y) for _, y in job.pipeline.loader(1)) == 24
        assert (job.stats.cached, job.stats.fallbacks) == (0, 0)
        assert not any(tracker.cached_route(each, None) for each in spans)
    until(lambda: len(kept(owner)) == 3)


@pytest.mark.usefixtures("empty")
@pytest.mark.usefixtures("frequent_plans")
def test_a_plan_counts_on_what_is_kept(cluster, connection):
    place = uploaded(connection, "planned", 6)
    with (
        slow_link(cluster.auth_url, LINK_BYTES_PER_SECOND) as url,
        connected(cluster, auth_url=url) as behind_link,
        job_of(
            behind_link,
            place,
            epochs=1e6,
        ) as job,
    ):
        deadline = time.monotonic() + 120
        while not job.reports or job.reports[-1].cached_samples < 48:
            assert time.monotonic() < deadline, job.plan or job.no_plan_reason
            assert (
                sum(len(y) for _, y in job.pipeline.loader(len(job.reports)))
                == 48
            )
        assert job.plan is not None
        assert job.plan.pushes
        before = jobs_done(cluster)
        train_tail(job, epochs=1, recipe=Recipe(0.0))
        assert job.reports[-1].cached_samples == 48
        assert jobs_done(cluster) == before


@pytest.mark.usefixtures("empty")
def test_commands_show_and_empty_the_cache(cluster, owner, model, tmp_path):
    warm(owner, put_shard(owner, "cli/a.tar"), model)
    environment = cluster.environment
    runner = CliRunner()

    def run(*words, status=0, typed=""):
        result = runner.invoke(
            app,
            ["cache", *words, "--json", str(tmp_path / "out.json")],
            env=environment,
            input=typed,
        )
        assert result.exit_code == status, result.output
        return result.output, json.loads((tmp_path / "out.json").read_text())

    text, facts = run("ls")
    assert "kept/cli/a.tar" in text
    for source in ("kept", "swift://kept/cli", "kept/cli/", "kept/cli/a.tar"):
        assert run("ls", source)[1] == facts
    text, nothing = run("ls", "kept/cl")
    assert "nothing is cached for kept/cl" in text
    assert nothing == {"entries": []}
    assert facts["entries"][0]["length_bytes"] > 1000
    text, facts = run("stats")
    assert facts["containers"][0]["name"] == "kept"
    assert facts["containers"][0]["entries"] == 1
    assert run("purge", "other", status=1)[1] == {"deleted": 0}
    assert "(1 entries" in run("purge", status=1, typed="n\n")[0]
    assert run("purge", "swift://kept/cli")[1] == {"deleted": 1}
    assert run("purge", "--yes")[1] == {"deleted": 0}
    assert kept(owner) == []
