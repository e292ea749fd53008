"""A process of its own that reads files and makes texts of their rows, while its parent tokenises those before.

It is there for two reasons: Python's part of the work costs about half as much as the tokenizer's and runs beside it,
and a chat template, which is anyone's program, can be limited in memory there and killed without harm. It is started as
a program, not forked, and loads neither torch nor transformers, nor numpy: a short data set waits for its start.

Frames on its standard output: JSON, then the texts of a batch one behind another, each after eight bytes of its length.
"""
from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatrain.data.formats import BadSample, Sample, detect, to_sample
from megatrain.data.options import Format
from megatrain.data.rows import Row, read_rows
from megatrain.data.sandbox import RENDER_LIMIT_S, TemplateSource, num_chars_in
from megatrain.data.texts import Text, Texts
from megatrain.errors import DataError

BATCH_ROWS = 512
BATCH_CHARS = 2 << 20           # of text handed to the tokenizer at once
GARBAGE_AFTER = 50_000          # new objects, a few batches: Python's own 700 cost a tenth of the reading
Frame = tuple[dict[str, Any], str]
ROOM = str(Path(__file__).parent)
# The room is entered without its __init__, which loads what the parent needs, numpy above all: 0.2 s for nothing here.
PROGRAM = """
import sys, types
sys.path[:] = sys.argv[2:]
room = sys.modules["megatrain.data"] = types.ModuleType("megatrain.data")
room.__path__ = [sys.argv[1]]
from megatrain.data.reader import main
main()
"""


@dataclass(frozen=True)
class Request:
    """What is to be read and how. `format=None`: read it from the rows."""
    files: Sequence[str]
    format: Format | None
    assistant_only_loss: bool
    train_roles: Sequence[str]
    template: TemplateSource | None
    hard_limit_s: float = 2 * RENDER_LIMIT_S    # of processor time for one row: then the kernel ends the process


class Item(NamedTuple):
    """A row: the index of its file, its line, and its text or why it has none."""
    file: int
    line: int
    text: Text | str


class Batch(NamedTuple):
    """Rows that were read together. `format` is None as long as no row could be read at all."""
    format: Format | None
    items: list[Item]
    warnings: tuple[str, ...]


def read_texts(request: Request, texts: Texts) -> Iterator[Batch]:
    """All rows of the files in order, each as an item. Raises DataError where nothing more can be read."""
    row_format = request.format
    indices = {file: i for i, file in enumerate(request.files)}
    for rows in _batches(request.files):
        row_format = row_format or detect(rows)
        items = [Item(indices[row.file], row.line, _text_of(row, row_format, texts)) for row in rows]
        yield Batch(row_format, items, texts.warnings())


def _batches(files: Sequence[str]) -> Iterator[list[Row]]:
    """Rows in groups of bounded text."""
    batch: list[Row] = []
    num_chars = 0
    for file in files:
        for row in read_rows(Path(file)):
            batch.append(row)
            num_chars += num_chars_in(row.value)
            if len(batch) >= BATCH_ROWS or num_chars >= BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def _text_of(row: Row, row_format: Format | None, texts: Texts) -> Text | str:
    if row.value is None:
        assert row.problem is not None
        return row.problem
    assert row_format is not None, "a readable row has been seen, so the format is known"
    try:
        return texts.of(to_sample(row.value, row_format))
    except BadSample as bad:
        return str(bad)


def texts_from_process(request: Request) -> Generator[Batch, None, None]:
    """`read_texts` in a process of its own; it is gone when the iteration ends, however it ends."""
    # It finds modules where this process does, and nowhere else: -P keeps out what lies in the working folder.
    command = [sys.executable, "-P", "-c", PROGRAM, ROOM, *filter(None, sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, (asdict(request), ""))
        while (frame := _receive(process.stdout)) is not None:
            fields, texts = frame
            if "error" in fields:
                raise DataError(fields["error"])
            if "failure" in fields:
                raise RuntimeError(f"the process that reads the data failed:\n{fields['failure']}")
            if fields.get("end"):
                return
            yield _batch_of(fields, texts)
        raise _death(process.wait(), request)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _death(code: int, request: Request) -> DataError:
    """Why the process may have ended without a word."""
    if code == -signal.SIGPROF:
        return DataError(f"the chat template of the tokenizer did not stop within {request.hard_limit_s:.0f} s of "
                         "processor time on one conversation, and could not be interrupted; mend the template")
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return DataError(f"the process that reads {', '.join(request.files)} ended ({what}); if memory is short, close "
                     "other programs, or cut very long rows")


class _MortalTexts(Texts):
    """A row that takes too long, and cannot be interrupted (one huge multiplication is enough), ends the process."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.template, assistant_only_loss=request.assistant_only_loss,
                         train_roles=request.train_roles)
        self._limit_s = request.hard_limit_s

    def of(self, sample: Sample) -> Text:
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        try:
            return super().of(sample)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    """The program of the process: a request from standard input, batches to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's: it ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    gc.freeze()                                         # nothing loaded so far is garbage: do not look again and again…
    gc.set_threshold(GARBAGE_AFTER)                     # …nor at the rows of a batch, many times over
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                       # what anything prints is no frame
    frame = _receive(sys.stdin.buffer)
    assert frame is not None, "the parent sends a request first"
    fields = frame[0]
    template = fields.pop("template")
    request = Request(**fields, template=None if template is None else TemplateSource(**template))
    try:
        for frame in _frames(request):
            _send(out, frame)
    except BrokenPipeError:
        os._exit(1)         # the parent is gone: nobody to tell


def _frames(request: Request) -> Iterator[Frame]:
    try:
        for batch in read_texts(request, _MortalTexts(request)):
            yield _frame_of(batch)
        yield {"end": True}, ""
    except DataError as error:
        yield {"error": str(error)}, ""
    except Exception:  # noqa: BLE001 - told to the parent with its traceback, and raised there
        yield {"failure": traceback.format_exc()}, ""


def _frame_of(batch: Batch) -> Frame:
    """Texts stand outside of the JSON, which would go over each of their characters."""
    texts = [text.text for _, _, text in batch.items if isinstance(text, Text)]
    items = [(file, line, text if isinstance(text, str) else (text.kind, len(text.text), text.edges))
             for file, line, text in batch.items]
    return {"format": batch.format, "items": items, "warnings": batch.warnings}, "".join(texts)


def _batch_of(fields: dict[str, Any], texts: str) -> Batch:
    items: list[Item] = []
    at = 0
    for file, line, text in fields["items"]:
        if not isinstance(text, str):
            kind, num_chars, edges = text
            text = Text(kind, texts[at:at + num_chars], edges)
            at += num_chars
        items.append(Item(file, line, text))
    return Batch(fields["format"], items, tuple(fields["warnings"]))


def _send(stream: IO[bytes], frame: Frame) -> None:
    fields, texts = frame
    for part in (json.dumps(fields, ensure_ascii=False), texts):
        data = part.encode("utf-8", "surrogatepass")
        stream.write(len(data).to_bytes(8, "little"))
        stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Frame | None:
    """The next frame; None where the stream ends."""
    parts = []
    for _ in range(2):
        head = stream.read(8)
        size = int.from_bytes(head, "little")
        data = stream.read(size)
        if len(head) < 8 or len(data) < size:
            return None
        parts.append(data.decode("utf-8", "surrogatepass"))
    return json.loads(parts[0]), parts[1]
