"""Faults in the models."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

ENGINE = "tests/engine/test_identity.py -k smollm2-fp32"
ATTENTION = "tests/models/test_attention.py"
KEPT = "tests/models/test_kept_attention.py"
PLACED = "tests/engine/test_identity.py -k (no_placement)and(gemma3)and(attention)"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "models/layout.py",
        "tests/engine/test_identity.py -k frozen",
        ("decay of the first tensor for all", "if spans and spans[-1].decay == tensor.decay:", "if spans:"),
        ("state of frozen tensors counted", "        if not tensor.trainable:\n            continue\n", ""),
    ),
    *of(
        "models/loss.py",
        "tests/models/test_loss.py",
        (
            "only the last chunk's gradient counts",
            "            view.add_(gradient)",
            "            view.copy_(gradient)",
        ),
        (
            "the loss of the first chunk only",
            "        loss += chunk_loss.detach()",
            "        loss = chunk_loss.detach()",
        ),
    ),
    *of(
        "models/grad.py",
        "tests/models/test_template.py",
        (
            "a view of a kept weight loses its strides",
            "weight.as_strided(packed.shape, packed.stride,",
            'weight.as_strided(packed.shape, torch.empty(packed.shape, device="meta").stride(),',
        ),
        ("weights keep their own place in a kept graph", "if first <= start < stop:", "if False:"),
    ),
    *of(
        "models/grad.py",
        ENGINE,
        (
            "the embedding's gradient is dropped",
            "    if not grads:\n        return\n    leaves, table",
            "    if True:\n        return\n    leaves, table",
        ),
        (
            "an idle row learns from a busy one",
            "grads[table], found[0])",
            "grads[table].roll(1, 0), found[0])",
        ),
    ),
    *of(
        "models/attention_cpu.py",
        ATTENTION,
        ("window one token wider", "(age_BS >= window)", "(age_BS > window)"),
        ("tokens see their future", "age_BS[:, first - low :] < 0", "age_BS[:, first - low :] < -1"),
        (
            "documents see each other",
            "    _, lengths = torch.unique_consecutive(document_ids_T, return_counts=True)",
            "    lengths = torch.tensor([num_tokens])",
        ),
        ("no soft-cap in the backward", "ds_GRBS.mul_(slope_GRBS)", "pass"),
        ("delta left out", ".sub_(delta_GRN1[:, :, rows])", ""),
    ),
    *of(
        "models/neftune.py",
        "tests/models/test_neftune.py tests/engine/test_neftune.py",
        (
            "every step has the same noise",
            "key = key_of(seed, step, micro_batch)",
            "key = key_of(seed, 0, micro_batch)",
        ),
        (
            "noise of the pack's length, not the document's",
            "(lengths_T.double() * hidden_size)",
            "(torch.full_like(lengths_T, len(lengths_T)).double() * hidden_size)",
        ),
    ),
    *of(
        "models/router.py",
        "tests/models/test_router_loss.py -k (label)or((two_steps)and(mixtral))",
        (
            "tokens without labels count for the router",
            "(before_T[stop_T] > before_T[first_T]).float()",
            "(before_T[stop_T] >= before_T[first_T]).float()",
        ),
        (
            "router loss without the number of experts",
            "balanced = balance.num_experts * torch.sum",
            "balanced = torch.sum",
        ),
    ),
    *of(
        "models/dice.py",
        "tests/models/test_dropout.py",
        ("dice are not thrown again", "        torch.manual_seed(key)\n", ""),
    ),
    *of(
        "models/grad.py",
        "tests/models/test_template.py",
        ("a view of a weight is found at its start", "offset = (start - first) // saved.element_size()", "offset = 0"),
    ),
    *of(
        "models/attention.py",
        KEPT,
        (
            "what is lent is computed again",
            "if lent_out_1THE is not None and lent_lse_1HT is not None:",
            "if False:",
        ),
    ),
    *of(
        "models/template.py",
        KEPT,
        ("what attention gave is left nowhere", "                place.copy_(tensor)", "                pass"),
    ),
    *of(
        "models/grad.py",
        KEPT,
        (
            "the recomputation is lent nothing",
            "template.apply_block(index, leaves, source, calls, attended)",
            "template.apply_block(index, leaves, source, calls)",
        ),
    ),
    *of(
        "models/template.py",
        "tests/engine/test_kept_attention.py -k stays_behind",
        (
            "what was lent stays with the template",
            "exchange.lent = exchange.given = None\n",
            "exchange.given = None\n",
        ),
    ),
    *of(
        "engine/handlers.py",
        PLACED,
        (
            "what attention gave of the first micro-batch for all",
            "self.places.attended(place) for place",
            "self.places.attended(place._replace(micro_batch=0)) for place",
        ),
    ),
)
