"""Complaints about data, heard of other tools: each cannot happen here.

The names are the public threads: project, number, what people said.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain.data import BatchPlan, DataOptions, TokenDataset, prepare
from megatrain.errors import DataError
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from tests.data.tiny_tokenizers import CHATML, CHATML_MARKED, chat, make_byte_tokenizer
from tests.engine.streamed import Streamed
from tests.families import tiny_batch, tiny_config, tiny_masters


def prepared(folder: Path, rows: list[dict], template: str = CHATML, **rest: object) -> TokenDataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = {"max_length": 256, "cache_dir": folder / "cache", **rest}
    return prepare(DataOptions((path,), **options), make_byte_tokenizer(template))  # type: ignore[arg-type]


def trained_text(dataset: TokenDataset) -> str:
    ids = np.asarray(dataset.tokens)[dataset.trained(0, len(dataset.tokens))]
    return make_byte_tokenizer().decode(ids.tolist())


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["no marks", "marks"])
def test_marin_7237_the_assistant_mask_is_all_zero(tmp_path: Path, template: str) -> None:
    """With generation marks or without; and where nothing would be trained, no run starts."""
    rows = [chat("user: Hi.", "assistant: Hello!", "user: 1+1?", "assistant: 2")]
    assert trained_text(prepared(tmp_path, rows, template)) == "Hello!<|im_end|>2<|im_end|>"
    with pytest.raises(DataError, match="none of its 1 rows can be trained on"):
        prepared(tmp_path, [chat("user: Hi.", "user: Are you there?")], template)


def test_trl_1623_the_model_never_stops(tmp_path: Path) -> None:
    """The end of every turn is a target, though padding has the same id; so is that of a completion."""
    dataset = prepared(tmp_path, [chat("user: Hi.", "assistant: Hello!")] * 3 + [chat("user: a", "assistant: b")])
    tokenizer = make_byte_tokenizer()
    assert dataset.pad_id == tokenizer.eos_token_id
    plan = BatchPlan(dataset, max_length=256, packing=False, train_batch_size=4, micro_batch_tokens=512, seed=0,
                     max_steps=1)
    labels = np.concatenate([m.labels_T for m in plan.step(0).micro_batches])
    assert (labels == tokenizer.eos_token_id).sum() == 4
    completion = prepared(tmp_path, [{"prompt": "1+1=", "completion": "2"}])
    assert trained_text(completion) == "2<|im_end|>"


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop"])
def test_chinese_llama_alpaca_3_29_truncation_removes_every_answer_token(tmp_path: Path, truncation: str) -> None:
    """A row whose answer is cut away is not trained on as if it were one: it is reported, with its line."""
    rows = [chat("user: Hi.", "assistant: Hello!"), chat(f"user: {'x' * 300}", "assistant: Hello!")]
    report = prepared(tmp_path, rows, truncation=truncation).report
    if truncation == "keep_end":
        assert (report.rows_out, report.num_truncated) == (2, 1)
        return
    [bad] = report.bad_rows
    assert (bad.line, report.rows_out) == (2, 1)
    assert bad.reason in ("all trained tokens lie beyond max_length", "longer than max_length")
    with pytest.raises(DataError, match="none of its 1 rows"):
        prepared(tmp_path, rows[1:], truncation=truncation)


def test_transformers_11284_28_hours_to_skip_data_at_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 900 of a plan that has seen no step reads the rows of step 900, and no other."""
    rows = [chat(f"user: {i}", f"assistant: {i * i}") for i in range(2000)]
    dataset = prepared(tmp_path, rows)
    asked = {"max_length": 256, "packing": False, "train_batch_size": 2, "micro_batch_tokens": 512, "seed": 3}
    walked = BatchPlan(dataset, num_epochs=1, **asked)
    for step in range(900):
        walked.step(step)
    fresh = BatchPlan(dataset, num_epochs=1, **asked)
    reads: list[int] = []
    trained = TokenDataset.trained

    def watched(self: TokenDataset, start: int, stop: int) -> np.ndarray:
        reads.append(stop - start)
        return trained(self, start, stop)

    monkeypatch.setattr(TokenDataset, "trained", watched)
    [one], [other] = fresh.step(900).micro_batches, walked.step(900).micro_batches
    assert len(reads) == 2 * 2
    assert one.sample_ids == other.sample_ids
    np.testing.assert_array_equal(one.input_ids_T, other.input_ids_T)
    np.testing.assert_array_equal(one.labels_T, other.labels_T)


def test_functionary_265_packed_samples_see_each_other() -> None:
    """The second sample's loss has the same bits whatever the first one says."""
    config, lengths = tiny_config("llama"), (10, 14)
    run = Streamed(config, tiny_masters(model_spec(config)), sum(lengths), precision="fp32")
    losses = []
    try:
        second = tiny_batch(lengths, seed=0)
        labels = second.labels_T.clone()
        labels[: lengths[0]] = -100
        for seed in range(3):
            ids = second.input_ids_T.clone()
            ids[: lengths[0]] = torch.randint(3, 96, (lengths[0],), generator=torch.Generator().manual_seed(seed))
            losses.append(run.engine.evaluate([second._replace(input_ids_T=ids, labels_T=labels)]))
        one_document = TokenBatch(second.input_ids_T, torch.arange(24), torch.zeros(24, dtype=torch.int32), labels)
        together = run.engine.evaluate([one_document])
    finally:
        run.close()
    assert losses[0] == losses[1] == losses[2] > 0
    assert together != losses[0], "as one document they do see each other"


def test_transformers_10204_a_cache_of_eighty_times_the_data(tmp_path: Path) -> None:
    """Two bytes a token and an eighth of one for its flag: less than the text, and once for each set of options."""
    rows = [chat(f"user: {'tell me more ' * 20}{i}", f"assistant: {'there is no more ' * 20}{i}") for i in range(400)]
    dataset = prepared(tmp_path, rows, max_length=2048)
    size = (tmp_path / "rows.jsonl").stat().st_size
    cached = sum(path.stat().st_size for path in dataset.folder.rglob("*"))
    assert dataset.tokens.dtype == np.uint16
    assert cached < 2.4 * dataset.report.num_tokens + 20_000
    assert cached < 2.4 * size      # with a token a byte, the worst there is
    again = prepared(tmp_path, rows, max_length=2048)
    assert again.folder == dataset.folder
    assert [path.name for path in dataset.folder.parent.iterdir()] == [dataset.folder.name]
