"""Models of today train on features as they do in a plain script."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import nn

from equal_training import (
    RATE,
    in_spans,
    job_of,
    local_batches,
    local_spans,
    optimizer_of,
)
from hapi_client import ArrayTransform, NamedArrays
from hapi_client.cli.demo.run import largest_difference
from hapi_client.swift.swift_url import parse_location
from jobs import upload_shards
from networks import SMALL_IMAGE
from photos import shards_of, tar_of

TOLERANCE = 1e-5
STEPS = 10
COUNTS = (40, 64, 40)
NUM_IDS, LENGTH, CLASSES = 50, 12, 4
PHOTOS = "swift://equal/photos"
TEXT = NamedArrays.of(
    input_ids=ArrayTransform((LENGTH,), "int64"),
    attention_mask=ArrayTransform((LENGTH,), "int64"),
)
MELS = ArrayTransform((8, 32))
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
VISION = TINY | {"image_size": SMALL_IMAGE, "patch_size": 16}


class Pooled(nn.Module):
    """A backbone of Hugging Face with a linear head."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(TINY["hidden_size"], CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images).pooler_output)


def lora() -> nn.Module:
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**VISION, num_labels=CLASSES)
    )
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            target_modules=["q_proj", "v_proj"],
            layers_to_transform=[2, 3],
            modules_to_save=["classifier"],
        ),
    )


def dinov3() -> nn.Module:
    config = transformers.DINOv3ViTConfig(**VISION)
    return Pooled(transformers.DINOv3ViTModel(config))


def clip() -> nn.Module:
    config = transformers.CLIPVisionConfig(**VISION)
    return Pooled(transformers.CLIPVisionModel(config)).bfloat16()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **TINY, vocab_size=NUM_IDS, num_labels=CLASSES
    )
    return transformers.BertForSequenceClassification(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        num_mel_bins=8,
        max_source_positions=16,
        vocab_size=NUM_IDS,
        pad_token_id=0,
        num_labels=CLASSES,
    )
    return transformers.WhisperForAudioClassification(config)


@dataclass(frozen=True)
class Training:
    """A model and where it is frozen.

    Args:
        build: builds the model.
        freeze: as of a job.
        frozen: what a plain script leaves in eval mode.
        transform: of arrays, or None for photos.
    """

    build: Callable[[], nn.Module]
    freeze: str
    frozen: tuple[str, ...]
    transform: ArrayTransform | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def of_a_script(self) -> nn.Module:
        """The whole model, as one fine-tunes it on local data.

        Images are channels last, as on both tiers: the other format adds in
        another order, and some features in bfloat16 round to the next number.
        """
        model = self.model().train().to(memory_format=torch.channels_last)
        for name in self.frozen:
            model.get_submodule(name).eval().requires_grad_(False)
        return model


LAYERS = "base_model.model.vit.layers"
BERT = "base_model.model.bert"
TRAININGS = {
    "dinov3 at a block": Training(
        dinov3,
        "backbone.model.layer.1",
        (
            "backbone.embeddings",
            "backbone.rope_embeddings",
            "backbone.model.layer.0",
            "backbone.model.layer.1",
        ),
    ),
    "CLIP in bfloat16": Training(
        clip,
        "backbone.encoder.layers.1",
        (
            "backbone.embeddings",
            "backbone.pre_layrnorm",
            "backbone.encoder.layers.0",
            "backbone.encoder.layers.1",
        ),
    ),
    "LoRA in two blocks": Training(
        lora,
        "auto",
        (
            "base_model.model.vit.embeddings",
            f"{LAYERS}.0",
            f"{LAYERS}.1",
        ),
    ),
}
ON_ARRAYS = {
    "BERT and masks": Training(
        bert,
        "bert.encoder.layer.1",
        ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"),
        TEXT,
    ),
    "Whisper at a block": Training(
        whisper,
        "encoder.layers.1",
        (
            "encoder.conv1",
            "encoder.conv2",
            "encoder.embed_positions",
            "encoder.layers.0",
            "encoder.layers.1",
        ),
        MELS,
    ),
}
"""Trainings on arrays in place of photos."""


