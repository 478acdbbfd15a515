"""TAB completion in a real bash."""

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
"""
"""Reads lines of words to complete; bash splits words at colons."""


@pytest.fixture(scope="module")
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
        "PS1": "ready> ",
        "TERM": "dumb",
        "INPUTRC": os.devnull,
    }


COMPLETIONS = {
    "hapi ext": "extract",
    "hapi train --c": "--classes --checkpoint --cut --cache",
    "hapi train --cut .": "auto freeze stream",
    "hapi extract --min-precision .": "lossless half uint8",
    "hapi extract --encoding .": "float32 float16 bfloat16 uint8",
    "hapi train --data swift : //photos/train --clas": "--classes",
    "hapi plan resnet3": "resnet34",
}


def test_bash_completes_commands_options_and_values(environment):
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        input="".join(f"{line}\n" for line in COMPLETIONS),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    found = dict(zip(COMPLETIONS, done.stdout.splitlines(), strict=True))
    assert found == COMPLETIONS
    # The script is only shown: no file has changed.
    assert list(Path(environment["HOME"]).iterdir()) == []


def test_tab_on_a_terminal_also_completes_files(environment, tmp_path):
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
        for typed, shown in (
            (b'eval "$(hapi --show-completion)"\r', b"ready> "),
            (b"hapi extr\t", b"extract "),
            (b"--data swift://c/p feat\t", b"features.npz "),
            (b"--cut fr\t", b"freeze "),
        ):
            os.write(ours, typed)
            _read_until(ours, shown)
    finally:
        shell.kill()
        shell.wait(10)
        os.close(ours)


def _read_until(terminal, wanted, seconds=30.0):
    found = b""
    deadline = time.monotonic() + seconds
    while wanted not in found:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([terminal], [], [], max(0.0, left))
        assert ready, f"{wanted!r} is not in {found!r}"
        found += os.read(terminal, 4096)


def test_model_names_are_those_of_torchvision():
    names = torchvision.models.list_models(module=torchvision.models)
    assert classifier_names() == sorted(names)


def test_completion_imports_neither_torch_nor_pyarrow():
    code = (
        "import sys, hapi_client.cli.main as main\n"
        "from hapi_client.cli import options\n"
        "assert 'resnet18' in options.complete_model('resnet')\n"
        "slow = {'torch', 'torchvision', 'pyarrow', 'numpy'}\n"
        "sys.exit(', '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
