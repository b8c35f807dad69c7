"""Architectures of the `transformers` library from small configurations, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.entry import zoo

WORDS = 41
SMALL = {
    "vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 6}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS["moe_intermediate_size"] = 16
PAIRED = {
    "vocab_size": WORDS, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
PICTURE = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
SPEECH = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "conv_dim": (12, 12, 12), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "vocab_size": WORDS,
}  # fmt: skip


def words(length: int = 7, batch: int = 2) -> Tensor:
    """Random tokens that are neither padding nor special."""
    return torch.randint(3, WORDS, (batch, length))


def text(**more: Any) -> dict[str, Any]:
    return {"input_ids": words(), "attention_mask": torch.ones(2, 7, dtype=torch.long), **more}


def causal() -> dict[str, Any]:
    return {"input_ids": words()}


def paired() -> dict[str, Any]:
    return {"input_ids": words(), "decoder_input_ids": words(5)}


def picture(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def spoken() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": words(5)}


def both() -> dict[str, Any]:
    return {"input_ids": words(), "pixel_values": torch.randn(2, 3, 32, 32)}


TWO_TOWERS = {
    "text_config": {**SMALL, "projection_dim": 12}, "vision_config": {**PICTURE, "projection_dim": 12},
    "projection_dim": 12,
}  # fmt: skip
SERIES = {
    "context_length": 16, "prediction_length": 4, "num_input_channels": 2, "patch_length": 4, "patch_stride": 4,
    "d_model": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 16, "scaling": None,
}  # fmt: skip

# name: (configuration and model classes, options, inputs); classes abbreviate
# "XConfig" and "X" + ending
TABLE: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "bert": ("Bert", "ForMaskedLM", SMALL, text),
    "roberta": ("Roberta", "ForSequenceClassification", SMALL, text),
    "xlm_roberta": ("XLMRoberta", "Model", SMALL, text),
    "albert": ("Albert", "ForMaskedLM", {**SMALL, "embedding_size": 12}, text),
    "distilbert": ("DistilBert", "ForSequenceClassification", {**SMALL, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}, text),
    "electra": ("Electra", "ForPreTraining", {**SMALL, "embedding_size": 12}, text),
    "mpnet": ("MPNet", "Model", SMALL, text),
    "deberta": ("Deberta", "Model", {**SMALL, "relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": 8}, text),
    "deberta_v2": ("DebertaV2", "Model", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8, "position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}, text),
    "modernbert": ("ModernBert", "ForMaskedLM", {**SMALL, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False}, text),
    "roformer": ("RoFormer", "Model", SMALL, text),
    "mobilebert": ("MobileBert", "Model", {**SMALL, "embedding_size": 12, "true_hidden_size": 12, "intra_bottleneck_size": 12}, text),
    "squeezebert": ("SqueezeBert", "Model", {**SMALL, "embedding_size": 24, "q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2}, text),
    "fnet": ("FNet", "Model", {**SMALL, "use_tpu_fourier_optimizations": False}, lambda: {"input_ids": words()}),
    "xlnet": ("XLNet", "LMHeadModel", {"vocab_size": WORDS, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40}, lambda: {"input_ids": words()}),
    "nystromformer": ("Nystromformer", "Model", {**SMALL, "num_landmarks": 8, "segment_means_seq_len": 8}, lambda: {"input_ids": words(8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}),
    "esm": ("Esm", "Model", {**SMALL, "mask_token_id": 3, "position_embedding_type": "rotary"}, text),
    "layoutlm": ("LayoutLM", "Model", {**SMALL, "max_2d_position_embeddings": 16}, text),
    "gpt": ("OpenAIGPT", "LMHeadModel", {**SMALL, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}, lambda: {"input_ids": words()}),
    "gpt2": ("GPT2", "LMHeadModel", {**SMALL, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}, causal),
    "gpt2_eager": ("GPT2", "LMHeadModel", {**SMALL, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "attn_implementation": "eager"}, causal),
    "gpt_neo": ("GPTNeo", "ForCausalLM", {**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}, causal),
    "gptj": ("GPTJ", "ForCausalLM", {**SMALL, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, causal),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", SMALL, causal),
    "gpt_oss": ("GptOss", "ForCausalLM", EXPERTS, causal),
    "codegen": ("CodeGen", "ForCausalLM", {**SMALL, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, causal),
    "opt": ("OPT", "ForCausalLM", {**SMALL, "ffn_dim": 40, "word_embed_proj_dim": 24, "do_layer_norm_before": True}, causal),
    "opt_350m": ("OPT", "ForCausalLM", {**SMALL, "ffn_dim": 40, "word_embed_proj_dim": 12, "do_layer_norm_before": False}, causal),
    "xglm": ("XGLM", "ForCausalLM", {**SMALL, "d_model": 24, "ffn_dim": 40, "num_layers": 2, "attention_heads": 4}, causal),
    "biogpt": ("BioGpt", "ForCausalLM", SMALL, causal),
    "bloom": ("Bloom", "ForCausalLM", {**SMALL, "n_layer": 2, "n_head": 4}, causal),
    "mpt": ("Mpt", "ForCausalLM", {**SMALL, "d_model": 24, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 32}, causal),
    "falcon": ("Falcon", "ForCausalLM", {**SMALL, "new_decoder_architecture": False, "multi_query": True}, causal),
    "falcon_alibi": ("Falcon", "ForCausalLM", {**SMALL, "alibi": True, "multi_query": False, "parallel_attn": False}, causal),
    "llama": ("Llama", "ForCausalLM", GROUPED, causal),
    "llama_eager_tied": ("Llama", "ForCausalLM", {**GROUPED, "attn_implementation": "eager", "tie_word_embeddings": True}, causal),
    "llama_relu": ("Llama", "ForCausalLM", {**GROUPED, "hidden_act": "relu", "attention_bias": True}, causal),
    "mistral": ("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "mixtral": ("Mixtral", "ForCausalLM", EXPERTS, causal),
    "mixtral_eager": ("Mixtral", "ForCausalLM", {**EXPERTS, "experts_implementation": "batched_mm"}, causal),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED, causal),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 16}, causal),
    "qwen3": ("Qwen3", "ForCausalLM", GROUPED, causal),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", EXPERTS, causal),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", {**EXPERTS, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1}, causal),
    "phi": ("Phi", "ForCausalLM", {**SMALL, "partial_rotary_factor": 0.67}, causal),
    "phi3": ("Phi3", "ForCausalLM", GROUPED, causal),
    "gemma": ("Gemma", "ForCausalLM", GROUPED, causal),
    "gemma2": ("Gemma2", "ForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "stablelm": ("StableLm", "ForCausalLM", GROUPED, causal),
    "starcoder2": ("Starcoder2", "ForCausalLM", GROUPED, causal),
    "olmo": ("Olmo", "ForCausalLM", GROUPED, causal),
    "olmo2": ("Olmo2", "ForCausalLM", GROUPED, causal),
    "cohere": ("Cohere", "ForCausalLM", {**GROUPED, "use_qk_norm": False}, causal),
    "nemotron": ("Nemotron", "ForCausalLM", GROUPED, causal),
    "granite": ("Granite", "ForCausalLM", GROUPED, causal),
    "glm4": ("Glm4", "ForCausalLM", GROUPED, causal),
    "mamba": ("Mamba", "ForCausalLM", {**SMALL, "state_size": 4, "time_step_rank": 2, "conv_kernel": 3}, causal),
    "mamba2": ("Mamba2", "ForCausalLM", {**SMALL, "state_size": 4, "num_heads": 4, "head_dim": 12, "n_groups": 2, "chunk_size": 8, "conv_kernel": 3}, causal),
    "rwkv": ("Rwkv", "ForCausalLM", {**SMALL, "attention_hidden_size": 24, "context_length": 32}, causal),
    "recurrent_gemma": ("RecurrentGemma", "ForCausalLM", {**GROUPED, "lru_width": 24, "attention_window_size": 4, "num_hidden_layers": 3}, causal),
    "arcee": ("Arcee", "ForCausalLM", GROUPED, causal),
    "apertus": ("Apertus", "ForCausalLM", GROUPED, causal),
    "bert_generation": ("BertGeneration", "Decoder", {**SMALL, "is_decoder": True}, causal),
    "blenderbot": ("Blenderbot", "ForConditionalGeneration", PAIRED, paired),
    "cohere2": ("Cohere2", "ForCausalLM", GROUPED, causal),
    "ctrl": ("CTRL", "LMHeadModel", {"vocab_size": WORDS, "n_positions": 32, "n_embd": 24, "dff": 40, "n_layer": 2, "n_head": 4}, causal),
    "diffllama": ("DiffLlama", "ForCausalLM", GROUPED, causal),
    "ernie4_5": ("Ernie4_5", "ForCausalLM", GROUPED, causal),
    "exaone4": ("Exaone4", "ForCausalLM", GROUPED, causal),
    "falcon_mamba": ("FalconMamba", "ForCausalLM", {**SMALL, "state_size": 4, "time_step_rank": 2, "conv_kernel": 3}, causal),
    "glm": ("Glm", "ForCausalLM", GROUPED, causal),
    "gpt_bigcode": ("GPTBigCode", "ForCausalLM", {"vocab_size": WORDS, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}, causal),
    "granitemoe": ("GraniteMoe", "ForCausalLM", EXPERTS, causal),
    "helium": ("Helium", "ForCausalLM", GROUPED, causal),
    "m2m_100": ("M2M100", "ForConditionalGeneration", PAIRED, paired),
    "olmo3": ("Olmo3", "ForCausalLM", GROUPED, causal),
    "olmoe": ("Olmoe", "ForCausalLM", EXPERTS, causal),
    "persimmon": ("Persimmon", "ForCausalLM", {**SMALL, "partial_rotary_factor": 0.67}, causal),
    "plbart": ("PLBart", "ForConditionalGeneration", PAIRED, paired),
    "seed_oss": ("SeedOss", "ForCausalLM", GROUPED, causal),
    "smollm3": ("SmolLM3", "ForCausalLM", GROUPED, causal),
    "umt5": ("UMT5", "ForConditionalGeneration", {**SMALL, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}, paired),
    "xlstm": ("xLSTM", "ForCausalLM", {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}, causal),
    "t5": ("T5", "ForConditionalGeneration", {**SMALL, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}, paired),
    "mt5": ("MT5", "ForConditionalGeneration", {**SMALL, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}, paired),
    "bart": ("Bart", "ForConditionalGeneration", PAIRED, paired),
    "mbart": ("MBart", "ForConditionalGeneration", PAIRED, paired),
    "pegasus": ("Pegasus", "ForConditionalGeneration", PAIRED, paired),
    "marian": ("Marian", "MTModel", PAIRED, paired),
    "whisper": ("Whisper", "ForConditionalGeneration", {**PAIRED, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8}, spoken),
    "wav2vec2": ("Wav2Vec2", "ForCTC", SPEECH, speech),
    "wav2vec2_layer_norm": ("Wav2Vec2", "Model", {**SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}, speech),
    "hubert": ("Hubert", "Model", SPEECH, speech),
    "wavlm": ("WavLM", "Model", SPEECH, speech),
    "data2vec_audio": ("Data2VecAudio", "Model", {**SPEECH, "conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2}, speech),
    "ast": ("AST", "ForAudioClassification", {**PICTURE, "max_length": 16, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}, lambda: {"input_values": torch.randn(2, 16, 16)}),
    "encodec": ("Encodec", "Model", {"num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 8, "hidden_size": 8, "num_residual_layers": 1, "target_bandwidths": [48.0], "codebook_dim": 8}, lambda: {"input_values": torch.randn(1, 1, 64)}),
    "vit": ("ViT", "ForImageClassification", PICTURE, picture),
    "vit_eager_relu": ("ViT", "ForImageClassification", {**PICTURE, "hidden_act": "relu", "attn_implementation": "eager"}, picture),
    "deit": ("DeiT", "ForImageClassification", PICTURE, picture),
    "beit": ("Beit", "ForImageClassification", {**PICTURE, "use_relative_position_bias": True}, picture),
    "dinov2": ("Dinov2", "Model", PICTURE, picture),
    "dinov2_swiglu_interpolated": ("Dinov2", "Model", {**PICTURE, "use_swiglu_ffn": True}, lambda: picture(48)),
    "swin": ("Swin", "ForImageClassification", {"image_size": 32, "num_labels": 5, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, picture),
    "swinv2": ("Swinv2", "ForImageClassification", {"image_size": 32, "num_labels": 5, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, picture),
    "convnext": ("ConvNext", "ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5}, picture),
    "convnextv2": ("ConvNextV2", "ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5}, picture),
    "resnet": ("ResNet", "ForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "bottleneck", "num_labels": 5}, picture),
    "bit": ("Bit", "ForImageClassification", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4, "num_labels": 5}, picture),
    "regnet": ("RegNet", "ForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "groups_width": 8, "num_labels": 5}, picture),
    "poolformer": ("PoolFormer", "ForImageClassification", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 5}, picture),
    "segformer": ("Segformer", "ForSemanticSegmentation", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16, "num_labels": 5}, lambda: picture(64)),
    "levit": ("Levit", "ForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4], "down_ops": [["Subsample", 4, 4, 4, 2, 2], ["Subsample", 4, 6, 4, 2, 2]], "num_labels": 5}, lambda: picture(64)),
    "cvt": ("Cvt", "ForImageClassification", {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0], "num_labels": 5}, lambda: picture(64)),
    "pvt": ("Pvt", "ForImageClassification", {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "num_labels": 5}, lambda: picture(64)),
    "mobilevit": ("MobileViT", "ForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 12, 16, 24, 32, 48], "num_attention_heads": 2, "num_labels": 5}, lambda: picture(64)),
    "mobilenet_v1": ("MobileNetV1", "ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, lambda: picture(64)),
    "mobilenet_v2_hf": ("MobileNetV2", "ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, lambda: picture(64)),
    "focalnet": ("FocalNet", "ForImageClassification", {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "hidden_sizes": [8, 16], "num_labels": 5}, picture),
    "hiera": ("Hiera", "ForImageClassification", {"image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_kernel": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "masked_unit_size": [4, 4], "query_stride": [2, 2], "num_query_pool": 1, "num_labels": 5}, picture),
    "dpt": ("DPT", "ForDepthEstimation", {**PICTURE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False, "reassemble_factors": [4, 2, 1, 0.5]}, picture),
    "glpn": ("GLPN", "ForDepthEstimation", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 8}, lambda: picture(64)),
    "vitmae": ("ViTMAE", "Model", {**PICTURE, "decoder_hidden_size": 16}, picture),
    "videomae": ("VideoMAE", "ForVideoClassification", {**PICTURE, "num_frames": 4, "tubelet_size": 2}, lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)}),
    "timesformer": ("Timesformer", "Model", {**PICTURE, "num_frames": 2}, lambda: {"pixel_values": torch.randn(1, 2, 3, 32, 32)}),
    "swin2sr": ("Swin2SR", "ForImageSuperResolution", {"image_size": 16, "patch_size": 1, "embed_dim": 12, "depths": [2], "num_heads": [2], "window_size": 4, "upscale": 2}, lambda: picture(16)),
    "clip": ("CLIP", "Model", TWO_TOWERS, both),
    "siglip": ("Siglip", "Model", TWO_TOWERS, both),
    "vilt": ("Vilt", "Model", {**SMALL, "image_size": 32, "patch_size": 8}, lambda: {**text(), "pixel_values": torch.randn(2, 3, 32, 32)}),
    "perceiver": ("Perceiver", "Model", {"num_latents": 4, "d_latents": 12, "d_model": 24, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}, lambda: {"inputs": torch.randn(2, 7, 24)}),
    "decision_transformer": ("DecisionTransformer", "Model", {"state_dim": 5, "act_dim": 3, "hidden_size": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}, lambda: {"states": torch.randn(2, 4, 5), "actions": torch.randn(2, 4, 3), "rewards": torch.randn(2, 4, 1), "returns_to_go": torch.randn(2, 4, 1), "timesteps": torch.arange(4).expand(2, 4), "attention_mask": torch.ones(2, 4)}),
    "patchtst": ("PatchTST", "ForPrediction", SERIES, lambda: {"past_values": torch.randn(2, 16, 2)}),
    "patchtsmixer": ("PatchTSMixer", "ForPrediction", SERIES, lambda: {"past_values": torch.randn(2, 16, 2)}),
}  # fmt: skip
# ruff: noqa: E501
FAST = "bert gpt2 llama_eager_tied albert t5 deberta_v2 dinov2 resnet swin mamba".split()


def build(config: str, ending: str, options: dict[str, Any], inputs: Any) -> tuple[Any, ...]:
    """A model with random weights and its example inputs."""
    import transformers

    transformers.logging.set_verbosity_error()
    options = dict(options)
    implementation = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    model_class = getattr(transformers, ending, None) or getattr(transformers, config + ending)
    settings = getattr(transformers, f"{config}Config")(**options)
    for key, value in implementation.items():
        setattr(settings, f"_{key}", value)
    return model_class(settings), inputs()


for label, row in TABLE.items():
    zoo(f"hf_{label}", "transformers", fast=label in FAST)(
        lambda row=row: build(*row)  # type: ignore[misc]
    )
