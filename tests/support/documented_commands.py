"""Checks or runs each command of the documentation."""

from __future__ import annotations

import argparse
import configparser
import itertools
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from braceexpand import braceexpand

from documentation import ROOT
from hapi_client.cli.main import app

NOT_RUN = {
    "install": "needs root, changes the host",
    "journalctl": "needs systemd",
    "ln": "needs root, changes the host",
    "swift-init": "needs root, changes the host",
    "systemctl": "needs root and systemd",
    "useradd": "needs root, changes the host",
    "userdel": "needs root, changes the host",
    "rm": "needs root, changes the host",
    "python3": "makes virtual environments, as CI does",
}
"""Programs that no test runs, and why."""

PARSED = {
    "hapi cluster": "tests/functional/test_cluster.py runs it",
    "hapi demo": "CI runs it (tox run -e demo)",
    "hapi plan": "tests/functional/test_tutorial.py runs it",
}
"""Commands whose options are looked at and that do not run here."""

RUN = ("curl", "hapi", "hapi-worker", "python", "swift-proxy-server")
"""Programs that :mod:`run_blocks` runs, or takes for others."""


def words_of(command: str) -> list[str]:
    """The words of one command; comments behind it are left out.

    Of one that another is to run, or whose output the shell reads, the inner
    one's.  Where output goes is left to the caller.
    """
    read = re.fullmatch(r'eval "\$\((.+)\)"', command)
    words = shlex.split(read[1] if read else command, comments=True)
    words = [word for word in words if not re.match(r"\d?>", word)]
    if words[:1] == ["runuser"]:
        return words[words.index("--") + 1 :]
    return words


def is_run(words: list[str]) -> bool:
    """Returns True if a command is to be run.

    Of others, the names in them are looked at.

    Raises:
        AssertionError: there is no such name, or nobody knows what to do.
    """
    program = Path(words[0]).name
    if program == "pip" or words[1:3] == ["-m", "pip"]:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        for extras in re.findall(r"(?:\.|swift-hapi)\[(.+?)\]", str(words)):
            assert {*extras.split(",")} <= {*setup["options.extras_require"]}
    elif program == "tox":
        sections = re.findall(
            r"\[testenv:(.+?)\]", (ROOT / "tox.ini").read_text()
        )
        known = {"py3", *itertools.chain(*map(braceexpand, sections))}
        names = words[words.index("-e") + 1].split(",")
        assert known.issuperset(names), words
    elif program == "pytest":
        paths = [ROOT / word for word in words if word.startswith("tests/")]
        assert all(path.exists() for path in paths), words
    elif words[:3] == ["python", "-m", "benchmarks"]:
        _check_benchmark(f"benchmarks.{words[3]}", words[4:])
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        _check_benchmark(words[2], words[3:])
    elif " ".join(words[:2]) in PARSED:
        _check_hapi(words)
    elif program in RUN:
        # Of those that no package of ours brings along, not all are here.
        return program != "curl" or shutil.which(program) is not None
    else:
        assert program in NOT_RUN, f"{words}: nobody knows how to run it"
    return False


def _check_benchmark(name: str, arguments: list[str]) -> None:
    """Its own parser takes the arguments; then it is stopped."""
    original = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, args: object = None) -> None:
        original(parser, arguments)
        raise _ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(_ParsedError):
            import_module(name).main()


class _ParsedError(Exception):
    """The arguments are right."""


def _check_hapi(words: list[str]) -> None:
    command, rest = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[1], rest)
