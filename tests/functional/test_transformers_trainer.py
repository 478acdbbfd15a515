"""The ``Trainer`` of Hugging Face transformers on features."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    ViTForImageClassification,
)

from as_user import environment_of
from children import run_family
from hapi_client.integrations.transformers import FeatureTrainer
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError
from jobs import upload_shards
from photos import jpegs, shard, shards_of
from preloaded import python
from trainer_job import (
    BATCH,
    DATA,
    PROCESSOR,
    accuracy,
    bert,
    job_of,
    options_of,
    text_job,
    vit,
    with_adapters,
)

COUNTS = {"train": (20, 16, 24, 11), "val": (10, 9)}
NUM_TRAIN, NUM_VAL = (sum(counts) for counts in COUNTS.values())
STEPS = math.ceil(NUM_TRAIN / BATCH)
EPOCHS = 2
TRAINED = "vit.layers.2", "vit.layernorm", "classifier"
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module", autouse=True)
def data(connection):
    for name, counts in COUNTS.items():
        place = parse_location(DATA[name])
        upload_shards(connection, place, shards_of(counts, size=120))


@pytest.fixture
def trainer_of(tmp_path):
    """Makes a trainer of a job, which saves in ``tmp_path``."""

    def make(job, *, kind=FeatureTrainer, **options):
        own = ("compute_metrics", "callbacks", "compute_loss_func")
        given = {name: options.pop(name) for name in own if name in options}
        return kind(job, options_of(tmp_path, **options), **given)

    return make


def weights_of(tail):
    return {name: each.clone() for name, each in tail.state_dict().items()}


def assert_same(weights, others):
    assert weights.keys() == others.keys()
    different = [n for n in weights if not torch.equal(weights[n], others[n])]
    assert not different


def images_of(split):
    """Pixels of a split by transformers' own processor, and labels."""
    samples = [
        sample
        for number, count in enumerate(COUNTS[split])
        for sample in jpegs(count, size=120, seed=number)
    ]
    images = [Image.open(io.BytesIO(data)) for data, _ in samples]
    pixels = PROCESSOR(images, return_tensors="pt")["pixel_values"]
    return [
        {"pixel_values": image, "labels": label}
        for image, (_, label) in zip(pixels, samples, strict=True)
    ]


# --- as on images ---


def test_evaluates_and_predicts_as_on_images(connection, trainer_of, tmp_path):
    options = {"compute_metrics": accuracy, "label_smoothing_factor": 0.1}
    plain = Trainer(
        vit(),
        options_of(tmp_path, label_smoothing_factor=0.1),
        eval_dataset=images_of("val"),
        compute_metrics=accuracy,
    )
    with job_of(connection) as job:
        trainer = trainer_of(job, **options)
        found, expected = trainer.evaluate(), plain.evaluate()
        for name in ("eval_loss", "eval_accuracy"):
            assert found[name] == pytest.approx(expected[name], abs=1e-4)
        found = trainer.predict(job.dataset("val"))
        expected = plain.predict(images_of("val"))
        assert found.metrics["test_loss"] == pytest.approx(
            expected.metrics["test_loss"], abs=1e-4
        )
    # In the order of the index.
    assert np.array_equal(found.label_ids, expected.label_ids)
    np.testing.assert_allclose(
        found.predictions, expected.predictions, atol=1e-4
    )


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trains_as_on_images(connection, trainer_of, accumulated):
    """Nine steps in an epoch, so that two do not divide them."""
    options = {"gradient_accumulation_steps": accumulated, "logging_steps": 1}
    with job_of(connection, drop=0.0) as job:
        images = [image["pixel_values"] for image in images_of("train")]
        numbers = {
            row.key: number
            for number, row in enumerate(
                row
                for span in job.pipeline.data.split("train").spans
                for row in span.rows
            )
        }
        batches = []
        ordered = job.dataset()
        for epoch in range(EPOCHS):
            ordered.set_epoch(epoch)
            for _, labels in ordered:
                rows = [numbers[key] for key in ordered.keys]
                pixels = torch.stack([images[row] for row in rows])
                batches.append({"pixel_values": pixels, "labels": labels})
        trainer = trainer_of(job, **options)
        trainer.train()

    class Plain(Trainer):
        def get_train_dataloader(self):
            return Epochs()

    class Epochs:
        def __len__(self):
            return STEPS

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            first = STEPS * self.epoch
            return iter(batches[first : first + STEPS])

    model = vit(drop=0.0)
    for name, weight in model.named_parameters():
        weight.requires_grad = name.startswith(TRAINED)
    plain = trainer_of(model, kind=Plain, **options)
    plain.train()
    losses, expected = (
        [entry["loss"] for entry in each.state.log_history if "loss" in entry]
        for each in (trainer, plain)
    )
    assert len(losses) == EPOCHS * math.ceil(STEPS / accumulated)
    np.testing.assert_allclose(losses, expected, atol=1e-4)


# --- saves and resumes ---


