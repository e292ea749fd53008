"""A word-by-word tokenizer (golden tables stay readable) and a byte-level one (takes any text), with ChatML."""
from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
WORDS = ["[UNK]", *SPECIAL, "\n", " ", "user", "assistant", "system", "tool", "think", "hi", "yes", "no", "why", "so",
         "one", "two", "a", "b", "c", "d", "e", ":"]


def _tokenizer(core: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                   chat_template=template)


def make_word_tokenizer(template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = _tokenizer(core, template)
    if bos:
        tokenizer.bos_token = "<s>"
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))])
    return tokenizer


def make_byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _tokenizer(core, template)


def chat(*turns: str) -> dict[str, Any]:
    """chat("user: hi", "assistant: yes") as a row."""
    messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
    return {"messages": messages}
