"""Exported folders: transformers opens them, with the same weights; companions verbatim; whole or not there."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from megatrain.checkpoint import (
    CheckpointWriter,
    Files,
    load_checkpoint,
    load_weights,
    restore,
    save_checkpoint,
    write_hf_folder,
)
from megatrain.errors import CheckpointError, ModelError
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
from megatrain.store import split_master
from megatrain.store.store import Precision
from tests.checkpoint.checkpoint_cases import (
    fill_random,
    make_store,
    stores_equal,
    tiny_config,
    tiny_spec,
    tokenizer_folder,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
def test_transformers_opens_it_with_equal_weights(tmp_path: Path, tied: bool, shard_bytes: int):
    spec = tiny_spec(tied=tied)
    store = make_store(spec, "bf16")
    fill_random(store, 1)
    path = tmp_path / "out"
    config = tiny_config(tied=tied)
    write_hf_folder(path, store, spec, config, None, shard_bytes=shard_bytes, dtype=torch.bfloat16)
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)  # type: ignore[misc]
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    weights = model.state_dict()
    for segment, layout in store.layouts.items():
        for entry in layout.entries:
            view = store.views(store.flat(segment, "w"), segment)[entry.tensor.local]
            assert torch.equal(weights[entry.tensor.name], view), entry.tensor.name
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    sharded = (path / "model.safetensors.index.json").exists()
    assert sharded == (shard_bytes == 3000)
    if sharded:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = {name: load_file(path / name) for name in set(index["weight_map"].values())}
        assert len(files) > 2
        assert all(
            set(tensors) == {n for n, f in index["weight_map"].items() if f == name} for name, tensors in files.items()
        )
        sizes = [tensor.numel() * 2 for tensors in files.values() for tensor in tensors.values()]
        assert index["metadata"]["total_size"] == sum(sizes)
        assert len(files) < 2 * sum(sizes) / 3000 + 1  # two shards in a row hold more than one may
        assert all(p.stat().st_size < 3000 + 2000 for p in path.glob("*.safetensors"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("hbm", [False, True])
def test_an_fp32_export_is_the_exact_masters_and_loads_back(tmp_path: Path, precision: Precision, hbm: bool):
    spec = tiny_spec()
    store = make_store(spec, precision, hbm=hbm)
    fill_random(store, 2)
    write_hf_folder(tmp_path / "out", store, spec, tiny_config(), None, dtype=torch.float32)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    back = make_store(spec, precision)
    load_weights(tmp_path / "out", back, spec)
    for segment, layout in store.layouts.items():
        for entry in layout.entries:
            assert torch.equal(back.master(segment, entry), store.master(segment, entry))
    for kind in ("w", "lo") if precision == "bf16" else ("w",):
        assert torch.equal(back.flat("L000", kind), store.flat("L000", kind))
    assert not stores_equal(back, store)  # m and v are no part of a model folder


def test_a_bf16_export_of_fp32_masters_is_rounded_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatrain.checkpoint.export.BLOCK_BYTES", 100)
    spec = tiny_spec()
    store = make_store(spec, "fp32")
    fill_random(store, 2)
    write_hf_folder(tmp_path / "out", store, spec, tiny_config(), None, dtype=torch.bfloat16)
    found = load_file(tmp_path / "out/model.safetensors")
    entry = store.layouts["EMBED"].entries[0]
    assert torch.equal(found[entry.tensor.name].flatten(), split_master(store.master("EMBED", entry))[0])


def test_companions_are_copied_byte_for_byte_and_nothing_else(tmp_path: Path):
    spec = tiny_spec()
    source = tokenizer_folder(tmp_path / "source")
    write_hf_folder(tmp_path / "out", make_store(spec, "bf16"), spec, tiny_config(), source, dtype=torch.bfloat16)
    names = {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == names | {"config.json", "model.safetensors"}


def test_the_generation_config_survives(tmp_path: Path):
    source = tmp_path / "source"
    GenerationConfig(eos_token_id=[3, 4], temperature=0.6, do_sample=True).save_pretrained(source)
    spec = tiny_spec()
    write_hf_folder(tmp_path / "out", make_store(spec, "bf16"), spec, tiny_config(), source, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [3, 4]
    assert model.generation_config.temperature == 0.6


def _mixtures() -> list[PretrainedConfig]:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {"num_key_value_heads": 1, "vocab_size": 32, "head_dim": 8}
    return [
        Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=3, num_experts_per_tok=2),
        MixtralConfig(**sizes, num_local_experts=3, num_experts_per_tok=2),
    ]


def _spec_of(model: PreTrainedModel) -> ModelSpec:
    """All of a model's parameters as one segment."""
    tensors = tuple(TensorSpec(name, name, tuple(p.shape), True, True) for name, p in model.named_parameters())
    return ModelSpec("X", (SegmentSpec("L000", "block", tensors),), False, 16, 32, (), 0, 64)