@pytest.mark.parametrize(
    ("accumulated", "step"),
    [(1, 4), (1, STEPS), (1, STEPS + 8), (2, 3), (2, 7)],
)
def test_resumed_run_has_the_weights_of_the_whole_one(
    connection, trainer_of, accumulated, step
):
    options = {
        "gradient_accumulation_steps": accumulated,
        "save_strategy": "steps",
        "save_steps": step,
    }
    with job_of(connection) as job:
        trainer_of(job, **{**options, "save_strategy": "no"}).train()
        whole = weights_of(job.tail)
    with job_of(connection) as job:
        stopped = trainer_of(job, **options, callbacks=[StopAt(step)])
        stopped.train()
        assert stopped.state.global_step == step
    with job_of(connection) as job:
        trainer_of(job, **options).train(resume_from_checkpoint=True)
        assert_same(weights_of(job.tail), whole)
        taken = step // math.ceil(STEPS / accumulated) * NUM_TRAIN
        taken += step % math.ceil(STEPS / accumulated) * accumulated * BATCH
        # Batches that were trained on are not read.
        assert job.stats.samples == EPOCHS * NUM_TRAIN - taken


class StopAt(TrainerCallback):
    def __init__(self, step):
        self._step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self._step


def test_epochs_of_a_resumed_trainer_are_whole(connection, trainer_of):
    options = {"save_strategy": "steps", "save_steps": 4}
    with job_of(connection) as job:
        trainer = trainer_of(job, num_train_epochs=1, **options)
        trainer.train()
        first = job.stats.samples
        assert first == NUM_TRAIN
        trainer.train(resume_from_checkpoint=f"{folder_of(trainer)}-4")
        assert job.stats.samples - first == NUM_TRAIN - 4 * BATCH
        trainer.train()
        assert job.stats.samples - first == 2 * NUM_TRAIN - 4 * BATCH


def folder_of(trainer):
    return Path(trainer.args.output_dir) / "checkpoint"


def test_checkpoint_of_other_data_is_refused(connection, trainer_of):
    options = {"save_strategy": "steps", "save_steps": 4}
    with job_of(connection) as job:
        trainer_of(job, **options).train()
    with (
        job_of(connection, data={"train": DATA["val"]}) as job,
        pytest.raises(ClientError, match="belongs to another data set"),
    ):
        trainer_of(job, **options).train(resume_from_checkpoint=True)
    with (
        job_of(connection, seed=1) as job,
        pytest.raises(ClientError, match="its seed is 0, this job's is 1"),
    ):
        trainer_of(job, **options).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_best_model_is_loaded_and_saved_whole(
    connection, trainer_of, strategy
):
    """The second of the losses is made the best one."""
    losses = iter((2.0, 1.0, 3.0, 4.0, 5.0))
    options = {
        "compute_metrics": lambda _: {"made": next(losses, 6.0)},
        "metric_for_best_model": "made",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    }
    for name in ("eval", "save"):
        options[f"{name}_strategy"] = strategy
        options[f"{name}_steps"] = 4
    with job_of(connection) as job:
        trainer = trainer_of(job, **options)
        trainer.train()
        best = {"steps": 8, "epoch": 2 * STEPS}[strategy]
        assert trainer.state.best_global_step == best
        weights = weights_of(job.tail)
        trainer.save_model()
        for place in (f"{folder_of(trainer)}-{best}", trainer.args.output_dir):
            model = ViTForImageClassification.from_pretrained(place)
            saved = model.state_dict()
            assert_same(weights, {name: saved[name] for name in weights})
            images = torch.stack([i["pixel_values"] for i in images_of("val")])
            model.eval()
            expected = trainer.predict(job.dataset("val")).predictions
            with torch.no_grad():
                logits = model(images).logits
            np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_adapters_are_saved_and_resumed(connection, trainer_of, tmp_path):
    from peft import PeftModel

    options = {"save_strategy": "steps", "save_steps": 3}
    with text_job(connection) as job:
        trainer = trainer_of(job, **options)
        trainer.train()
        whole = weights_of(job.tail)
        trainer.save_model(str(tmp_path / "saved"))
        predicted = trainer.predict(job.dataset(shuffle=False))
    assert "tail.safetensors" not in (p.name for p in tmp_path.glob("saved/*"))
    with text_job(connection) as job:
        trainer = trainer_of(job, **options)
        trainer.train(f"{folder_of(trainer)}-3")
        assert_same(weights_of(job.tail), whole)
    for name in ("saved", "checkpoint-6"):
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= names
        assert "model.safetensors" not in names
    model = PeftModel.from_pretrained(bert(), tmp_path / "saved").eval()
    again = with_adapters(bert())
    assert not any(
        torch.equal(a, b)
        for (name, a), b in zip(
            model.named_parameters(), again.parameters(), strict=True
        )
        if "lora_B" in name and "layer.2" in name
    )
    assert np.isfinite(predicted.predictions).all()