@pytest.fixture(scope="module")
def photos(connection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    shards = shards_of(COUNTS, size=120)
    upload_shards(connection, parse_location(PHOTOS), shards, folder)
    return local_spans(sorted(folder.glob("*.tar")))


def array_of(transform, number, numbers):
    """Returns the suffix and content of a member, padded on either side."""
    sink = io.BytesIO()
    if transform is not TEXT:
        values = numbers.standard_normal(transform.shape, np.float32)
        np.save(sink, values)
        return "npy", sink.getvalue()
    mask = np.ones(LENGTH, np.int8)
    padded = numbers.integers(1, LENGTH // 2)
    mask[padded:] = number % 2
    mask[:padded] = 1 - number % 2
    ids = numbers.integers(1, NUM_IDS, LENGTH) * mask
    np.savez(sink, input_ids=ids, attention_mask=mask)
    return "npz", sink.getvalue()


@pytest.fixture(scope="module")
def uploaded(connection):
    """Uploads arrays once for each transform; returns URL and spans."""
    stored = {}

    def upload(transform):
        if transform in stored:
            return stored[transform]
        url = f"swift://equal/arrays-{len(stored)}"
        numbers = np.random.default_rng(0)
        packed, shards = [], {}
        for place, count in enumerate(COUNTS):
            members, samples = [], []
            for number in range(count):
                label = number % CLASSES
                suffix, content = array_of(transform, number, numbers)
                members.append((f"{number:03}.{suffix}", content))
                members.append((f"{number:03}.cls", str(label).encode()))
                samples.append((transform.read(content), label))
            shards[f"{place}.tar"] = tar_of(members)
            packed.append(samples)
        upload_shards(connection, parse_location(url), shards)
        stored[transform] = url, in_spans(packed)
        return stored[transform]

    return upload


def losses_of(model, call, batches_of):
    """Losses of the first steps; code before each step sets the seeds."""
    optimizer = optimizer_of(model)
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        for inputs, labels in batches_of(epoch):
            torch.manual_seed(len(losses))
            random.seed(len(losses))
            result = call(inputs)
            logits = getattr(result, "logits", result)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
        epoch += 1
    return losses


def check_training(connection, training, url, spans, cut):
    """Compares the losses of a job with those of the whole model."""
    whole = training.of_a_script()

    def call(inputs):
        if isinstance(training.transform, NamedArrays):
            return whole(**training.transform.separate(inputs))
        return whole(inputs.to(next(whole.parameters()).dtype))

    expected = losses_of(
        whole, call, lambda epoch: local_batches(spans, epoch)
    )
    model = training.model()
    options = {"transform": training.transform} if training.transform else {}
    with job_of(
        connection,
        cut,
        network=model,
        freeze=training.freeze,
        data={"train": url},
        **options,
    ) as job:
        job.tail.train()
        losses = losses_of(model, job.tail, job.pipeline.loader)
        assert job.stats.fallbacks == 0
    assert len(losses) == STEPS
    assert largest_difference(expected, losses) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:the frozen module")
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("cut", ["freeze", "stream"])
def test_losses_are_those_of_a_plain_script(connection, photos, name, cut):
    check_training(connection, TRAININGS[name], PHOTOS, photos, cut)


@pytest.mark.parametrize("name", ON_ARRAYS)
@pytest.mark.parametrize("cut", ["freeze", "stream"])
def test_losses_on_arrays_are_those_of_a_plain_script(
    connection, uploaded, name, cut
):
    training = ON_ARRAYS[name]
    url, spans = uploaded(training.transform)
    check_training(connection, training, url, spans, cut)


class FeatureTrainer(transformers.Trainer):
    """Hugging Face's trainer on the features of a job."""

    def __init__(self, job, **options):
        super().__init__(model=job.tail, **options)
        self._loader = job.train_loader
        self.losses: list[float] = []

    def get_train_dataloader(self):
        return self._loader

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        features, labels = inputs
        outputs = model(features)
        loss = nn.functional.cross_entropy(outputs.logits, labels)
        self.losses.append(loss.item())
        return (loss, outputs) if return_outputs else loss


def test_trainer_of_hugging_face_trains_on_a_job(connection, photos, tmp_path):
    training = TRAININGS["LoRA in two blocks"]
    steps = -(-sum(COUNTS) // 16)
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    model = training.of_a_script()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    expected = []
    for epoch in range(2):
        for images, labels in local_batches(photos, epoch):
            loss = nn.functional.cross_entropy(model(images).logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    with job_of(
        connection,
        "freeze",
        network=training.model(),
        freeze="auto",
        data={"train": PHOTOS},
    ) as job:
        trainer = FeatureTrainer(job, args=options)
        trainer.train()
    assert len(trainer.losses) == len(expected) >= 2 * (steps - 1)
    assert largest_difference(expected, trainer.losses) <= TOLERANCE
