"""Every command has help with examples that parse and its JSON keys."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hapi_client.cli import main as cli

ROOT = Path(__file__).resolve().parents[4]
WITHOUT_TABLE = {"cluster start", "cluster stop", "cluster env"}


def commands(group, words=""):
    """All commands of a group and its subgroups, with their words."""
    for name, command in group.commands.items():
        path = f"{words} {name}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, path)
        else:
            yield path, command


TREE = typer.main.get_command(cli.app)
COMMANDS = dict(commands(TREE))


def help_of(command):
    return inspect.cleandoc(command.help or "")


def examples(command):
    """The example command lines in its help."""
    _, _, text = help_of(command).partition("Example")
    blocks = [" ".join(b.split()) for b in text.split("\n\n")[1:]]
    lines = [re.sub(r'^eval "\$\((.*)\)"$', r"\1", b) for b in blocks]
    return [line for line in lines if line.startswith("hapi ")]


def recorder(called, name):
    """A command that only records that it was called."""
    return lambda **_: called.append(name)


def first_sentence(command):
    text = " ".join(help_of(command).split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


def test_commands_of_groups_are_found():
    assert len(COMMANDS) >= 20
    assert {"extract", "cache purge", "worker status"} < set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS)
def test_help_begins_with_a_sentence(words):
    sentence = first_sentence(COMMANDS[words])
    assert re.fullmatch(r"[A-Z].{10,}\.", sentence)


@pytest.mark.parametrize("words", COMMANDS)
def test_options_and_arguments_have_help(words):
    named = [p for p in COMMANDS[words].params if p.name != "help"]
    without_help = [p.opts for p in named if not getattr(p, "help", None)]
    assert not without_help


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - WITHOUT_TABLE))
def test_command_with_a_table_has_json_with_documented_keys(words):
    options = [opt for p in COMMANDS[words].params for opt in p.opts]
    assert "--json" in options
    assert "Keys of --json:" in help_of(COMMANDS[words])


def test_groups_and_global_options_have_help():
    for group in (TREE, *TREE.commands.values()):
        assert group.help
    assert all(p.help for p in TREE.params)


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_parse(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shard-*.tar").touch()  # a shell would expand the pattern
    lines = examples(COMMANDS[words])
    named: list[str] = []
    for line in lines:
        tree = typer.main.get_command(cli.app)
        called: list[str] = []
        for name, command in commands(tree):
            monkeypatch.setattr(command, "callback", recorder(called, name))
        tree.main(
            args=shlex.split(line)[1:], prog_name="hapi", standalone_mode=False
        )
        assert len(called) == 1, line
        named += called
    # Examples may contain other commands, e.g. one that writes the input.
    assert words in named


def test_documentation_lists_all_commands():
    (page,) = (ROOT / "docs").rglob("commands.rst")
    listed = re.findall(r"\* - ``hapi ([a-z ]+)``", page.read_text())
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("plan", ["--min-precision", "--device"]),
        (
            "train",
            [
                "--min-precision",
                "--encoding",
                "--augment-period-epochs",
                "--seed",
            ],
        ),
        ("extract", ["--min-precision", "--encoding", "--device"]),
    ],
)
def test_expert_options_come_last(words, last):
    options = [
        (p.opts[0], p.rich_help_panel)
        for p in COMMANDS[words].params
        if p.name != "help" and p.opts[0].startswith("-")
    ]
    assert [name for name, panel in options if panel == "Expert"] == last
    assert [name for name, _ in options[-len(last) :]] == last
    assert all(panel for _, panel in options)


def test_worker_daemon_has_an_example():
    done = subprocess.run(
        [sys.executable, "-m", "hapi_worker.main", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert (
        "hapi-worker --config /etc/hapi/hapi-worker.conf --check"
        in done.stdout
    )
