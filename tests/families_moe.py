"""Tiny configurations of mixtures of experts: every special feature alive, and how to switch each one off."""

from __future__ import annotations

from tests.family_cases import Case, rope

_WIDE = {"sliding_window": 64}
_LAYERS_3 = {"num_hidden_layers": 3}
_TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_ALL_FULL = {"layer_types": ["full_attention"] * 3}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_NO_MULTIPLIERS = {
    "embedding multiplier": {"embedding_multiplier": 1.0},
    "logits scaling": {"logits_scaling": 1.0},
    "residual multiplier": {"residual_multiplier": 1.0},
    "attention multiplier": {"attention_multiplier": 0.25},
}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32}
_SHARED = {"n_shared_experts": 1, "norm_topk_prob": True}
_ONE_EXPERT = {"one expert a token": {"num_experts_per_tok": 1}}


def _bases(of_windows: float) -> dict[str, object]:
    """Rotary tables by layer type, those of window layers with a base of their own."""
    bases = {"sliding_attention": of_windows, "full_attention": 10000.0}
    return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}}


MOE = {
    "mixtral": Case(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        _ONE_EXPERT | {"window": _WIDE},
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        _LAYERS_3
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
        | {"shared_expert_intermediate_size": 48, "norm_topk_prob": True},
        _ONE_EXPERT | {"normalised weights": {"norm_topk_prob": False}},
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        _LAYERS_3
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
        | {"head_dim": 16, "norm_topk_prob": True},
        _ONE_EXPERT | {"normalised weights": {"norm_topk_prob": False}},
    ),
    "olmoe": Case(
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "clip_qkv": 0.5},
        _ONE_EXPERT | {"clipped projections": {"clip_qkv": None}, "normalised weights": {"norm_topk_prob": True}},
    ),
    "flex_olmo": Case("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}, _ONE_EXPERT),
    "granitemoe": Case(
        "granitemoe",  # three chosen: its experts' rows are summed in an order, which a GPU must keep
        _MULTIPLIERS | {"num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 32},
        _ONE_EXPERT | _NO_MULTIPLIERS,
    ),
    "granitemoeshared": Case(
        "granitemoeshared",
        _MULTIPLIERS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 48},
        _ONE_EXPERT | _NO_MULTIPLIERS,
    ),
    "granitemoe_swa": Case(
        "granitemoe_swa",
        _LAYERS_3
        | _TWO_TYPES
        | _MULTIPLIERS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 48}
        | {"sliding_window": 8, "layer_rope_theta": [10000.0, 100.0, 10000.0]},
        _ONE_EXPERT | _NO_MULTIPLIERS | {"windows": _WIDE, "rotary by layer": {"layer_rope_theta": [10000.0] * 3}},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        _LAYERS_3
        | _TWO_TYPES
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
        | {"intermediate_size": 32, "rope_parameters": _YARN | {"truncate": False}},
        _ONE_EXPERT | {"windows": _WIDE, "which layers": _ALL_FULL, "yarn": rope()},
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        _MLA
        | _GROUPS
        | {"n_shared_experts": 1, "topk_method": "group_limited_greedy", "topk_group": 1, "routed_scaling_factor": 2.0}
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "rope_parameters": _YARN | {"mscale": 0.7}},
        _ONE_EXPERT
        | {
            "groups": {"topk_method": "greedy"},
            "routed scale": {"routed_scaling_factor": 1.0},
            "yarn": rope(),
        },
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        _MLA
        | _GROUPS
        | _SHARED
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_hidden_layers": 3}
        | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        _ONE_EXPERT
        | {
            "groups": {"n_group": 1, "topk_group": 1},
            "routed scale": {"routed_scaling_factor": 1.0},
            "interleaved rotary": {"rope_interleave": False},
            "yarn": rope(),
            "normalised weights": {"norm_topk_prob": False},
        },
    ),
    "glm4_moe": Case(
        "glm4_moe",
        _GROUPS
        | _SHARED
        | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3}
        | rope(partial_rotary_factor=0.5),
        _ONE_EXPERT
        | {
            "groups": {"n_group": 1, "topk_group": 1},
            "routed scale": {"routed_scaling_factor": 1.0},
            "partial rotary": rope(partial_rotary_factor=1.0),
            "normalised weights": {"norm_topk_prob": False},
            "q and k norms": {"use_qk_norm": False},
        },
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        _MLA | _GROUPS | _SHARED | _LAYERS_3 | _DENSE_FIRST | {"routed_scaling_factor": 1.8},
        _ONE_EXPERT | {"groups": {"n_group": 1, "topk_group": 1}, "routed scale": {"routed_scaling_factor": 1.0}},
    ),
    "dots1": Case(
        "dots1",
        _LAYERS_3
        | _GROUPS
        | _SHARED
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "head_dim": 16, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        _ONE_EXPERT | {"windows": _WIDE, "groups": {"n_group": 1, "topk_group": 1}},
    ),
    "solar_open": Case(
        "solar_open",
        _GROUPS | _SHARED | {"head_dim": 16, "routed_scaling_factor": 2.5},
        _ONE_EXPERT | {"groups": {"n_group": 1, "topk_group": 1}, "routed scale": {"routed_scaling_factor": 1.0}},
    ),
    "exaone_moe": Case(
        "exaone_moe",
        _LAYERS_3
        | _TWO_TYPES
        | _DENSE_FIRST
        | {"sliding_window": 8, "sliding_window_pattern": 2, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "head_dim": 16},
        _ONE_EXPERT | {"windows": _WIDE, "groups": {"n_group": 1, "topk_group": 1}},
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        _LAYERS_3
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "use_bias": True, "tie_word_embeddings": True},
        {"one expert a token": {"moe_k": 1}},
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "attention_bias": False, "intermediate_size": 32} | rope(),
        {"one expert a token": {"moe_topk": 1}},
    ),
    "minimax_m2": Case(
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
        | rope(partial_rotary_factor=0.5),
        _ONE_EXPERT | {"partial rotary": rope(partial_rotary_factor=1.0)},
    ),
    "afmoe": Case(
        "afmoe",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "num_shared_experts": 1, "route_scale": 2.0, "mup_enabled": True},
        _ONE_EXPERT
        | {"windows": _WIDE, "route scale": {"route_scale": 1.0}, "embedding scale": {"mup_enabled": False}},
    ),
    "jetmoe": Case(
        "jetmoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "intermediate_size": 32}
        | {"num_key_value_heads": 2, "num_attention_heads": 4, "tie_word_embeddings": True},
        {"one expert a token": {"num_experts_per_tok": 1}},
    ),
    "aria_text": Case(
        "aria_text",
        {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32},
        {"one expert a token": {"moe_topk": 1}},
    ),
    "cohere2_moe": Case(
        "cohere2_moe",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}
        | {"intermediate_size": 32, "tie_word_embeddings": True, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        _ONE_EXPERT | {"windows": _WIDE, "logit scale": {"logit_scale": 1.0}},
    ),
    "mellum": Case(
        "mellum",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "mlp_layer_types": ["sparse"] * 3}
        | _bases(100.0),
        _ONE_EXPERT | {"windows": _WIDE, "rotary by layer type": _bases(10000.0)},
    ),
    "laguna": Case(
        "laguna",
        _LAYERS_3
        | _TWO_TYPES
        | _DENSE_FIRST
        | {"head_dim": 16, "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 2.0}
        | {"num_attention_heads_per_layer": [4, 4, 4]},
        _ONE_EXPERT | {"windows": _WIDE, "routed scale": {"moe_routed_scaling_factor": 1.0}},
    ),
    "flint": Case(
        "flint",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        _ONE_EXPERT | {"windows": _WIDE},
    ),
    "hy_v3": Case(
        "hy_v3",
        _LAYERS_3
        | _DENSE_FIRST
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        _ONE_EXPERT | {"router scale": {"router_scaling_factor": 1.0}},
    ),
    "mimo_v2_flash": Case(
        "mimo_v2_flash",
        _LAYERS_3
        | _TWO_TYPES
        | _DENSE_FIRST
        | {"head_dim": 24, "v_head_dim": 16, "sliding_window": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32},
        _ONE_EXPERT | {"windows": _WIDE, "value scale": {"attention_value_scale": 1.0}},
    ),
    "kolibri1": Case(
        "kolibri1",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        _ONE_EXPERT | {"windows": _WIDE},
    ),
    "axk1": Case(
        "axk1",
        _MLA | _GROUPS | _SHARED | _LAYERS_3 | _DENSE_FIRST,
        _ONE_EXPERT | {"groups": {"n_group": 1, "topk_group": 1}},
    ),
    "longcat_flash": Case(
        "longcat_flash",
        _MLA
        | {"num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32}
        | {"ffn_hidden_size": 96, "routed_scaling_factor": 2.0, "head_dim": 8},
        {"routed scale": {"routed_scaling_factor": 1.0}, "two experts a token": {"moe_topk": 3}},
    ),
    "llama4": Case(
        "llama4_text",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}
        | {"intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True}
        | {"floor_scale": 4, "attn_scale": 0.5, "use_qk_norm": True},
        {
            "chunks": {"attention_chunk_size": 64},
            "temperature": {"attn_temperature_tuning": False},
            "layer without rotary": {"no_rope_layers": [1, 1, 1, 1]},
            "query and key norm": {"use_qk_norm": False},
        },
    ),
}
