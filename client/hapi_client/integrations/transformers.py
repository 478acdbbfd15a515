"""The ``Trainer`` of Hugging Face transformers on features."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from safetensors import torch as safetensors
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from hapi_client.data.splits import TRAIN
from hapi_client.integrations.accelerate import FeatureDataLoader
from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.job.transfer_job import VAL, TransferJob
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.option_checks import check_types
from hapi_protocol.errors import ClientError
from hapi_splitter.freezing.tail import whole_model

_SPLITS = {"train_dataset": TRAIN, "eval_dataset": VAL}
_UNLABELLED = -100
_TAIL = "tail.safetensors"
_CACHES = "cache", "past_key_values"
_REMEDIES = {
    "train_sampling_strategy": "give FeatureDataset(shuffle=)",
    "auto_find_batch_size": "give FeatureDataset(batch_size=)",
    "data_seed": "give FeatureDataset(seed=)",
    "dataloader_num_workers": "give ReadConfig(num_threads=)",
    "data_collator": "the data set makes the batches",
    "gradient_checkpointing": "call the model's function before its split",
    "neftune_noise_alpha": "the embeddings are frozen",
    "bf16_full_eval": "give bf16=True",
    "fp16_full_eval": "give fp16=True",
}
"""Remedies for options that do not work with features."""
_ALLOWED = (None, False, 0, "random")


class FeatureTrainer(Trainer):
    """A ``Trainer`` on features; also a base of your own trainer, before
    another one: ``class MyTrainer(FeatureTrainer, OtherTrainer)``.

    The loss is the mean cross entropy, or ``compute_loss_func``; samples
    without a label have -100.  Checkpoints hold the whole model, or its
    adapters, by its ``save_pretrained``, and what resuming needs.

    Args:
        model: a tail; or a job, for its tail and its data sets.
        args: as for ``Trainer``, with the ``batch_size`` of the data.
        options: as for ``Trainer``; ``train_dataset`` and ``eval_dataset`` are
            :class:`.FeatureDataset`, by default ``train`` and ``val`` of the
            job.

    Raises:
        ClientError: ``bad_configuration`` naming an option that does not
            work with features; ``bad_state`` for a checkpoint of other data.
    """

    def __init__(
        self,
        model: TransferJob | torch.nn.Module,
        args: TrainingArguments | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments() if args is None else copy.copy(args)
        for name, remedy in _REMEDIES.items():
            value = options.get(name, getattr(args, name, None))
            if value not in _ALLOWED:
                raise _refused(f"{name}={value!r} does not work", remedy)
        if isinstance(model, TransferJob):
            for name, split in _SPLITS.items():
                if split in model.pipeline.data.splits:
                    drop_last = args.dataloader_drop_last
                    data = model.dataset(split, drop_last=drop_last)
                    options.setdefault(name, data)
            model = model.tail
        self.whole_model, self._num_rows = whole_model(model), 0
        (self._input_name, *_) = inspect.signature(model.forward).parameters
        vars(model)["main_input_name"] = self._input_name
        smoothing, args.label_smoothing_factor = args.label_smoothing_factor, 0
        if options.get("compute_loss_func") is None:
            options["compute_loss_func"] = partial(_mean_loss, smoothing)
        super().__init__(model, args, **options)
        args.label_smoothing_factor = smoothing
        self.label_names = ["labels"]
        self.add_callback(_EpochOrder(self.train_dataset))

    def _get_dataloader(
        self, dataset: Any, description: str, *_: Any, **options: Any
    ) -> FeatureDataLoader:
        name = f"data set of {description}"
        check_types({name: (FeatureDataset,)}, {name: dataset})
        is_trained = options.get("is_training", False)
        _check_batches(name, dataset, self.args, is_trained)
        return FeatureDataLoader(dataset, self._inputs, from_start=True)

    def _inputs(self, batch: LabelledBatch) -> dict[str, torch.Tensor]:
        features, labels = batch
        labels = labels.masked_fill(labels < 0, _UNLABELLED)
        return {self._input_name: features, "labels": labels}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        self._num_rows = len(inputs["labels"])
        # In evaluation, a mean of this rank's samples.
        items = num_items_in_batch if model.training else None
        loss, outputs = super().compute_loss(model, dict(inputs), True, items)
        if isinstance(outputs, torch.Tensor):
            outputs = {"logits": outputs}
        elif not isinstance(outputs, Mapping):
            outputs = dict(enumerate(outputs))
        outputs = {k: v for k, v in outputs.items() if k not in _CACHES}
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self.gather_function = self._gather_rows
        return super().evaluation_loop(*args, **options)

    def _gather_rows(self, data: Any) -> Any:
        """Gathers the ranks' parts of a batch, whose sizes may differ."""
        number, ranks = self._num_rows, self.accelerator
        sizes = ranks.gather(torch.tensor([number], device=ranks.device))

        def gather(rows: torch.Tensor) -> torch.Tensor:
            # A loss is repeated for each sample of a full batch.
            rows = rows if len(rows) == number else rows[:1].expand(number)
            padded = ranks.gather(ranks.pad_across_processes(rows))
            parts = zip(padded.split(int(sizes.max())), sizes, strict=True)
            return torch.cat([part[:size] for part, size in parts])

        return recursively_apply(gather, data)

    @contextmanager
    def _with_whole_model(self) -> Iterator[Any]:
        tail, self.model = self.model, self.whole_model
        try:
            yield tail
        finally:
            self.model = tail

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        with self._with_whole_model() as tail:
            super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir and self.args.should_save:
            safetensors.save_model(tail, str(Path(output_dir, _TAIL)))

    def create_model_card(self, *args: Any, **options: Any) -> None:
        with self._with_whole_model():
            super().create_model_card(*args, **options)

    def _load_from_checkpoint(self, folder: Any, model: Any = None) -> None:
        tail: Any = self.model
        safetensors.load_model(tail, Path(folder, _TAIL))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class _EpochOrder(TrainerCallback):
    """Saves what the order of an epoch depends on; checks it at a resume."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def on_train_begin(
        self, args: Any, state: Any, *_: Any, **__: Any
    ) -> None:
        saved = state.stateful_callbacks.get("FeatureDataset")
        if saved is not None:
            accumulated = args.gradient_accumulation_steps
            num_updates = -(-len(self._data) // accumulated)
            epoch, update = divmod(state.global_step, num_updates)
            place = {"epoch": epoch, "step": update * accumulated}
            self._data.load_state_dict({**saved, **place})

    def on_epoch_begin(
        self, args: Any, state: Any, *_: Any, **__: Any
    ) -> None:
        state.stateful_callbacks["FeatureDataset"] = self._data.state_dict(0)


def _mean_loss(
    smoothing: float, outputs: Any, labels: Any, num_items_in_batch: Any = None
) -> Any:
    if not isinstance(outputs, torch.Tensor):
        outputs = outputs["logits" if isinstance(outputs, Mapping) else 0]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(
        outputs, labels, reduction=reduction, label_smoothing=smoothing
    )
    return loss / (1 if num_items_in_batch is None else num_items_in_batch)


def _check_batches(
    name: str, data: FeatureDataset, args: Any, is_trained: bool
) -> None:
    batch, ranks = args.train_batch_size, args.world_size
    if args.n_gpu > 1:
        raise _refused(f"a process has {args.n_gpu} devices", "use torchrun")
    if data.num_ranks != ranks:
        raise _refused(f"the {name} has shared=False", "leave it True")
    if data.drop_last != args.dataloader_drop_last:
        raise _refused(
            f"the {name} has drop_last={data.drop_last}",
            "give dataloader_drop_last, too",
        )
    if is_trained and data.batch_size != batch * ranks:
        raise _refused(
            f"per_device_train_batch_size={batch} on {ranks} ranks is not the "
            f"batch_size={data.batch_size} of the {name}",
            "give both alike",
        )


def _refused(message: str, remedy: str) -> ClientError:
    return ClientError("bad_configuration", f"{message}; {remedy}")
