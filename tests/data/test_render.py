"""Golden tokens and trained flags. In the tables, a trained token stands in brackets."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import encode, sandbox, template
from megatrain.data.encode import Encoded, Encoder
from megatrain.data.formats import BadSample, Chat, Completion, Document, Sample
from megatrain.data.sandbox import source_of
from megatrain.data.texts import Text, Texts
from megatrain.errors import DataError
from tests.data.tiny_tokenizers import CHATML, CHATML_MARKED, chat, make_byte_tokenizer, make_word_tokenizer

THINKING = (    # drops the reasoning of all turns but the last, as Qwen3's template does
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ 'think ' + m.reasoning|default('') + ' think ' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
OPENS_THINKING = (      # the generation prompt goes on into a reasoning block that a finished turn does not have
    CHATML[:CHATML.rindex("<|im_start|>assistant")] + "<|im_start|>assistant\nthink' }}{% endif %}")
NO_EOT = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
TWO_ENDS = (       # the last turn ends with a token of its own, as gpt-oss's does
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ '<s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
OPEN_CALLS = (      # a turn that calls a tool has no end token
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ m.tool_calls[0].function.arguments.x + '\n' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TWO_PARTS = (      # one turn opens twice: reasoning, then the answer
    "{% for m in messages %}{% if m.reasoning %}{{ '<|im_start|>' + m.role + '\n' + m.reasoning + '<|im_end|>' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
MERGED = (         # an assistant turn behind another one has no header
    "{% for m in messages %}{% if not loop.previtem or loop.previtem.role != 'assistant' or m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TEXT_ARGUMENTS = CHATML.replace(
    "m.content +", "m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '') +")
CALL = {"role": "assistant", "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "so"}}}]}
TWO_TURNS = ("user: hi", "assistant: yes no", "user: why", "assistant: so")
TWO_TURNS_TABLE = ("<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [yes] [_] [no] [<|im_end|>] n "
                   "<|im_start|> user n why <|im_end|> n <|im_start|> assistant n [so] [<|im_end|>] n")


def to_chat(*turns: str, **rest: Any) -> Chat:
    return Chat(chat(*turns)["messages"], rest.get("tools"), rest.get("first_trained", 0))


class Maker:
    """Samples to tokens: the texts of a chat template, then the tokenizer, in one process."""

    def __init__(self, tokenizer: Any, *, assistant_only_loss: bool = True,
                 train_roles: tuple[str, ...] = ("assistant",), **rest: Any) -> None:
        self.texts = Texts(source_of(tokenizer), assistant_only_loss=assistant_only_loss, train_roles=train_roles)
        self.encoder = Encoder(tokenizer, assistant_only_loss=assistant_only_loss,
                               **{"max_length": 64, "truncation": "keep_start", **rest})

    def encode(self, samples: list[Sample]) -> list[Encoded | BadSample]:
        made = [self._text(sample) for sample in samples]
        encoded = iter(self.encoder.encode([text for text in made if isinstance(text, Text)]))
        return [next(encoded) if isinstance(text, Text) else text for text in made]

    def _text(self, sample: Sample) -> Text | BadSample:
        try:
            return self.texts.of(sample)
        except BadSample as bad:
            return bad


def table(tokenizer: Any, sample: Sample, **rest: Any) -> str:
    [result] = Maker(tokenizer, **rest).encode([sample])
    if isinstance(result, BadSample):
        raise result
    assert len(result.ids) == len(result.trained)
    names = [t.replace("\n", "n").replace(" ", "_") for t in tokenizer.convert_ids_to_tokens(result.ids.tolist())]
    return " ".join(f"[{name}]" if flag else name for name, flag in zip(names, result.trained, strict=True))


@pytest.mark.parametrize("template_text", [CHATML, CHATML_MARKED])
def test_every_assistant_turn_and_its_end_token_is_trained(template_text: str) -> None:
    assert table(make_word_tokenizer(template_text), to_chat(*TWO_TURNS)) == TWO_TURNS_TABLE


def test_prefix_difference_gives_the_same_as_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template.ChatTemplate, "_scan", lambda *_: None)
    assert table(make_word_tokenizer(), to_chat(*TWO_TURNS)) == TWO_TURNS_TABLE


@pytest.mark.parametrize("template_text", [CHATML, CHATML_MARKED])
def test_everything_is_trained_on_request(template_text: str) -> None:
    shown = table(make_word_tokenizer(template_text), to_chat("user: hi", "assistant: yes"), assistant_only_loss=False)
    assert shown == ("[<|im_start|>] [user] [n] [hi] [<|im_end|>] [n] [<|im_start|>] [assistant] [n] [yes] "
                     "[<|im_end|>] [n]")


def test_pad_equal_to_eos_does_not_matter() -> None:
    tokenizer = make_word_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert table(tokenizer, Document("one<|im_end|>two")) == "[one] [<|im_end|>] [two] [<|im_end|>]"


@pytest.mark.parametrize("template_text", [CHATML, CHATML_MARKED])
def test_first_trained_and_weights(template_text: str) -> None:
    second_only = TWO_TURNS_TABLE.replace("[yes] [_] [no] [<|im_end|>]", "yes _ no <|im_end|>")
    tokenizer = make_word_tokenizer(template_text)
    assert table(tokenizer, to_chat(*TWO_TURNS, first_trained=2)) == second_only
    weighted = to_chat(*TWO_TURNS)
    weighted.messages[1]["weight"] = 0
    assert table(tokenizer, weighted) == second_only


@pytest.mark.parametrize("template_text", [CHATML, CHATML_MARKED])
def test_loss_on_chosen_roles(template_text: str) -> None:
    """The content of a turn and its end token; a role's own name in its header stays out."""
    tokenizer = make_word_tokenizer(template_text)
    sample = to_chat("system: so", "user: user", "assistant: yes", "tool: b", "assistant: no")
    user = ("<|im_start|> system n so <|im_end|> n <|im_start|> user n [user] [<|im_end|>] n <|im_start|> assistant n "
            "yes <|im_end|> n <|im_start|> tool n b <|im_end|> n <|im_start|> assistant n no <|im_end|> n")
    assert table(tokenizer, sample, train_roles=("user",)) == user
    both = user.replace("yes <|im_end|>", "[yes] [<|im_end|>]").replace("no <|im_end|>", "[no] [<|im_end|>]")
    both = both.replace("[user] [<|im_end|>]", "user <|im_end|>").replace("b <|im_end|>", "[b] [<|im_end|>]")
    assert table(tokenizer, sample, train_roles=("tool", "assistant")) == both
    assert table(tokenizer, sample, train_roles=("assistant",)) == both.replace("[b] [<|im_end|>]", "b <|im_end|>")
    sample.messages[1]["weight"] = 0
    with pytest.raises(BadSample, match="no token of it is trained"):
        table(tokenizer, sample, train_roles=("user",))


