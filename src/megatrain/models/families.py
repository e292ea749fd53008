"""The registry of architectures: where their parts are, and what is special about them. Torch-free.

An architecture enters the table when tests/models prove, for tiny models of it, that streamed logits, loss, every
gradient and three training steps equal those of the whole model bit for bit, in fp32 and bf16. `REFUSED` names those
that were looked at and cannot be trained rightly, with the reason. Anything else is refused unless the user says
otherwise. `docs/models.md` shows both tables with the tests that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatrain.errors import ModelError


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its parts. Paths are submodule names, `layers` and `final` inside the backbone.

    Everything of the backbone that is neither in `layers` nor in `final` comes before the first layer.
    """

    architecture: str  # class of transformers, "LlamaForCausalLM"
    special: str  # what the tests show alive
    backbone: str = "model"
    layers: str = "layers"
    final: tuple[str, ...] = ("norm",)  # run after the last layer, each maps one hidden state to one
    by_document: tuple[str, ...] = ()  # classes inside a layer that carry state along the tokens
    attends_by_document: tuple[str, ...] = ()  # attention classes that count positions from the start of the pack
    renamed: tuple[tuple[str, str], ...] = ()  # (piece of our names, what published checkpoints have there)
    hands_over_window: bool = True  # False: the attention code does not pass its window on, so windows are refused
    embedding_copies: int = 0  # made by the backbone's own code of what was looked up: a scale 1, a norm 4
    logit_copies: int = 0  # made by the model's own code: a cast to fp32
    one_graph: bool = True  # False: shapes inside a layer follow where its tokens are routed, so it is not compiled
    others: int | None = None  # what a layer returns beside its hidden state: so many values, all None; None: no tuple


_GRANITE_EXPERTS = (
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
)


def _named(*families: Family) -> Mapping[str, Family]:
    return MappingProxyType({family.architecture: family for family in families})


