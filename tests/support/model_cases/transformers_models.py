"""Cases of Hugging Face's models, built from tiny configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hapi_splitter.inputs.array_transform import ArrayTransform
from model_cases.case import (
    IDS,
    IMAGE,
    LARGE_IMAGE,
    NUM_IDS,
    ModelCase,
    accepted,
    refused,
)

WAVE = ArrayTransform((1600,))
MELS = ArrayTransform((16, 32))
SPECTROGRAM = ArrayTransform((32, 16))
VIDEO = (4, 3, 32, 32)
LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VISION = {**LAYERS, "image_size": 32, "patch_size": 8}
TEXT = {
    **LAYERS,
    "vocab_size": NUM_IDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
SPEECH = {
    **LAYERS,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 16,
    "layerdrop": 0.0,
    "num_labels": 5,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "vocab_size": NUM_IDS,
    "pad_token_id": 0,
    "num_labels": 5,
}


def library_model(name: str, options: dict[str, Any]) -> nn.Module:
    """Builds a model from options of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


_MODELS: dict[Any, list[tuple[str, dict[str, Any], str]]] = {
    IMAGE: [
        ("ViTForImageClassification", VISION, "default vit.layers.0"),
        ("ViTMAEModel", VISION, "embeddings.patch_embeddings"),
        ("ViTModel", VISION, "layers.0"),
        ("DeiTForImageClassification", VISION, "deit.layers.0"),
        (
            "BeitForImageClassification",
            {**VISION, "use_relative_position_bias": True},
            "beit.layers.0",
        ),
        (
            "Dinov2ForImageClassification",
            VISION,
            "default dinov2.encoder.layer.0",
        ),
        (
            "Dinov2WithRegistersForImageClassification",
            VISION,
            "dinov2_with_registers.encoder.layer.0",
        ),
        ("DINOv3ViTModel", VISION, "default model.layer.0"),
        ("DINOv3ConvNextModel", STAGES, "model.stages.1"),
        ("SwinForImageClassification", SWIN, "swin.encoder.layers.0"),
        ("Swinv2ForImageClassification", SWIN, "swinv2.encoder.layers.0"),
        (
            "ConvNextForImageClassification",
            STAGES,
            "convnext.encoder.stages.1",
        ),
        (
            "ConvNextV2ForImageClassification",
            STAGES,
            "convnextv2.encoder.stages.1",
        ),
        ("SiglipVisionModel", VISION, "encoder.layers.0"),
        (
            "SiglipForImageClassification",
            {"vision_config": VISION},
            "default vision_model.encoder.layers.0",
        ),
        ("CLIPVisionModel", VISION, "encoder.layers.0"),
        ("CLIPVisionModelWithProjection", VISION, "default"),
        (
            "CLIPForImageClassification",
            {
                "vision_config": VISION,
                "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2},
            },
            "vision_model.encoder.layers.0",
        ),
        (
            "ResNetForImageClassification",
            {**STAGES, "embedding_size": 8},
            "resnet.encoder.stages.1",
        ),
        (
            "RegNetForImageClassification",
            {**STAGES, "embedding_size": 8, "groups_width": 8},
            "regnet.encoder.stages.1",
        ),
        (
            "PoolFormerForImageClassification",
            STAGES,
            "poolformer.encoder.block.1",
        ),
        (
            "Data2VecVisionForImageClassification",
            {**VISION, "use_relative_position_bias": True},
            "data2vec_vision.encoder.layer.0",
        ),
    ],
    LARGE_IMAGE: [
        (
            "SegformerForImageClassification",
            {
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 1, 2, 2],
            },
            "segformer.stages.1",
        ),
        (
            "SegformerForSemanticSegmentation",
            {
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 1, 2, 2],
                "decoder_hidden_size": 16,
            },
            "segformer",
        ),
        (
            "MobileViTForImageClassification",
            {
                "image_size": 64,
                "hidden_sizes": [16, 16, 16],
                "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
                "num_attention_heads": 2,
            },
            "mobilevit.encoder.layer.1",
        ),
        (
            "HieraForImageClassification",
            {
                "image_size": [64, 64],
                "embed_dim": 16,
                "depths": [1, 1, 1],
                "num_heads": [1, 2, 2],
                "num_query_pool": 2,
                "masked_unit_size": [4, 4],
                "patch_stride": [4, 4],
            },
            "default hiera.encoder.stages.0",
        ),
        (
            "PvtV2ForImageClassification",
            {
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 1, 2, 2],
            },
            "default",
        ),
    ],
    VIDEO: [
        (
            "VideoMAEForVideoClassification",
            {**VISION, "num_frames": 4},
            "default",
        ),
    ],
    IDS: [
        (
            "BertForSequenceClassification",
            TEXT,
            "default bert.encoder.layer.0 bert.embeddings",
        ),
        (
            "BertForMaskedLM",
            {**TEXT, "tie_word_embeddings": False},
            "bert.encoder.layer.0",
        ),
        (
            "RobertaForSequenceClassification",
            TEXT,
            "default roberta.encoder.layer.0",
        ),
        ("XLMRobertaForTokenClassification", TEXT, "roberta.encoder.layer.0"),
        (
            "DistilBertForSequenceClassification",
            {
                "dim": 32,
                "hidden_dim": 64,
                "n_layers": 2,
                "n_heads": 2,
                "vocab_size": NUM_IDS,
                "max_position_embeddings": 32,
            },
            "distilbert.transformer.layer.0",
        ),
        (
            "AlbertForSequenceClassification",
            {**TEXT, "embedding_size": 16},
            "default",
        ),
        (
            "ElectraForSequenceClassification",
            {**TEXT, "embedding_size": 16},
            "default electra.encoder.layer.0",
        ),
        (
            "ModernBertForSequenceClassification",
            {
                **TEXT,
                "global_attn_every_n_layers": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "default model.layers.0",
        ),
        (
            "DebertaV2ForSequenceClassification",
            {
                **TEXT,
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
            },
            "default",
        ),
        ("MPNetForSequenceClassification", TEXT, "mpnet.encoder.layer.0"),
        (
            "GPT2LMHeadModel",
            {
                "use_cache": False,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 2,
                "vocab_size": NUM_IDS,
                "n_positions": 32,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "tie_word_embeddings": False,
            },
            "transformer.h.0 transformer",
        ),
        (
            "GPT2ForSequenceClassification",
            {
                "use_cache": False,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 2,
                "vocab_size": NUM_IDS,
                "n_positions": 32,
                "pad_token_id": 0,
            },
            "default transformer.h.0",
        ),
        ("LlamaForCausalLM", DECODER, "model.layers.0"),
        (
            "LlamaForSequenceClassification",
            DECODER,
            "default model.layers.0",
        ),
        ("Qwen3ForCausalLM", DECODER, "model.layers.0"),
        ("Qwen3ForSequenceClassification", DECODER, "default model"),
        (
            "Gemma2ForCausalLM",
            {**DECODER, "tie_word_embeddings": False},
            "model.layers.0",
        ),
        (
            "Gemma3ForCausalLM",
            {**DECODER, "tie_word_embeddings": False},
            "model.layers.0",
        ),
        ("MistralForCausalLM", DECODER, "model.layers.0"),
        ("GPTNeoXForCausalLM", TEXT, "gpt_neox.layers.0"),
        (
            "OPTForCausalLM",
            {
                "use_cache": False,
                "hidden_size": 32,
                "word_embed_proj_dim": 32,
                "ffn_dim": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": NUM_IDS,
                "max_position_embeddings": 32,
                "tie_word_embeddings": False,
            },
            "model.decoder.layers.0",
        ),
        (
            "T5EncoderModel",
            {
                "d_model": 32,
                "d_kv": 16,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 2,
                "vocab_size": NUM_IDS,
            },
            "encoder.block.0",
        ),
    ],
    MELS: [
        (
            "WhisperForAudioClassification",
            WHISPER,
            "default encoder.layers.0 encoder.conv2",
        ),
    ],
    WAVE: [
        (
            "Wav2Vec2ForSequenceClassification",
            SPEECH,
            "wav2vec2.encoder.layers.0 wav2vec2.feature_extractor",
        ),
        (
            "Wav2Vec2ForCTC",
            {
                **SPEECH,
                "do_stable_layer_norm": True,
                "feat_extract_norm": "layer",
                "conv_bias": True,
            },
            "wav2vec2.encoder.layers.0",
        ),
        ("HubertForSequenceClassification", SPEECH, "hubert.encoder.layers.0"),
        ("WavLMForSequenceClassification", SPEECH, "wavlm.encoder.layers.0"),
    ],
    SPECTROGRAM: [
        (
            "ASTForAudioClassification",
            {
                **LAYERS,
                "max_length": 32,
                "num_mel_bins": 16,
                "patch_size": 8,
                "time_stride": 8,
                "frequency_stride": 8,
            },
            "default audio_spectrogram_transformer.layers.0",
        ),
    ],
}


