"""What TAB completes, and ``hapi completion``."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import typer

# Where typer itself takes them from: it has a command line of its own.
from typer.completion import (  # type: ignore[attr-defined]
    completion_init,
    get_completion_script,
)

from hapi_client.model.torchvision_names import classifier_names
from hapi_protocol.encodings import DTYPES, FLOORS
from hapi_protocol.headers import CACHE_MODES

PROGRAM = "hapi"
VARIABLE = "_HAPI_COMPLETE"
"""By which a shell asks for completions."""


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion_command(
    shell: Annotated[
        Shell, typer.Argument(help="For which shell.", show_default=False)
    ],
) -> None:
    """Print what makes TAB complete commands, options and their values.

    Nothing is installed: put the line into the file that your shell reads
    when it starts (~/.bashrc, ~/.zshrc behind compinit,
    ~/.config/fish/config.fish: 'hapi completion fish | source').

    Examples:

        eval "$(hapi completion bash)"

        eval "$(hapi completion zsh)"

        hapi completion fish
    """
    typer.echo(
        get_completion_script(
            prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value
        )
    )


def prepare() -> None:
    """To be called before the command line is read."""
    if VARIABLE in os.environ:
        completion_init()


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes to some words."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in values if each.startswith(incomplete)]

    return complete


cuts = one_of("auto", "freeze", "stream")
floors = one_of(*FLOORS)
# Their compressions stand behind a semicolon, where a shell ends a command.
encodings = one_of(*DTYPES)
cache_modes = one_of(*CACHE_MODES)
devices = one_of("cpu", "cuda")
layouts = one_of("single", "replicated", "ec", "mixed")
published_weights = one_of("DEFAULT")


def models(incomplete: str) -> list[str]:
    """Completes to torchvision's classifiers."""
    return one_of(*classifier_names())(incomplete)
