"""Completion by TAB, asked for by a real bash."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torchvision

from hapi_client.model.torchvision_names import classifier_names

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None, reason="needs bash"
)

ASKED = """
eval "$(hapi completion bash)"
while read -ra COMP_WORDS; do
    # A trailing dot stands for a word that is empty so far.
    last=$(( ${#COMP_WORDS[@]} - 1 ))
    [ "${COMP_WORDS[$last]}" = . ] && COMP_WORDS[$last]=
    COMP_CWORD=$last COMPREPLY=()
    _hapi_completion hapi
    echo "${COMPREPLY[@]}"
done
"""
"""Words to complete stand in lines; bash splits them at colons."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With a command hapi."""
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
        "PS1": "ready> ",
        "TERM": "dumb",
        "INPUTRC": os.devnull,
    }


WANTED = {
    "hapi ext": "extract",
    "hapi train --c": "--classes --checkpoint --cut --cache",
    "hapi train --cut .": "auto freeze stream",
    "hapi extract --min-precision .": "lossless half uint8",
    "hapi extract --encoding .": "float32 float16 bfloat16 uint8",
    "hapi train --data swift : //photos/train --clas": "--classes",
    "hapi plan resnet3": "resnet34",
}


def test_bash_has_commands_options_and_values(environment):
    done = subprocess.run(
        ["bash", "--norc", "-c", ASKED],
        input="".join(f"{line}\n" for line in WANTED),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    found = dict(zip(WANTED, done.stdout.splitlines(), strict=True))
    assert found == WANTED


def test_tab_completes_a_line_and_leaves_files_to_bash(environment, tmp_path):
    """On a terminal, as a user has it."""
    (tmp_path / "features.npz").touch()
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        _read_until(ours, b"ready> ")
        os.write(ours, b'eval "$(hapi completion bash)"\r')
        _read_until(ours, b"ready> ")
        os.write(ours, b"hapi extr\t")
        _read_until(ours, b"extract ")
        os.write(ours, b"--data swift://c/p feat\t")
        _read_until(ours, b"features.npz ")
        os.write(ours, b"--cut fr\t")
        _read_until(ours, b"freeze ")
    finally:
        shell.kill()
        shell.wait(10)
        os.close(ours)


def _read_until(terminal: int, wanted: bytes, seconds: float = 30.0) -> None:
    found = b""
    deadline = time.monotonic() + seconds
    while wanted not in found:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([terminal], [], [], max(0.0, left))
        assert ready, f"{wanted!r} does not come: {found!r}"
        found += os.read(terminal, 4096)


def test_names_of_models_are_torchvisions():
    every = torchvision.models.list_models(module=torchvision.models)
    assert classifier_names() == sorted(every)


def test_completion_waits_neither_for_torch_nor_for_arrow():
    code = (
        "import sys, hapi_client.cli.main as main\n"
        "from hapi_client.cli import completion\n"
        "assert 'resnet18' in completion.models('resnet')\n"
        "slow = {'torch', 'torchvision', 'pyarrow', 'numpy'}\n"
        "sys.exit(', '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_installs_nothing(environment, tmp_path):
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            ["hapi", "completion", shell],
            env={**environment, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"_HAPI_COMPLETE=complete_{shell}" in done.stdout
    assert list(Path(tmp_path).iterdir()) == []
