"""The worker's options: an INI file, read once into frozen, typed values.

An unknown option or a bad value is a ``ValueError`` that names the option,
the value and what is allowed.
"""

from __future__ import annotations

import configparser
import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hapi_protocol.samples import IMAGE

SECTION = "hapi-worker"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_SIZE = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_MAX_SOCKET_PATH_BYTES = 107 - len(".admin")


def parse_bytes(text: str) -> int:
    """Parses a size such as ``"64 MiB"``; a bare number counts bytes.

    Raises:
        ValueError: the text is not a size; the message says what is allowed.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError("a positive size such as 8GiB, 64MiB or 4096")
    return int(match[1]) << _UNITS[match[2] or "B"]


def _memory(text: str) -> int | None:
    try:
        return None if text == "auto" else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"auto, or {error}") from None


def _count(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < smallest:
            raise ValueError(f"a whole number from {smallest} on")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?", text) or float(text) == 0:
        raise ValueError("a positive number of seconds")
    return float(text)


def _mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError("three octal digits such as 0660")
    return int(text, 8)


def _socket_path(text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError("an absolute path")
    if len(os.fsencode(text)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"a path of at most {_MAX_SOCKET_PATH_BYTES} bytes (a limit of "
            "unix sockets)"
        )
    return text


def _users(text: str) -> frozenset[int]:
    return frozenset(_uid(name.strip()) for name in text.split(",") if name)


def _uid(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(
            f"names or ids of users of this host, separated by commas; "
            f"there is no user {name!r}"
        ) from None


def _device(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if text != "auto" and not all(map(_DEVICE.fullmatch, names)):
        raise ValueError(
            "auto, or cpu, cuda, cuda:<number>; several separated by commas"
        )
    return ",".join(names)


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(","))
    if not set(names) <= set(IMAGE.kinds):
        raise ValueError(f"some of {', '.join(IMAGE.kinds)}")
    return names


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    allowed = (
        "pairs such as AUTH_a=4, AUTH_b=0.5, each account once, its weight "
        "from 0.001 to 1000"
    )
    pairs = []
    for pair in filter(None, (each.strip() for each in text.split(","))):
        account, _, weight = (part.strip() for part in pair.rpartition("="))
        if not account or not re.fullmatch(r"\d{1,4}(\.\d{1,6})?", weight):
            raise ValueError(allowed)
        pairs.append((account, float(weight)))
    if len({account for account, _ in pairs}) < len(pairs) or not all(
        0.001 <= weight <= 1000 for _, weight in pairs
    ):
        raise ValueError(allowed)
    return tuple(pairs)


def _log_level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise ValueError(", ".join(LOG_LEVELS))
    return text.upper()


def _option(
    default: str, parse: Callable[[str], Any], *, reloads: bool = False
) -> Any:
    return field(
        default=parse(default),
        metadata={"text": default, "parse": parse, "reloads": reloads},
    )


@dataclass(frozen=True)
class WorkerConfig:
    """The operator's options; ``deploy/hapi-worker.conf-sample`` explains
    them."""

    socket: str = _option("/run/hapi/worker.sock", _socket_path)
    """Unix socket for the filter; ``<socket>.admin`` answers health and
    metrics."""
    socket_mode: int = _option("0660", _mode)
    allowed_users: frozenset[int] = _option("", _users)
    """Users that may connect, in addition to root and the worker's own."""
    device: str = _option("auto", _device)
    """``auto`` for all GPUs, or the CPU without one; or names of devices,
    separated by commas."""
    memory_limit: int | None = _option("auto", _memory)
    """Bytes on each device for loaded models and running forward passes;
    None for a share of the device's memory."""
    max_streams: int = _option("16", _count(1))
    """Jobs at a time, granted or running."""
    max_streams_per_account: int = _option("8", _count(1), reloads=True)
    account_weights: tuple[tuple[str, float], ...] = _option(
        "", _weights, reloads=True
    )
    """Accounts and their weights; all others have 1."""
    max_batch: int = _option("0", _count(0))
    """Samples in a micro-batch; 0 for the device's default."""
    forwards: int = _option("0", _count(0))
    """Forward passes at a time on a CPU; 0 for one per allowed core."""
    decode_threads: int = _option("0", _count(0))
    """Threads that only decode; 0 for one per allowed core with a GPU, and
    for none on a CPU, where the threads of the forward passes decode."""
    torch_threads: int = _option("1", _count(1))
    """Threads of one forward pass on the CPU."""
    buffer_bytes: int = _option("64MiB", parse_bytes, reloads=True)
    """Bytes per job for samples that are not in a batch yet, and for features
    that are not sent yet."""
    max_object_bytes: int = _option("16GiB", parse_bytes, reloads=True)
    max_package_bytes: int = _option("2GiB", parse_bytes)
    max_sample_bytes: int = _option("64MiB", parse_bytes, reloads=True)
    """Bytes of one sample with all its members, or of one array as the model
    takes it."""
    max_pixels: int = _option("67108864", _count(1), reloads=True)
    """Pixels of one image, checked before it is decoded."""
    image_formats: tuple[str, ...] = _option(
        ", ".join(IMAGE.kinds), _formats, reloads=True
    )
    """Formats of images that are decoded."""
    decode_seconds: float = _option("30", _seconds, reloads=True)
    """Longest decoding of one large image, which then ends."""
    max_samples: int = _option("1000000", _count(1), reloads=True)
    """Samples in one object."""
    max_identities: int = _option("4096", _count(1))
    """Model objects whose digest is remembered."""
    grant_seconds: float = _option("10", _seconds)
    """Lifetime of an unused grant."""
    queue_seconds: float = _option("20", _seconds, reloads=True)
    """Longest wait of a request for admission, and for memory."""
    model_wait_seconds: float = _option("60", _seconds)
    """Longest wait of a job for another job's upload of the same model."""
    idle_seconds: float = _option("75", _seconds, reloads=True)
    """Longest wait for bytes of a job's body."""
    stall_seconds: float = _option("120", _seconds)
    """Longest time that a client may take nothing."""
    batch_seconds: float = _option("300", _seconds, reloads=True)
    """Longest time without progress inside the worker."""
    pass_seconds: float = _option("60", _seconds, reloads=True)
    """Longest forward pass; a model that exceeds it repeatedly is refused for
    a while."""
    profile_seconds: float = _option("10", _seconds)
    """Device time for the profile of one model."""
    drain_seconds: float = _option("30", _seconds, reloads=True)
    """Time for running jobs to end after SIGTERM."""
    log_level: str = _option("INFO", _log_level, reloads=True)


