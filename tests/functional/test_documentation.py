"""Code blocks of the README and the documentation work.

Pages are followed from top to bottom on the embedded cluster, code and
commands; configuration goes through the loaders of proxy and worker; HTTP
messages are exchanged.  What does not run is in :mod:`documented_commands`
with the reason, or has a comment ``not run: REASON`` in front of it.
"""

from __future__ import annotations

import configparser
import contextlib
import getpass
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
import typer
from torchvision.models import ResNet18_Weights, resnet18

import run_blocks
from as_user import run
from caller import Caller
from documentation import PAGES, ROOT, all_blocks, blocks_of, commands_of
from documented_commands import is_run, words_of
from hapi_client.cli.main import app
from hapi_client.model.package_store import upload_package
from hapi_client.swift.credentials import Credentials
from hapi_middleware.config import ObjectFilterConfig
from hapi_middleware.filter import filter_factory
from hapi_splitter.package.writer import write_package
from hapi_worker.config import SECTION, load_config
from jobs import connected
from networks import small_parts
from photos import jpegs
from waiting import SECONDS

TUTORIAL = "docs/tutorial/finetune.rst"
"""test_tutorial.py follows it."""
CLASSES = 3
TEXT = ("text", "none")
"""Blocks that are not run: answers, log lines, formulae."""
PYTHON = ("python",)
COMMANDS = ("sh", "console")
CONFIGURATION = ("ini", "yaml")
HTTP = ("http",)


@pytest.fixture(scope="module")
def workplace(cluster, tmp_path_factory):
    """A folder with ``photos/`` of three classes, which lie in Swift.

    In ``torch`` is what torchvision has downloaded: random weights.
    """
    folder = tmp_path_factory.mktemp("user")
    for number, (data, _) in enumerate(jpegs(4 * CLASSES)):
        place = folder / "photos" / f"class-{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"photo {number}.jpg").write_bytes(data)
    place = folder / "torch" / "hub" / "checkpoints"
    place.mkdir(parents=True)
    name = ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(resnet18().state_dict(), place / name)
    for prefix in ("train", "val"):
        words = ["hapi", "upload", "photos/", f"photos/{prefix}"]
        done = run(cluster, folder, words)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small one's package."""
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    return write_package(small_parts().frozen, path)


def store(cluster, model):
    with connected(cluster) as connection:
        upload_package(connection, "hapi-models", model.path, model.digest)


@pytest.fixture(scope="module")
def as_here(cluster, model):
    """Names in the documentation become those of this cluster."""
    store(cluster, model)
    names = {
        "http://127.0.0.1:8080": cluster.proxy_url,
        "worker status": f"worker status --socket {cluster.worker_socket}",
        "/run/hapi/worker.sock": str(cluster.worker_socket),
        "/etc/hapi/": f"{cluster.directory}/etc/",
        "/etc/swift/": f"{cluster.directory}/etc/",
        "01f1c2": f"{model.digest} --yes",
        "--older-than 30d": "--older-than 30d --yes",
        "--epochs 3": "--epochs 1",
    }

    def translate(text):
        for theirs, ours in names.items():
            text = text.replace(theirs, ours)
        return text

    return translate


def test_every_block_says_its_language():
    known = (*TEXT, *PYTHON, *COMMANDS, *CONFIGURATION, *HTTP)
    unknown = [
        f"{block} ({block.language or 'none; say which'})"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in known
    ]
    assert not unknown
    for block in all_blocks(*PYTHON):
        compile(block.text, str(block), "exec")


# --- following pages ---


def shortened(block):
    """A script for one epoch of small batches."""
    code = re.sub(r"range\((\w+\.epoch, )?5\)", r"range(\g<1>1)", block.text)
    code = code.replace("max_epochs=5", "max_epochs=1")
    return code.replace("batch_size=64", "batch_size=8")


def is_for_ranks(block):
    return "init_process_group" in block.text


