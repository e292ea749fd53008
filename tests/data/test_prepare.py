"""From files to a token dataset: every row accounted for, found again by content, never half-written."""
from __future__ import annotations

import gc
import json
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megatrain.data import BadRow, DataOptions, TokenDataset, prepare, preview
from megatrain.data.prepare import cache_key
from megatrain.data.rows import list_files
from megatrain.errors import ConfigError, DataError
from tests.data.tiny_tokenizers import CHATML_MARKED, chat, make_byte_tokenizer, make_word_tokenizer

prepare_module = import_module("megatrain.data.prepare")     # the package exports the function of that name
Write = Callable[..., Path]
Options = Callable[..., DataOptions]
GOOD = chat("user: hi", "assistant: yes")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_word_tokenizer()


def samples(dataset: TokenDataset) -> list[tuple[list[int], list[bool]]]:
    bounds = dataset.offsets.tolist()
    return [(dataset.tokens[a:b].tolist(), dataset.trained(a, b).tolist())
            for a, b in pairwise(bounds)]


def test_hostile_corpus_is_accounted_for_row_by_row(tmp_path: Path, options: Options, tokenizer: Any) -> None:
    path = tmp_path / "hostile.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([
        b"{broken", good, b"[]", b"", b'{"messages": 3}', good,
        b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\\udc00"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}]}', b"\xff\xfe{}", good,
        json.dumps(chat("user: " + "hi " * 99, "assistant: yes")).encode()]))
    report = prepare(options(path), tokenizer).report
    assert (report.rows_in, report.rows_out) == (10, 3)
    assert report.rows_in == report.rows_out + sum(report.reasons.values())
    assert sorted((bad.line, bad.reason[:20]) for bad in report.bad_rows) == [
        (1, "not JSON"), (3, "not a JSON object bu"), (5, "`messages` is int, n"), (7, "lone surrogate or by"),
        (8, "no assistant turn"), (9, "not UTF-8"), (11, "all trained tokens l")]
    assert {bad.file for bad in report.bad_rows} == {str(path)}
    assert report.format == "messages"
    assert report.longest_tokens == 12
    assert report.length_histogram == {16: 3}
    assert (report.num_tokens, report.num_trained) == (36, 6)
    assert report.trained_share == 6 / 36


