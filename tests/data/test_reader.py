"""The process that reads and renders: the same rows as without it, and no template can hurt its parent."""
from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import prepare, reader
from megatrain.data.reader import Batch, Request, read_texts, texts_from_process
from megatrain.data.sandbox import TemplateSource, source_of
from megatrain.data.texts import Texts
from megatrain.errors import DataError
from tests.data.tiny_tokenizers import CHATML, chat, make_word_tokenizer

GOOD = chat("user: hi", "assistant: yes")


def request(path: Path, template: str = CHATML, **rest: Any) -> Request:
    source = source_of(make_word_tokenizer(template))
    assert isinstance(source, TemplateSource)
    return Request([str(path)], None, True, ["assistant"], source, **rest)


def in_this_process(asked: Request) -> list[Batch]:
    texts = Texts(asked.template, assistant_only_loss=asked.assistant_only_loss, train_roles=asked.train_roles)
    return list(read_texts(asked, texts))


def reasons(batches: list[Batch]) -> list[str]:
    return [item.text for batch in batches for item in batch.items if isinstance(item.text, str)]


def test_a_process_gives_what_a_call_gives(write_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_ROWS", 3)        # in this process only: the batches differ, the rows do not
    asked = request(write_rows([GOOD, 3, chat("user: é\u2028\0", "assistant: \U0001f600"), {"messages": "x"}] * 5))
    with closing(texts_from_process(asked)) as batches:
        apart = list(batches)
    here = in_this_process(asked)
    assert [item for batch in apart for item in batch.items] == [item for batch in here for item in batch.items]
    assert len(here) == 7
    assert (apart[0].format, apart[0].warnings) == (here[0].format, here[0].warnings) == ("messages", ())


def test_what_is_wrong_with_the_data_is_raised_here(write_rows: Any) -> None:
    for row, message in (({"title": "a\ud800"}, "keys found: title"), ({"chosen": 1, "rejected": 2}, "preference")):
        with pytest.raises(DataError, match=message):
            list(texts_from_process(request(write_rows([row]))))
    with pytest.raises(DataError, match="cannot be read"):
        list(texts_from_process(request(Path("gone.jsonl"))))


def test_a_defect_of_ours_shows_its_traceback(write_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PROGRAM", "from megatrain.data import reader; reader.detect = None; reader.main()")
    with pytest.raises(RuntimeError, match=r"Traceback(.|\n)*TypeError: 'NoneType' object is not callable"):
        list(texts_from_process(request(write_rows([GOOD]))))


@pytest.mark.parametrize(("program", "message"), [
    ("raise SystemExit(3)", r"ended \(exit code 3\)"),
    ("import os; os.kill(os.getpid(), 9)", r"ended \(signal 9\); if memory is short"),
])
def test_a_process_that_dies_is_an_error_at_once(write_rows: Any, monkeypatch: pytest.MonkeyPatch, program: str,
                                                 message: str) -> None:
    monkeypatch.setattr(reader, "PROGRAM", program)
    path = write_rows([GOOD])
    start = time.monotonic()
    with pytest.raises(DataError, match=message):
        list(texts_from_process(request(path)))
    assert time.monotonic() - start < 60


def test_it_is_gone_when_the_iteration_is_left(write_rows: Any) -> None:
    path = write_rows([chat("user: " + "hi " * 999, "assistant: yes")] * 3000)     # more than a pipe holds
    batches = texts_from_process(request(path))
    next(batches)
    pid = batches.gi_frame.f_locals["process"].pid
    os.kill(pid, 0)
    batches.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nothing_in_the_working_folder_is_imported(write_rows: Any, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert len(list(texts_from_process(request(write_rows([GOOD])))))


def test_it_starts_without_what_only_its_parent_needs() -> None:
    program = reader.PROGRAM.replace("\nmain()", "\nprint(*sys.modules)")
    command = [sys.executable, "-P", "-c", program, reader.ROOM, *filter(None, sys.path)]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert "megatrain.data.reader" in loaded
    assert not loaded & {"numpy", "pyarrow", "tokenizers", "transformers", "torch"}


LARGE = [   # each asks for a gigabyte or more, in another way
    "{{ 'x' * 2 ** 31 }}",
    "{% set n = namespace(x='xx') %}{% for _ in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'x'.ljust(3000000000) }}",
    "{% set n = namespace(x=['xx']) %}{% for _ in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ '%3000000000d' % 1 }}",
    "{{ ('ab' * 99999).replace('a', 'b' * 99999) }}",
]


@pytest.mark.parametrize("greed", LARGE)
def test_a_template_that_takes_memory_costs_its_row(write_rows: Any, greed: str) -> None:
    greedy = CHATML + "{% if messages|length > 2 %}" + greed + "{% endif %}"
    asked = request(write_rows([GOOD, chat("user: hi", "assistant: yes", "user: hi", "assistant: yes"), GOOD]), greedy)
    batches = list(texts_from_process(asked))
    assert reasons(batches) == ["the chat template asks for more than 1 GiB"]
    assert [item.line for batch in batches for item in batch.items] == [1, 2, 3]


def test_a_template_that_writes_without_end_costs_its_row(write_rows: Any) -> None:
    endless = CHATML + "{% if messages|length > 2 %}{% for _ in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endif %}"
    asked = request(write_rows([GOOD, chat("user: hi", "assistant: yes", "user: hi", "assistant: yes")]), endless)
    [reason] = reasons(list(texts_from_process(asked)))
    assert "makes more than 1050880 characters of 36" in reason


def test_a_template_that_cannot_be_interrupted_ends_the_run(write_rows: Any) -> None:
    """One multiplication of huge numbers: no Python code runs in between, so no alarm is heard."""
    stuck = CHATML + "{% if messages|length > 2 %}{{ 3 ** (10 ** 8) }}{% endif %}"
    asked = request(write_rows([GOOD, chat("user: hi", "assistant: yes", "user: hi", "assistant: yes")]), stuck,
                    hard_limit_s=0.5)
    with pytest.raises(DataError, match="could not be interrupted; mend the template"):
        list(texts_from_process(asked))


@pytest.mark.slow
def test_lines_of_200_megabytes(tmp_path: Path, options: Any) -> None:
    """A conversation, and nothing at all: memory for some copies of one line, and both are accounted for."""
    path = tmp_path / "rows.jsonl"
    size = 200 << 20
    good = json.dumps(GOOD).encode()
    with open(path, "wb") as file:
        file.write(good + b"\n" + good.replace(b'"hi"', b'"' + b"hi " * (size // 3) + b'"') + b"\n")
        file.write(b'{"messages": "' + b"x" * size + b"\n" + good + b"\n")
    dataset = prepare(options(path), make_word_tokenizer())
    assert [dataset.source(i)[1] for i in range(dataset.num_samples)] == [1, 4]
    assert [(bad.line, bad.reason) for bad in dataset.report.bad_rows] == [
        (2, "all trained tokens lie beyond max_length"), (3, "not JSON")]
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    assert peak_bytes < 12 * size
