"""A Hugging Face model folder -> its config and its tokenizer; what transformers cannot use is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from megatrain.errors import ModelError, UserError
from megatrain.models.hub import refuse_no_config

_LONGEST_REASON = 300  # characters; transformers lists every tokenizer class it knows


def read_hf_config(folder: Path) -> PreTrainedConfig:
    """The config.json of `folder`, as transformers reads it; ModelError if there is none, or it cannot be used."""
    refuse_no_config(folder)
    remedy = "fetch the model again, or update transformers if the model is newer than it"
    with refusals_of_transformers(f"{folder / 'config.json'}: transformers cannot use it", remedy):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _refuse_quantized(config, folder)
    return config


def _refuse_quantized(config: PreTrainedConfig, folder: Path) -> None:
    """ModelError for a model of quantized weights: they are another storage than masters can be made from."""
    members = config.to_dict()
    for key in ("quantization_config", "compression_config"):
        if members.get(key):
            method = members[key].get("quant_method", "unnamed") if isinstance(members[key], dict) else "unnamed"
            raise ModelError(
                f"{folder / 'config.json'}: {key} says the weights are quantized ({method}); training needs BF16, F16 "
                "or F32 weights: take the unquantized original, or dequantize it and save that; if they are BF16 "
                f"already, remove {key} from config.json"
            )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`; ModelError if there is none, or it cannot be used."""
    remedy = "fetch tokenizer.json and tokenizer_config.json of the model again"
    with refusals_of_transformers(f"{folder}: its tokenizer cannot be read", remedy):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def refusals_of_transformers(what: str, remedy: str) -> Iterator[None]:
    """Inside, whatever is raised becomes a ModelError of one sentence: `what`, the reason given, `remedy`.

    For calls whose only input is a file of the user. They fail in any way: KeyError for an unknown activation,
    ZeroDivisionError for no heads, a dataclass error for a wrong type, a plain Exception from the Rust tokenizers.
    """
    failure: Exception | None = None
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kind, as said above; raised again below
        failure = error
    if failure is not None:
        reason = " ".join(str(failure).split())
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        raise ModelError(f"{what} ({type(failure).__name__}: {reason}); {remedy}") from failure
