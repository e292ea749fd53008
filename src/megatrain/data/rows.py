"""Files to rows: one object at a time, each with the line it came from; a line that cannot be read is a row too."""
from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.data.options import KEYS
from megatrain.errors import DataError

try:
    import zstandard
except ImportError:
    zstandard = None

MAX_LINE_BYTES = 512 << 20      # a longer line is passed over in pieces, never held
PIECE_BYTES = 1 << 20
ARROW_BATCH_ROWS = 1024
KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}
COLUMNS = frozenset().union(*KEYS.values())
NOT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")     # bookkeeping beside saved Arrow folders
BLANK = b" \t\r\n"


class Row(NamedTuple):
    """One row of a file. Exactly one of `value` (a JSON object) and `problem` (why it is none) is given."""
    file: str
    line: int
    value: dict[str, Any] | None
    problem: str | None


def list_files(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The data files behind the given paths, in order; a folder stands for its data files sorted by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.is_file() and _kind(p) and p.name not in NOT_DATA)
            if not inside:
                raise DataError(f"dataset folder {path} holds no data file; accepted are {_accepted()}")
            files += inside
        elif path.is_file():
            if not _kind(path):
                raise DataError(f"dataset {path} is of no known kind; accepted are {_accepted()}{_instead_of(path)}")
            files.append(path)
        else:
            raise DataError(f"dataset {path} does not exist; give the path of a local file or folder, or "
                            "a name on the hub (ORG/NAME)")
    return tuple(files)


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of one file in order, streaming; blank lines of JSONL are no rows."""
    kind = _kind(path)
    try:
        if kind in (".parquet", ".arrow"):
            yield from _read_arrow(path, kind)
            return
        with _open(path) as stream:
            _refuse_utf16(path, stream)
            if kind in SEPARATORS:
                yield from _read_csv(path, stream, SEPARATORS[kind])
            elif kind == ".json" and _first_byte(stream) == b"[":
                yield from _read_array(path, stream)
            else:
                yield from _read_lines(path, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"dataset {path} cannot be read ({error}); check that it is complete and readable") from error


def _accepted() -> str:
    return ", ".join(KINDS) + ", the text kinds also as .gz or .zst"


def _instead_of(path: Path) -> str:
    """What to do with a kind of file that people have and that is none of ours."""
    if {suffix.lower() for suffix in path.suffixes} & {".txt", ".md"}:
        return '; write plain text as JSONL, one document a line: {"text": "..."}'
    return ""


def _kind(path: Path) -> str | None:
    suffixes = [s.lower() for s in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in (".gz", ".zst")
    kind = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    if kind not in KINDS or (packed and kind in (".parquet", ".arrow")):
        return None
    return kind


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """A buffered byte stream with `peek`, decompressed, with a UTF-8 byte order mark taken off."""
    suffix = path.suffix.lower()
    if suffix == ".zst" and zstandard is None:
        raise DataError(f"dataset {path} is zstd-compressed; install the extra: pip install 'megatrain[data]'")
    opener = {".gz": gzip.open, ".zst": zstandard.open if zstandard else open}.get(suffix, open)
    with opener(path, "rb") as raw:
        stream = io.BufferedReader(raw, PIECE_BYTES)
        if stream.peek(3)[:3] == b"\xef\xbb\xbf":
            stream.read(3)
        yield stream


def _refuse_utf16(path: Path, stream: io.BufferedReader) -> None:
    if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"dataset {path} is UTF-16 text; convert it to UTF-8")


def _first_byte(stream: io.BufferedReader) -> bytes:
    """The first byte that is no blank; blanks before it are consumed."""
    while (head := stream.peek(1)[:1]) and head in BLANK:
        stream.read(1)
    return head


def _read_lines(path: Path, stream: io.BufferedReader) -> Iterator[Row]:
    """JSONL. Only LF ends a line: U+2028 and its kin inside a string are text."""
    line = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        line += 1
        if len(raw) > MAX_LINE_BYTES:
            while not raw.endswith(b"\n") and (raw := stream.readline(PIECE_BYTES)):
                pass
            yield Row(str(path), line, None, f"line longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        raw = raw.strip(BLANK)
        if raw:
            yield _parse(path, line, raw)


def _parse(path: Path, line: int, raw: bytes) -> Row:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return Row(str(path), line, None, "not UTF-8")
    except (ValueError, RecursionError):
        return Row(str(path), line, None, "not JSON")
    return _object_row(path, line, value)


def _object_row(path: Path, line: int, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(str(path), line, None, f"not a JSON object but {type(value).__name__}")
    return Row(str(path), line, value, None)


def _read_array(path: Path, stream: io.BufferedReader) -> Iterator[Row]:
    """One JSON array of objects; the text is held whole, the objects one at a time."""
    try:
        text = stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"dataset {path} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
    decoder = json.JSONDecoder()
    one_line = "\n" not in text.strip()     # then a line says nothing, and rows are counted in its place
    at, counted, number = 1, 0, 0 if one_line else 1
    while True:
        at = _skip(text, at, " \t\r\n")
        if text[at:at + 1] == "]":
            return
        number += 1 if one_line else text.count("\n", counted, at)
        counted = at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _broken_array(path, text[:at], f" ({error})") from error
        yield _object_row(path, number, value)
        at = _skip(text, at, " \t\r\n")
        if text[at:at + 1] == ",":
            at += 1
        elif text[at:at + 1] != "]":
            raise _broken_array(path, text[:at], " after this row")


def _broken_array(path: Path, whole: str, how: str) -> DataError:
    line = 1 + whole.count("\n")
    return DataError(f"dataset {path} line {line}: the JSON array breaks off{how}; repair it, or use JSONL, where one "
                     "bad row costs one row")


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _read_csv(path: Path, stream: io.BufferedReader, separators: str) -> Iterator[Row]:
    """CSV with a header line; bytes that are not UTF-8 become lone surrogates, which the formats refuse by row."""
    csv.field_size_limit(MAX_LINE_BYTES)
    header: list[str] | None = None
    start = 1
    with io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="") as text:
        try:
            first = text.readline()
            reader = csv.reader(chain([first], text), delimiter=_separator(first, separators))
            for cells in reader:
                if header is None:
                    header = cells
                elif cells and len(cells) != len(header):
                    yield Row(str(path), start, None, f"{len(cells)} cells under a header of {len(header)}")
                elif cells:
                    yield Row(str(path), start, dict(zip(header, cells, strict=True)), None)
                start = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"dataset {path} line {start}: not CSV ({error}); repair the line") from error


def _separator(header: str, separators: str) -> str:
    """The one between whose cells are most columns that a format asks for, else most cells at all: spreadsheets of
    much of Europe write semicolons. csv.Sniffer goes by letters that repeat, and takes one cell for two."""

    def cells(separator: str) -> tuple[int, int]:
        found = next(csv.reader([header], delimiter=separator), [])
        return len(COLUMNS.intersection(found)), len(found)

    return max(separators, key=cells)


def _read_arrow(path: Path, kind: str) -> Iterator[Row]:
    try:    # here and not above: with numpy, which it loads, it takes twice the time that all else takes to start
        pyarrow, ipc, parquet = map(import_module, ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))
    except ImportError:
        raise DataError(f"dataset {path} needs pyarrow; install the extra: pip install 'megatrain[data]'") from None
    number = 0
    try:
        batches = _parquet_batches(path, parquet) if kind == ".parquet" else _arrow_batches(path, pyarrow, ipc)
        for batch in batches:
            for value in batch.to_pylist():
                number += 1
                yield _object_row(path, number, value)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"dataset {path} is not a whole {kind[1:]} file ({error}); write it again") from error


def _parquet_batches(path: Path, parquet: Any) -> Iterator[Any]:
    with parquet.ParquetFile(path) as table:
        yield from table.iter_batches(batch_size=ARROW_BATCH_ROWS)


def _arrow_batches(path: Path, pyarrow: Any, ipc: Any) -> Iterator[Any]:
    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            reader = ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(ipc.open_stream(source))
        for batch in batches:
            for start in range(0, batch.num_rows, ARROW_BATCH_ROWS):
                yield batch.slice(start, ARROW_BATCH_ROWS)
