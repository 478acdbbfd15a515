"""Runner of checks, one after another, each with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hapi_protocol.errors import HapiError, TooSlowError

OK = "ok"
WARNING = "warning"
FAILURE = "failure"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        state: ``ok``, ``warning``, ``failure`` or ``skipped``.
        found: description of the result.
        remedy: action to take; empty if there is none.
        trans_id: transaction id of the failed request, if Swift sent one.
        check: name of the check, such as ``worker``.
    """

    state: str
    found: str
    remedy: str = ""
    trans_id: str | None = None
    check: str = ""


@dataclass(frozen=True)
class Check:
    """One check of a connection, store or data set.

    Attributes:
        name: name of the check.
        run: returns a finding, or a text if all is well.
        needs: names of checks that must have succeeded before.
        remedies: remedy of a HapiError by its code or status; ``""`` for
            all others.
    """

    name: str
    run: Callable[[], Finding | str]
    needs: tuple[str, ...] = ()
    remedies: Mapping[str | int, str] = field(default_factory=dict)


CheckMethod: TypeAlias = Callable[[Any], Finding | str]


def check(
    *needs: str, remedies: Mapping[str | int, str] | None = None
) -> Callable[[CheckMethod], CheckMethod]:
    """Declares a method as a check of its name, without the underscore.

    Args:
        needs: names of checks that must have succeeded before.
        remedies: remedies of the check, in which ``{self.x}`` is replaced
            by the attribute ``x`` of the object.
    """

    def declare(method: CheckMethod) -> CheckMethod:
        method.declared = (needs, remedies or {})  # type: ignore[attr-defined]
        return method

    return declare


def checks_of(group: object) -> Iterator[Check]:
    """Yields the declared checks of an object in their order."""
    for name, method in vars(type(group)).items():
        if hasattr(method, "declared"):
            needs, remedies = method.declared
            texts = {k: v.format(self=group) for k, v in remedies.items()}
            run = getattr(group, name)
            yield Check(name.lstrip("_"), run, needs, texts)


def run_checks(
    checks: Sequence[Check], max_seconds: float
) -> Iterator[Finding]:
    """Runs the checks and yields each finding once it is known.

    Args:
        checks: checks in the order in which they run.
        max_seconds: deadline of each check.
    """
    unsuccessful: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name in unsuccessful]
        if missing:
            finding = Finding(
                SKIPPED,
                f"not checked, because it needs {missing[0]}",
                check=check.name,
            )
        else:
            finding = _run(check, max_seconds)
        if finding.state in (FAILURE, SKIPPED):
            unsuccessful.add(check.name)
        yield finding


def _run(check: Check, max_seconds: float) -> Finding:
    try:
        result = _call_with_deadline(check.run, max_seconds)
    except HapiError as error:
        remedies = check.remedies
        result = Finding(
            FAILURE,
            _describe(error),
            remedies.get(error.code)
            or remedies.get(error.status)
            or remedies.get("", ""),
            error.trans_id,
        )
    if isinstance(result, str):
        result = Finding(OK, result)
    return replace(result, check=check.name)


def _describe(error: HapiError) -> str:
    name = error.object_name
    prefix = f"{name}: " if name and name not in error.message else ""
    return f"{prefix}{error.message} (code {error.code})"


def _call_with_deadline(
    run: Callable[[], Finding | str], max_seconds: float
) -> Finding | str:
    """Returns or raises the result of ``run``.

    It runs in a thread that is abandoned if it hangs, because some waits,
    such as a DNS look-up, have no deadline of their own.

    Raises:
        TooSlowError: if the deadline passes.
    """
    result: Future[Finding | str] = Future()

    def work() -> None:
        try:
            result.set_result(run())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    wait([result], max_seconds)
    if not result.done():
        raise TooSlowError(
            "too_slow", f"the check did not end within {max_seconds:g} s"
        )
    return result.result()
