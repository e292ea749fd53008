"""`megatrain chat`: talk to a run's checkpoint or to a model folder. Layers stay resident or stream; same words."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from megatrain.checkpoint import read_buffers
from megatrain.cli.assemble import Planned
from megatrain.cli.opened import Source, filled_store, planned_to_read, sources_of
from megatrain.cli.pointed import on_cpu
from megatrain.cli.prompts import piped_lines, refuse_no_text, typed_lines, whole_input
from megatrain.config import RunConfig
from megatrain.data.formats import BadSample
from megatrain.data.sandbox import source_of
from megatrain.data.template import ChatTemplate
from megatrain.engine.lend import Lender
from megatrain.errors import DataError
from megatrain.models.generate import GenerativeModel, Sampling
from megatrain.models.hf_folder import read_tokenizer
from megatrain.planner.table import gib
from megatrain.store import SegmentStore

WHOLE_INPUT = "-"  # as a prompt: all of standard input
HELP = "an empty line is ignored; /new starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer"
CACHE_TOKENS = 8192  # of a long conversation: HBM for their keys and values is not filled with blocks
PASS_TOKENS = 512  # what the planner counts the working memory of a pass with
Messages = list[dict[str, str]]


class Writer:
    """Turns tokens into text as they come; a character that is not whole yet waits. Control characters stay out.

    (A model can write anything, and a terminal obeys escape sequences.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, hidden: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._out = out
        self._hidden = frozenset(hidden)
        self.ids: list[int] = []
        self._shown: list[int] = []
        self._start = self._end = 0  # tokens [start, end) are shown, and give the text before those after end
        self.text = ""
        self.stopped = False
        self.first_s = self.last_s = 0.0

    def put(self, token: int) -> None:
        """One more token; a stop token is counted, not shown."""
        self.last_s = time.perf_counter()
        if not self.ids:
            self.first_s = self.last_s
        self.ids.append(token)
        if token in self._hidden:
            return
        self._shown.append(token)
        before = self._decoded(self._start, self._end)
        after = self._decoded(self._start, len(self._shown))
        if len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}"):
            self._write(after[len(before) :])
            self._start, self._end = self._end, len(self._shown)

    def finish(self) -> None:
        """Show what still waits."""
        rest = self._decoded(self._start, len(self._shown))[len(self._decoded(self._start, self._end)) :]
        self._write(rest)

    def _decoded(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._shown[start:end], skip_special_tokens=True)
        assert isinstance(text, str), "one row of tokens is one text"
        return text

    def _write(self, piece: str) -> None:
        self.text += piece
        self._out.write("".join(c for c in piece if c in "\n\t" or not ("\0" <= c < " " or "\x7f" <= c < "\xa0")))
        self._out.flush()


@dataclass
class Talker:
    """A model with its tokenizer, ready to answer."""

    run: Planned
    tokenizer: PreTrainedTokenizerBase
    store: SegmentStore
    lender: Lender
    model: GenerativeModel
    template: ChatTemplate | None  # None: raw text goes in
    link_Bps: float | None = field(default=None)  # bytes a second

    @property
    def stop_ids(self) -> list[int]:
        return self.model.stop_ids(self.template.end_ids if self.template is not None else ())

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Tokens of a conversation up to the opening of the next answer; of the text itself without a template."""
        if self.template is None:
            return self.tokenizer.encode(messages[-1]["content"])
        try:
            text = self.template.render(messages, None, prompt=True)
        except BadSample as error:
            raise DataError(f"this conversation cannot be rendered: {error}") from None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, messages: Messages, sampling: Sampling, out: TextIO) -> Writer:
        """Write the answer to `out` while it is made. Ctrl-C ends it where it is."""
        prompt = self.prompt_ids(messages)
        room = self.run.spec.max_positions - len(prompt)
        if not prompt:
            raise DataError("the prompt is empty; write something")
        if room < 1:
            raise DataError(
                f"the conversation is {len(prompt)} tokens long, the model knows {self.run.spec.max_positions} "
                "positions; start again with a shorter one"
            )
        writer = Writer(self.tokenizer, out, self.stop_ids)
        try:
            limit = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            self.model.generate(prompt, limit, writer.put, self.stop_ids)
        except KeyboardInterrupt:
            writer.stopped = True
        writer.finish()
        out.write("\n")
        return writer

    def speed(self, writer: Writer, started_s: float) -> str:
        """Tokens a second, and what the link allows where layers stream."""
        count = len(writer.ids)
        if not count:
            return "[no token]"
        parts = [f"{count} tokens, first after {writer.first_s - started_s:.2f} s"]
        if count > 1 and writer.last_s > writer.first_s:
            parts.append(f"then {(count - 1) / (writer.last_s - writer.first_s):.1f} tokens/s")
        if self.link_Bps is not None and self.lender.streamed_bytes:
            bound = self.link_Bps / self.lender.streamed_bytes
            size, rate = gib(self.lender.streamed_bytes), self.link_Bps / 1e9
            parts.append(f"link bound {bound:.1f} tokens/s ({size} a token at {rate:.0f} GB/s)")
        return f"[{'; '.join(parts)}]"

    def close(self) -> None:
        """Give the weights' memory back."""
        self.store.close()


