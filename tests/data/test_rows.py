"""Reading files: every line is a row or a reported problem, with its number."""
from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from megatrain.data import rows
from megatrain.data.rows import list_files, read_rows
from megatrain.errors import DataError


def lines(path: Path) -> list[tuple[int, object]]:
    return [(row.line, row.problem if row.value is None else row.value) for row in read_rows(path)]


def test_jsonl_with_everything_that_goes_wrong(tmp_path: Path) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([
        b'{"text": "first"}', b"", '{"text": "a\u2028b\u0085c"}'.encode(), b"{broken", b'{"text": "\xff"}', b"[1, 2]",
        b'"text"', b"3", b"null", b'{"text": "nul\x00raw"}', b'{"text": "nul\\u0000"}', b'{"text": "\\ud800"}',
        b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b"   \t", b'{"text": "last"}']))
    assert lines(path) == [
        (1, {"text": "first"}), (3, {"text": "a\u2028b\u0085c"}), (4, "not JSON"), (5, "not UTF-8"),
        (6, "not a JSON object but list"), (7, "not a JSON object but str"), (8, "not a JSON object but int"),
        (9, "not a JSON object but NoneType"), (10, "not JSON"), (11, {"text": "nul\0"}), (12, {"text": "\ud800"}),
        (13, "not JSON"), (14, "not JSON"), (16, {"text": "last"})]


def test_overlong_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(rows, "PIECE_BYTES", 16)
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "' + "x" * 500 + '"}\n{"text": "y"}\n{"text": "' + "z" * 500 + '"}')
    found = lines(path)
    assert [line for line, _ in found] == [1, 2, 3]
    assert found[1][1] == {"text": "y"}
    assert "line longer than" in found[0][1]
    assert "line longer than" in found[2][1]


@pytest.mark.parametrize("text", ["", "\n", " \r\n\n"])
def test_empty_files_have_no_rows(tmp_path: Path, text: str) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        path = tmp_path / name
        path.write_text(text)
        assert lines(path) == []


def test_json_array_with_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n[\n {"text": "one\\ntwo"},\n\n 7, {"text":\n "b"}\n]\n', encoding="utf-8-sig")
    assert [(row.value, row.problem) for row in read_rows(path)] == [
        ({"text": "one\ntwo"}, None), (None, "not a JSON object but int"), ({"text": "b"}, None)]
    assert lines(path)[0][0] == 2
    assert lines(path)[2][0] == lines(path)[1][0] == 4


def test_rows_of_an_array_that_is_one_line_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, 7, {"text": "b"}]\n')
    assert lines(path) == [(1, {"text": "a"}), (2, "not a JSON object but int"), (3, {"text": "b"})]


@pytest.mark.parametrize("name", ["a.txt", "a.MD", "a.txt.gz"])
def test_a_file_of_plain_text_is_told_how_to_come_in(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("words")
    with pytest.raises(DataError, match=r'one document a line: \{"text"'):
        list_files((tmp_path / name,))


@pytest.mark.parametrize("text", ['[{"text": "a"}', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"},', "[nonsense]"])
def test_broken_json_array_names_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.json line 1: the JSON array breaks off"):
        lines(path)


def test_json_file_with_lines_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert lines(path) == [(1, {"text": "a"}), (2, {"text": "b"})]


def test_gzip_and_its_damage(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "a"}\n' * 3000)
    whole, torn, wrong = (tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz"))
    whole.write_bytes(packed)
    torn.write_bytes(packed[:len(packed) // 2])
    wrong.write_bytes(b"not gzip")
    assert len(lines(whole)) == 3000
    for path in (torn, wrong):
        with pytest.raises(DataError, match="cannot be read"):
            lines(path)


def test_zstd_without_the_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setattr(rows, "zstandard", None)
    with pytest.raises(DataError, match=r"megatrain\[data\]"):
        lines(path)


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "a"}\n'))
    assert lines(path) == [(1, {"text": "a"})]


def test_csv_with_quoted_line_breaks_and_ragged_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"a\nb",c\r\nonly one\r\n\xff,d\r\n')
    assert lines(path) == [(2, {"prompt": "a\nb", "completion": "c"}), (4, "1 cells under a header of 2"),
                           (5, {"prompt": "\udcff", "completion": "d"})]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
@pytest.mark.parametrize(
    ("header", "separator"),
    [
        ("instruction,output", ","),
        ("instruction;output", ";"),
        ("instruction\toutput", "\t"),
        ('"output";"instruction"', ";"),
        ('"one;two;three",output,instruction', ","),            # a separator inside of quotes is none
        ("output,instruction,notes (a;b;c;d)", ","),            # columns that a format asks for decide
        ("instruction;output;notes, if any, on it", ";"),
        ("one;two;three, more", ";"),
        ("text", ","),
        ("text,notes;more", ","),
    ],
)
def test_the_header_shows_what_stands_between_cells(tmp_path: Path, name: str, header: str, separator: str) -> None:
    separator = "\t" if name == "a.tsv" else separator
    names = next(csv.reader([header], delimiter=separator))
    values = [f"{i},;\n\t|" for i in range(len(names))]
    body = io.StringIO(newline="")
    csv.writer(body, delimiter=separator).writerows([values, [*values, "more"], values])
    data = (header + "\n" + body.getvalue()).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [got for _, got in lines(tmp_path / name)] == [
        dict(zip(names, values, strict=True)),
        f"{len(names) + 1} cells under a header of {len(names)}",
        dict(zip(names, values, strict=True)),
    ]


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"row {i}" for i in range(2500)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "c.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    want = [(i + 1, {"text": f"row {i}"}) for i in range(2500)]
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert lines(tmp_path / name) == want
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:500])
    with pytest.raises(DataError, match="not a whole parquet file"):
        lines(tmp_path / "torn.parquet")


def test_parquet_without_the_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"megatrain\[data\]"):
        lines(path)


def test_utf16_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}), encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        lines(path)


def test_list_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "dataset_info.json", "notes.md"):
        (tmp_path / name).write_text("")
    assert list_files((tmp_path,)) == (tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl")
    assert list_files((tmp_path / "b.jsonl", tmp_path / "b.jsonl")) == (tmp_path / "b.jsonl",) * 2
    for path, message in ((tmp_path / "gone.jsonl", "does not exist"), (tmp_path / "notes.md", "no known kind")):
        with pytest.raises(DataError, match=message):
            list_files((path,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data file"):
        list_files((tmp_path / "empty",))
