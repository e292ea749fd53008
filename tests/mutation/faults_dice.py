"""Faults in dropout, in the router loss, and in what is made document by document (rotary tables, mixers)."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

ROUTER = "tests/models/test_router_loss.py -k (label)or(felt)or(transformers)or((two_steps)and(mixtral))"
DROPOUT = "tests/models/test_dropout.py"
TABLES = "tests/models/test_rotary_tables.py"
DOCUMENTS = (
    "tests/models/test_families.py -k (documents_of_a_pack)and((lfm2)or(falcon_h1)or(llama4))or(as_alone)and(llama4)"
)

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "models/router.py",
        ROUTER,
        ("no rows are divided by", ".clamp(min=1.0)", ""),
        (
            "router loss without the supervised tokens",
            "loss = (self.num_supervised * balance.coefficient) * balanced",
            "loss = balance.coefficient * balanced",
        ),
        (
            "router loss without its coefficient",
            "(self.num_supervised * balance.coefficient) * balanced",
            "self.num_supervised * balanced",
        ),
        (
            "the router's gradient is not divided by the step's tokens",
            "loss.new_full((), inv_denominator)",
            "loss.new_full((), 1.0)",
        ),
        (
            "rows of one router for all",
            "(self.counted_T.sum() * len(self.sums))",
            "(self.counted_T.sum() * 1)",
        ),
        ("the choice of the last router for all", "chosen_E += one.chosen_E", "chosen_E = one.chosen_E"),
    ),
    *of(
        "models/grad.py",
        ROUTER,
        (
            "the gradient at a router's sums is dropped",
            "return [dh, *[call.tally.gradient_E] * num_routers]",
            "return [dh, *[torch.zeros_like(call.tally.gradient_E)] * num_routers]",
        ),
    ),
    *of(
        "models/template.py",
        DROPOUT,
        (
            "every layer has the same dice",
            "return None if key is None else key_of(key, number)",
            "return key",
        ),
        ("evaluation drops too", "dice = key if self._rolls_dice else None", "dice = key or 0"),
    ),
    *of(
        "models/grad.py",
        DROPOUT,
        (
            "the embedding's backward has no dropout",
            "h, _ = template.embed(leaves, batch, key)",
            "h, _ = template.embed(leaves, batch)",
        ),
    ),
    *of(
        "models/dice.py",
        DROPOUT,
        ("only the first word counts", "    for word in words:\n", "    for word in words[:1]:\n"),
    ),
    *of(
        "engine/engine.py",
        DROPOUT,
        (
            "every micro-batch has the same dice",
            "key_of(self.numerics.seed, step, micro_batch)",
            "key_of(self.numerics.seed, step, 0)",
        ),
        (
            "every step has the same dice",
            "key_of(self.numerics.seed, step, micro_batch)",
            "key_of(self.numerics.seed, 0, micro_batch)",
        ),
        (
            "dice without the seed",
            "key_of(self.numerics.seed, step, micro_batch)",
            "key_of(0, step, micro_batch)",
        ),
    ),
    *of(
        "engine/handlers.py",
        DROPOUT,
        (
            "the embedding's backward has the dice of the first micro-batch",
            "self._grads(op), batch, dh, self.step.key_of(m))",
            "self._grads(op), batch, dh, self.step.key_of(0))",
        ),
    ),
    *of(
        "models/documents.py",
        TABLES,
        ("a rotary module remembers the longest document", "copy.deepcopy(new)(x", "new(x"),
        (
            "tables of the pack, not of the document",
            "    if not _RESIZED & set(",
            "    if _RESIZED & set(",
        ),
        ("every document at the positions of the first", "(x, piece, *layer_type", "(x, pieces[0], *layer_type"),
        (
            "every layer type has the tables of one",
            "(x, piece, *layer_type, **kwargs)",
            '(x, piece, *["full_attention" for _ in layer_type], **kwargs)',
        ),
        (
            "only the first layer type is looked at",
            "isinstance(value, Mapping)] or [parameters]",
            "isinstance(value, Mapping)][:1] or [parameters]",
        ),
    ),
    *of(
        "models/documents.py",
        DOCUMENTS,
        (
            "mixers see the whole pack",
            "for length in packing.lengths_tokens:\n        cut",
            "for length in [num_tokens]:\n        cut",
        ),
        ("every mixer gets the first document", "rows=slice(start, start + length)", "rows=slice(0, length)"),
        (
            "chunks run through documents",
            "(batch.position_ids_T % chunk_tokens == 0)",
            "(torch.arange(batch.position_ids_T.numel()) % chunk_tokens == 0)",
        ),
    ),
)
