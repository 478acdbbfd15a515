"""Jobs of small models of transformers, and a run of two ranks.

torchrun --nproc-per-node=2 trainer_job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from array_networks import (
    NUM_CLASSES,
    NUM_IDS,
    NUM_TOKENS,
    TOKENS,
    array_shard,
    token_arrays,
)
from hapi_client import Connection, EpochPartition, TransferJob
from hapi_client.integrations.transformers import FeatureTrainer
from hapi_client.swift.swift_url import parse_location
from jobs import transfer_job, upload_shards

BATCH = 8
DATA = {"train": "swift://trainer/train", "val": "swift://trainer/val"}
TEXTS = "swift://trainer/texts"
PROCESSOR = ViTImageProcessor(size={"height": 32, "width": 32})


def vit(drop: float = 0.1) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=4,
        hidden_dropout_prob=drop,
    )
    return ViTForImageClassification(config)


def job_of(
    connection: Connection, drop: float = 0.1, **options: Any
) -> TransferJob:
    return transfer_job(
        options.pop("network", None) or vit(drop),
        connection=connection,
        **{
            "freeze": "vit.layers.1",
            "transform": PROCESSOR,
            "data": DATA,
            "batch_size": BATCH,
            "cut": "stream",
            "partition": EpochPartition(2, 1),
            "memory_bytes": 0,
            **options,
        },
    )


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUM_IDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=NUM_TOKENS,
        num_labels=NUM_CLASSES,
    )
    return BertForSequenceClassification(config)


def with_adapters(model: torch.nn.Module) -> PeftModel:
    """The model with adapters in its last layer."""
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="SEQ_CLS", target_modules=r".*layer\.2.*(query|value)"
    )
    adapted: PeftModel = get_peft_model(model, config)
    return adapted


def text_job(connection: Connection) -> TransferJob:
    shards = {"a.tar": array_shard(token_arrays(24))}
    place = upload_shards(connection, parse_location(TEXTS), shards)
    return job_of(
        connection,
        network=with_adapters(bert()),
        freeze="auto",
        transform=TOKENS,
        data=str(place),
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def options_of(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        **{
            "disable_tqdm": True,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "logging_steps": 100,
            "per_device_train_batch_size": BATCH,
            "save_strategy": "no",
            **options,
        },
    )


def main(folder: Path) -> None:
    args = options_of(
        folder,
        per_device_train_batch_size=BATCH // 2,
        ddp_backend="gloo",
        save_strategy="steps",
        save_steps=5,
    )
    with Connection() as connection, job_of(connection, drop=0.0) as job:
        trainer = FeatureTrainer(job, args, compute_metrics=accuracy)
        trainer.train()
        read = torch.tensor([job.stats.samples])
        dist.all_reduce(read)
        metrics = trainer.evaluate()
        predicted = trainer.predict(job.dataset("val"))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
        result = {
            **metrics,
            "read": read.item(),
            "labels": predicted.label_ids.tolist(),
            "resumed_loss": trainer.evaluate()["eval_loss"],
        }
        if trainer.is_world_process_zero():
            (folder / "result").write_text(json.dumps(result))
        trainer.accelerator.free_memory()
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
