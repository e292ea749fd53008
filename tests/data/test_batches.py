"""Steps by index: shifted labels that cross no boundary, each sample once an epoch, the same in any order of asking."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatrain.data import BatchPlan, DataOptions, MicroBatch, StepBatch, TokenDataset, eval_micro_batches, prepare
from megatrain.data.pack import pack, permutation
from megatrain.errors import ConfigError
from tests.data.tiny_tokenizers import WORDS, make_word_tokenizer

pytestmark = pytest.mark.usefixtures("one_process")

A, B, C, D, E, EOS = (WORDS.index(w) for w in ("a", "b", "c", "d", "e", "<|im_end|>"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_word_tokenizer()


@pytest.fixture
def make(write_rows: Callable[..., Path], options: Callable[..., DataOptions],
         tokenizer: Any) -> Callable[..., TokenDataset]:
    def build(rows: list[Any], max_length: int = 64) -> TokenDataset:
        return prepare(options(write_rows(rows), max_length=max_length), tokenizer)
    return build


def completions(lengths: list[int], prompt: str = "a:") -> list[dict[str, str]]:
    """Samples of two prompt tokens, as many answer tokens as asked for, and EOS."""
    return [{"prompt": prompt, "completion": ":" * n} for n in lengths]


def documents(*texts: str) -> list[dict[str, str]]:
    return [{"text": ":".join(text)} for text in texts]     # "ab" makes the tokens a : b and EOS


def split(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each real document, after checking that bounds, positions and padding are right."""
    ids_T = batch.document_ids_T
    assert all(a.shape == ids_T.shape for a in (batch.input_ids_T, batch.position_ids_T, batch.labels_T))
    assert (batch.input_ids_T.dtype, batch.position_ids_T.dtype, ids_T.dtype, batch.labels_T.dtype) == (
        np.int64, np.int64, np.int32, np.int64)
    assert set(np.unique(np.diff(ids_T, prepend=0))) <= {0, 1}
    num_documents = len(batch.sample_ids)
    assert int(ids_T[-1]) == num_documents - (batch.num_tokens == len(ids_T))
    found = []
    for document in range(int(ids_T[-1]) + 1):
        where = ids_T == document
        positions = np.arange(int(where.sum()))
        if document == num_documents:      # padding: its positions stay within those of real documents
            positions %= int(np.unique(ids_T[:batch.num_tokens], return_counts=True)[1].max())
        assert batch.position_ids_T[where].tolist() == positions.tolist()
        found.append((batch.input_ids_T[where].tolist(), batch.labels_T[where].tolist()))
    assert batch.num_tokens == sum(len(ids) for ids, _ in found[:num_documents])
    assert all(label == -100 for _, labels in found[num_documents:] for label in labels)
    assert batch.num_supervised == sum(label != -100 for _, labels in found for label in labels)
    return found[:num_documents]


def steps(plan: BatchPlan) -> list[StepBatch]:
    return [plan.step(i) for i in range(plan.num_steps)]


def same(a: StepBatch, b: StepBatch) -> bool:
    return len(a.micro_batches) == len(b.micro_batches) and all(
        np.array_equal(x.input_ids_T, y.input_ids_T) and np.array_equal(x.labels_T, y.labels_T)
        and np.array_equal(x.document_ids_T, y.document_ids_T) and x.sample_ids == y.sample_ids
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


def test_golden_micro_batch(make: Callable[..., TokenDataset]) -> None:
    dataset = make([{"prompt": "a:", "completion": "b:c"}, {"prompt": "d:", "completion": "e"}])
    [batch] = eval_micro_batches(dataset, max_length=64, packing=False, micro_batch_tokens=12)
    colon = WORDS.index(":")
    assert batch.input_ids_T.tolist() == [A, colon, B, colon, C, EOS, D, colon, E, EOS, EOS, EOS]
    assert batch.labels_T.tolist() == [-100, B, colon, C, EOS, -100, -100, E, EOS, -100, -100, -100]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]
    assert batch.document_ids_T.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert (batch.num_tokens, batch.num_supervised, batch.sample_ids) == (10, 6, (0, 1))