def test_tokens_and_flags_survive_the_file(write_rows: Write, options: Options, tokenizer: Any) -> None:
    words = ["hi", "yes", "no", "why", "so"]
    rows = [chat(f"user: {' '.join(words[:i % 5 + 1])}", f"assistant: {' '.join(words[i % 4:])}") for i in range(1100)]
    dataset = prepare(options(write_rows(rows)), tokenizer)
    found = samples(dataset)
    assert dataset.num_samples == len(rows) == dataset.report.rows_out
    for row, (ids, trained) in zip(rows, found, strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert tokenizer.decode(ids) == text
        answer = tokenizer.decode([i for i, flag in zip(ids, trained, strict=True) if flag])
        assert answer == row["messages"][1]["content"] + "<|im_end|>"
    assert dataset.source(7) == (dataset.files[0], 8)
    whole = dataset.trained(0, len(dataset.tokens))
    for start, stop in ((0, 1), (7, 9), (8, 8), (13, 1000), (len(whole) - 3, len(whole))):
        np.testing.assert_array_equal(dataset.trained(start, stop), whole[start:stop])


def test_uint16_until_it_does_not_fit(write_rows: Write, options: Options, tokenizer: Any) -> None:
    path = write_rows([GOOD])
    assert prepare(options(path), tokenizer).tokens.dtype == np.uint16
    large = make_word_tokenizer()
    missing = 65536 - len(large)
    large.add_tokens([f"extra{i}" for i in range(missing)])
    assert prepare(options(path), large).tokens.dtype == np.uint16
    large.add_tokens(["last"])
    dataset = prepare(options(write_rows([chat("user: last", "assistant: yes")])), large)
    assert dataset.tokens.dtype == np.uint32
    assert 65536 in dataset.tokens


def test_cache_is_used_again_and_keyed_by_content(write_rows: Write, options: Options, tokenizer: Any,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows([GOOD, 3])
    first = prepare(options(path), tokenizer)
    moved = path.rename(path.with_name("moved.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "texts_from_process", None)
        again = prepare(options(moved), make_word_tokenizer())
    assert (again.folder, again.digest, samples(again)) == (first.folder, first.digest, samples(first))
    assert again.source(0) == (str(moved), 1)
    assert again.report.bad_rows == (BadRow(str(moved), 2, "not a JSON object but int"),)


def test_anything_that_changes_tokens_changes_the_key(write_rows: Write, options: Options, tokenizer: Any) -> None:
    path = write_rows([GOOD])
    files = list_files((path,))
    base = cache_key(options(path), tokenizer, files)
    renamed = make_word_tokenizer()
    renamed.eos_token = "<s>"
    keys = [base, cache_key(options(path, max_length=63), tokenizer, files),
            cache_key(options(path, truncation="keep_end"), tokenizer, files),
            cache_key(options(path, assistant_only_loss=False), tokenizer, files),
            cache_key(options(path, format="messages"), tokenizer, files),
            cache_key(options(path, train_roles=("user",)), tokenizer, files),
            cache_key(options(path), make_word_tokenizer(CHATML_MARKED), files),
            cache_key(options(path), make_byte_tokenizer(), files), cache_key(options(path), renamed, files),
            cache_key(options(path), tokenizer, files * 2)]
    path.write_text(path.read_text().replace("yes", "no"))
    keys.append(cache_key(options(path), tokenizer, files))
    assert len(set(keys)) == len(keys)
    path.write_text(path.read_text().replace("no", "yes"))
    assert cache_key(options(path), tokenizer, files) == base


@pytest.mark.parametrize("name", ["tokens.bin", "trained.bin", "offsets.bin", "sources.bin", "meta.json"])
def test_damaged_cache_is_made_again(write_rows: Write, options: Options, tokenizer: Any, name: str) -> None:
    path = write_rows([GOOD] * 9)
    first = prepare(options(path), tokenizer)
    want, folder = samples(first), first.folder
    damaged = bytearray((folder / name).read_bytes())
    damaged[0] ^= 1
    (folder / name).unlink()
    (folder / name).write_bytes(damaged)
    assert samples(prepare(options(path), tokenizer)) == want
    assert (folder.parent / f"{folder.name}.damaged-0").is_dir()


def test_failure_leaves_no_folder(tmp_path: Path, write_rows: Write, options: Options) -> None:
    with pytest.raises(DataError):
        prepare(options(write_rows([3])), make_word_tokenizer())
    assert list((tmp_path / "cache").iterdir()) == []
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_folders_are_private(write_rows: Write, options: Options, tokenizer: Any) -> None:
    assert prepare(options(write_rows([GOOD])), tokenizer).folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("rows", "rest", "message"), [
    ([], {}, "is empty"),
    ([3, "x"], {}, r"none of its 2 rows .*1 × not a JSON object but int.*line 1\); mend"),
    ([chat("user: hi", "assistant: yes")], {"max_length": 4},
     r"1 × all trained tokens lie beyond max_length.*line 1\); raise max_length, or set truncation: keep_end"),
    ([chat("user: hi", "assistant: yes")], {"max_length": 4, "truncation": "drop"},
     r"1 × longer than max_length.*line 1\); raise max_length, or set truncation: keep_start"),
    ([{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "train": False}]}], {},
     r"1 × no token of it is trained.*line 1\); look for .* or train other roles"),
    ([chat("user: hi", "assistant: yes")], {"format": "text"}, r"`text` is missing"),
    ([{"prompt": "", "completion": "yes so"}], {}, "every token would be trained"),
    ([{"chosen": "a", "rejected": "b"}], {}, "preference pairs"),
    ([{"title": "a"}], {}, "keys found: title"),
])
def test_refusals(write_rows: Write, options: Options, tokenizer: Any, rows: list[Any], rest: dict[str, Any],
                  message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(options(write_rows(rows), **rest), tokenizer)


def test_everything_trained_is_right_when_asked_for(write_rows: Write, options: Options, tokenizer: Any) -> None:
    path = write_rows([{"prompt": "", "completion": "yes so"}])
    assert prepare(options(path, assistant_only_loss=False), tokenizer).report.trained_share == 1.0
    assert prepare(options(write_rows([{"text": "yes so"}], "t.jsonl")), tokenizer).report.trained_share == 1.0


def test_cut_samples_are_counted(write_rows: Write, options: Options, tokenizer: Any) -> None:
    rows = [GOOD, GOOD, chat("user: hi", "assistant: yes so")]      # 12, 12 and 14 tokens
    path = write_rows(rows)
    counts = [prepare(options(path, max_length=n), tokenizer).report.num_truncated for n in (11, 12, 13, 14)]
    assert counts == [3, 1, 1, 0]


def test_options_are_checked() -> None:
    for rest in ({"paths": ()}, {"max_length": 1}, {"format": "parquet"}, {"truncation": "middle"}):
        with pytest.raises(ConfigError):
            DataOptions(**{"paths": (Path("a"),), "max_length": 8, "cache_dir": Path("c"), **rest})


def test_bad_rows_beyond_the_list_are_counted_and_filed(write_rows: Write, options: Options, tokenizer: Any,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "MAX_LISTED", 3)
    dataset = prepare(options(write_rows([1, 2, 3, 4, 5, GOOD])), tokenizer)
    assert len(dataset.report.bad_rows) == 3
    assert dataset.report.reasons == {"not a JSON object but int": 5}
    filed = [json.loads(line) for line in (dataset.folder / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in filed] == [1, 2, 3, 4, 5]


def test_several_files_and_formats_by_first_row(write_rows: Write, options: Options, tokenizer: Any) -> None:
    a, b = write_rows([GOOD], "a.jsonl"), write_rows([{"text": "hi"}, GOOD], "b.jsonl")
    dataset = prepare(options(a, b), tokenizer)
    assert [dataset.source(i) for i in range(dataset.num_samples)] == [(str(a), 1), (str(b), 2)]
    assert dataset.report.reasons == {"`messages` is missing, not a list": 1}


def test_preview_shows_what_is_trained(write_rows: Write, options: Options, tokenizer: Any) -> None:
    path = write_rows([chat("user: hi", "assistant: yes", "user: why", "assistant: so")] * 2 + [GOOD] * 4)
    shown = preview(prepare(options(path), tokenizer), tokenizer)
    assert len(shown) == 3
    assert shown[0].pieces == (
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False), ("yes<|im_end|>", True),
        ("\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n", False), ("so<|im_end|>", True), ("\n", False))
    assert (shown[1].line, shown[1].num_tokens, shown[1].num_trained) == (2, 24, 4)
    [short] = preview(prepare(options(path), tokenizer), tokenizer, num_rows=1, max_tokens=5)
    assert short.pieces == (("<|im_start|>user\nhi<|im_end|>", False),)


def test_what_was_loaded_before_is_no_garbage_meanwhile_and_may_be_afterwards(
        write_rows: Write, options: Options, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector stops all threads: while a data set is tokenised it does not look at all that is loaded."""
    frozen, thresholds, before = [], [], gc.get_threshold()
    take = prepare_module._take

    def taken(*args: Any) -> None:
        frozen.append(gc.get_freeze_count())
        thresholds.append(gc.get_threshold())
        take(*args)

    monkeypatch.setattr(prepare_module, "_take", taken)
    prepare(options(write_rows([GOOD])), tokenizer)
    with pytest.raises(DataError, match="none of its 1 rows"):
        prepare(options(write_rows([3], "bad.jsonl"), format="text"), tokenizer)
    assert len(frozen) == 2
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0
    assert min(thresholds)[0] > 10 * before[0]
    assert gc.get_threshold() == before