def merged(
    running: WorkerConfig, wanted: WorkerConfig
) -> tuple[WorkerConfig, list[str]]:
    """Applies the options of ``wanted`` that may change at run time.

    Returns:
        The new configuration, and the options that need a new start.
    """
    changes, unchanged = {}, []
    for option in fields(WorkerConfig):
        value = getattr(wanted, option.name)
        if value == getattr(running, option.name):
            continue
        if option.metadata["reloads"]:
            changes[option.name] = value
        else:
            unchanged.append(option.name)
    return replace(running, **changes), unchanged


def load_config(path: str) -> WorkerConfig:
    """Reads section ``[hapi-worker]`` of an INI file.

    Raises:
        ValueError: the file cannot be read, or an option is unknown or bad.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    unknown = [name for name in parser.sections() if name != SECTION]
    if unknown or not parser.has_section(SECTION):
        raise ValueError(
            f"{path}: sections {parser.sections()}; there must be "
            f"[{SECTION}] and no other"
        )
    return parse_config(dict(parser.items(SECTION)))


def parse_config(texts: dict[str, str]) -> WorkerConfig:
    """Parses option names and texts into a typed configuration.

    Raises:
        ValueError: the message has each bad option, its value and what is
            allowed.
    """
    options = {option.name: option for option in fields(WorkerConfig)}
    values = {}
    problems = []
    for name, text in texts.items():
        if name not in options:
            problems.append(f"unknown option {name!r} in [{SECTION}]")
            continue
        try:
            values[name] = options[name].metadata["parse"](text.strip())
        except ValueError as error:
            problems.append(f"option {name!r} is {text!r}; allowed: {error}")
    if not set(texts) <= set(options):
        problems.append(f"known options: {', '.join(sorted(options))}")
    if problems:
        raise ValueError("; ".join(problems))
    return WorkerConfig(**values)


def option_defaults() -> dict[str, str]:
    """Returns the text of each option's default."""
    return {o.name: o.metadata["text"] for o in fields(WorkerConfig)}
