"""pytest processes that report their tests, and the command line."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence

import pytest

from swift_functional import __main__ as command
from swift_functional import runs
from swift_functional.comparison import SIDES, Comparison
from swift_functional.errors import NotRunError
from swift_functional.outcomes import UNFINISHED, Outcome
from swift_functional.runs import Result, Task, run_side_by_side

TEST_FILE = """
import os, pytest, unittest
import test.functional

with open(os.environ["SWIFT_TEST_CONFIG_FILE"]) as file:
    SIDE = file.read()

class TestThings(unittest.TestCase):
    def test_depends(self):
        assert SIDE == "without", f"it is {SIDE}"

    @unittest.skip("never")
    def test_skipped(self):
        pass

    def test_of_two(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(number, 1)

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as ever")

@pytest.fixture
def broken():
    raise OSError("no fixture")

def test_begins(broken):
    pass
"""
ID = "test/functional/test_x.py::"


@pytest.fixture
def source(tmp_path):
    """A folder with tests instead of Swift's."""
    folder = tmp_path / "source"
    (folder / "test" / "functional").mkdir(parents=True)
    for package in ("test", "test/functional"):
        (folder / package / "__init__.py").touch()
    return folder


@pytest.fixture
def run(source, tmp_path):
    """Runs a file of tests on both sides; ``test.conf`` names the side."""

    def run_text(
        text,
        *options,
        show=lambda _: None,
    ):
        (source / "test" / "functional" / "test_x.py").write_text(text)
        clusters = {}
        for side in SIDES:
            folder = tmp_path / side
            folder.mkdir()
            (folder / "test.conf").write_text(side)
            clusters[side] = (folder / "test.conf", folder)
        task = Task(source, ["test/functional"], options)
        return run_side_by_side(task, clusters, show)

    return run_text


def test_outcomes_of_both_sides_are_reported(
    run,
    monkeypatch,
):
    monkeypatch.setenv("SWIFT_TEST_IN_PROCESS", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    results = run(TEST_FILE)
    same = {
        f"{ID}TestThings::test_skipped": Outcome("skipped", "never"),
        f"{ID}TestThings::test_of_two": Outcome(
            "failed", "AssertionError: 2 != 1"
        ),
        f"{ID}TestThings::test_expected": Outcome("xfailed"),
        f"{ID}test_begins": Outcome("error", "OSError: no fixture"),
    }
    depends = f"{ID}TestThings::test_depends"
    found = {side: dict(results[side].outcomes) for side in SIDES}
    for side in SIDES:
        reason = found[side][f"{ID}TestThings::test_expected"]
        found[side][f"{ID}TestThings::test_expected"] = Outcome(reason.kind)
    assert found["without"] == {**same, depends: Outcome("passed")}
    failed = found["with"].pop(depends)
    assert found["with"] == same
    assert failed.kind == "failed"
    assert "it is with" in failed.reason


def test_tests_after_the_death_of_pytest_are_unfinished(
    run,
):
    results = run(
        "import os\n"
        "def test_a(): pass\n"
        "def test_b(): os._exit(0)\n"
        "def test_c(): pass\n"
    )
    for side in SIDES:
        assert [o.kind for o in results[side].outcomes.values()] == [
            *("passed", "unfinished", "unfinished")
        ]


def test_silent_pytest_is_killed(run, monkeypatch):
    def show(records):
        if all(record.selected for record in records.values()):
            monkeypatch.setattr(runs, "SILENCE_SECONDS", 0.2)

    monkeypatch.setattr(runs, "TICK_SECONDS", 0.1)
    text = "import time\ndef test_hangs(): time.sleep(600)\n"
    results = run(text, show=show)
    assert results["with"].outcomes == {f"{ID}test_hangs": UNFINISHED}


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "import nothing_of_that_name",
            (),
            "test_x.py: ModuleNotFoundError: No module named 'nothing_of",
        ),
        ("", ("--no-such-option",), "status 4:\n.*no-such-option"),
    ],
)
def test_pytest_that_cannot_start_is_an_error(
    run,
    text,
    options,
    said,
):
    with pytest.raises(NotRunError, match=f"(?s){said}"):
        run(text, *options)


def test_empty_selection_has_empty_results(
    run,
):
    results = run("def test_a(): pass\n", "-k", "nothing")
    assert [results[side].outcomes for side in SIDES] == [{}, {}]


# -- the command ------------------------------------------------------------


class FakeClusters:
    """Replaces two clusters; its results are set by ``kinds``."""

    kinds: Mapping[str, tuple[str, str]] = {}

    def __init__(self, layout, source, logs):
        self._layout = layout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def compare(self, suite, tests, options):
        results = {
            side: Result(
                {t: Outcome(kinds[n]) for t, kinds in self.kinds.items()}, 1.0
            )
            for n, side in enumerate(SIDES)
        }
        return Comparison(self._layout, suite, results, {})


@pytest.mark.parametrize(
    ("kinds", "status", "said"),
    [
        ({"a": ("passed", "passed")}, 0, "No difference."),
        ({"a": ("passed", "failed")}, 1, "plain, a differs"),
        ({"a": ("failed", "failed")}, 1, "a fails without the filter as well"),
    ],
)
def test_exit_status_reports_differences_and_failures(
    tmp_path,
    monkeypatch,
    capsys,
    kinds,
    status,
    said,
):
    monkeypatch.setattr(command, "Clusters", FakeClusters)
    monkeypatch.setattr(command, "unpacked_sdist", lambda *_: tmp_path)
    monkeypatch.setattr(FakeClusters, "kinds", kinds)
    path = tmp_path / "r.json"
    words = ("--json", str(path), "--layout", "plain", "--suite", "s3api")
    assert command.main(words) == status
    assert said in capsys.readouterr().out
    body = json.loads(path.read_text())
    assert body["succeeded"] is (status == 0)
    (comparison,) = body["comparisons"]
    assert (comparison["layout"], comparison["suite"]) == ("plain", "s3api")
    for key in {*body, *comparison}:
        assert key in command.EPILOG, key


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), ()),
        (("--only", "a or b"), ("-k", "(a or b)")),
        (("--quick",), ("-k", command.NOT_QUICK)),
        (
            ("--only", "a or b", "--quick"),
            ("-k", f"(a or b) and {command.NOT_QUICK}"),
        ),
    ],
)
def test_selections_are_passed_to_pytest(
    words,
    options,
    tmp_path,
    monkeypatch,
):
    asked: list[tuple[Sequence[str], Sequence[str]]] = []

    class Listening(FakeClusters):
        def compare(self, suite, tests, options):
            asked.append((tests, options))
            return super().compare(suite, tests, options)

    monkeypatch.setattr(command, "Clusters", Listening)
    monkeypatch.setattr(command, "unpacked_sdist", lambda *_: tmp_path)
    monkeypatch.setattr(FakeClusters, "kinds", {"a": ("passed", "passed")})
    assert command.main(["--layout", "plain", *words]) == 0
    suites = command.QUICK if "--quick" in words else command.SUITES
    assert asked == [(tests, options) for tests in suites.values()]


def test_selection_of_no_test_is_an_error(
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(command, "Clusters", FakeClusters)
    monkeypatch.setattr(command, "unpacked_sdist", lambda *_: tmp_path)
    monkeypatch.setattr(FakeClusters, "kinds", {})
    assert command.main(["--only", "nothing"]) == command.EXIT_NOT_RUN
    assert "'nothing' selects no test" in capsys.readouterr().err


def test_interruption_has_its_own_exit_status(
    monkeypatch,
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "unpacked_sdist", interrupted)
    assert command.main([]) == 128 + signal.SIGINT
