"""The forked Python of tests: it runs programs as a new one does."""

import os
import signal
import subprocess
import sys

import pytest

from preloaded import python

PROGRAM = """
import os, random, signal, sys
print(sys.argv, sys.path, __name__, os.getcwd(), sorted(os.environ.items()))
print(oct(os.umask(0)), sys.stdin.read(), file=sys.stderr)
"""


def test_program_has_what_its_caller_gives(tmp_path):
    (tmp_path / "name.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NEW": "\udce9"}
    ways = (["-c", PROGRAM, "a b"], ["-u", "-m", "name"], ["-m", "name", "-u"])
    for way in (*ways, ["-u", "name.py", "'"], ["name.py"]):
        mine, real = (
            subprocess.run(
                [program, *way],
                cwd=tmp_path,
                env=environment,
                input="é",
                capture_output=True,
                text=True,
                umask=0o27,
            )
            for program in (python(), sys.executable)
        )
        assert (mine.stdout, mine.stderr) == (real.stdout, real.stderr)
        assert mine.stderr == "0o27 é\n"
        assert not mine.returncode


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("raise ValueError", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_program_ends_as_in_a_new_python(code, status):
    assert subprocess.run([python(), "-c", code]).returncode == status


WAITS = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told"))
print("here")
while True: time.sleep(60)
"""


def test_signals_reach_a_program_that_ends_with_its_launcher():
    with subprocess.Popen(
        [python(), "-u", "-c", WAITS], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "here\n"
        child.terminate()
        assert child.stdout.read(4) == "told"
        child.kill()
        # Its end of the pipe is closed.
        assert child.stdout.read() == ""