FAMILIES = _named(
    Family("LlamaForCausalLM", "tied and untied, biases, rotary scaling: linear, dynamic, YaRN, Llama 3"),
    Family("MistralForCausalLM", "window"),
    Family("MinistralForCausalLM", "window layers"),
    Family("Ministral3ForCausalLM", "YaRN, query scale by position"),
    Family("ArceeForCausalLM", "squared ReLU, biases"),
    Family("ApertusForCausalLM", "xIELU with trained slopes, q and k norms"),
    Family("CwmForCausalLM", "window layers, Llama 3 rotary scaling"),
    Family("DiffLlamaForCausalLM", "differential attention"),
    Family("HeliumForCausalLM", "interleaved rotary"),
    Family("SeedOssForCausalLM", "biases"),
    Family("SmolLM3ForCausalLM", "layers without rotary"),
    Family("BitNetForCausalLM", "norms inside attention and MLP"),
    Family(
        "NanoChatForCausalLM", "norms without weights, squared ReLU, soft-capped logits", final=(), embedding_copies=4
    ),
    Family("Ernie4_5ForCausalLM", "interleaved rotary, biases"),
    Family("HunYuanDenseV1ForCausalLM", "q and k norms after rotary"),
    Family("HyperCLOVAXForCausalLM", "multipliers, norms after"),
    Family("Jais2ForCausalLM", "squared ReLU, biases, layer norms"),
    Family("MiniCPM3ForCausalLM", "MLA, scaled embedding, residual and logits"),
    Family("YoutuForCausalLM", "MLA"),
    Family("Qwen2ForCausalLM", "q, k, v biases, window on the upper layers"),
    Family("Qwen3ForCausalLM", "q and k norms"),
    Family("GemmaForCausalLM", "scaled embedding"),
    Family("Gemma2ForCausalLM", "scaled embedding, window layers, soft-capped attention and logits, four norms"),
    Family("Gemma3ForCausalLM", "scaled embedding, two rotary tables, window layers, soft-capped logits"),
    Family("VaultGemmaForCausalLM", "scaled embedding, window layers, soft-capped attention and logits"),
    Family("PhiForCausalLM", "parallel residual, partial rotary, q and k norms", final=("final_layernorm",)),
    Family("Phi3ForCausalLM", "fused projections, window, partial rotary, long rotary"),
    Family("OlmoForCausalLM", "norms without weights, clipped projections"),
    Family("Olmo2ForCausalLM", "norms after, q and k norms"),
    Family("Olmo3ForCausalLM", "window layers, rotary by layer type"),
    Family("GraniteForCausalLM", "embedding, residual, attention and logit multipliers"),
    Family("GraniteSWAForCausalLM", "sinks, window layers, rotary by layer, multipliers"),
    Family("CohereForCausalLM", "parallel residual, logit scale, q and k norms"),
    Family("Cohere2ForCausalLM", "parallel residual, window layers, layers without rotary, logit scale"),
    Family("GlmForCausalLM", "partial rotary, fused MLP"),
    Family("Glm4ForCausalLM", "partial rotary, four norms"),
    Family("Exaone4ForCausalLM", "window layers, layers without rotary, norms after"),
    Family("NemotronForCausalLM", "norms with 1 + weight, partial rotary, squared ReLU"),
    Family("StableLmForCausalLM", "parallel residual, norm a head, partial rotary"),
    Family("Starcoder2ForCausalLM", "window, biases, layer norms"),
    Family("PersimmonForCausalLM", "fused projections, q and k norms, partial rotary", final=("final_layernorm",)),
    Family("GPT2LMHeadModel", "learned positions, scale by layer", backbone="transformer", layers="h", final=("ln_f",)),
    Family(
        "GPTBigCodeForCausalLM", "learned positions, one key head", backbone="transformer", layers="h", final=("ln_f",)
    ),
    Family(
        "GPTNeoXForCausalLM",
        "parallel residual, partial rotary",
        backbone="gpt_neox",
        final=("final_layer_norm",),
        renamed=(("lm_head.", "embed_out."),),
    ),
    Family("OPTForCausalLM", "learned positions", backbone="model.decoder", final=("final_layer_norm",)),
    # Mixtures of experts.
    Family("MixtralForCausalLM", "experts, window"),
    Family("Qwen2MoeForCausalLM", "experts, shared expert with a gate", hands_over_window=False),
    Family("Qwen3MoeForCausalLM", "experts, q and k norms"),
    Family("OlmoeForCausalLM", "experts, clipped projections"),
    Family("FlexOlmoForCausalLM", "experts, norms after"),
    Family("GraniteMoeForCausalLM", "experts, multipliers", renamed=_GRANITE_EXPERTS),
    Family("GraniteMoeSharedForCausalLM", "experts, shared expert, multipliers", renamed=_GRANITE_EXPERTS),
    Family("GraniteMoeSWAForCausalLM", "experts, sinks, window layers, rotary by layer, multipliers"),
    Family("GptOssForCausalLM", "experts with biases, router bias, sinks, window layers, YaRN"),
    Family("DeepseekV2ForCausalLM", "MLA, expert groups, shared expert, YaRN"),
    Family("DeepseekV3ForCausalLM", "MLA, expert groups, score correction, shared expert, YaRN"),
    Family("Glm4MoeForCausalLM", "expert groups, score correction, shared expert, partial rotary"),
    Family("Glm4MoeLiteForCausalLM", "MLA, expert groups, score correction, shared expert"),
    Family("Dots1ForCausalLM", "expert groups, score correction, shared expert, window layers"),
    Family("SolarOpenForCausalLM", "expert groups, score correction, shared expert"),
    Family(
        "ExaoneMoeForCausalLM",
        "expert groups, score correction, shared expert, window layers",
        renamed=((".mlp.gate.e_score", ".mlp.e_score"),),
    ),
    Family(
        "Ernie4_5_MoeForCausalLM",
        "experts, score correction, shared expert",
        renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
    ),
    Family("HunYuanMoEV1ForCausalLM", "experts, shared expert"),
    Family(
        "MiniMaxM2ForCausalLM", "experts, score correction, partial rotary", renamed=((".mlp.", ".block_sparse_moe."),)
    ),
    Family("AfmoeForCausalLM", "experts, shared expert, gated attention, window layers"),
    Family("JetMoeForCausalLM", "experts in attention and MLP", one_graph=False),
    Family(
        "AriaTextForCausalLM",
        "experts, shared expert",
        renamed=((".experts.gate_up_proj", ".experts.fc1.weight"), (".experts.down_proj", ".experts.fc2.weight")),
    ),
    Family("Cohere2MoeForCausalLM", "experts, shared expert, parallel residual, window layers"),
    Family("MellumForCausalLM", "experts, window layers, rotary by layer type"),
    Family(
        "LagunaForCausalLM",
        "experts, shared expert, gated attention, window layers",
        renamed=((".shared_experts.", ".shared_expert."), (".gate.e_score", ".experts.e_score")),
    ),
    Family(
        "FlintForCausalLM", "experts, shared expert, sinks, window layers", renamed=((".sinks", ".softmax_offset"),)
    ),
    Family(
        "HYV3ForCausalLM",
        "experts, score correction, shared expert",
        renamed=(
            (".mlp.gate.", ".mlp.router.gate."),
            (".e_score_correction_bias", ".expert_bias"),
            (".shared_experts.", ".shared_mlp."),
        ),
    ),
    Family(
        "MiMoV2FlashForCausalLM",
        "experts, score correction, sinks, window layers, values of another size",
        renamed=((".sinks", ".attention_sink_bias"),),
    ),
    Family(
        "Kolibri1ForCausalLM",
        "experts, score correction, shared expert, window layers",
        renamed=(
            (".post_self_attn_layernorm", ".post_attn_norm"),
            (".post_mlp_layernorm", ".post_ffn_norm"),
            (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
        ),
    ),
    Family(
        "AXK1ForCausalLM",
        "MLA, expert groups, score correction, shared expert",
        renamed=((".mlp.post_mlp_layernorm", ".post_mlp_layernorm"),),
    ),
    Family("LongcatFlashForCausalLM", "two MLA a layer, experts, experts that do nothing", one_graph=False),
    Family(
        "Llama4ForCausalLM",
        "experts, shared expert, chunked attention, layers without rotary, temperature",
        attends_by_document=("Llama4TextAttention",),
    ),
    # Recurrent and convolutional layers.
    Family("Qwen3NextForCausalLM", "gated delta rule, experts, shared expert", by_document=("Qwen3NextGatedDeltaNet",)),
    Family("Qwen3_5ForCausalLM", "gated delta rule", by_document=("Qwen3_5GatedDeltaNet",)),
    Family(
        "Qwen3_5MoeForCausalLM", "gated delta rule, experts, shared expert", by_document=("Qwen3_5MoeGatedDeltaNet",)
    ),
    Family("OlmoHybridForCausalLM", "gated delta rule", by_document=("OlmoHybridGatedDeltaNet",)),
    Family("LaraMiniForCausalLM", "gated delta rule, experts, windows", by_document=("LaraMiniGatedDeltaNet",)),
    Family("KimiLinearForCausalLM", "Kimi delta attention, MLA, experts", by_document=("KimiLinearDeltaAttention",)),
    Family(
        "Lfm3ForCausalLM",
        "short convolutions",
        final=("embedding_norm",),
        by_document=("Lfm3ShortConv",),
        renamed=((".self_attn.g_proj", ".self_attn.gate_proj"),),
    ),
    Family("Lfm2ForCausalLM", "short convolutions", final=("embedding_norm",), by_document=("Lfm2ShortConv",)),
    Family(
        "Lfm2MoeForCausalLM",
        "short convolutions, experts",
        final=("embedding_norm",),
        by_document=("Lfm2MoeShortConv",),
    ),
    Family(
        "FalconH1ForCausalLM",
        "Mamba 2 beside attention",
        final=("final_layernorm",),
        by_document=("FalconH1Mixer",),
        others=0,
    ),
    Family("BambaForCausalLM", "Mamba 2 layers", final=("final_layernorm",), by_document=("BambaMixer",), others=1),
    Family(
        "GraniteMoeHybridForCausalLM",
        "Mamba 2 layers, experts, multipliers",
        by_document=("GraniteMoeHybridMambaLayer",),
        renamed=_GRANITE_EXPERTS,
    ),
    Family("Mamba2ForCausalLM", "Mamba 2", "backbone", final=("norm_f",), by_document=("Mamba2Mixer",), logit_copies=1),
    Family("MambaForCausalLM", "Mamba", "backbone", final=("norm_f",), by_document=("MambaMixer",), logit_copies=1),
    Family(
        "FalconMambaForCausalLM",
        "Mamba",
        "backbone",
        final=("norm_f",),
        by_document=("FalconMambaMixer",),
        logit_copies=1,
    ),
    Family("JambaForCausalLM", "Mamba layers, experts", final=("final_layernorm",), by_document=("JambaMambaMixer",)),
    Family(
        "NemotronHForCausalLM",
        "Mamba 2 layers, experts",
        final=("norm_f",),
        by_document=("NemotronHMamba2Mixer",),
        logit_copies=1,
        renamed=(("model.", "backbone."),),
    ),
    Family(
        "MiniMaxForCausalLM",
        "lightning attention, experts",
        by_document=("MiniMaxLightningAttention",),
    ),
    Family(
        "RecurrentGemmaForCausalLM",
        "recurrent layers",
        final=("final_norm",),
        by_document=("RecurrentGemmaRecurrentBlock",),
        embedding_copies=1,
    ),
)

_OWN_ATTENTION = "its attention is code of its own, which knows no documents and keeps T x T scores"
_ENCODER = "it is an encoder, or the decoder of an encoder-decoder"
_IMAGES = "it is a model of images, sound and text; choose its text model"
_SHARED = "its layers share keys, values or weights with one another outside the hidden state"
_INDEXER = "its sparse attention builds T x T masks from an indexer, whose choice carries no gradient"
_SEVERAL = "what passes from layer to layer is more than one hidden state"

# Looked at, and not trained, because they would be trained wrongly; architecture -> why.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "BloomForCausalLM": f"ALiBi: {_OWN_ATTENTION}",
        "MptForCausalLM": f"ALiBi: {_OWN_ATTENTION}",
        "FalconForCausalLM": _OWN_ATTENTION,
        "GPTNeoForCausalLM": _OWN_ATTENTION,
        "GPTNeoXJapaneseForCausalLM": _OWN_ATTENTION,
        "XGLMForCausalLM": _OWN_ATTENTION,
        "GPTJForCausalLM": f"in some versions of transformers {_OWN_ATTENTION}",
        "CodeGenForCausalLM": f"in some versions of transformers {_OWN_ATTENTION}",
        "DogeForCausalLM": "its attention builds masks from the values, T x T",
        "RwkvForCausalLM": "it divides its weights in place, layer after layer",
        "PhimoeForCausalLM": "its router samples experts while training, so recomputation would choose others",
        "BioGptForCausalLM": "its output matrix is not lm_head",
        "ModernBertDecoderForCausalLM": "its output layer is not lm_head",
        "Gemma3nForCausalLM": _SHARED,
        "Gemma4ForCausalLM": f"inputs of every layer come from a second embedding, and {_SHARED}",
        "Gemma4UnifiedForCausalLM": f"inputs of every layer come from a second embedding, and {_SHARED}",
        "ZambaForCausalLM": _SHARED,
        "Zamba2ForCausalLM": _SHARED,
        "DoryForCausalLM": "its layers run several times in a loop",
        "HrmTextForCausalLM": "its layers run several times in a loop",
        "ZayaForCausalLM": _SEVERAL,
        "HYV4ForCausalLM": _SEVERAL,
        "DeepseekV32ForCausalLM": _INDEXER,
        "DeepseekV4ForCausalLM": _INDEXER,
        "GlmMoeDsaForCausalLM": _INDEXER,
        "MllamaForCausalLM": "it attends to images across layers; choose its text model",
        "Gemma3ForConditionalGeneration": _IMAGES,
        "Gemma3nForConditionalGeneration": _IMAGES,
        "Gemma4ForConditionalGeneration": _IMAGES,
        "Gemma4UnifiedForConditionalGeneration": _IMAGES,
        "Phi4MultimodalForCausalLM": _IMAGES,
        "FuyuForCausalLM": _IMAGES,
        "GotOcr2ForConditionalGeneration": _IMAGES,
        "BltForCausalLM": "it works on bytes through models of several kinds",
        "BartForCausalLM": _ENCODER,
        "BertLMHeadModel": _ENCODER,
        "RobertaForCausalLM": _ENCODER,
        "XLMRobertaForCausalLM": _ENCODER,
        "ElectraForCausalLM": _ENCODER,
        "MBartForCausalLM": _ENCODER,
        "MarianForCausalLM": _ENCODER,
        "PegasusForCausalLM": _ENCODER,
        "TrOCRForCausalLM": _ENCODER,
        "WhisperForCausalLM": _ENCODER,
    }
)


def family_of(architecture: str, allow_unproven: bool) -> Family:
    """The family of `architecture`; an unproven one is refused, or assumed to be laid out as Llama is."""
    if architecture in REFUSED:
        raise ModelError(f"architecture {architecture} cannot be trained: {REFUSED[architecture]}")
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    if allow_unproven:
        return Family(architecture, "unproven: allowed by the user")
    raise ModelError(
        f"architecture {architecture} is not proven (proven: {', '.join(FAMILIES)}); "
        "train one of these, or set allow_unproven: true to run without the parity proof"
    )
