"""Every command has help with examples that parse and its JSON keys."""

import inspect
import re
import shlex
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from hapi_client.cli import main as cli

ROOT = Path(__file__).resolve().parents[4]
WITH_EXPERT_OPTIONS = {"extract", "plan", "train"}
WITHOUT_TABLE = {f"cluster {c}" for c in ("run", "start", "stop", "env")}
WITHOUT_TABLE |= {"rendezvous", "device-queue serve"}


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


def help_of(words):
    return inspect.cleandoc(COMMANDS[words].help or "")


def examples(words):
    """The example command lines in its help."""
    _, _, text = help_of(words).partition("Example")
    blocks = [" ".join(b.split()) for b in text.split("\n\n")[1:]]
    lines = [re.sub(r'^eval "\$\((.*)\)"$', r"\1", b) for b in blocks]
    return [line for line in lines if line.startswith("hapi ")]


def test_groups_have_commands_and_help():
    assert len(COMMANDS) >= 20
    assert {"extract", "cache purge", "worker status"} < set(COMMANDS)
    assert all(group.help for group in (TREE, *TREE.commands.values()))
    assert all(p.help for p in TREE.params)


@pytest.mark.parametrize("words", COMMANDS)
def test_command_options_and_json_have_help(words):
    first = " ".join(help_of(words).split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", first)[0]
    assert re.fullmatch(r"[A-Z].{10,}\.", sentence)
    named = [p for p in COMMANDS[words].params if p.name != "help"]
    assert [p.opts for p in named if not getattr(p, "help", None)] == []
    panels = [p.rich_help_panel for p in named if p.opts[0][0] == "-"]
    if words in WITH_EXPERT_OPTIONS:
        assert all(panels)
        assert set(panels[panels.index("Expert") :]) == {"Expert"}
    if words not in WITHOUT_TABLE:
        assert "--json" in [opt for p in named for opt in p.opts]
        assert "Keys of --json:" in help_of(words)


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_parse(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shard-*.tar").touch()  # a shell would expand the pattern
    record = Mock()
    for number, line in enumerate(examples(words), 1):
        tree = typer.main.get_command(cli.app)
        for name, command in commands(tree):
            monkeypatch.setattr(command, "callback", partial(record, name))
        arguments = shlex.split(line)[1:]
        tree.main(args=arguments, prog_name="hapi", standalone_mode=False)
        assert record.call_count == number, line
    # Examples may contain other commands, e.g. one that writes the input.
    assert words in [call.args[0] for call in record.call_args_list]


def test_documentation_lists_all_commands():
    (page,) = (ROOT / "docs").rglob("commands.rst")
    listed = re.findall(r"\* - ``hapi ([a-z -]+)``", page.read_text())
    assert sorted(listed) == sorted(COMMANDS)