@pytest.mark.parametrize("config", _mixtures(), ids=["qwen3_moe", "mixtral"])
def test_a_mixture_leaves_as_it_came(tmp_path: Path, config: PretrainedConfig):
    """Loaded from one tensor an expert, saved so, and opened by transformers so."""
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base/model.safetensors")
    assert sum(".experts.2." in name for name in base) == 3
    spec = _spec_of(original)
    store = make_store(spec, "bf16")
    load_weights(tmp_path / "base", store, spec)
    for name, parameter in original.named_parameters():
        master = store.master("L000", store.layouts["L000"][name])
        assert torch.equal(master, parameter.detach().flatten()), name
    write_hf_folder(tmp_path / "out", store, spec, config, tmp_path / "base", dtype=torch.float32)
    out = load_file(tmp_path / "out/model.safetensors")
    assert set(out) == set(base)
    assert all(torch.equal(out[name], base[name]) for name in base)
    write_hf_folder(tmp_path / "fused", store, spec, config, None, dtype=torch.float32)
    fused = load_file(tmp_path / "fused/model.safetensors")
    assert set(fused) == {name for name, _ in original.named_parameters()}
    for folder in ("out", "fused"):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for (name, ours), (_, theirs) in zip(opened.named_parameters(), original.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), (folder, name)
    fill_random(store, 1)
    writer = CheckpointWriter(tmp_path, store, spec, config, tmp_path / "base", keep=2, run_facts={})
    save_checkpoint(writer, 1, lambda write_segment: write_segment("L000"), {"step": 1})
    checkpoint = load_checkpoint(tmp_path, "auto")
    assert checkpoint is not None
    assert set(load_file(checkpoint.path / "model/model.safetensors")) == set(base)
    back = make_store(spec, "bf16")
    restore(back, checkpoint)
    assert stores_equal(back, store)


def test_folders_and_files_are_private(tmp_path: Path):
    spec = tiny_spec()
    write_hf_folder(tmp_path / "out", make_store(spec, "bf16"), spec, tiny_config(), None, dtype=torch.bfloat16)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in (tmp_path / "out").iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "out").mkdir()
    spec = tiny_spec()
    with pytest.raises(CheckpointError, match="out is already there"):
        write_hf_folder(tmp_path / "out", make_store(spec, "bf16"), spec, tiny_config(), None, dtype=torch.bfloat16)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_in_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path):
    spec = tiny_spec()
    store = make_store(spec, "bf16")
    (tmp_path / "file").touch()
    for parent in ("none", "file"):
        with pytest.raises(CheckpointError, match=f"out cannot be made: .*{parent} is no folder"):
            write_hf_folder(tmp_path / parent / "out", store, spec, tiny_config(), None, dtype=torch.bfloat16)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_hf_folder(tmp_path / "link" / "out", store, spec, tiny_config(), None, dtype=torch.bfloat16)
    assert (tmp_path / "real/out/config.json").is_file()


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    class Full(Files):
        def reserve(self, fd: int, num_bytes: int) -> None:
            if num_bytes > 2000:
                raise OSError(28, "No space left on device")
            super().reserve(fd, num_bytes)

    spec = tiny_spec()
    store = make_store(spec, "bf16")
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"out could not be written: .*No space left"):
        write_hf_folder(out, store, spec, tiny_config(), None, dtype=torch.bfloat16, files=Full())
    assert not list(tmp_path.iterdir())

    class Small(Files):
        def free_bytes(self, path: Path) -> int:
            assert path.is_dir()
            return 1000

    with pytest.raises(CheckpointError, match=r"[\d,]+ bytes are needed, 1,000 are free"):
        write_hf_folder(out, store, spec, tiny_config(), None, dtype=torch.bfloat16, files=Small())
    source = tokenizer_folder(tmp_path / "source")
    (source / "vocab.json").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match=r"vocab\.json is a symbolic link"):
        write_hf_folder(out, store, spec, tiny_config(), source, dtype=torch.bfloat16)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
