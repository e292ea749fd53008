"""Several datasets: how often each row comes, in an order that (seed, epoch, index) alone decide."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import BatchPlan, DataOptions, Part, StepBatch, TokenDataset, prepare
from megatrain.data.mix import quotas, stretches
from megatrain.errors import DataError
from tests.data.tiny_tokenizers import WORDS, make_word_tokenizer

pytestmark = pytest.mark.usefixtures("one_process")

Make = Callable[..., TokenDataset]


@pytest.fixture
def make(write_rows: Callable[..., Path], options: Callable[..., DataOptions]) -> Make:
    def build(word: str, num_rows: int, format_: str = "completion") -> TokenDataset:
        """Rows whose tokens are a count of `word`, different in length, so that a row tells where it is from."""
        rows = [{"prompt": "a:", "completion": word * (i + 1)} for i in range(num_rows)]
        if format_ == "text":
            rows = [{"text": word * (i + 2)} for i in range(num_rows)]
        return prepare(options(write_rows(rows, f"{ord(word)}.jsonl")), make_word_tokenizer())
    return build


def plan_of(*parts: Part, seed: int = 1, **rest: Any) -> BatchPlan:
    settings = {"max_length": 64, "packing": False, "train_batch_size": 4, "micro_batch_tokens": 64, "num_epochs": 4}
    return BatchPlan(parts, seed=seed, **{**settings, **rest})


def samples(plan: BatchPlan, epoch: int) -> list[int]:
    first = epoch * plan.steps_per_epoch
    return [sample for i in range(first, first + plan.steps_per_epoch) for m in plan.step(i).micro_batches
            for sample in m.sample_ids]


def same(a: StepBatch, b: StepBatch) -> bool:
    return all(np.array_equal(x.input_ids_T, y.input_ids_T) and x.sample_ids == y.sample_ids
               for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


def test_one_dataset_in_a_list_is_the_dataset(make: Make) -> None:
    dataset = make(":", 9)
    alone = BatchPlan(dataset, max_length=64, packing=False, train_batch_size=4, micro_batch_tokens=64, seed=1,
                      num_epochs=4)
    listed = plan_of(Part(dataset))
    assert listed.fingerprint == alone.fingerprint
    assert all(same(alone.step(i), listed.step(i)) for i in range(alone.num_steps))


def test_repeat_says_how_often_an_epoch_holds_a_row(make: Make) -> None:
    plan = plan_of(Part(make(":", 6), repeat=2), Part(make("\n", 10), repeat=0.5), Part(make(" ", 3)))
    assert plan.rows_by_part == (12, 5, 3)
    assert plan.num_rows == 20
    epochs = [Counter(samples(plan, epoch)) for epoch in range(4)]
    for seen in epochs:
        assert [seen[i] for i in range(6)] == [2] * 6
        assert sum(seen[i] for i in range(6, 16)) == 5
        assert [seen[i] for i in range(16, 19)] == [1] * 3
    for first, second in ((0, 1), (2, 3)):
        both = epochs[first] + epochs[second]
        assert [both[i] for i in range(6, 16)] == [1] * 10, "two halves make a whole: no row is missed or comes twice"
    assert epochs[0] != epochs[2], "halves are drawn anew"


def test_weights_share_the_rows_of_an_epoch(make: Make) -> None:
    plan = plan_of(Part(make(":", 16), weight=1), Part(make("\n", 4), weight=3))
    assert plan.rows_by_part == (5, 15)
    seen = Counter(samples(plan, 0))
    assert sum(seen[i] for i in range(16)) == 5
    assert sorted(seen[i] for i in range(16, 20)) == [3, 4, 4, 4]


def test_rows_of_all_datasets_are_shuffled_together_and_by_index(make: Make) -> None:
    parts = (Part(make(":", 12)), Part(make("\n", 12)))
    plan = plan_of(*parts)
    order = samples(plan, 0)
    assert sorted(order) == list(range(24))
    assert {sample < 12 for sample in order[:8]} == {True, False}
    again = plan_of(*parts)
    assert all(same(again.step(i), plan.step(i)) for i in reversed(range(plan.num_steps)))
    assert samples(plan, 1) != order
    assert samples(plan_of(*parts, seed=2), 0) != order


def test_tokens_and_labels_come_from_the_right_dataset(make: Make) -> None:
    names = {0: ":", 1: "\n"}
    plan = plan_of(Part(make(":", 5)), Part(make("\n", 7)))
    for i in range(plan.steps_per_epoch):
        for batch in plan.step(i).micro_batches:
            for document, sample in enumerate(batch.sample_ids):
                tokens = batch.input_ids_T[batch.document_ids_T == document].tolist()
                which, row = (0, sample) if sample < 5 else (1, sample - 5)
                assert tokens.count(WORDS.index(names[which])) == row + 1 + (which == 0), "prompt a: has one colon too"
                labels = batch.labels_T[batch.document_ids_T == document]
                assert np.count_nonzero(labels >= 0) == row + 2


@pytest.mark.parametrize("packing", [True, False])
def test_conversations_and_documents_mix(make: Make, packing: bool) -> None:
    parts = (Part(make(":", 20), repeat=0.5), Part(make("\n", 20, "text"), repeat=2))
    plan = plan_of(*parts, packing=packing, max_length=32, micro_batch_tokens=32)
    firsts = {sample < 20 for sample in samples(plan, 0)}
    assert firsts == {True, False}
    assert all(plan.step(i).num_supervised > 0 for i in range(plan.num_steps))


def test_the_fingerprint_knows_datasets_and_shares(make: Make) -> None:
    a, b = make(":", 8), make("\n", 8)
    plans = [plan_of(Part(a), Part(b)), plan_of(Part(b), Part(a)), plan_of(Part(a), Part(b, repeat=2)),
             plan_of(Part(a, repeat=2)), plan_of(Part(a))]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plan_of(Part(a, weight=1), Part(b, weight=1)).fingerprint == plans[0].fingerprint, "the same steps"


def test_a_dataset_that_gives_no_row_is_named(make: Make, write_rows: Callable[..., Path],
                                              options: Callable[..., DataOptions]) -> None:
    file = write_rows([{"text": "a"}] * 3, "short.jsonl")
    tokenizer = make_word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"short\.jsonl"):
        plan_of(Part(make(":", 3)), Part(prepare(options(file), tokenizer)))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 9))
def test_stretches_follow_one_another(quota: int, num_rows: int, epoch: int) -> None:
    taken = [number * num_rows + row for number, first, last in stretches(epoch, quota, num_rows)
             for row in range(first, last)]
    assert taken == list(range(epoch * quota, (epoch + 1) * quota))


def test_every_part_gives_at_least_a_row(make: Make) -> None:
    dataset = make(":", 2)
    assert quotas([Part(dataset, weight=1e-9), Part(dataset, weight=1)], [2, 2]) == [1, 4]
    assert quotas([Part(dataset, repeat=0.01)], [2]) == [1]
