"""Small networks of token ids and of audio features, and data for them."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hapi_splitter.inputs.array_transform import ArrayTransform
from photos import tar_of

NUM_IDS = 50
NUM_TOKENS = 16
NUM_CLASSES = 4
TOKENS = ArrayTransform((NUM_TOKENS,), "int64")
MELS = ArrayTransform((1, 64, 100))


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """Returns an array as the content of a ``.npy`` file."""
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


class TextNetwork(nn.Module):
    """A text encoder ``body``, which tests freeze, and a ``head``."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Embedded(width), Attention(width), Attention(width)
        )
        self.head = nn.Sequential(
            nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(ids).mean(1))
        return result


class Embedded(nn.Module):
    """Token and position embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_IDS, width, padding_idx=0)
        self.positions = nn.Embedding(NUM_TOKENS, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        embedded = self.tokens(ids) + self.positions(positions)[None]
        result: torch.Tensor = self.norm(embedded)
        return result


class Attention(nn.Module):
    """An encoder layer with two attention heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.first(x)).unflatten(-1, (3, 2, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.narrow(
            functional.gelu(self.wide(self.second(x)))
        )
        return result


class AudioNetwork(nn.Module):
    """A ``body`` of convolutions over log-mel features and a ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.pool = nn.AdaptiveAvgPool2d((4, 1))
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.pool(self.body(mels)).flatten(1))
        return result


def text_network(width: int = 64) -> TextNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TextNetwork(width)


def audio_network() -> AudioNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AudioNetwork()


def token_arrays(count: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """Returns int16 ids and labels; each class prefers a quarter of ids."""
    random = np.random.default_rng(seed)
    quarter = NUM_IDS // NUM_CLASSES
    samples = []
    for number in range(count):
        label = number % NUM_CLASSES
        ids = random.integers(0, NUM_IDS, NUM_TOKENS)
        own = random.random(NUM_TOKENS) < 0.5
        ids[own] = label * quarter + ids[own] % quarter
        samples.append((ids.astype(np.int16), label))
    return samples


def mel_arrays(count: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """Returns float16 features; each class is loud in a quarter of bands."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        label = number % NUM_CLASSES
        mels = random.standard_normal(MELS.shape)
        mels[:, 16 * label : 16 * (label + 1)] += 3.0
        samples.append((mels.astype(np.float16), label))
    return samples


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit",))


def bad_tokens() -> dict[str, tuple[bytes, str]]:
    """Returns contents of files that no text model takes, and why."""
    fine = token_arrays(1)[0][0]
    outside, negative = fine.copy(), fine.copy()
    outside[-1] = NUM_IDS
    negative[0] = -1
    return {
        "cut": (
            npy(fine)[:-2],
            "truncated .npy: 30 bytes of values, expected 32 for (16,) of "
            "int16",
        ),
        "lying": (
            npy(fine).replace(b"(16,)", b"(99,)"),
            "an array of shape (99,); the model takes (16,)",
        ),
        "pickle": (pickle.dumps(_Payload()), "not a NumPy array (.npy)"),
        "objects": (
            npy(fine).replace(b"'<i2'", b"'|O' "),
            "an array of object; the model takes int64",
        ),
        "huge": (
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
            "a .npy header of 4294967295 bytes; at most 1024",
        ),
        "floats": (
            npy(fine.astype(np.float32)),
            "an array of float32; the model takes int64",
        ),
        "shape": (
            npy(fine[None]),
            "an array of shape (1, 16); the model takes",
        ),
        "outside": (
            npy(outside),
            "the id 50 at [15]; the model accepts ids from 0 to 49 there",
        ),
        "negative": (npy(negative), "the id -1 at [0]"),
        "empty": (b"", "not a NumPy array (.npy)"),
        "bool": (npy(fine.astype(bool)), "an array of bool"),
    }


def shard_with_bad_tokens() -> bytes:
    """Returns a shard of 20 good arrays; bad ones follow the first."""
    mixed: list[tuple[np.ndarray | bytes, int]] = []
    bad = [(data, 0) for data, _ in bad_tokens().values()]
    for pair in itertools.zip_longest(token_arrays(20), bad):
        mixed += [each for each in pair if each is not None]
    return array_shard(mixed)


def array_shard(
    samples: Iterable[tuple[np.ndarray | bytes, int]], seed: int = 0
) -> bytes:
    """Returns a shard of arrays, or of given file contents."""
    members = []
    for number, (data, label) in enumerate(samples):
        key = f"a{seed}-{number:04d}"
        content = data if isinstance(data, bytes) else npy(data)
        members.append((f"{key}.npy", content))
        members.append((f"{key}.cls", str(label).encode()))
    return tar_of(members)
