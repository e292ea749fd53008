"""Tiny configurations of families with recurrent or convolutional layers, and how to switch each feature off."""

from __future__ import annotations

from tests.family_cases import Case, rope

_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_ONE_EXPERT = {"one expert a token": {"num_experts_per_tok": 1}}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}

HYBRID = {
    "qwen3_next": Case(
        "qwen3_next",
        _LINEAR | _EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
        _ONE_EXPERT | {"normalised weights": {"norm_topk_prob": False}},
    ),
    "qwen3_5": Case("qwen3_5_text", _LINEAR | {"head_dim": 16}, {}),
    "qwen3_5_moe": Case("qwen3_5_moe_text", _LINEAR | _EXPERTS | {"head_dim": 16}, _ONE_EXPERT),
    "olmo_hybrid": Case(
        "olmo_hybrid",
        _LINEAR
        | {"linear_num_key_heads": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        {"negative eigenvalues": {"linear_allow_neg_eigval": False}},
    ),
    "lara_mini": Case(
        "lara_mini",
        _LINEAR
        | _EXPERTS
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention"],
        },
        _ONE_EXPERT | {"window": {"sliding_window": 64}},
    ),
    "kimi_linear": Case(
        "kimi_linear",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12}
        | {"qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "num_experts": 4}
        | {"num_experts_per_token": 2, "moe_intermediate_size": 32},
        {"one expert a token": {"num_experts_per_token": 1}},
    ),
    "lfm3": Case(
        "lfm3",
        {
            "num_hidden_layers": 3,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "head_dim": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
        {"window": {"sliding_window": 64}},
    ),
    "lfm2": Case(
        "lfm2",
        {"num_hidden_layers": 3, "conv_L_cache": 3, "conv_bias": True, "tie_word_embeddings": True}
        | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        {"num_hidden_layers": 3, "conv_L_cache": 3, "conv_bias": True, "tie_word_embeddings": True}
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "moe_intermediate_size": 32}
        | {"num_experts": 4, "num_experts_per_tok": 2, "use_expert_bias": True},
        _ONE_EXPERT,
    ),
    "falcon_h1": Case(
        "falcon_h1",
        _MAMBA
        | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5}
        | {"key_multiplier": 0.7, "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.8}
        | {"mlp_multipliers": [0.9, 1.1]},
        {
            "embedding multiplier": {"embedding_multiplier": 1.0},
            "logit multiplier": {"lm_head_multiplier": 1.0},
            "key multiplier": {"key_multiplier": 1.0},
            "recurrent multiplier": {"ssm_out_multiplier": 1.0},
            "attention multiplier": {"attention_out_multiplier": 1.0},
            "MLP multipliers": {"mlp_multipliers": [1.0, 1.0]},
            "norm in the mixer": {"mamba_rms_norm": False},
        },
    ),
    "bamba": Case("bamba", _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]} | rope()),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        _MAMBA
        | _MULTIPLIERS
        | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 48}
        | {"position_embedding_type": "rope"},
        _ONE_EXPERT
        | {
            "logits scaling": {"logits_scaling": 1.0},
            "embedding multiplier": {"embedding_multiplier": 1.0},
            "residual multiplier": {"residual_multiplier": 1.0},
            "attention multiplier": {"attention_multiplier": 0.25},
        },
    ),
    "mamba2": Case(
        "mamba2",
        {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "expand": 2, "chunk_size": 16}
        | {"hidden_size": 64, "num_hidden_layers": 2, "residual_in_fp32": False, "tie_word_embeddings": True},
        plain_sizes=False,
    ),
    "mamba": Case(
        "mamba",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "residual_in_fp32": False,
            "tie_word_embeddings": True,
        },
        plain_sizes=False,
    ),
    "falcon_mamba": Case(
        "falcon_mamba",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "residual_in_fp32": False,
            "tie_word_embeddings": True,
        },
        plain_sizes=False,
    ),
    "jamba": Case(
        "jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8}
        | {"mamba_dt_rank": 4, "use_mamba_kernels": False},
        _ONE_EXPERT,
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 16}
        | {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "chunk_size": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
        | {"moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False, "routed_scaling_factor": 2.5},
        _ONE_EXPERT | {"routed scale": {"routed_scaling_factor": 1.0}},
    ),
    "minimax": Case(
        "minimax",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"head_dim": 16, "num_key_value_heads": 4, "linear_attn_alpha_factor": 0.7, "full_attn_alpha_factor": 0.8},
        _ONE_EXPERT
        | {
            "residual factor": {"linear_attn_alpha_factor": 1.0},
            "residual factor of attention": {"full_attn_alpha_factor": 1.0},
        },
    ),
    "recurrent_gemma": Case(
        "recurrent_gemma",
        {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8, "tie_word_embeddings": True},
        {"window": {"attention_window_size": 64}},
    ),
}
