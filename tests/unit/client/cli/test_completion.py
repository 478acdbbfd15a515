"""TAB completion in a real bash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision

from hapi_client.model.torchvision_names import classifier_names

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None, reason="needs bash"
)

COMPLETE = """
eval "$(hapi --show-completion)"
while read -ra COMP_WORDS; do
    # A trailing dot stands for an empty word.
    last=$(( ${#COMP_WORDS[@]} - 1 ))
    [ "${COMP_WORDS[$last]}" = . ] && COMP_WORDS[$last]=
    COMP_CWORD=$last COMPREPLY=()
    _hapi_completion hapi
    echo "${COMPREPLY[@]}"
done
complete -p hapi
"""
"""Reads lines of words to complete; bash splits words at colons."""


@pytest.fixture
def environment(tmp_path_factory):
    """Environment with a command hapi and an empty home."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "hapi"
    command.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m hapi_client.cli.main "$@"\n'
    )
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "HOME": str(tmp_path_factory.mktemp("home")),
    }


COMPLETIONS = {
    "hapi ext": "extract",
    "hapi train --c": "--checkpoint --classes --cut --cache-dir",
    "hapi train --cut .": "auto freeze stream",
    "hapi extract --min-precision .": "lossless half uint8",
    "hapi extract --encoding .": "float32 float16 bfloat16 uint8",
    "hapi train --data swift : //photos/train --clas": "--classes",
    "hapi plan resnet3": "resnet34",
    # Bash completes the name of a file itself.
    "hapi extract --data swift : //photos/train feat": "",
}
DEFAULT_IS_FILES = "complete -o default -F _hapi_completion hapi"


def test_bash_completes_commands_options_values_and_files(environment):
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        input="".join(f"{line}\n" for line in COMPLETIONS),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    *found, shown = done.stdout.splitlines()
    assert dict(zip(COMPLETIONS, found, strict=True)) == COMPLETIONS
    assert shown == DEFAULT_IS_FILES
    # The script is only shown: no file has changed.
    assert list(Path(environment["HOME"]).iterdir()) == []


def test_model_names_are_those_of_torchvision():
    names = torchvision.models.list_models(module=torchvision.models)
    assert classifier_names() == sorted(names)
