"""Every code block of the README and the documentation does what it says.

Python runs on the embedded cluster, and so do commands; configuration goes
through the loaders of proxy and worker; HTTP messages are exchanged.  What
does not run is in :mod:`documented_commands` with the reason, or has a comment
``not run: REASON`` in front of it in its page.
"""

from __future__ import annotations

import ast
import configparser
import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import run_blocks
from caller import Caller
from children import run_family
from documentation import (
    PAGES,
    ROOT,
    Block,
    all_blocks,
    blocks_of,
    commands_of,
)
from documented_commands import (
    RUN_ELSEWHERE,
    CommandError,
    check_unrun,
    words_of,
)
from documented_http import Exchange, exchanges_of
from hapi_client.cli import main as cli
from hapi_client.connection import Connection
from hapi_client.credentials import Credentials
from hapi_client.packages import upload_package
from hapi_cluster import Cluster
from hapi_middleware.filter import filter_factory
from hapi_splitter.package import PackageInfo, write_package
from hapi_splitter.trace import split
from hapi_worker import main as worker
from hapi_worker.config import SECTION, load_config
from networks import small_network, small_transform
from photos import jpegs

CLASSES = 3
SECONDS = 280
TEXT = ("text", "none")
"""What people read: answers, log lines, formulae."""
PYTHON = ("python",)
COMMANDS = ("sh", "console")
CONFIGURATION = ("ini", "yaml")
HTTP = ("http",)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def workplace(cluster: Cluster, tmp_path_factory) -> Path:
    """A folder with ``photos/`` of three classes, uploaded as told."""
    folder = tmp_path_factory.mktemp("user")
    for number, (data, _) in enumerate(jpegs(4 * CLASSES)):
        place = folder / "photos" / f"class-{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"photo {number}.jpg").write_bytes(data)
    (command,) = [
        line
        for block in blocks_of("docs/quickstart.rst")
        if block.language in COMMANDS
        for line in commands_of(block)
        if line.startswith("hapi upload")
    ]
    words = [sys.executable, "-m", "hapi_client.cli.main"]
    done = run(cluster, folder, words + shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> PackageInfo:
    """A small one's package."""
    parts = split(small_network(), "body", transform=small_transform())
    path = tmp_path_factory.mktemp("package") / "model.hapi"
    return write_package(parts.frozen, path)


@pytest.fixture
def package(cluster: Cluster, model: PackageInfo) -> str:
    """The digest of the package, which lies in ``hapi-models``."""
    login = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    with Connection(login) as connection:
        upload_package(connection, "hapi-models", model.path, model.digest)
    return model.digest


@pytest.fixture
def as_here(cluster: Cluster, package: str) -> Callable[[str], str]:
    """Names in the documentation become those of this cluster."""
    names = {
        "http://127.0.0.1:8080": cluster.proxy_url,
        "worker status": f"worker status --socket {cluster.worker_socket}",
        "/run/hapi/worker.sock": str(cluster.worker_socket),
        "/etc/hapi/": f"{cluster.directory}/etc/",
        "/etc/swift/": f"{cluster.directory}/etc/",
        "01f1c2": f"{package} --yes",
        "--older-than 30d": "--older-than 30d --yes",
        # Nothing can be downloaded here, and nobody wants to wait.
        "--weights DEFAULT ": "",
        "--epochs 3": "--epochs 1",
    }

    def translate(text: str) -> str:
        for theirs, ours in names.items():
            text = text.replace(theirs, ours)
        return text

    return translate


def run(cluster: Cluster, folder: Path, command: list[str]):
    """A child process, as a user of the cluster."""
    return run_family(
        command,
        SECONDS,
        environment={
            **os.environ,
            **cluster.environment,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        folder=folder,
    )


def test_every_block_says_its_language():
    known = (*TEXT, *PYTHON, *COMMANDS, *CONFIGURATION, *HTTP)
    unknown = [
        f"{block} ({block.language or 'none; say which'})"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in known
    ]
    assert not unknown


# --- Python ---


def program(block: Block) -> str:
    """What a block does, however it is written."""
    tree = ast.parse(block.text)
    for number, statement in enumerate(tree.body):
        if isinstance(statement, ast.Import):
            # "import a, b" is two statements.
            tree.body[number : number + 1] = [
                ast.Import([name]) for name in statement.names
            ]
    return ast.dump(tree)


def shortened(block: Block) -> str:
    """A script without downloads, for one epoch of small batches."""
    code = block.text.replace('weights="DEFAULT"', "weights=None")
    code = re.sub(r"range\((\w+\.epoch, )?5\)", r"range(\g<1>1)", code)
    return code.replace("batch_size=64", "batch_size=8")


SCRIPTS = {
    program(block): block for block in all_blocks(*PYTHON) if not block.not_run
}
"""Those that several pages have, once."""
ON_RANKS = [b for b in SCRIPTS.values() if "init_process_group" in b.text]


def test_python_that_is_not_run_is_python_at_least():
    for block in all_blocks(*PYTHON):
        compile(block.text, str(block), "exec")


def test_python_runs(cluster, workplace, tmp_path):
    folders = []
    blocks = [b for b in SCRIPTS.values() if b not in ON_RANKS]
    for block in blocks:
        folder = tmp_path / re.sub(r"\W", "-", str(block))
        folder.mkdir()
        (folder / "photos").symlink_to(workplace / "photos")
        (folder / run_blocks.SCRIPT).write_text(shortened(block))
        folders.append(str(folder))
    done = run(
        cluster, tmp_path, [sys.executable, run_blocks.__file__, *folders]
    )
    ended = [f for f in folders if f"{run_blocks.DONE} {f}\n" in done.stdout]
    assert ended == folders, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", ON_RANKS, ids=str)
def test_python_runs_on_two_ranks(cluster, workplace, tmp_path, block):
    script = tmp_path / run_blocks.SCRIPT
    script.write_text(shortened(block) + "\nprint('all of it')\n")
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    words = [sys.executable, *launcher, "--nproc-per-node=2", str(script)]
    done = run(cluster, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all of it") == 2


def test_training_script_of_the_readme_is_that_of_the_quick_start():
    def script(page: str) -> str:
        (found,) = [b for b in blocks_of(page) if "TransferJob(" in b.text]
        return program(found)

    assert script("README.md") == script("docs/quickstart.rst")


# --- commands ---

PAGES_WITH_COMMANDS = [
    page
    for page in PAGES
    if any(b.language in COMMANDS for b in blocks_of(page))
    and page not in RUN_ELSEWHERE
]


@pytest.fixture
def type_in(
    cluster: Cluster,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_here: Callable[[str], str],
) -> Callable[[str], int]:
    """Runs a command line, or looks at it; returns its exit status."""
    for variable, value in cluster.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(workplace)

    def hapi(words: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    def type_line(command: str) -> int:
        words = words_of(as_here(command))
        if not words or check_unrun(words):
            return 0
        program = Path(words[0]).name
        if program == "hapi":
            return hapi(words)
        if program == "hapi-worker":
            with pytest.raises(SystemExit) as caught:
                sys.exit(worker.main(words[1:]))
            return int(caught.value.code or 0)
        if program in ("python", "swift-proxy-server"):
            words[0] = str(Path(sys.executable).parent / program)
        elif program != "curl":
            raise CommandError(f"{command}: nobody knows how to run it")
        return run(cluster, workplace, words).returncode

    return type_line


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_commands_run(type_in, page):
    for block in blocks_of(page):
        if block.language in COMMANDS and not block.not_run:
            for line in commands_of(block):
                for command in re.split(r" && | \| ", line):
                    assert type_in(command) == 0, f"{block}: {command}"


def test_pages_that_others_follow_are_there():
    for page, test in RUN_ELSEWHERE.items():
        assert page in PAGES
        assert Path(page).name in (ROOT / test).read_text()


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
    done = subprocess.run(
        [sys.executable, "-m", "hapi_client.cli.main", "--help"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\| `hapi (\w+)", text, re.M))
    assert len(named) >= 10
    assert all(name in done.stdout for name in named), done.stdout


# --- configuration ---


def blocks_in(*languages: str) -> list[Block]:
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


def check_filter(options: dict[str, str]) -> None:
    assert options["use"] == "egg:swift-hapi#hapi"
    filter_factory({}, **options)


def check_pipeline(names: list[str]) -> None:
    place = names.index("hapi")
    for name in ("tempauth", "keystoneauth", "s3api", "authtoken"):
        assert name not in names[place:]
    for name in ("copy", "slo", "dlo", "versioned_writes", "symlink"):
        assert names.index(name) > place


def check_drop_in(block: Block, folder: Path) -> None:
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
        timeout=60,
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


@pytest.mark.parametrize("exchange", exchanges_of(all_blocks(*HTTP)), ids=str)
def test_http_messages_are_exchanged_as_told(
    cluster: Cluster, workplace, package, as_here, exchange: Exchange
):
    caller = Caller(cluster)
    try:
        exchange.check(caller, {"DIGEST": package})
    finally:
        caller.close()