def test_a_turn_the_template_rewrites_is_reported() -> None:
    shouting = CHATML.replace("m.content", "(m.content | upper if m.role == 'user' else m.content)")
    tokenizer = make_word_tokenizer(shouting)
    with pytest.raises(BadSample, match="a user turn is not in the rendered text as it is written"):
        table(tokenizer, to_chat("user: hi", "assistant: yes"), train_roles=("user",))


def test_messages_that_spell_control_tokens_do_not_move_the_mask() -> None:
    sample = to_chat("user: hi<|im_end|>\n<|im_start|>assistant\nno", "assistant: yes")
    assert table(make_word_tokenizer(), sample) == (
        "<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n no <|im_end|> n "
        "<|im_start|> assistant n [yes] [<|im_end|>] n")
    inner = to_chat("user: hi", "assistant: a<|im_end|>b", "user: c", "assistant: d")
    assert table(make_word_tokenizer(), inner) == (
        "<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [a] [<|im_end|>] [b] [<|im_end|>] n "
        "<|im_start|> user n c <|im_end|> n <|im_start|> assistant n [d] [<|im_end|>] n")


@pytest.mark.parametrize("scan", [True, False])
def test_templates_that_rewrite_earlier_turns(monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    if not scan:
        monkeypatch.setattr(template.ChatTemplate, "_scan", lambda *_: None)
    sample = to_chat("user: hi", "assistant: yes", "user: why", "assistant: so")
    sample.messages[1]["reasoning"] = "a"
    sample.messages[3]["reasoning"] = "b"
    assert table(make_word_tokenizer(THINKING), sample) == (
        "<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [yes] [<|im_end|>] n <|im_start|> user n why "
        "<|im_end|> n <|im_start|> assistant n [think] [_] [b] [_] [think] [_] [so] [<|im_end|>] n")


def test_generation_prompt_that_opens_reasoning() -> None:
    assert table(make_word_tokenizer(OPENS_THINKING), to_chat("user: hi", "assistant: yes")) == (
        "<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [yes] [<|im_end|>] n")


def test_generation_prompt_that_opens_as_the_answer_does() -> None:
    tokenizer = make_byte_tokenizer(OPENS_THINKING)
    [result] = Maker(tokenizer, max_length=256).encode([to_chat("user: hi", "assistant: this")])
    assert isinstance(result, Encoded)
    assert tokenizer.decode(result.ids[result.trained].tolist()) == "this<|im_end|>"  # not just "is"


@pytest.mark.parametrize("scan", [True, False])
def test_last_turn_with_an_end_of_its_own(monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    if not scan:
        monkeypatch.setattr(template.ChatTemplate, "_scan", lambda *_: None)
    assert table(make_word_tokenizer(TWO_ENDS), to_chat(*TWO_TURNS)) == (
        "<|im_start|> user n hi <|im_end|> <|im_start|> assistant n [yes] [_] [no] [<|im_end|>] "
        "<|im_start|> user n why <|im_end|> <|im_start|> assistant n [so] [<s>]")


@pytest.mark.parametrize("template_text", [CHATML, CHATML_MARKED])
def test_end_of_two_tokens(template_text: str) -> None:
    double = template_text.replace("<|im_end|>", "<s><|im_end|>")
    assert table(make_word_tokenizer(double), to_chat("user: hi", "assistant: yes")) == (
        "<|im_start|> user n hi <s> <|im_end|> n <|im_start|> assistant n [yes] [<s>] [<|im_end|>] n")


def test_a_turn_without_end_does_not_swallow_the_next() -> None:
    sample = Chat([{"role": "user", "content": "hi"}, CALL, {"role": "tool", "content": "one"},
                   {"role": "assistant", "content": "yes"}], None, 0)
    assert table(make_word_tokenizer(OPEN_CALLS), sample) == (
        "<|im_start|> user n hi <|im_end|> <|im_start|> assistant n [so] [n] <|im_start|> tool n one <|im_end|> "
        "<|im_start|> assistant n [yes] [<|im_end|>]")


def test_a_turn_that_opens_twice_is_trained_whole() -> None:
    sample = to_chat(*TWO_TURNS)
    sample.messages[1]["reasoning"] = "a"
    assert table(make_word_tokenizer(TWO_PARTS), sample) == (
        "<|im_start|> user n hi <|im_end|> <|im_start|> assistant n [a] [<|im_end|>] [<|im_start|>] [assistant] [n] "
        "[yes] [_] [no] [<|im_end|>] <|im_start|> user n why <|im_end|> <|im_start|> assistant n [so] [<|im_end|>]")


def test_a_spelt_header_does_not_stand_in_for_a_missing_one() -> None:
    sample = to_chat("user: hi<|im_start|>assistant\nno", "assistant: yes", "assistant: so")
    assert table(make_word_tokenizer(MERGED), sample) == (
        "<|im_start|> user n hi <|im_start|> assistant n no <|im_end|> <|im_start|> assistant n [yes] [<|im_end|>] "
        "[so] [<|im_end|>]")


def test_call_arguments_as_the_template_takes_them() -> None:
    sample = Chat([{"role": "user", "content": "hi"}, CALL], None, 0)
    tokenizer = make_byte_tokenizer(TEXT_ARGUMENTS)
    [result] = Maker(tokenizer).encode([sample])
    assert isinstance(result, Encoded)
    assert tokenizer.decode(result.ids[result.trained].tolist()) == '{"x": "so"}<|im_end|>'
    assert sample.messages[1] is CALL
    assert CALL["tool_calls"][0]["function"]["arguments"] == {"x": "so"}


def test_template_without_end_token_warns() -> None:
    tokenizer = make_word_tokenizer(NO_EOT)
    assert table(tokenizer, to_chat("user: hi", "assistant: yes")) == "user : hi n assistant : [yes] [n]"
    used = Maker(tokenizer)
    used.encode([to_chat("user: hi", "assistant: yes")])
    assert "not learn to stop" in used.texts.warnings()[0]
    assert Maker(make_word_tokenizer()).texts.warnings() == ()


def test_assistant_first() -> None:
    assert table(make_word_tokenizer(), to_chat("assistant: yes", "user: hi<|im_end|>")) == (
        "<|im_start|> assistant n [yes] [<|im_end|>] n <|im_start|> user n hi <|im_end|> <|im_end|> n")


def test_assistant_first_without_opening_is_refused() -> None:
    always = CHATML.split("{% if add")[0]
    with pytest.raises(BadSample, match="starts with an assistant turn"):
        table(make_word_tokenizer(always), to_chat("assistant: yes", "user: hi"))


def test_completion_and_document_ends() -> None:
    assert table(make_word_tokenizer(), Completion("hi ", "yes")) == "hi _ [yes] [<|im_end|>]"
    assert table(make_word_tokenizer(), Completion("hi ", "yes<|im_end|>")) == "hi _ [yes] [<|im_end|>]"
    assert table(make_word_tokenizer(), Completion("hi ", "yes"), assistant_only_loss=False) == \
        "[hi] [_] [yes] [<|im_end|>]"
    assert table(make_word_tokenizer(), Document("hi yes")) == "[hi] [_] [yes] [<|im_end|>]"


def test_bos_is_never_doubled() -> None:
    tokenizer = make_word_tokenizer("{{ bos_token }}" + CHATML, bos=True)
    assert table(tokenizer, Document("hi")) == "[<s>] [hi] [<|im_end|>]"
    assert table(tokenizer, Document("<s>hi")) == "[<s>] [hi] [<|im_end|>]"
    assert table(tokenizer, Completion("hi ", "yes")) == "<s> hi _ [yes] [<|im_end|>]"
    one = "<s> <|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [yes] [<|im_end|>] n"
    assert table(tokenizer, to_chat("user: hi", "assistant: yes")) == one
    twice = make_word_tokenizer("{{ bos_token }}{{ bos_token }}" + CHATML_MARKED, bos=True)
    assert table(twice, to_chat("user: hi", "assistant: yes")) == one


def test_truncation() -> None:
    tokenizer, sample = make_word_tokenizer(), to_chat(*TWO_TURNS)
    full = TWO_TURNS_TABLE.split()
    assert table(tokenizer, sample, max_length=11).split() == full[:11]
    assert table(tokenizer, sample, max_length=4, truncation="keep_end").split() == full[-4:]
    with pytest.raises(BadSample, match="all trained tokens lie beyond max_length"):
        table(tokenizer, sample, max_length=9)
    with pytest.raises(BadSample, match="longer than max_length"):
        table(tokenizer, sample, max_length=11, truncation="drop")


def test_huge_chat_is_cut_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHARS_PER_TOKEN_BOUNDS", (1, 2))
    tokenizer = make_word_tokenizer()
    sample = to_chat("user: hi", "assistant: " + "yes " * 500)
    assert len(table(tokenizer, sample, max_length=300).split()) == 300     # the cut was too early: tokenised again
    monkeypatch.setattr(encode, "CHARS_PER_TOKEN_BOUNDS", (4,))
    early = table(tokenizer, sample, max_length=300)
    monkeypatch.undo()
    assert early == table(tokenizer, sample, max_length=300)


def test_long_documents_are_tokenised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = make_byte_tokenizer(), "one two\nthree é four five\n" * 20 + "x" * 200
    [whole] = Maker(tokenizer).encode([Document(text)])
    monkeypatch.setattr(encode, "PIECE_CHARS", 33)
    monkeypatch.setattr(encode, "CALL_CHARS", 70)
    [pieces] = Maker(tokenizer).encode([Document(text)])
    assert isinstance(whole, Encoded)
    assert isinstance(pieces, Encoded)
    assert whole.ids.tolist() == pieces.ids.tolist()


def test_truncation_and_padding_of_the_tokenizer_file_are_switched_off() -> None:
    tokenizer = make_word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert table(tokenizer, Document("a:b:c:d")) == "[a] [:] [b] [:] [c] [:] [d] [<|im_end|>]"
    tokenizer.backend_tokenizer.enable_padding(length=40)
    assert table(tokenizer, Document("hi")) == "[hi] [<|im_end|>]"


def test_long_documents_are_cut_where_tokens_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PIECE_CHARS", 8)
    assert encode._split("ab\n\ncd\n ef\ngh") == ["ab\n\n", "cd\n ef\n", "gh"]
    assert encode._split("ab\ncd\n\n\n\nefg") == ["ab\n", "cd\n\n\n\n", "efg"]
    assert encode._split("x" * 9) == ["x" * 8, "x"]
    assert encode._split("ab") == ["ab"]


@pytest.mark.parametrize("sample", [
    Document("a\udcff"), Completion("\ud800", "a"), to_chat("user: hi", "assistant: \udfff"),
    Chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], ["\ud800"], 0)])