def is_followed(block):
    """Returns true for a block that is run in its place on its page."""
    return not (
        block.not_run
        or block.page == TUTORIAL
        or is_for_ranks(block)
        # The very script of the quick start.
        or (block.page == "README.md" and block.language in PYTHON)
    )


FOLLOWED = [b for b in all_blocks(*PYTHON, *COMMANDS) if is_followed(b)]
ON_RANKS = [
    block
    for block in all_blocks(*PYTHON)
    if is_for_ranks(block) and not block.not_run
]


def steps_of(block, as_here):
    """Steps of a block, in the format of :mod:`run_blocks`."""
    if block.language in PYTHON:
        yield {"python": shortened(block)}
        return
    for line in commands_of(block):
        for command in re.split(r" && | \| ", line):
            words = words_of(as_here(command))
            if is_run(words):
                yield {"words": words}


@pytest.fixture(scope="module")
def outcomes(cluster, workplace, as_here, tmp_path_factory):
    """Problem of each step of each block, or None."""
    root = tmp_path_factory.mktemp("pages")
    steps = []
    for block in FOLLOWED:
        folder = root / re.sub(r"\W", "-", block.page)
        if not folder.exists():
            folder.mkdir()
            for name in ("photos", "my-photos"):
                (folder / name).symlink_to(workplace / "photos")
        about = {"block": str(block), "folder": str(folder)}
        steps += [about | step for step in steps_of(block, as_here)]
    (root / "steps").write_text(json.dumps(steps))
    words = ["python", run_blocks.__file__, "steps", str(root / "outcomes")]
    environment = {
        "TORCH_HOME": str(workplace / "torch"),
        "HF_DATASETS_CACHE": str(root / "datasets"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = run(cluster, root, words, environment, SECONDS)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str | None]] = {str(b): [] for b in FOLLOWED}
    for line in (root / "outcomes").read_text().splitlines():
        outcome = json.loads(line)
        found[outcome["block"]].append(outcome["problem"])
    return found


@pytest.mark.parametrize("page", sorted({b.page for b in FOLLOWED}))
def test_page_can_be_followed(outcomes, page):
    for block in FOLLOWED:
        if block.page == page:
            problems = [p for p in outcomes[str(block)] if p]
            assert not problems, f"{block}: {problems[0]}"


