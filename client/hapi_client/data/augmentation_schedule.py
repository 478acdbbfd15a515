"""Which random changes the images of an epoch have (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import MAX_NUMBER, Training


@dataclass(frozen=True)
class AugmentedEpochs:
    """The random changes of a job's epochs.

    Attributes:
        augments: whether there are any.
        seed: of the job.
        period: epochs after which they repeat, so that kept features can be
            found again; None for never.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    augments: bool
    seed: int
    period: int | None = None

    def __post_init__(self) -> None:
        if not self.augments and self.period is not None:
            raise _bad(
                f"augment_epochs is {self.period!r}, and there is no "
                "augmentation to repeat: give augment as well"
            )
        if self.period is not None and not _is_whole(self.period, 1):
            raise _bad(
                f"augment_epochs is {self.period!r}; a whole number from 1 "
                "on, or None"
            )
        if self.augments and not _is_whole(self.seed, 0):
            raise _bad(
                f"seed is {self.seed!r}; with an augmentation a whole number "
                "from 0 to 2**63 - 1"
            )

    @property
    def variants(self) -> int | None:
        """Epochs after which the images are the same again; None for never."""
        return self.period if self.augments else 1

    def training(self, epoch: int | None) -> Training | None:
        """Seed and epoch of the changes; None for evaluation.

        Args:
            epoch: of training; None for evaluation.
        """
        if epoch is None or not self.augments:
            return None
        number = int(epoch)
        if self.period is not None:
            number %= self.period
        return Training(self.seed, number)


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_NUMBER


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