def test_lone_surrogates_cost_the_row(sample: Sample) -> None:
    tokenizer = make_word_tokenizer(CHATML + "{{ tools | tojson if tools }}")
    with pytest.raises(BadSample, match="lone surrogate"):
        table(tokenizer, sample)


def test_document_of_one_token_is_refused() -> None:
    with pytest.raises(BadSample, match="fewer than two tokens"):
        table(make_word_tokenizer(), Document("<|im_end|>"))


def test_results_keep_the_order_of_samples() -> None:
    samples = [Document("one"), to_chat("user: hi", "assistant: yes"), Document("a\0"), Completion("a", "b"),
               to_chat("user: hi", "assistant: no")]
    results = Maker(make_word_tokenizer()).encode(samples)
    assert [len(r.ids) for r in results if isinstance(r, Encoded)] == [2, 12, 3, 2, 12]


@pytest.mark.parametrize(("text", "reason"), [
    (CHATML + "{% if messages|length > 2 %}{{ raise_exception('only two') }}{% endif %}", "refuses it: only two"),
    (CHATML + "{{ 'x' * 10**15 if messages|length > 2 }}", "asks for more than 1 GiB"),
    (CHATML + "{{ messages[2].nothing.there if messages|length > 2 }}", "refuses it"),
    (CHATML + "{% set _ = messages.append(1) if messages|length > 2 %}", "refuses it"),
    (CHATML + "{{ ''.__class__.__mro__[1].__subclasses__() if messages|length > 2 }}", "refuses it"),
])
def test_template_faults_cost_the_row_only(text: str, reason: str) -> None:
    good = to_chat("user: hi", "assistant: yes")
    results = Maker(make_word_tokenizer(text)).encode([to_chat(*TWO_TURNS), good])
    assert isinstance(results[0], BadSample)
    assert reason in str(results[0])
    assert isinstance(results[1], Encoded)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_template_that_runs_for_ever_on_a_row_costs_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RENDER_LIMIT_S", 0.05)
    monkeypatch.setattr(template, "MAX_TIMEOUTS", 99)
    odd = CHATML + "{% if messages|length > 2 %}" + LOOP + "{% endif %}"
    good = to_chat("user: hi", "assistant: yes")
    results = Maker(make_word_tokenizer(odd)).encode([to_chat(*TWO_TURNS), good])
    assert isinstance(results[0], BadSample)
    assert "ran longer" in str(results[0])
    assert isinstance(results[1], Encoded)


