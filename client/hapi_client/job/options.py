"""Options of data sets and jobs, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.model.frozen_region import AUTO, check_cut
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.number_checks import check_integers, check_seconds
from hapi_client.planning.replanner import ReplanOptions
from hapi_client.swift.connection import Connection
from hapi_protocol.encodings import PRECISIONS, Encoding, allowed_encodings
from hapi_protocol.errors import AnnotationError, ClientError
from hapi_protocol.headers import CACHE_MODES, CACHE_OFF
from hapi_splitter.inputs.augmentation import Augmentation


@dataclass(frozen=True)
class PlanConfig:
    """Options of planning.

    Attributes:
        encoding: encoding of features on the wire, e.g. ``"float16"``; None
            leaves it to the plan, and means the dtype of the features if the
            cut is fixed.
        min_precision: lowest precision that a plan may use: ``"lossless"``,
            ``"half"`` (16 bits) or ``"uint8"``.
        epochs: number of passes over the data, evaluations included, by
            which startup costs are judged; None assumes that as many follow
            as there were already.
        replan_seconds: loading time between two re-plans, jittered by a
            quarter to either side.
        replan_min_spans: spans that must have arrived between two re-plans.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    encoding: str | None = None
    min_precision: str = PRECISIONS[0]
    epochs: float | None = None
    replan_seconds: float = 5.0
    replan_min_spans: int = 4

    def __post_init__(self) -> None:
        self.encodings()
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise _bad(f"epochs is {self.epochs!r}; a positive number or None")
        check_integers(self, 1, "replan_min_spans")
        check_seconds(self, "replan_seconds")

    def encodings(self, dtype: str = "float32") -> tuple[str, ...]:
        """Returns encodings that a plan may choose from, the default first.

        Args:
            dtype: dtype of the features.
        """
        try:
            allowed = allowed_encodings(self.min_precision, dtype)
            if self.encoding is None:
                return allowed
            chosen = str(Encoding.parse(self.encoding))
        except (AnnotationError, ValueError) as error:
            raise _bad(getattr(error, "message", str(error))) from error
        # The default precision is no request of the user.
        if self.min_precision != PRECISIONS[0] and chosen not in allowed:
            raise _bad(
                f"encoding is {self.encoding!r}, which rounds more than "
                f"min_precision {self.min_precision!r} allows: leave one of "
                "them out"
            )
        return (chosen,)

    @property
    def replan_options(self) -> ReplanOptions:
        return ReplanOptions(self.replan_seconds, self.replan_min_spans)


@dataclass(frozen=True)
class SwiftConfig:
    """Options of Swift.

    Attributes:
        connection: None opens one from the environment, and closes it with
            the data set or job.
        models_container: container in which model packages are stored.
    """

    connection: Connection | None = None
    models_container: str = DEFAULT_MODELS_CONTAINER


@dataclass(frozen=True)
class JobConfig:
    """Options of a :class:`TransferJob` that most scripts leave alone.

    Attributes:
        cut: last layer that the worker computes: ``"auto"`` plans, and
            revises the plan while the job runs; ``"freeze"`` for the whole
            frozen region, ``"stream"`` or 0 for none of it, or the number of
            a cut, 1 being nearest to the input (``hapi plan`` lists them).
        cache: mode of the store's feature cache: ``"off"``, ``"read"``, or
            ``"readwrite"``, which takes space in your account (the operator
            has to enable it).
        device: device of the tail and of the frozen layers that run on the
            client.
        augment: random changes of training images; None for none.
        image: extension of the member that is the image, such as ``"jpg"``
            or ``"left.jpg"``, if samples have several; None if they have one.
        exif: ``"turn"`` images as their EXIF data say and people see them, or
            ``"ignore"`` that, as ``ImageFolder`` does; None for what the
            transform says, else ``"ignore"``.
        augment_period_epochs: epochs after which the random changes repeat,
            so that features of them can be cached; None for never.
        plan: options of planning.
        read: options of reading and decoding.
        swift: options of the store.
        split_cache_directory: directory on this machine in which splits of
            models are cached; None for ``HAPI_CACHE_DIR``, else
            ``~/.cache/hapi``; "" for none.
        num_classes: outputs of the tail: data with more classes is an error
            before the model is split.  None warns if the tail has too few
            outputs.
    """

    cut: int | str = AUTO
    cache: str = CACHE_OFF
    device: torch.device | str = "cpu"
    augment: Augmentation | None = None
    augment_period_epochs: int | None = None
    image: str | None = None
    exif: str | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)
    read: ReadConfig = field(default_factory=ReadConfig)
    swift: SwiftConfig = field(default_factory=SwiftConfig)
    split_cache_directory: str | Path | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        check_cut(self.cut)
        check_cache(self.cache)


def check_cache(cache: str) -> None:
    """Refuses an unknown mode of the feature cache.

    Raises:
        ClientError: ``bad_configuration`` naming the modes.
    """
    if cache not in CACHE_MODES:
        raise _bad(f"cache is {cache!r}; one of {', '.join(CACHE_MODES)}")


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