@pytest.mark.parametrize("block", ON_RANKS, ids=str)
def test_python_runs_on_two_ranks(cluster, workplace, tmp_path, block):
    script = tmp_path / "block.py"
    script.write_text(shortened(block) + "\nprint('all of it')\n")
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    words = ["python", *launcher, "--nproc-per-node=2", str(script)]
    environment = {"TORCH_HOME": str(workplace / "torch")}
    done = run(cluster, tmp_path, words, environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all of it") == 2


def test_training_script_of_the_readme_is_that_of_the_quick_start():
    pages = ("README.md", "docs/tutorial/quickstart.rst")
    blocks = [block for page in pages for block in blocks_of(page)]
    readme, start = [b.text for b in blocks if "FeatureDataset(" in b.text]
    assert readme == start


def test_commands_of_the_readme_are_those_ci_runs():
    lines = [
        line
        for block in blocks_of("README.md")
        if block.language in COMMANDS
        for line in commands_of(block)
    ]
    assert len(lines) == 2
    script = (ROOT / ".ci" / "run").read_text()
    for line, environment in zip(lines, ("demo", "py3"), strict=True):
        assert line.startswith("python3 -m venv .venv && ")
        assert line.endswith(f"tox run -e {environment}")
        assert f"readme_command {environment}" in script


def test_every_table_row_of_the_readme_is_a_command():
    text = (ROOT / "README.md").read_text()
    cells = re.findall(r"^\| (`hapi [^|]+)\|", text, re.M)
    named = set(re.findall(r"`(?:hapi )?([\w-]+)", "".join(cells)))
    assert len(named) >= 10
    assert named <= {*typer.main.get_command(app).commands}


# --- configuration ---


def blocks_in(*languages):
    return [block for block in all_blocks(*languages) if not block.not_run]


@pytest.mark.parametrize("block", blocks_in("ini"), ids=str)
def test_configuration_is_read_by_what_it_is_for(block, tmp_path):
    # systemd's options may stand in a file several times.
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(block.text)
    for section in parser.sections():
        options = dict(parser.items(section))
        if section == "filter:hapi":
            check_filter(options)
        elif section == "filter:hapi_object":
            assert options.pop("use") == "egg:swift-hapi#hapi_object"
            ObjectFilterConfig.from_conf({}, options)
        elif section == "pipeline:main":
            check_pipeline(options["pipeline"].split())
        elif section == SECTION:
            path = tmp_path / "hapi-worker.conf"
            us = getpass.getuser()  # there may be no user swift
            path.write_text(block.text.replace("= swift", f"= {us}"))
            load_config(str(path))
        elif section in ("Unit", "Service", "Socket"):
            check_drop_in(block, tmp_path)
        else:
            pytest.fail(f"{block}: nobody reads [{section}]")


def check_filter(options):
    assert options["use"] == "egg:swift-hapi#hapi"
    filter_factory({}, **options)


def check_pipeline(names):
    if names[-1] == "object-server":
        assert names[-2] == "hapi_object"
        return
    place = names.index("hapi")
    for name in ("tempauth", "keystoneauth", "s3api", "authtoken"):
        assert name not in names[place:]
    for name in ("copy", "slo", "dlo", "versioned_writes", "symlink"):
        assert names.index(name) > place


def check_drop_in(block, folder):
    """systemd takes our unit with what is in the block."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here")
    unit = folder / "hapi-worker.service"
    shutil.copy(ROOT / "deploy" / unit.name, unit)
    drop_in = folder / f"{unit.name}.d"
    drop_in.mkdir()
    (drop_in / "local.conf").write_text(block.text)
    # The program's path is that of some other host.
    (drop_in / "program.conf").write_text(
        "[Service]\nExecStart=\nExecStart=/bin/true\n"
    )
    done = subprocess.run(
        [tool, "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_clouds_are_found_in_clouds_yaml(block, tmp_path):
    path = tmp_path / "clouds.yaml"
    path.write_text(block.text.replace("/etc/ssl/lab.pem", str(path)))
    environ = {"OS_CLIENT_CONFIG_FILE": str(path)}
    found = Credentials.from_cloud("lab", environ)
    assert found.auth_url in block.text


# --- HTTP ---


def message(text):
    """The first line, the headers and the body."""
    head, _, body = text.partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body.strip()


def alike(told, found):
    """An ellipsis on the page stands for anything."""
    parts = map(re.escape, " ".join(told.split()).split("…"))
    return re.fullmatch(".*".join(parts), " ".join(found.split()))


@pytest.mark.parametrize(
    ("asked", "answered"),
    [*zip(*[iter(all_blocks(*HTTP))] * 2, strict=True)],
    ids=str,
)
def test_http_messages_are_exchanged_as_documented(
    cluster, workplace, model, asked, answered
):
    store(cluster, model)
    first, headers, body = message(asked.text.replace("DIGEST", model.digest))
    method, path = re.fullmatch(r"(\w+) /v1(\S+) HTTP/1\.1", first).groups()
    del headers["X-Auth-Token"]  # the caller has its own
    with contextlib.closing(Caller(cluster)) as caller:
        found = caller.request(method, path, headers, body.encode())
    first, headers, body = message(answered.text)
    assert first.startswith(f"HTTP/1.1 {found.status_code} "), found.text
    for name, text in headers.items():
        assert alike(text, found.headers[name]), (name, found.headers)
    assert not body or alike(body, found.text), found.text
