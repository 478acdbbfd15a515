"""The worker's options: an INI file, read once into frozen, typed values.

An unknown option or a bad value is a ``ValueError`` that names the option,
the value and what is allowed.
"""

from __future__ import annotations

import configparser
import pwd
import re
from dataclasses import dataclass, fields, replace

from hapi_protocol.options import (
    MAX_SOCKET_PATH_BYTES,
    absolute_path,
    count,
    option,
    read_options,
    seconds,
)
from hapi_protocol.samples import IMAGE

SECTION = "hapi-worker"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_SIZE = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


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


def _mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError("three octal digits such as 0660")
    return int(text, 8)


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
    for pair in filter(None, (name.strip() for name in text.split(","))):
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
        raise ValueError(f"one of {', '.join(LOG_LEVELS)}")
    return text.upper()


@dataclass(frozen=True)
class WorkerConfig:
    """The operator's options; ``deploy/hapi-worker.conf-sample`` explains
    them."""

    socket: str = option(
        "/run/hapi/worker.sock",
        absolute_path(MAX_SOCKET_PATH_BYTES - len(".admin")),
    )
    """Unix socket for the filter; ``<socket>.admin`` answers health and
    metrics."""
    socket_mode: int = option("0660", _mode)
    allowed_users: frozenset[int] = option("", _users)
    """Users that may connect, in addition to root and the worker's own."""
    device: str = option("auto", _device)
    """``auto`` for all GPUs, or the CPU without one; or names of devices,
    separated by commas."""
    memory_limit: int | None = option("auto", _memory)
    """Bytes on each device for loaded models and running forward passes;
    None for a share of the device's memory."""
    max_streams: int = option("16", count(1))
    """Jobs at a time, granted or running."""
    max_streams_per_account: int = option("8", count(1), reloads=True)
    account_weights: tuple[tuple[str, float], ...] = option(
        "", _weights, reloads=True
    )
    """Accounts and their weights; all others have 1."""
    max_batch: int = option("0", count(0))
    """Samples in a micro-batch; 0 for the device's default."""
    forwards: int = option("0", count(0))
    """Forward passes at a time on a CPU; 0 for one per allowed core."""
    decode_threads: int = option("0", count(0))
    """Threads that only decode; 0 for one per allowed core with a GPU, and
    for none on a CPU, where the threads of the forward passes decode."""
    torch_threads: int = option("1", count(1))
    """Threads of one forward pass on the CPU."""
    buffer_bytes: int = option("64MiB", parse_bytes, reloads=True)
    """Bytes per job for samples that are not in a batch yet, and for features
    that are not sent yet."""
    max_object_bytes: int = option("16GiB", parse_bytes, reloads=True)
    max_package_bytes: int = option("2GiB", parse_bytes)
    max_sample_bytes: int = option("64MiB", parse_bytes, reloads=True)
    """Bytes of one sample with all its members, or of one array as the model
    takes it."""
    max_pixels: int = option("67108864", count(1), reloads=True)
    """Pixels of one image, checked before it is decoded."""
    image_formats: tuple[str, ...] = option(
        ", ".join(IMAGE.kinds), _formats, reloads=True
    )
    """Formats of images that are decoded."""
    decode_seconds: float = option("30", seconds, reloads=True)
    """Longest decoding of one large image, which then ends."""
    max_samples: int = option("1000000", count(1), reloads=True)
    """Samples in one object."""
    max_identities: int = option("4096", count(1))
    """Model objects whose digest is remembered."""
    grant_seconds: float = option("10", seconds)
    """Lifetime of an unused grant."""
    queue_seconds: float = option("20", seconds, reloads=True)
    """Longest wait of a request for admission, and for memory."""
    model_wait_seconds: float = option("60", seconds)
    """Longest wait of a job for another job's upload of the same model."""
    idle_seconds: float = option("75", seconds, reloads=True)
    """Longest wait for bytes of a job's body."""
    stall_seconds: float = option("120", seconds)
    """Longest time that a client may take nothing."""
    batch_seconds: float = option("300", seconds, reloads=True)
    """Longest time without progress inside the worker."""
    pass_seconds: float = option("60", seconds, reloads=True)
    """Longest forward pass; a model that exceeds it repeatedly is refused for
    a while."""
    profile_seconds: float = option("10", seconds)
    """Device time for the profile of one model."""
    drain_seconds: float = option("30", seconds, reloads=True)
    """Time for running jobs to end after SIGTERM."""
    log_level: str = option("INFO", _log_level, reloads=True)


def merged(
    running: WorkerConfig, wanted: WorkerConfig
) -> tuple[WorkerConfig, list[str]]:
    """Applies the options of ``wanted`` that may change at run time.

    Returns:
        The new configuration, and the options that need a new start.
    """
    changes, unchanged = {}, []
    for setting in fields(WorkerConfig):
        value = getattr(wanted, setting.name)
        if value == getattr(running, setting.name):
            continue
        if setting.metadata["reloads"]:
            changes[setting.name] = value
        else:
            unchanged.append(setting.name)
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
    return read_options(WorkerConfig, SECTION, dict(parser.items(SECTION)))


def option_defaults() -> dict[str, str]:
    """Returns the text of each option's default."""
    return {o.name: o.metadata["text"] for o in fields(WorkerConfig)}
