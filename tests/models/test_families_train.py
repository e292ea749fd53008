"""Every accepted family through the engine: three steps give the reference's loss, norm, weights, m and v.

And out to a folder: transformers opens what was written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import load_weights, read_buffers, write_hf_folder
from megatrain.errors import ModelError
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from megatrain.store.store import SegmentStore
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, make_plan, same_bytes
from tests.families import CASES, tiny_batch, tiny_buffers, tiny_config, tiny_masters

CPU = torch.device("cpu")
TOKENS = 24
MAX_NORM = 0.1
PLACEMENTS = {"fp32": Placement(), "bf16": Placement(keep=True)}  # test_families has the others in its quick list
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(3)]
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(11, 13), (24,)])] for step in range(3)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_are_the_references(case: str, precision: str) -> None:
    config = tiny_config(case)
    masters = tiny_masters(model_spec(config))
    settings = {"precision": precision, "placement": PLACEMENTS[precision], "max_grad_norm": MAX_NORM}
    run = Streamed(config, masters, TOKENS, **settings)
    try:
        buffers = tiny_buffers(run.template)
        for name, buffer in run.template.saved_buffers.items():
            buffer.copy_(buffers[name])
        results = run.train(STEPS, HYPERS)
        state = run.state()
    finally:
        run.close()
    want = reference.train(
        config, masters, STEPS, HYPERS, precision=precision, max_grad_norm=MAX_NORM, chunk_tokens=CHUNK_TOKENS,
        buffers=buffers,
    )  # fmt: skip
    other = same_bytes(state, want.state)
    assert [r.loss for r in results] == want.losses, f"{case}: losses; then differ {other[:4]}"
    assert [r.grad_norm for r in results] == want.grad_norms, f"{case}: norms; then differ {other[:4]}"
    assert all(norm > MAX_NORM for norm in want.grad_norms), "clipping must be at work, or this proves less"
    assert other == [], case
    still = [name for name, (w, _, _) in state.items() if w.tobytes() == masters[name].tobytes()]
    assert still == [], f"{case}: never updated"


def empty_store(spec: ModelSpec) -> SegmentStore:
    return SegmentStore([layout_of(s) for s in spec.segments], "fp32", make_plan(spec, Placement()), CPU)


@pytest.mark.parametrize("case", CASES)
def test_written_folder_opens_in_transformers(case: str, tmp_path: Path) -> None:
    """Every tensor is there with its bits, under the name that transformers reads."""
    config = tiny_config(case)
    spec = model_spec(config)
    masters = tiny_masters(spec)
    store = empty_store(spec)
    for name, layout in store.layouts.items():
        for entry in layout.entries:
            store.set_master(name, entry, torch.from_numpy(masters[entry.tensor.name]).flatten())
    write_hf_folder(tmp_path / "out", store, spec, config, None, dtype=torch.float32)
    store.close()
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"] & masters.keys()
    found = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for name, master in masters.items():
        assert np.array_equal(found[name], master), name


# Published checkpoints that hold a tensor cut otherwise, so that ours is not a run of theirs: refused by name.
UNREAD = [case for case in ("olmo_hybrid", "lara_mini", "kimi_linear") if case in CASES]


@pytest.mark.parametrize("case", [case for case in CASES if case not in UNREAD])
def test_published_folder_is_read_and_written_alike(case: str, tmp_path: Path) -> None:
    """What transformers saves (in the names and pieces of published checkpoints) is loaded, and written alike again."""
    config = tiny_config(case)
    template = ModelTemplate(config, CPU, torch.float32)
    masters, buffers = tiny_masters(template.spec), tiny_buffers(template)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({n: torch.from_numpy(w) for n, w in masters.items()} | buffers, strict=False)
    model.save_pretrained(tmp_path / "published")
    store = empty_store(template.spec)
    load_weights(tmp_path / "published", store, template.spec)
    for name, layout in store.layouts.items():
        for entry in layout.entries:
            loaded = store.master(name, entry).numpy().reshape(entry.tensor.shape)
            assert np.array_equal(loaded, masters[entry.tensor.name]), entry.tensor.name
    found = {name: value for name, (_, value) in read_buffers(tmp_path / "published", template.spec).items()}
    assert found.keys() == buffers.keys()
    assert all(torch.equal(found[name], value) for name, value in buffers.items())
    write_hf_folder(tmp_path / "ours", store, template.spec, config, tmp_path / "published", dtype=torch.float32)
    store.close()
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("published", "ours"))
    theirs.pop("lm_head.weight" if template.spec.tied else "", None)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("case", UNREAD)
def test_published_folder_cut_otherwise_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config = tiny_config(case)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "published")
    spec = model_spec(config)
    store = empty_store(spec)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\..* is in none of its files"):
        load_weights(tmp_path / "published", store, spec)
    store.close()
