"""Every command explains itself, by examples that can be given as they are."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hapi_client.cli import main as cli

ROOT = Path(__file__).resolve().parents[4]
WITHOUT_RESULT = {"cluster start", "cluster stop", "cluster env", "completion"}
"""They print no table."""


def commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    """All commands of a group and below it, with their words."""
    for name, command in group.commands.items():
        path = f"{words} {name}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, path)
        else:
            yield path, command


TREE = typer.main.get_command(cli.app)
COMMANDS = dict(commands(TREE))


def help_of(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def examples(command: Any) -> list[str]:
    """The command lines of its help, each in one line."""
    _, _, text = help_of(command).partition("Example")
    blocks = [" ".join(b.split()) for b in text.split("\n\n")[1:]]
    lines = [re.sub(r'^eval "\$\((.*)\)"$', r"\1", b) for b in blocks]
    return [line for line in lines if line.startswith("hapi ")]


def noting(given: list[str], name: str) -> Callable[..., None]:
    """A command that does nothing else."""
    return lambda **_: given.append(name)


def first_sentence(command: Any) -> str:
    text = " ".join(help_of(command).split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


def test_all_commands_are_looked_at():
    assert len(COMMANDS) >= 20
    assert {"extract", "cache purge", "worker status"} < set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_says_what_it_does(words):
    sentence = first_sentence(COMMANDS[words])
    assert re.fullmatch(r"[A-Z].{10,}\.", sentence)


@pytest.mark.parametrize("words", COMMANDS)
def test_options_and_arguments_say_what_they_mean(words):
    named = [p for p in COMMANDS[words].params if p.name != "help"]
    silent = [p.opts for p in named if not getattr(p, "help", None)]
    assert not silent


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - WITHOUT_RESULT))
def test_a_result_is_had_as_json_whose_keys_are_told(words):
    options = [opt for p in COMMANDS[words].params for opt in p.opts]
    assert "--json" in options
    assert "Keys of --json:" in help_of(COMMANDS[words])


def test_groups_and_options_before_a_command_say_what_they_mean():
    for group in (TREE, *TREE.commands.values()):
        assert group.help
    assert all(p.help for p in TREE.params)


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_are_command_lines(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shard-*.tar").touch()  # what a shell would have put there
    lines = examples(COMMANDS[words])
    told: list[str] = []
    for line in lines:
        tree = typer.main.get_command(cli.app)
        given: list[str] = []
        for name, command in commands(tree):
            monkeypatch.setattr(command, "callback", noting(given, name))
        tree.main(
            args=shlex.split(line)[1:],
            prog_name="hapi",
            standalone_mode=False,
        )
        assert len(given) == 1, line
        told += given
    # Others may stand beside it, as what writes a file that it reads.
    assert words in told


def test_the_page_of_commands_has_all_of_them_as_their_help_says():
    page = " ".join((ROOT / "docs" / "commands.rst").read_text().split())
    rows = [
        f"* - ``hapi {words}`` - {first_sentence(command)}"
        for words, command in COMMANDS.items()
    ]
    assert [row for row in rows if row not in page] == []
    assert page.count("* - ``hapi ") == len(rows)


def test_exit_statuses_are_told():
    for status in ("0 done", "1 failed", "2 wrong", "130 Ctrl-C", "143 SIG"):
        assert status in TREE.help


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
