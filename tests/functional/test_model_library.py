"""A library of packages: one account publishes, jobs of another use it."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

import hostile
from access_lines import used
from caller import Caller
from commands import run_hapi
from hapi_client.doctor.pushdown_checks import findings
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import package_name
from hapi_client.plan_report.plan_study import advise
from hapi_client.plan_report.study_inputs import PlanRequest
from hapi_client.progress import SilentReporter
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_protocol.headers import ModelPath
from hapi_splitter.package.writer import package_bytes
from hapi_training.loop import train_tail
from hapi_training.recipe import Recipe
from jobs import connected, small_job, upload_shards
from networks import small_network, small_parts, small_transform
from photos import shard
from preloaded import python
from second_swift import second_swift
from waiting import until

OPERATOR = {"ST_USER": "test2:tester2", "ST_KEY": "testing2"}
ACCOUNT = "AUTH_test2"
LIBRARY = f"{ACCOUNT}/library"
NUM_SAMPLES = 16
NAMES = ("mobilenet_v3_small", "shufflenet_v2_x0_5")
TIMM = "mobilenetv3_small_050.lamb_in1k"


@pytest.fixture(scope="module")
def swift(cluster):
    options = {"model_library": LIBRARY}
    with second_swift(cluster, filter_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def operator(swift):
    caller = Caller(swift, "test2:tester2")
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def connection(swift):
    """A connection of the user, who owns the data."""
    with connected(swift) as made:
        yield made


@pytest.fixture(scope="module")
def photos(connection):
    place = Location("library-photos", "train")
    return upload_shards(connection, place, {"a.tar": shard(NUM_SAMPLES)})


@pytest.fixture(scope="module")
def torch_home(tmp_path_factory):
    """Download folder of torchvision with random weights of NAMES."""
    home = tmp_path_factory.mktemp("torch")
    place = home / "hub" / "checkpoints"
    place.mkdir(parents=True)
    for name in NAMES:
        torch.manual_seed(7)
        state = models.get_model(name).state_dict()
        url = models.get_model_weights(name).DEFAULT.url
        torch.save(state, place / url.rpartition("/")[2])
    return home


@pytest.fixture
def publish(swift, monkeypatch, tmp_path, torch_home):
    """Runs ``hapi models publish``; returns its status and its JSON."""

    def run(*words, **environ):
        path = tmp_path / "published.json"
        path.unlink(missing_ok=True)
        for variable, value in {
            **swift.environment,
            **OPERATOR,
            "TORCH_HOME": str(torch_home),
            **environ,
        }.items():
            monkeypatch.setenv(variable, value)
        words = ("models", "publish", *words, "--json", path)
        status = run_hapi(monkeypatch, *words)
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


def states(facts):
    rows = facts["packages"]
    return [(each["model"], each["freeze"], each["state"]) for each in rows]


def trained(job):
    """Counters of a job whose samples were all pushed down."""
    with job:
        train_tail(job, epochs=1, recipe=Recipe(0.01))
        stats = job.stats
    assert stats.samples == NUM_SAMPLES
    assert stats.fallbacks == 0
    assert sum(stats.samples_by_cut.values()) == NUM_SAMPLES
    assert 0 not in stats.samples_by_cut
    return stats


def test_models_are_published_once_and_failures_stop_nothing(
    operator, publish, capsys
):
    freezes = ("--freeze", "avgpool", "--freeze", "features.3")
    rows = [(NAMES[0], "avgpool"), (NAMES[0], "features.3")]
    status, dry = publish(NAMES[0], *freezes, "--dry-run")
    assert (status, dry["read_acl"]) == (0, None)
    assert states(dry) == [(*each, "missing") for each in rows]
    assert operator.get(f"/{LIBRARY}").status_code == 404

    status, facts = publish(NAMES[0], "resnet-18", NAMES[0], *freezes)
    assert status == 1
    assert (facts["account"], facts["container"]) == tuple(LIBRARY.split("/"))
    assert facts["read_acl"] == ".r:*"
    assert states(facts) == [
        *((*each, "published") for each in rows),
        *(("resnet-18", each, "failed") for each in ("avgpool", "features.3")),
    ]
    assert "resnet18" in facts["packages"][-1]["problem"]
    assert "model_library" not in capsys.readouterr().out
    for planned, done in zip(dry["packages"], facts["packages"], strict=False):
        assert planned["digest"] == done["digest"]
        place = f"/{LIBRARY}/{package_name(done['digest'])}"
        assert len(operator.get(place).content) == done["bytes"]
        assert planned["bytes"] == done["bytes"]

    # An interrupted run continues; what is damaged is published again.
    operator.put(place, b"damaged")
    acl = "test:*,test2:*"
    status, facts = publish(NAMES[0], *freezes, "--read-acl", acl)
    assert [each["state"] for each in facts["packages"]] == [
        "present",
        "published",
    ]
    status, facts = publish(NAMES[0], *freezes)
    assert status == 0
    assert facts["read_acl"] == acl
    assert {each["state"] for each in facts["packages"]} == {"present"}


def test_only_the_librarys_account_has_a_default_container(
    publish, connection, capsys
):
    user = {"ST_USER": "test:tester", "ST_KEY": "testing"}
    assert publish(NAMES[1], **user) == (1, None)
    assert "is not in your account AUTH_test" in capsys.readouterr().err
    assert publish()[0] == 2
    status, facts = publish(NAMES[1], "--container", "own", **user)
    assert status == 0
    assert facts["account"] == "AUTH_test"
    assert "model_library = AUTH_test/own" in capsys.readouterr().out
    assert connection.read_acl("own") == ".r:*"


def test_job_of_another_account_uploads_nothing(
    swift, publish, connection, photos, torch_home, monkeypatch
):
    status, facts = publish(*NAMES, "--read-acl", ".r:*")
    assert status == 0
    package = facts["packages"][0]
    weights = models.get_model_weights(NAMES[0]).DEFAULT
    network = models.get_model(NAMES[0], weights=weights)
    network.classifier[-1] = nn.Linear(1024, 4)
    stats = trained(
        small_job(
            photos,
            connection=connection,
            network=network,
            freeze=package["freeze"],
            transform=weights.transforms(),
            cut="freeze",
            batch_size=8,
        )
    )
    assert stats.package_bytes == 0
    assert connection.read_acl("hapi-models") is None


def test_timms_weights_are_published(swift, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(TIMM)
    hub = tmp_path / f"models--timm--{TIMM}"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    files = hub / "snapshots" / ("0" * 40)
    files.mkdir(parents=True)
    save_file(model.state_dict(), files / "model.safetensors")
    done = subprocess.run(
        [
            *(python(), "-m", "hapi_client.cli.main"),
            *("models", "publish", f"timm:{TIMM}", "timm:no_such_model"),
            *("--json", "-"),
        ],
        env={
            **os.environ,
            **swift.environment,
            **OPERATOR,
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    found, failed = json.loads(done.stdout)["packages"]
    assert (done.returncode, failed["state"]) == (1, "failed")
    assert (found["state"], found["problem"]) == ("published", None)
    data = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**data, is_training=False)
    region = FrozenRegion(
        model, found["freeze"], transform, torch.device("cpu")
    )
    with connected(swift) as connection:
        assert region.find(connection, "none") == ModelPath(
            *LIBRARY.split("/"), package_name(found["digest"])
        )


# -- the same small model in the library and in jobs --------------------------


@pytest.fixture
def package(operator):
    """Path of the small model in the library, which everybody may read."""
    frozen = small_parts().frozen
    operator.put(f"/{LIBRARY}", headers={"X-Container-Read": ".r:*"})
    path = f"/{LIBRARY}/{package_name(frozen.digest)}"
    operator.put(path, package_bytes(frozen))
    yield path
    operator.request("DELETE", path)


def one_job(connection, photos, container):
    return trained(
        small_job(
            photos,
            connection=connection,
            cut="freeze",
            batch_size=8,
            models_container=container,
        )
    )


def features(swift, photos, package, user="test:tester"):
    """The answer to a plain request that names a package."""
    caller = Caller(swift, user)
    answer = caller.get(
        f"/AUTH_test/{photos.container}/train/a.tar",
        {"X-Hapi-Model": package, "X-Hapi-Cut": "1"},
    )
    plain = caller.get(package)
    caller.close()
    return answer, plain


def test_the_user_is_charged_for_a_model_of_the_library(
    swift, photos, package, connection
):
    answer, _ = features(swift, photos, package)
    assert answer.status_code == 200
    entry = used(swift, answer.headers["X-Trans-Id"])
    assert (entry["model"], entry["account"]) == (package, "AUTH_test")
    assert one_job(connection, photos, "unused").package_bytes == 0
    assert connection.read_acl("unused") is None


def not_readable(operator, package):
    operator.request("POST", f"/{LIBRARY}", {"X-Remove-Container-Read": "yes"})
    return 403, "forbidden"


def deleted(operator, package):
    operator.request("DELETE", package)
    return 404, "not_found"


def replaced(operator, package):
    operator.put(package, hostile.valid_package())
    return 409, "digest_mismatch"


def large_object(operator, package):
    content = operator.get(package).content
    operator.put(f"/{LIBRARY}/part", content)
    manifest = [{"path": f"/{LIBRARY.partition('/')[2]}/part"}]
    operator.put(
        f"{package}?multipart-manifest=put", json.dumps(manifest).encode()
    )
    assert operator.get(package).content == content
    return 422, "package_is_manifest"


@pytest.mark.parametrize(
    "change", [not_readable, deleted, replaced, large_object]
)
def test_what_the_library_cannot_give_is_refused_and_uploaded(
    swift, operator, photos, package, connection, change
):
    status, code = change(operator, package)

    def is_refused():
        answer, _ = features(swift, photos, package)
        found = answer.status_code
        return found == status and answer.json()["code"] == code

    # A proxy's process uses the facts of a package for a second.
    until(is_refused)
    _, plain = features(swift, photos, package)
    if status in (403, 404):
        assert plain.status_code == status
    container = change.__name__
    stats = one_job(connection, photos, container)
    assert stats.package_bytes == len(package_bytes(small_parts().frozen))
    assert one_job(connection, photos, container).package_bytes == 0


def test_plan_counts_no_upload_and_names_the_library(
    connection, photos, package
):
    notes = []
    reporter = SilentReporter()
    reporter.note = notes.append
    request = {
        "min_precision": "lossless",
        "epochs": 1,
        "batch_size": 8,
        "link": 1e7,
        "num_samples": None,
        "name": "small",
    }
    for seed, upload in ((0, True), (0, False), (1, False)):
        notes.clear()
        region = FrozenRegion(
            small_network(seed=seed),
            "body",
            small_transform(),
            torch.device("cpu"),
        )
        study = advise(
            region,
            PlanRequest(upload=upload, **request),
            reporter,
            connection,
            photos,
        )
        upload_bytes = study.report.problem.startup.package_bytes
        text = f"already in the model library, as {package[1:]}"
        assert (text in notes) == (seed == 0)
        assert upload_bytes == (0 if seed == 0 else region.parameter_bytes)


def test_doctor_reads_the_library_as_the_user(swift, operator, package):
    def finding():
        (found,) = (
            finding
            for finding in findings(
                lambda: Credentials.from_environment(swift.environment)
            )
            if finding.check == "library"
        )
        return found

    assert (finding().state, LIBRARY in finding().found) == ("ok", True)
    not_readable(operator, package)
    assert finding().state == "warning"
    assert "read ACL" in finding().remedy
