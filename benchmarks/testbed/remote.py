"""Remote calls to another process, one JSON line each.

The caller starts the process and holds its standard input.  When that input
ends, also because the caller was killed, the process cleans up and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

UNWIND_SECONDS = 60.0
"""Time to clean up after the end of the input."""

KILL_SECONDS = 5.0
PIECE_BYTES = 65536


class RemoteError(Exception):
    """The other process reports an error, has ended or is too slow."""


class Remote:
    """The caller's side.

    Args:
        process: with pipes as standard input and output, running
            :func:`serve`.
        name: of the process, for messages.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self._received = b""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *, seconds: float, **arguments: Any) -> Any:
        """Calls the handler ``do`` of the other process; returns its answer.

        Calls of several threads are answered one after the other.

        Args:
            do: the handler's name.
            seconds: deadline.
            arguments: JSON-able.

        Raises:
            RemoteError: naming the process, the question and the reason.
        """
        assert self._process.stdin is not None
        line = json.dumps({"do": do, "arguments": arguments}) + "\n"
        with self._lock:
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except BrokenPipeError as error:
                raise self._gone(do) from error
            answer = json.loads(self._read_line(do, seconds))
        if "error" in answer:
            raise RemoteError(f"{self._name}: {do}: {answer['error']}")
        return answer["value"]

    def _read_line(self, do: str, seconds: float) -> bytes:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise RemoteError(
                    f"{self._name}: {do}: no answer within {seconds:g} s"
                )
            piece = os.read(stream, PIECE_BYTES)
            if not piece:
                raise self._gone(do)
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _gone(self, do: str) -> RemoteError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        status = self._process.returncode
        return RemoteError(
            f"{self._name}: {do}: the process ended with status {status};"
            " see its error output above"
        )

    def close(self, seconds: float = UNWIND_SECONDS) -> None:
        """Ends the process; kills it after ``seconds``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_SECONDS)
        finally:
            self._process.stdout.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answers calls until standard input ends.

    A handler that still runs then is interrupted.  Output of handlers goes to
    standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Ctrl-C is for the caller to act on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    questions: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(
        target=_read_questions, args=(questions,), daemon=True
    )
    try:
        reader.start()
        while True:
            _answer(handlers, json.loads(questions.get()), answers)
    except (KeyboardInterrupt, BrokenPipeError):
        # The caller has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read_questions(questions: queue.Queue[str]) -> None:
    # A forked child closes its sys.stdin, and must not find it locked.
    with os.fdopen(os.dup(sys.stdin.fileno())) as lines:
        for line in lines:
            questions.put(line)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
    time.sleep(UNWIND_SECONDS)
    os._exit(1)


def _answer(
    handlers: Mapping[str, Callable[..., Any]],
    question: Mapping[str, Any],
    answers: TextIO,
) -> None:
    try:
        value = handlers[question["do"]](**question["arguments"])
        text = json.dumps({"value": value})
    except Exception as error:  # sent to the caller, which raises it
        traceback.print_exc(file=sys.stderr)
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
    answers.write(text + "\n")
    answers.flush()
