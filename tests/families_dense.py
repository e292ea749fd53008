"""Tiny configurations of dense families: every special feature alive, and how to switch each one off."""

from __future__ import annotations

from tests.family_cases import Case, rope

_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_WIDE = {"sliding_window": 64}
_TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_ALL_FULL = {"layer_types": ["full_attention"] * 3}
_PLAIN = rope()
_LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
_BY_TYPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_ONE_BASE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
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
_LAYERS_3 = {"num_hidden_layers": 3}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
_GPT2_SIZES = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 96}

DENSE = {
    # Llama and what its code became.
    "llama": Case("llama", _LAYERS_3 | _LLAMA3, {"llama3 rotary scaling": _PLAIN}),
    "llama2-bias": Case("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "smollm2": Case("llama", {"tie_word_embeddings": True}),
    "llama-linear": Case("llama", rope("linear", factor=4.0), {"linear rotary scaling": _PLAIN}),
    "llama-dynamic": Case(
        "llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 8}, {"dynamic rotary scaling": _PLAIN}
    ),
    "llama-yarn": Case("llama", _YARN, {"yarn rotary scaling": _PLAIN}),
    "mistral": Case("mistral", {"sliding_window": 8}, {"window": _WIDE}),
    "ministral": Case("ministral", _LAYERS_3 | _TWO_TYPES | {"sliding_window": 8, "head_dim": 16}, {"windows": _WIDE}),
    "ministral3": Case(
        "ministral3",
        {"head_dim": 16, "max_position_embeddings": 128}
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1, beta_fast=32.0)
        | {"sliding_window": None},
        {
            "yarn": rope("default", llama_4_scaling_beta=0.1, original_max_position_embeddings=16),
            "query scale": rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.0, beta_fast=32.0
            ),
        },
    ),
    "arcee": Case("arcee", {"mlp_bias": True, "attention_bias": True}),
    "apertus": Case("apertus", _LLAMA3, {"llama3 rotary scaling": _PLAIN}),
    "cwm": Case(
        "cwm",
        _LAYERS_3 | _TWO_TYPES | _LLAMA3 | {"sliding_window": 8, "head_dim": 16},
        {"windows": _WIDE, "llama3 rotary scaling": _PLAIN},
    ),
    "diffllama": Case("diffllama", {}),
    "helium": Case("helium", {"head_dim": 16}),
    "seed_oss": Case(
        "seed_oss",
        {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_bias": True}
        | {"attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": Case(
        "smollm3",
        _LAYERS_3 | {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
        {"layer without rotary": {"no_rope_layers": [1, 1, 1]}},
    ),
    "bitnet": Case("bitnet", {}),
    "nanochat": Case("nanochat", {"final_logit_softcapping": 2.0}, {"soft-cap": {"final_logit_softcapping": None}}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True} | _PLAIN),
    "hyperclovax": Case(
        "hyperclovax",
        _MULTIPLIERS | {"use_post_norm": True},
        _NO_MULTIPLIERS | {"norms after": {"use_post_norm": False}},
    ),
    "jais2": Case("jais2", {"head_dim": 16}),
    "minicpm3": Case(
        "minicpm3",
        _MLA | {"head_dim": 8, "scale_emb": 4, "scale_depth": 1.4, "dim_model_base": 16, "num_key_value_heads": 4},
        {
            "embedding scale": {"scale_emb": 1},
            "residual scale": {"scale_depth": 2.8},
            "logit scale": {"dim_model_base": 64},
        },
    ),
    "youtu": Case("youtu", _MLA | {"num_key_value_heads": 4}, {"interleaved rotary": {"rope_interleave": False}}),
    # Qwen.
    "qwen2": Case("qwen2", _LAYERS_3 | _QWEN_WINDOW, {"windows": _WIDE, "which layers": _ALL_FULL}),
    "qwen3": Case("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    # Gemma.
    "gemma": Case("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
        {
            "windows": _WIDE,
            "which layers": _ALL_FULL,
            "attention scale": {"query_pre_attn_scalar": 16},
            "attention soft-cap": {"attn_logit_softcapping": None},
            "logit soft-cap": {"final_logit_softcapping": None},
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        _LAYERS_3
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 16}
        | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0, "sliding_window": 8}
        | {"tie_word_embeddings": True},
        {
            "windows": _WIDE,
            "which layers": _ALL_FULL,
            "two rotary tables": _ONE_BASE,
            "logit soft-cap": {"final_logit_softcapping": None},
            "attention scale": {"query_pre_attn_scalar": 16},
        },
    ),
    "vaultgemma": Case(
        "vaultgemma",
        _LAYERS_3
        | _TWO_TYPES
        | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
        {
            "windows": _WIDE,
            "attention scale": {"query_pre_attn_scalar": 16},
            "attention soft-cap": {"attn_logit_softcapping": None},
            "logit soft-cap": {"final_logit_softcapping": None},
        },
    ),
    # Phi.
    "phi": Case(
        "phi",
        {"qk_layernorm": True} | rope(partial_rotary_factor=0.5),
        {"partial rotary": rope(partial_rotary_factor=1.0), "q and k norms": {"qk_layernorm": False}},
    ),
    "phi3": Case(
        "phi3",
        {"sliding_window": 8} | rope(partial_rotary_factor=0.5),
        {"window": _WIDE, "partial rotary": rope(partial_rotary_factor=1.0)},
    ),
    "phi3-longrope": Case(
        "phi3",
        {"original_max_position_embeddings": 8}
        | rope(
            "longrope",
            short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
            long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
            original_max_position_embeddings=8,
            partial_rotary_factor=1.0,
        ),
        {"long rotary": rope(partial_rotary_factor=1.0)},
    ),
    # OLMo.
    "olmo": Case("olmo", {"clip_qkv": 0.5}, {"clipped projections": {"clip_qkv": None}}),
    "olmo2": Case("olmo2", {}),
    "olmo3": Case(
        "olmo3",
        _LAYERS_3 | _TWO_TYPES | {"sliding_window": 8} | _BY_TYPE,
        {"windows": _WIDE, "which layers": _ALL_FULL, "rotary by layer type": _ONE_BASE},
    ),
    # Granite.
    "granite": Case("granite", _MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}, _NO_MULTIPLIERS),
    "granite_swa": Case(
        "granite_swa",
        _LAYERS_3
        | _TWO_TYPES
        | _MULTIPLIERS
        | {"sliding_window": 8, "layer_rope_theta": [10000.0, 100.0, 10000.0], "tie_word_embeddings": True},
        _NO_MULTIPLIERS | {"windows": _WIDE, "rotary by layer": {"layer_rope_theta": [10000.0] * 3}},
    ),
    # Cohere.
    "cohere": Case(
        "cohere",
        {"use_qk_norm": True, "tie_word_embeddings": True},
        {"logit scale": {"logit_scale": 1.0}, "q and k norms": {"use_qk_norm": False}},
    ),
    "cohere2": Case(
        "cohere2",
        _LAYERS_3 | _TWO_TYPES | {"sliding_window": 8, "tie_word_embeddings": True},
        {"windows": _WIDE, "layer without rotary": _ALL_FULL, "logit scale": {"logit_scale": 1.0}},
    ),
    # GLM.
    "glm": Case(
        "glm", {"head_dim": 16} | rope(partial_rotary_factor=0.5), {"partial rotary": rope(partial_rotary_factor=1.0)}
    ),
    "glm4": Case(
        "glm4", {"head_dim": 16} | rope(partial_rotary_factor=0.5), {"partial rotary": rope(partial_rotary_factor=1.0)}
    ),
    # EXAONE, Nemotron, StableLM, StarCoder 2, Persimmon.
    "exaone4": Case(
        "exaone4",
        _LAYERS_3 | _TWO_TYPES | {"sliding_window": 8, "sliding_window_pattern": 2},
        {"windows": _WIDE, "layer without rotary": _ALL_FULL},
    ),
    "nemotron": Case("nemotron", rope(partial_rotary_factor=0.5), {"partial rotary": rope(partial_rotary_factor=1.0)}),
    "stablelm": Case(
        "stablelm",
        {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True, "hidden_dropout": 0.0}
        | rope(partial_rotary_factor=0.5),
        {
            "parallel residual": {"use_parallel_residual": False},
            "partial rotary": rope(partial_rotary_factor=1.0),
            "norm a head": {"qk_layernorm": False},
        },
    ),
    "starcoder2": Case(
        "starcoder2",
        {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0, "tie_word_embeddings": True},
        {"window": _WIDE},
    ),
    "persimmon": Case(
        "persimmon", rope(partial_rotary_factor=0.5), {"partial rotary": rope(partial_rotary_factor=1.0)}
    ),
    # The GPTs.
    "gpt2": Case(
        "gpt2",
        _GPT2_SIZES | _NO_DROPOUT | {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
        {"scale by layer": {"scale_attn_by_inverse_layer_idx": False}},
        plain_sizes=False,
    ),
    "gpt_bigcode": Case("gpt_bigcode", _GPT2_SIZES | _NO_DROPOUT | {"tie_word_embeddings": True}, plain_sizes=False),
    "gpt_neox": Case(
        "gpt_neox",
        {"use_parallel_residual": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
        | rope(partial_rotary_factor=0.5),
        {"parallel residual": {"use_parallel_residual": False}, "partial rotary": rope(partial_rotary_factor=1.0)},
    ),
    "opt": Case("opt", {"ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
}