# --- length of a run ---


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"max_steps": STEPS + 2}, STEPS + 2),
        ({"num_train_epochs": 0.5}, 5),
        ({"num_train_epochs": 1.5}, 14),
        ({"num_train_epochs": 1, "dataloader_drop_last": True}, STEPS - 1),
    ],
)
def test_run_has_the_steps_that_were_asked_for(
    connection, trainer_of, options, steps
):
    with job_of(connection) as job:
        trainer = trainer_of(job, **options)
        assert trainer.train().global_step == steps
        # Another run begins at step 0.
        assert trainer.train().global_step == steps


def test_early_stop_ends_a_run(connection, trainer_of):
    worse = iter(range(9))
    with job_of(connection) as job:
        trainer = trainer_of(
            job,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            callbacks=[EarlyStoppingCallback(1, 1e9)],
            compute_metrics=lambda _: {"worse": next(worse)},
        )
        assert trainer.train().global_step == 4


# --- unusual data and options ---


def test_one_batch_is_an_epoch(connection, trainer_of):
    with job_of(connection, data=[DATA["val"]], batch_size=32) as job:
        trainer = trainer_of(job, per_device_train_batch_size=32)
        assert trainer.train().global_step == EPOCHS
        with pytest.raises(ValueError, match="requires an eval_dataset"):
            trainer.evaluate()


def test_several_data_sets_and_each_batch_are_evaluated(
    connection, trainer_of, tmp_path
):
    seen = []

    def metrics(prediction, compute_result):
        seen.append(len(prediction.label_ids))
        return {"samples": sum(seen)} if compute_result else {}

    with job_of(connection) as job:
        trainer = FeatureTrainer(
            job.tail,
            options_of(tmp_path, batch_eval_metrics=True),
            eval_dataset={
                "a": job.dataset("val"),
                "b": job.dataset(shuffle=False),
            },
            compute_metrics=metrics,
        )
        found = trainer.evaluate()
    assert found["eval_a_samples"] == NUM_VAL
    assert found["eval_b_samples"] == NUM_VAL + NUM_TRAIN
    assert seen[:3] == [8, 8, 3]


def test_samples_without_a_label_have_no_loss(connection, trainer_of):
    place = parse_location("swift://trainer/unlabelled")
    upload_shards(connection, place, {"a.tar": shard(9, labels=False)})
    data = {"train": str(place), "val": [str(place), DATA["val"]]}
    with job_of(connection, data=data, labels="optional") as job:
        trainer = trainer_of(job)
        assert trainer.train().training_loss == 0
        assert all(w.isfinite().all() for w in job.tail.parameters())
        predicted = trainer.predict(job.dataset("val"))
    assert (predicted.label_ids == -100).sum() == 9
    assert 0 < predicted.metrics["test_loss"] < 9


def test_bfloat16_trains(connection, trainer_of):
    with (
        job_of(connection) as job,
        pytest.warns(UserWarning, match="autocast"),
    ):
        trainer_of(job, bf16=True, max_steps=2).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"train_sampling_strategy": "sequential"}, r"shuffle="),
        ({"dataloader_num_workers": 2}, r"ReadConfig\(num_threads=\)"),
        ({"auto_find_batch_size": True}, "batch_size="),
        ({"data_seed": 3}, r"FeatureDataset\(seed=\)"),
        ({"per_device_train_batch_size": 4}, "batch_size=8"),
    ],
)
def test_option_without_effect_is_refused(
    connection, trainer_of, options, message
):
    with (
        job_of(connection) as job,
        pytest.raises(ClientError, match=message) as raised,
    ):
        trainer_of(job, **options).train()
    assert next(iter(options)) in str(raised.value)


def test_data_that_differ_from_the_options_are_refused(connection, tmp_path):
    with job_of(connection) as job:
        for options, data, message in (
            ({}, job.dataset(drop_last=True), "dataloader_drop_last"),
            (
                {},
                job.train_loader,
                "data set of Training is .*; give FeatureD",
            ),
        ):
            trainer = FeatureTrainer(
                job.tail, options_of(tmp_path, **options), train_dataset=data
            )
            with pytest.raises(ClientError, match=message):
                trainer.train()
        with pytest.raises(ClientError, match="data_collator="):
            FeatureTrainer(job, options_of(tmp_path), data_collator=list)


# --- several ranks ---


def test_two_ranks_train_and_evaluate_as_one(
    cluster, connection, trainer_of, tmp_path
):
    done = run_family(
        [
            *(python(), "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2"),
            *(str(SUPPORT / "trainer_job.py"), str(tmp_path / "ranks")),
        ],
        300,
        environment={**environment_of(cluster), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "ranks" / "result").read_text())
    with job_of(connection, drop=0.0) as job:
        trainer = trainer_of(job, compute_metrics=accuracy)
        trainer.train()
        metrics = trainer.evaluate()
        predicted = trainer.predict(job.dataset("val"))
    assert found["read"] == EPOCHS * NUM_TRAIN
    for name in ("eval_loss", "eval_accuracy"):
        assert found[name] == pytest.approx(metrics[name], abs=1e-4)
    assert sorted(found["labels"]) == sorted(predicted.label_ids.tolist())
    assert found["resumed_loss"] == pytest.approx(found["eval_loss"], abs=0)
