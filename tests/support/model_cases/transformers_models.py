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
    "layerdrop": 0.2,
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
    "encoder_layerdrop": 0.3,
    "num_labels": 5,
}


def library_model(
    name: str, config: str, options: dict[str, Any]
) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(getattr(transformers, config)(**options))


_MODELS: list[tuple[str, str, dict[str, Any], str, Any]] = [
    (
        "ViTForImageClassification",
        "ViTConfig",
        VISION,
        "default vit.layers.0",
        IMAGE,
    ),
    ("ViTModel", "ViTConfig", VISION, "layers.0", IMAGE),
    (
        "DeiTForImageClassification",
        "DeiTConfig",
        VISION,
        "deit.layers.0",
        IMAGE,
    ),
    (
        "BeitForImageClassification",
        "BeitConfig",
        {**VISION, "use_relative_position_bias": True},
        "beit.layers.0",
        IMAGE,
    ),
    (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        VISION,
        "default dinov2.encoder.layer.0",
        IMAGE,
    ),
    (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        VISION,
        "dinov2_with_registers.encoder.layer.0",
        IMAGE,
    ),
    (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        VISION,
        "default model.layer.0",
        IMAGE,
    ),
    (
        "DINOv3ConvNextModel",
        "DINOv3ConvNextConfig",
        STAGES,
        "model.stages.1",
        IMAGE,
    ),
    (
        "SwinForImageClassification",
        "SwinConfig",
        SWIN,
        "swin.encoder.layers.0",
        IMAGE,
    ),
    (
        "Swinv2ForImageClassification",
        "Swinv2Config",
        SWIN,
        "swinv2.encoder.layers.0",
        IMAGE,
    ),
    (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        STAGES,
        "convnext.encoder.stages.1",
        IMAGE,
    ),
    (
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        STAGES,
        "convnextv2.encoder.stages.1",
        IMAGE,
    ),
    (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        VISION,
        "encoder.layers.0",
        IMAGE,
    ),
    (
        "SiglipForImageClassification",
        "SiglipConfig",
        {"vision_config": VISION},
        "default vision_model.encoder.layers.0",
        IMAGE,
    ),
    ("CLIPVisionModel", "CLIPVisionConfig", VISION, "encoder.layers.0", IMAGE),
    (
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        VISION,
        "default",
        IMAGE,
    ),
    (
        "CLIPForImageClassification",
        "CLIPConfig",
        {
            "vision_config": VISION,
            "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2},
        },
        "vision_model.encoder.layers.0",
        IMAGE,
    ),
    (
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 1, 2, 2],
        },
        "default segformer.stages.1",
        LARGE_IMAGE,
    ),
    (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        "segformer",
        LARGE_IMAGE,
    ),
    (
        "ResNetForImageClassification",
        "ResNetConfig",
        {**STAGES, "embedding_size": 8},
        "resnet.encoder.stages.1",
        IMAGE,
    ),
    (
        "RegNetForImageClassification",
        "RegNetConfig",
        {**STAGES, "embedding_size": 8, "groups_width": 8},
        "regnet.encoder.stages.1",
        IMAGE,
    ),
    (
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_attention_heads": 2,
        },
        "mobilevit.encoder.layer.1",
        LARGE_IMAGE,
    ),
    (
        "HieraForImageClassification",
        "HieraConfig",
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
        LARGE_IMAGE,
    ),
    (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        STAGES,
        "poolformer.encoder.block.1",
        IMAGE,
    ),
    (
        "PvtV2ForImageClassification",
        "PvtV2Config",
        {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 1, 2, 2],
        },
        "default",
        LARGE_IMAGE,
    ),
    (
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        {**VISION, "use_relative_position_bias": True},
        "data2vec_vision.encoder.layer.0",
        IMAGE,
    ),
    (
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        {**VISION, "num_frames": 4},
        "default",
        VIDEO,
    ),
    (
        "TimesformerForVideoClassification",
        "TimesformerConfig",
        {**VISION, "num_frames": 4},
        "default",
        VIDEO,
    ),
    (
        "BertForSequenceClassification",
        "BertConfig",
        TEXT,
        "default bert.encoder.layer.0 bert.embeddings",
        IDS,
    ),
    (
        "BertForMaskedLM",
        "BertConfig",
        {**TEXT, "tie_word_embeddings": False},
        "bert.encoder.layer.0 bert",
        IDS,
    ),
    (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        TEXT,
        "default roberta.encoder.layer.0",
        IDS,
    ),
    (
        "XLMRobertaForTokenClassification",
        "XLMRobertaConfig",
        TEXT,
        "roberta.encoder.layer.0",
        IDS,
    ),
    (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 2,
            "vocab_size": NUM_IDS,
            "max_position_embeddings": 32,
        },
        "distilbert.transformer.layer.0",
        IDS,
    ),
    (
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**TEXT, "embedding_size": 16},
        "default",
        IDS,
    ),
    (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**TEXT, "embedding_size": 16},
        "default electra.encoder.layer.0",
        IDS,
    ),
    (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {
            **TEXT,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "default model.layers.0",
        IDS,
    ),
    (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "default",
        IDS,
    ),
    (
        "MPNetForSequenceClassification",
        "MPNetConfig",
        TEXT,
        "mpnet.encoder.layer.0",
        IDS,
    ),
    (
        "GPT2LMHeadModel",
        "GPT2Config",
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
        IDS,
    ),
    (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {
            "use_cache": False,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": NUM_IDS,
            "n_positions": 32,
            "pad_token_id": 0,
        },
        "transformer.h.0",
        IDS,
    ),
    (
        "LlamaForCausalLM",
        "LlamaConfig",
        DECODER,
        "default model.layers.0",
        IDS,
    ),
    (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        DECODER,
        "model.layers.0",
        IDS,
    ),
    ("Qwen3ForCausalLM", "Qwen3Config", DECODER, "model.layers.0", IDS),
    (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "tie_word_embeddings": False},
        "model.layers.0",
        IDS,
    ),
    (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "tie_word_embeddings": False},
        "model.layers.0",
        IDS,
    ),
    ("MistralForCausalLM", "MistralConfig", DECODER, "model.layers.0", IDS),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, "gpt_neox.layers.0", IDS),
    (
        "OPTForCausalLM",
        "OPTConfig",
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
        IDS,
    ),
    (
        "T5EncoderModel",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": NUM_IDS,
        },
        "encoder.block.0",
        IDS,
    ),
    (
        "WhisperForAudioClassification",
        "WhisperConfig",
        WHISPER,
        "default encoder.layers.0 encoder.conv2",
        MELS,
    ),
    (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        SPEECH,
        "default wav2vec2.encoder.layers.0 wav2vec2.feature_extractor",
        WAVE,
    ),
    (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **SPEECH,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
            "conv_bias": True,
        },
        "wav2vec2.encoder.layers.0",
        WAVE,
    ),
    (
        "HubertForSequenceClassification",
        "HubertConfig",
        SPEECH,
        "hubert.encoder.layers.0",
        WAVE,
    ),
    (
        "WavLMForSequenceClassification",
        "WavLMConfig",
        SPEECH,
        "wavlm.encoder.layers.0",
        WAVE,
    ),
    (
        "ASTForAudioClassification",
        "ASTConfig",
        {
            **LAYERS,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "time_stride": 8,
            "frequency_stride": 8,
        },
        "default audio_spectrogram_transformer.layers.0",
        SPECTROGRAM,
    ),
]
TRANSFORMERS_CASES: list[ModelCase] = [
    case
    for name, config, options, freezes, sample in _MODELS
    for case in accepted(
        f"transformers {name}",
        partial(library_model, name, config, options),
        freezes,
        sample=sample,
    )
] + [
    *refused(
        "transformers BertForMaskedLM, tied",
        partial(library_model, "BertForMaskedLM", "BertConfig", TEXT),
        "bert.encoder.layer.0",
        "cannot_freeze",
        "used before and after",
        IDS,
    ),
    *refused(
        "transformers DebertaV2ForSequenceClassification",
        partial(
            library_model,
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            {**TEXT, "relative_attention": True, "pos_att_type": ["p2c"]},
        ),
        "deberta.encoder.layer.0",
        "cannot_freeze",
        "rel_embeddings.weight' is used before and after",
        IDS,
    ),
]
