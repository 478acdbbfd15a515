"""The README's and the quick start's commands and code do what they say."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from children import run_family
from hapi_cluster import Cluster
from photos import jpegs

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 3
SECONDS = 280

pytestmark = pytest.mark.timeout(300)


def blocks(path: str, language: str) -> list[str]:
    """Code blocks of a Markdown or reStructuredText page."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    found = re.findall(
        rf"\.\. code-block:: {language}\n\n((?:(?:    .*)?\n)+)", text
    )
    return [re.sub(r"^    ", "", block, flags=re.M) for block in found]


def runnable(code: str) -> str:
    """A training script without the download, and for one epoch."""
    for old, new in (
        ('resnet18(weights="DEFAULT")', "resnet18(weights=None)"),
        ("range(5)", "range(1)"),
        ("batch_size=64", "batch_size=8"),
    ):
        assert old in code
        code = code.replace(old, new)
    return code + "\nprint(f'loss {loss.item():.3f} of {job.stats}')\n"


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
        for block in blocks("docs/quickstart.rst", "sh")
        for line in block.splitlines()
        if line.startswith("hapi upload")
    ]
    assert run(cluster, folder, shlex.split(command)).returncode == 0
    return folder


def run(cluster: Cluster, folder: Path, command: list[str]):
    """Runs a command of ours, or a script, as a user of the cluster."""
    if command[0] == "hapi":
        command = [sys.executable, "-m", "hapi_client.cli.main", *command[1:]]
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


def training_script(page: str) -> str:
    (code,) = [b for b in blocks(page, "python") if "TransferJob" in b]
    return runnable(code)


def test_training_script_of_the_quick_start_runs(cluster, workplace):
    script = workplace / "train.py"
    script.write_text(training_script("docs/quickstart.rst"))
    done = run(cluster, workplace, [sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert re.match(r"loss \d+\.\d+ of JobStats", done.stdout)
    assert "fallbacks=0" in done.stdout


SCRIPTS = [
    block
    for block in blocks("docs/data.rst", "python")
    if "TransferJob(" in block
]


@pytest.mark.parametrize(
    ("script", "torchrun"),
    list(zip(SCRIPTS, [True, False, False], strict=True)),
)
def test_scripts_about_data_run(cluster, workplace, script, torchrun):
    code = script.replace('weights="DEFAULT"', "weights=None")
    code = re.sub(r"range\((\w+\.epoch, )?5\)", r"range(\g<1>1)", code)
    code = code.replace("batch_size=64", "batch_size=8")
    path = workplace / "data.py"
    path.write_text(code + "\nprint('all of it')\n")
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2"]
    done = run(
        cluster,
        workplace,
        [sys.executable, *(launcher if torchrun else []), str(path)],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all of it") == 1 + torchrun


def test_training_script_of_the_readme_is_the_same_program():
    def program(page: str) -> str:
        tree = ast.parse(training_script(page))
        for number, statement in enumerate(tree.body):
            if isinstance(statement, ast.Import):
                # "import a, b" is two statements.
                tree.body[number : number + 1] = [
                    ast.Import([name]) for name in statement.names
                ]
        return ast.dump(tree)

    assert program("README.md") == program("docs/quickstart.rst")


def test_train_command_of_the_quick_start_runs(cluster, workplace):
    (command,) = [
        line
        for block in blocks("docs/quickstart.rst", "sh")
        for line in block.splitlines()
        if line.startswith("hapi train")
    ]
    # Nothing can be downloaded here.
    command = command.replace("--weights DEFAULT ", "")
    words = shlex.split(command.replace("--epochs 3", "--epochs 1"))
    done = run(cluster, workplace, words)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_are_those_ci_runs():
    lines = [
        line
        for block in blocks("README.md", "sh")
        for line in block.splitlines()
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
    assert len(named) == 12
    assert all(name in done.stdout for name in named), done.stdout
