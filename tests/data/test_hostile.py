"""Files as they come: whatever is in them, every row is either trained on, whole, or reported with its line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatrain.data import DataOptions, TokenDataset, prepare
from megatrain.errors import DataError
from tests.data.tiny_tokenizers import make_byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_process")
Options = Callable[..., DataOptions]
TEXTS = {   # what must come through unchanged
    "plain": "yes", "CRLF": "a\r\nb\rc", "separators": "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg", "NUL": "a\0b",
    "BOM": "\ufeffa", "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "right to left": "שלום\u202e", "noncharacter": "\ufffe\U0010ffff", "combining": "e\u0301\u0301",
    "quotes": '"\\/",\'\t', "other": "\ufffd",
}
MAKE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "messages": lambda text: {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]},
    "sharegpt": lambda text: {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": text}]},
    "alpaca": lambda text: {"instruction": "q", "output": text},
    "prompt_completion": lambda text: {"prompt": "q", "completion": text},
    "text": lambda text: {"text": text},
}
WRONG: dict[str, list[Any]] = {     # rows that are JSON and no row of the format
    "messages": [{"messages": None}, {"messages": 3}, {"messages": []}, {"messages": ["q"]},
                 {"messages": [{"role": 1}]}, {"messages": [{"role": "user", "content": "q"}]},
                 {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 5}]},
                 {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
                 {"messages": [{"role": "user", "content": "q"},
                               {"role": "assistant", "content": "a", "train": False}]}],
    "sharegpt": [{"conversations": {}}, {"conversations": [[]]}, {"conversations": [{"from": "dog", "value": "woof"}]},
                 {"conversations": [{"from": "human"}]}, {"conversations": [{"from": "human", "value": "q"}]}],
    "alpaca": [{"instruction": "q"}, {"instruction": "q", "output": None}, {"instruction": 1, "output": "a"},
               {"instruction": "q", "output": "a", "history": [["only one"]]}],
    "prompt_completion": [{"prompt": "q"}, {"prompt": "q", "completion": ""}, {"prompt": ["q"], "completion": "a"},
                          {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "tool"}]}],
    "text": [{"text": ""}, {"text": None}, {"text": ["a"]}, {}, {"text": {"a": 1}}],
}
LINES = [   # lines of JSONL that are no JSON object
    b"{broken", b"[]", b"3", b'"text"', b"null", b"{}}", b"\xff\xfe{}", b'{"text": "\xc3("}', b"[" * 100_000,
    b'{"n": ' + b"9" * 5000 + b"}", b'{"text": "a', "\ufeff{}".encode(), b"\0", b'{"a": 1} {"b": 2}', b"NaN",
]


def prepared(options: Options, path: Path, row_format: str, **rest: Any) -> TokenDataset:
    return prepare(options(path, format=row_format, max_length=4096, **rest), make_byte_tokenizer())


def check(dataset: TokenDataset, texts: dict[int, str], bad_lines: list[int]) -> None:
    """`texts`: the answer of every good row by its line; every other line is reported."""
    report = dataset.report
    assert report.rows_in == len(texts) + len(bad_lines) == report.rows_out + sum(report.reasons.values())
    assert [bad.line for bad in report.bad_rows] == bad_lines
    assert all(bad.reason for bad in report.bad_rows)
    assert report.rows_out == dataset.num_samples == len(texts)
    tokenizer = make_byte_tokenizer()
    for sample, (line, text) in enumerate(texts.items()):
        start, stop = int(dataset.offsets[sample]), int(dataset.offsets[sample + 1])
        ids, trained = dataset.tokens[start:stop], dataset.trained(start, stop)
        assert dataset.source(sample)[1] == line
        assert tokenizer.decode(ids[trained].tolist()) == f"{text}<|im_end|>"


@pytest.mark.parametrize("row_format", MAKE)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_lines(tmp_path: Path, options: Options, row_format: str, ending: bytes) -> None:
    """Good, bad and worse lines in turn, with blank ones, a BOM in front and no line end behind."""
    answers = list(TEXTS.values())
    good = [json.dumps(MAKE[row_format](text), ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(answers)]
    surrogate = [json.dumps(MAKE[row_format](text)).encode() for text in ("\ud800", "a\udc00b")]
    bad = [*(json.dumps(row).encode() for row in WRONG[row_format]), *LINES, *surrogate]
    lines, texts, bad_lines = [], {}, []
    for i in range(max(len(good), len(bad))):
        if i < len(good):
            lines.append(good[i])
            texts[len(lines)] = answers[i]
        lines.append(b" \t" if i % 2 else b"")
        if i < len(bad):
            lines.append(bad[i])
            bad_lines.append(len(lines))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + ending.join(lines))
    check(prepared(options, path, row_format), texts, bad_lines)


def as_array(path: Path, rows: list[Any]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]", encoding="utf-8-sig")


def as_lines(pack: Callable[[bytes], bytes]) -> Callable[[Path, list[Any]], None]:
    return lambda path, rows: path.write_bytes(pack("".join(json.dumps(row) + "\n" for row in rows).encode())) and None


@pytest.mark.parametrize("row_format", MAKE)
@pytest.mark.parametrize(("name", "write", "first_line"), [
    ("rows.json", as_array, 2), ("rows.ndjson", as_lines(bytes), 1), ("rows.jsonl.gz", as_lines(gzip.compress), 1),
    ("rows.jsonl.zst", as_lines(zstandard.ZstdCompressor().compress), 1)], ids=["array", "lines", "gzip", "zstd"])
def test_json_of_every_kind(tmp_path: Path, options: Options, row_format: str, name: str,
                            write: Callable[[Path, list[Any]], None], first_line: int) -> None:
    rows = [*(MAKE[row_format](text) for text in TEXTS.values()), *WRONG[row_format], 3, None, "x", [], True]
    write(tmp_path / name, rows)
    texts = {i + first_line: text for i, text in enumerate(TEXTS.values())}
    bad_lines = list(range(first_line + len(texts), first_line + len(rows)))
    check(prepared(options, tmp_path / name, row_format), texts, bad_lines)


def flat(row: dict[str, Any]) -> dict[str, str | None]:
    """A row as tables hold it: lists as JSON text."""
    return {key: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
            for key, value in row.items()}


@pytest.mark.parametrize("row_format", MAKE)
@pytest.mark.parametrize(("name", "separator"), [("rows.csv", ","), ("rows.csv", ";"), ("rows.tsv", "\t")])
def test_csv(tmp_path: Path, options: Options, row_format: str, name: str, separator: str) -> None:
    rows = [flat(MAKE[row_format](text)) for text in TEXTS.values()]
    if len(rows[0]) == 1 and name == "rows.csv":
        separator = ","     # a header of one column shows none
    path = tmp_path / name
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    good = path.read_bytes()
    broken = [b'"", "",""\r\n', b"\xff" + b",\xff" * (len(rows[0]) - 1) + b"\r\n", b"," * len(rows[0]) + b"\r\n"]
    path.write_bytes(good + b"".join(broken).replace(b",", separator.encode()))
    dataset = prepared(options, path, row_format)
    lines = [dataset.source(i)[1] for i in range(dataset.num_samples)]
    bad_lines = [bad.line for bad in dataset.report.bad_rows]
    check(dataset, dict(zip(lines, TEXTS.values(), strict=True)), bad_lines)
    assert len(bad_lines) == len(broken)
    assert lines == sorted(lines)
    assert bad_lines[0] > lines[-1]


@pytest.mark.parametrize("row_format", MAKE)
@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "file.arrow"])
def test_tables(tmp_path: Path, options: Options, row_format: str, kind: str) -> None:
    """Columns have one type, so what is wrong in them is null or empty; the lists are real ones."""
    rows = [MAKE[row_format](text) for text in TEXTS.values()]
    nothing = dict.fromkeys(rows[0])
    table = pyarrow.Table.from_pylist([*rows[:3], nothing, *rows[3:], nothing])
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4)
    else:
        make = pyarrow.ipc.new_stream if kind.startswith("stream") else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as out:
            out.write_table(table, max_chunksize=4)
    lines = [i for i in range(1, len(rows) + 3) if i not in (4, len(rows) + 2)]
    check(prepared(options, path, row_format), dict(zip(lines, TEXTS.values(), strict=True)), [4, len(rows) + 2])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz", "rows.parquet", "rows.arrow"])
def test_files_without_a_row(tmp_path: Path, options: Options, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(DataError, match=r"is empty: it holds no row|is not a whole \w+ file"):
        prepared(options, path, "text")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_text_in_another_encoding(tmp_path: Path, options: Options, name: str, encoding: str) -> None:
    """With a byte order mark it is named; without one nothing is trained on by mistake."""
    path = tmp_path / name
    path.write_text('{"text": "a"}\n{"text": "b"}\n', encoding=encoding)
    with pytest.raises(DataError, match=r"UTF-16|none of its .* rows|is not UTF-8|breaks off|not CSV") as refusal:
        prepared(options, path, "text")
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("row_format", MAKE)
def test_one_row_is_enough_and_one_bad_row_is_not(tmp_path: Path, options: Options, row_format: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(MAKE[row_format]("yes")))
    check(prepared(options, path, row_format), {1: "yes"}, [])
    path.write_text(json.dumps(WRONG[row_format][0]))
    with pytest.raises(DataError, match="none of its 1 rows can be trained on"):
        prepared(options, path, row_format)


def test_rows_without_a_trained_token_are_reported_and_alone_are_refused(tmp_path: Path, options: Options) -> None:
    masked = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (masked, MAKE["messages"]("yes"), masked)))
    check(prepared(options, path, "messages"), {2: "yes"}, [1, 3])
    path.write_text("\n".join([json.dumps(masked)] * 2))
    with pytest.raises(DataError, match="2 × no token of it is trained"):
        prepared(options, path, "messages")