@pytest.mark.parametrize("packing", [True, False])
def test_each_sample_once_an_epoch_with_its_own_labels(make: Callable[..., TokenDataset], packing: bool) -> None:
    dataset = make(completions([i % 9 + 1 for i in range(53)]), max_length=16)
    plan = BatchPlan(dataset, max_length=16, packing=packing, train_batch_size=4, micro_batch_tokens=32, seed=3,
                     num_epochs=3)
    orders = []
    for epoch in range(3):
        seen: Counter[int] = Counter()
        order = []
        for i in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            step = plan.step(i)
            assert step.num_tokens == sum(m.num_tokens for m in step.micro_batches)
            assert step.num_supervised == sum(m.num_supervised for m in step.micro_batches) > 0
            for batch in step.micro_batches:
                assert len(batch.input_ids_T) == 32
                for sample, (ids, labels) in zip(batch.sample_ids, split(batch), strict=True):
                    start, stop = dataset.offsets[sample:sample + 2].tolist()
                    assert ids == dataset.tokens[start:stop].tolist()
                    trained = dataset.trained(start, stop).tolist()
                    targets = [t if flag else -100 for t, flag in zip(ids, trained, strict=True)]
                    assert labels == [*targets[1:], -100]
                    seen[sample] += 1
                    order.append(sample)
        assert seen == Counter(range(53))
        orders.append(tuple(order))
    assert len(set(orders)) == 3, "each epoch has its own order"
    assert plan.num_steps == 3 * plan.steps_per_epoch


def test_batch_size_counts_rows_and_the_last_batch_is_kept(make: Callable[..., TokenDataset]) -> None:
    dataset = make(completions([1] * 10))
    plan = BatchPlan(dataset, max_length=64, packing=False, train_batch_size=4, micro_batch_tokens=64, seed=0,
                     num_epochs=1)
    assert [sum(len(m.sample_ids) for m in s.micro_batches) for s in steps(plan)] == [4, 4, 2]
    packed = BatchPlan(dataset, max_length=9, packing=True, train_batch_size=2, micro_batch_tokens=64, seed=0,
                       num_epochs=1)
    assert packed.num_rows == 5     # ten samples of four tokens, two to a row of nine
    assert [sum(len(m.sample_ids) for m in s.micro_batches) for s in steps(packed)] == [4, 4, 2]


def test_steps_are_known_before_the_start(make: Callable[..., TokenDataset]) -> None:
    dataset = make(completions([1] * 10))

    def plan(**rest: Any) -> BatchPlan:
        return BatchPlan(dataset, max_length=64, packing=False, train_batch_size=3, micro_batch_tokens=64, seed=0,
                         **rest)

    assert plan(num_epochs=2).num_steps == 8
    assert plan(num_epochs=0.3).num_steps == 2
    assert plan(max_steps=9).num_steps == 9
    assert same(plan(max_steps=9).step(8), plan(num_epochs=3).step(8))
    for rest in ({}, {"num_epochs": 1, "max_steps": 1}, {"max_steps": 0}, {"num_epochs": -1.0}):
        with pytest.raises(ConfigError):
            plan(**rest)
    for index in (-1, 9):
        with pytest.raises(IndexError):
            plan(max_steps=9).step(index)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [completions([i % 7 + 1 for i in range(40)]),
                                  documents(*["abcde" * (i % 4 + 1) for i in range(40)])])
def test_random_access_resume_and_a_second_run(make: Callable[..., TokenDataset], rows: list[Any],
                                               packing: bool) -> None:
    dataset = make(rows, max_length=16)

    def plan(seed: int = 5) -> BatchPlan:
        return BatchPlan(dataset, max_length=16, packing=packing, train_batch_size=3, micro_batch_tokens=48, seed=seed,
                         num_epochs=4)
    first = steps(plan())
    resumed = plan()
    for i in [len(first) - 1, 0, 17, 3, 16, 3]:
        assert same(resumed.step(i), first[i])
    assert all(same(a, b) for a, b in zip(steps(plan()), first, strict=True))
    assert not all(same(a, b) for a, b in zip(steps(plan(6)), first, strict=True))


def test_fingerprint_names_what_the_steps_depend_on(make: Callable[..., TokenDataset]) -> None:
    base = {"max_length": 64, "packing": True, "train_batch_size": 3, "micro_batch_tokens": 64, "seed": 0,
            "max_steps": 3}
    dataset, other = make(completions([1] * 10)), make(completions([1] * 9 + [2]))
    changed = [{}, {"packing": False}, {"train_batch_size": 4}, {"micro_batch_tokens": 65}, {"seed": 1},
               {"max_length": 63}]
    prints = [BatchPlan(dataset, **{**base, **change}).fingerprint for change in changed]
    prints.append(BatchPlan(other, **base).fingerprint)
    assert len(set(prints)) == len(prints)
    assert BatchPlan(dataset, **{**base, "max_steps": 9}).fingerprint == prints[0]


def test_documents_packed_are_one_stream_cut_into_rows(make: Callable[..., TokenDataset]) -> None:
    dataset = make(documents("ab", "c", "abcde", "d"), max_length=6)       # 4 + 2 + 10 + 2 tokens
    batches = list(eval_micro_batches(dataset, max_length=6, packing=True, micro_batch_tokens=6))
    assert [m.sample_ids for m in batches] == [(0, 1), (2,), (2, 3)]
    pieces = [piece for m in batches for piece in split(m)]
    assert [token for ids, _ in pieces for token in ids] == dataset.tokens.tolist()
    assert all(labels == [*ids[1:], -100] for ids, labels in pieces)


