"""Checks that are made one after the other, each within a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hapi_protocol.errors import HapiError, TooSlowError

OK = "ok"
WARNING = "warning"
FAILURE = "failure"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        state: ``ok``, ``warning``, ``failure`` or ``skipped``.
        found: the thing and its value.
        remedy: what to do; empty where all is well.
        trans_id: of the request that failed, where Swift gave one.
        check: its name, as ``worker``.
    """

    state: str
    found: str
    remedy: str = ""
    trans_id: str | None = None
    check: str = ""


@dataclass(frozen=True)
class Check:
    """One look at one thing.

    Attributes:
        name: of the check.
        look: what there is to say: of all that is well just a text.
        needs: checks that must not have failed or been skipped before.
        remedies: of a HapiError, by its code or status; ``""`` for others.
    """

    name: str
    look: Callable[[], Finding | str]
    needs: tuple[str, ...] = ()
    remedies: Mapping[str | int, str] = field(default_factory=dict)


def run_checks(
    checks: Sequence[Check], max_seconds: float
) -> Iterator[Finding]:
    """One finding for each check, in their order, once it is known.

    Args:
        checks: to make.
        most_seconds: for each of them.
    """
    unknown: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name in unknown]
        if missing:
            finding = Finding(
                SKIPPED,
                f"not looked at without {missing[0]}",
                check=check.name,
            )
        else:
            finding = _made(check, max_seconds)
        if finding.state in (FAILURE, SKIPPED):
            unknown.add(check.name)
        yield finding


def _made(check: Check, max_seconds: float) -> Finding:
    try:
        found = _in_time(check.look, max_seconds)
    except HapiError as error:
        remedies = check.remedies
        found = Finding(
            FAILURE,
            _said(error),
            remedies.get(error.code)
            or remedies.get(error.status)
            or remedies.get("", ""),
            error.trans_id,
        )
    if isinstance(found, str):
        found = Finding(OK, found)
    return Finding(
        found.state, found.found, found.remedy, found.trans_id, check.name
    )


def _said(error: HapiError) -> str:
    """What is wrong, and with what."""
    name = error.object_name
    where = f"{name}: " if name and name not in error.message else ""
    return f"{where}{error.message} (code {error.code})"


def _in_time(
    look: Callable[[], Finding | str], max_seconds: float
) -> Finding | str:
    """What ``look`` returns or raises.

    In a thread, which is left where it hangs: not all that waits has a
    deadline of its own, the look-up of a name for one.

    Raises:
        TooSlowError: the time is over.
    """
    outcomes: queue.SimpleQueue[Finding | str | BaseException] = (
        queue.SimpleQueue()
    )

    def work() -> None:
        try:
            outcomes.put(look())
        except BaseException as error:
            outcomes.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        outcome = outcomes.get(timeout=max_seconds)
    except queue.Empty:
        raise TooSlowError(
            "too_slow", f"this did not end in {max_seconds:g} s"
        ) from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