def talker_of(config: RunConfig, source: Source, *, raw: bool, through_slots: bool | None = None) -> Talker:
    """Load `source`. The planner keeps in HBM what fits; the rest streams, layer by layer, for every token."""
    run = planned_to_read(_config_to_write(config), source.folder, cache_tokens=CACHE_TOKENS)
    tokenizer = read_tokenizer(run.source)
    template = None if raw else _template_of(tokenizer, source.folder)
    store = filled_store(run)
    lender = Lender(
        store, run.plan, run.device, through_slots=run.device.type == "cuda" if through_slots is None else through_slots
    )
    model = GenerativeModel(
        run.hf_config,
        source.folder,
        store.dtype("w"),
        run.device,
        lender.outer(),
        {name: value for name, (_, value) in read_buffers(source.folder, run.spec).items()},
        lender.block,
        allow_unproven=config.allow_unproven,
    )
    return Talker(run, tokenizer, store, lender, model, template, lender.link_Bps())


def _config_to_write(config: RunConfig) -> RunConfig:
    """One row of few tokens a pass; on the device there is, which need not be the one the run was trained on."""
    if config.device == "cuda" and not torch.cuda.is_available():
        config = on_cpu(config)
    changes = {
        "compile": False,
        "max_length": 8,
        "train_batch_size": 1,
        "micro_batch_tokens": PASS_TOKENS,
        "loss_chunk_tokens": PASS_TOKENS,
        "round_micro_batches": 1,
    }
    return config.model_copy(update=changes)


def _template_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatTemplate:
    source = source_of(tokenizer)
    if source is None:
        raise DataError(f"{folder} has no chat template: it continues text; use --raw")
    return ChatTemplate(source)


def chat(
    path: Path,
    config: RunConfig,
    step: str,
    prompt: str | None,
    system: str | None,
    sampling: Sampling,
    *,
    raw: bool,
) -> int:
    """One answer to `prompt` ("-": to all of standard input), or a conversation, a line a turn: typed or piped."""
    if prompt == WHOLE_INPUT:
        prompt = whole_input()
    for text in filter(None, (prompt, system)):
        refuse_no_text(text)
    (source,) = sources_of(path, [step])
    talker = talker_of(config, source, raw=raw)
    before: Messages = [] if system is None else [{"role": "system", "content": system}]
    stopped = False
    if prompt is not None:
        stopped = _turn(talker, [*before, {"role": "user", "content": prompt}], sampling).stopped
    elif sys.stdin.isatty():
        print(f"{source.label} of {path}; {HELP}", file=sys.stderr)
        _converse(talker, before, sampling, typed_lines(), typed=True)
    else:
        stopped = _converse(talker, before, sampling, piped_lines(), typed=False)
    talker.close()
    return 128 + signal.SIGINT if stopped else 0


def _turn(talker: Talker, messages: Messages, sampling: Sampling) -> Writer:
    started_s = time.perf_counter()
    writer = talker.answer(messages, sampling, sys.stdout)
    print(talker.speed(writer, started_s), file=sys.stderr, flush=True)
    return writer


def _converse(talker: Talker, before: Messages, sampling: Sampling, lines: Iterable[str], *, typed: bool) -> bool:
    """A turn for every line until they end; whether Ctrl-C ended them. Each reads the conversation again: one pass.

    Whoever types sees an answer stop, or a prompt refused, and goes on; a script must not take either for success.
    """
    messages, asked_any = list(before), False
    for line in lines:
        if line == "/exit":
            break
        if line == "/new":
            messages = list(before)
        if line in ("", "/new"):
            continue
        asked, asked_any = [*messages, {"role": "user", "content": line}], True
        try:
            writer = _turn(talker, asked, sampling)
        except DataError as error:
            if not typed:
                raise DataError(f"{error} (after a line with /new)") from error
            print(f"megatrain: {error} (/new)", file=sys.stderr)
            continue
        if writer.stopped and not typed:
            return True
        messages = [*asked, {"role": "assistant", "content": writer.text}]
    if not typed and not asked_any:
        raise DataError("standard input holds no prompt; give one a line, or --prompt TEXT")
    return False