def test_documents_unpacked_lose_nothing(make: Callable[..., TokenDataset]) -> None:
    dataset = make(documents("ab", "c", "abcde", "d"), max_length=4)
    batches = list(eval_micro_batches(dataset, max_length=4, packing=False, micro_batch_tokens=4))
    rows = sorted((m.sample_ids, ids) for m in batches for ids, _ in split(m))
    assert sorted(len(ids) for _, ids in rows) == [2, 2, 2, 4, 4, 4]
    assert Counter(token for _, ids in rows for token in ids) == Counter(dataset.tokens.tolist())


def test_rows_in_which_nothing_can_be_predicted_are_left_out(make: Callable[..., TokenDataset]) -> None:
    dataset = make(documents("ab", "cd", "e"), max_length=3)      # 4 + 4 + 2 tokens; the last row of three has one
    for packing, rows in ((True, 3), (False, 3)):
        plan = BatchPlan(dataset, max_length=3, packing=packing, train_batch_size=1, micro_batch_tokens=3, seed=0,
                         num_epochs=1)
        assert plan.num_rows == rows
        assert all(step.num_supervised > 0 for step in steps(plan))


def test_packed_rows_are_shuffled_though_packing_sorts_them(make: Callable[..., TokenDataset]) -> None:
    dataset = make(completions([i % 12 + 1 for i in range(96)]), max_length=16)
    plan = BatchPlan(dataset, max_length=16, packing=True, train_batch_size=1, micro_batch_tokens=16, seed=0,
                     num_epochs=1)
    longest = [max(len(ids) for ids, _ in split(step.micro_batches[0])) for step in steps(plan)]
    falls = sum(a > b for a, b in pairwise(longest))
    rises = sum(a < b for a, b in pairwise(longest))
    assert min(falls, rises) > len(longest) // 5


def test_nothing_of_one_sample_shows_in_its_neighbour(make: Callable[..., TokenDataset]) -> None:
    kinds = [[{"prompt": first, "completion": "b:c"}, {"prompt": "d:", "completion": "e"}] for first in ("a:", "e:")]
    both = []
    for rows in kinds:
        [batch] = eval_micro_batches(make(rows), max_length=16, packing=True, micro_batch_tokens=16)
        both.append(dict(zip(batch.sample_ids, split(batch), strict=True)))
    assert both[0][1] == both[1][1]
    assert both[0][0] != both[1][0]


def test_rows_over_the_budget_are_refused(make: Callable[..., TokenDataset]) -> None:
    dataset = make(completions([1, 20]))
    plan: dict[str, Any] = {"train_batch_size": 1, "seed": 0, "max_steps": 1}
    with pytest.raises(ConfigError, match=r"row has up to 23 tokens .* at least 23"):
        BatchPlan(dataset, max_length=64, packing=False, micro_batch_tokens=22, **plan)
    with pytest.raises(ConfigError, match="up to 64 tokens"):
        BatchPlan(dataset, max_length=64, packing=True, micro_batch_tokens=63, **plan)
    with pytest.raises(ConfigError, match="longest sample has 23 tokens, over max_length 22"):
        BatchPlan(dataset, max_length=22, packing=False, micro_batch_tokens=64, **plan)
    assert len(steps(BatchPlan(dataset, max_length=64, packing=False, micro_batch_tokens=23, **plan))) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(0, 5), st.integers(40, 60))
@settings(max_examples=200, deadline=None)
def test_pack_is_best_fit_decreasing(lengths: list[int], seed: int, capacity: int) -> None:
    array = np.array(lengths)
    bins = pack(array, permutation(len(array), seed, 0), capacity)
    assert sorted(bins.items.tolist()) == list(range(len(lengths)))
    loads = [int(array[bins.of(b)].sum()) for b in range(bins.num_bins)]
    assert max(loads) <= capacity
    assert min(loads) > 0
    slow: list[int] = []        # free space of each bin, the plain way
    for length in sorted(lengths, reverse=True):
        room = [space for space in slow if space >= length]
        if room:
            slow.remove(min(room))
            slow.append(min(room) - length)
        else:
            slow.append(capacity - length)
    assert sorted(loads) == sorted(capacity - space for space in slow)


def test_order_is_pinned_for_ever() -> None:
    assert permutation(8, 0, 0).tolist() == PERMUTATION_0_0
    assert pack(np.array([5, 3, 3, 2, 2, 1]), np.array([5, 4, 3, 2, 1, 0]), 8).items.tolist() == PACKED


PERMUTATION_0_0 = [3, 2, 1, 6, 0, 7, 4, 5]
PACKED = [0, 2, 1, 4, 3, 5]