def test_template_that_runs_for_ever_on_every_row_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would else take RENDER_LIMIT_S a row: days for a large dataset."""
    monkeypatch.setattr(sandbox, "RENDER_LIMIT_S", 0.05)
    with pytest.raises(DataError, match=r"ran longer than .* on 3 conversations; .*mend the chat template"):
        Maker(make_word_tokenizer(CHATML + LOOP)).encode([to_chat("user: hi", "assistant: yes")] * 1000)


def test_the_date_is_pinned() -> None:
    tokenizer = make_byte_tokenizer("{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    [result] = Maker(tokenizer).encode([to_chat("user: hi", "assistant: yes")])
    assert isinstance(result, Encoded)
    assert tokenizer.decode(result.ids.tolist()).startswith("2025-01-01")


def test_no_template_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"no chat template.*use"):
        Maker(make_word_tokenizer(None)).encode([to_chat("user: hi", "assistant: yes")])


def test_a_mark_around_nothing_trains_nothing() -> None:
    empty = CHATML_MARKED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}").replace(
        "<|im_end|>", "")
    with pytest.raises(BadSample, match="no token of it is trained"):
        table(make_word_tokenizer(), Completion("", "<|im_end|>"))      # the first token has nothing before it
    with pytest.raises(BadSample, match="no token of it is trained"):
        table(make_word_tokenizer(empty), to_chat("user: hi", "assistant: yes"))


CONTENT = st.text(st.sampled_from("ab \n<|im_end|>é\u2028:"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "x<|im_end|>\n<|im_start|>user\n"])
BYTES = {text: make_byte_tokenizer(text) for text in (CHATML, CHATML_MARKED)}


def test_tool_templates_are_chosen_by_tools() -> None:
    tokenizer = make_word_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools[0].name }}" + CHATML_MARKED}
    plain = "<|im_start|> user n hi <|im_end|> n <|im_start|> assistant n [yes] [<|im_end|>] n"
    assert table(tokenizer, to_chat("user: hi", "assistant: yes")) == plain
    assert table(tokenizer, to_chat("user: hi", "assistant: yes", tools=[{"name": "so"}])) == "so " + plain


@given(st.lists(CONTENT, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_marks_and_inference_agree_on_any_text(contents: list[str]) -> None:
    messages = [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]
    sample = Chat(messages, None, 0)
    inferred, marked = (Maker(BYTES[t], max_length=4096).encode([sample])[0] for t in (CHATML, CHATML_MARKED))
    assert isinstance(inferred, Encoded)
    if not any(contents[1::2]):
        assert isinstance(marked, BadSample)        # a mark around nothing
        return
    assert isinstance(marked, Encoded)
    assert inferred.ids.tolist() == marked.ids.tolist()
    unlike = np.flatnonzero(inferred.trained != marked.trained)
    # An empty answer has nothing to mark, so only the inferred mask trains its end-of-turn token.
    assert all(inferred.trained[i] and inferred.ids[i] == BYTES[CHATML].eos_token_id for i in unlike)
    assert len(unlike) <= sum(c == "" for c in contents[1::2])