def _refused(
    name: str, options: dict[str, Any], *answer: Any, **others: Any
) -> list[ModelCase]:
    return refused(
        f"transformers {name}, refused",
        partial(library_model, name, options),
        *answer,
        **others,
    )


TRANSFORMERS_CASES: list[ModelCase] = [
    *(
        case
        for sample, rows in _MODELS.items()
        for name, options, freezes in rows
        for case in accepted(
            f"transformers {name}",
            partial(library_model, name, options),
            freezes,
            sample,
        )
    ),
    *_refused(
        "BertForMaskedLM",
        TEXT,
        "bert.encoder.layer.0",
        "cannot_freeze",
        "used before and after",
        IDS,
    ),
    *_refused(
        "DebertaV2ForSequenceClassification",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c"]},
        "deberta.encoder.layer.0",
        "cannot_freeze",
        "rel_embeddings.weight' is used before and after",
        IDS,
    ),
    # In training it skips frozen layers at random.
    *_refused(
        "Wav2Vec2ForSequenceClassification",
        {**SPEECH, "layerdrop": 0.2},
        "wav2vec2.encoder.layers.0",
        "cannot_freeze",
        "did not do there when the model was split",
        WAVE,
    ),
    *_refused(
        "WhisperForAudioClassification",
        {**WHISPER, "encoder_layerdrop": 0.1},
        "encoder.layers.0",
        "cannot_freeze",
        "did not do there when the model was split",
        MELS,
    ),
    # It masks patches at random.
    *_refused("ViTMAEModel", VISION, "layers.0", "unknown_op", "aten.rand"),
    # It takes a slice of the batch.
    *_refused(
        "TimesformerForVideoClassification",
        {**VISION, "num_frames": 4},
        "timesformer.encoder.layer.0",
        "unknown_op",
        "aten.slice.Tensor",
        VIDEO,
        later=True,
    ),
]
