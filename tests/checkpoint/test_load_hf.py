"""Loading Hugging Face folders: exact masters, every misfit named, memory bounded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import Files, check_weights, load_weights
from megatrain.checkpoint.experts import candidates
from megatrain.errors import ModelError
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
from megatrain.store import SegmentStore, split_master
from megatrain.store.store import Precision
from tests.checkpoint.checkpoint_cases import FFN, HIDDEN, VOCAB, make_store, tiny_config, tiny_spec

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


def _weights(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(dtype)
        for segment in spec.segments
        for tensor in segment.tensors
    }


def _folder(path: Path, weights: Mapping[str, Tensor], shards: int = 1) -> Path:
    path.mkdir(exist_ok=True)
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[shard::shards]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _loaded(folder: Path, spec: ModelSpec, precision: Precision = "bf16") -> SegmentStore:
    store = make_store(spec, precision)
    load_weights(folder, store, spec)
    return store


def _masters(store: SegmentStore) -> dict[str, Tensor]:
    return {
        entry.tensor.name: store.master(segment, entry).view(entry.tensor.shape)
        for segment, layout in store.layouts.items()
        for entry in layout.entries
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 3])
def test_masters_are_the_files_values_exactly(tmp_path: Path, precision: Precision, dtype: torch.dtype, shards: int):
    spec = tiny_spec()
    weights = _weights(spec, dtype)
    store = _loaded(_folder(tmp_path / "m", weights, shards), spec, precision)
    masters = _masters(store)
    assert set(masters) == set(weights)
    for name, values in weights.items():
        assert torch.equal(masters[name], values.float()), name
    assert not store.flat("L000", "m").any()


def test_a_saved_transformers_model_loads(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(tiny_config(tied=True))
    model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    masters = _masters(_loaded(tmp_path / "m", tiny_spec(tied=True)))
    for name, value in model.state_dict().items():
        if name != HEAD:
            assert torch.equal(masters[name], value)


def test_weights_are_right_whatever_the_piece_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatrain.checkpoint.load_hf.BLOCK_BYTES", 100)
    monkeypatch.setattr("megatrain.checkpoint.load_hf.CHUNK_ELEMENTS", 7)
    spec = tiny_spec()
    weights = _weights(spec, torch.bfloat16)
    masters = _masters(_loaded(_folder(tmp_path / "m", weights), spec))
    assert all(torch.equal(masters[name], values.float()) for name, values in weights.items())


def test_frozen_weights_are_rounded_by_the_rule(tmp_path: Path):
    spec = tiny_spec(freeze_embed=True)
    weights = _weights(spec)
    store = _loaded(_folder(tmp_path / "m", weights), spec)
    assert torch.equal(store.flat("EMBED", "w")[: VOCAB * HIDDEN], split_master(weights[EMBED])[0].flatten())


# ---- tied


def test_a_tied_head_may_be_absent_or_equal_but_not_different(tmp_path: Path):
    spec = tiny_spec(tied=True)
    weights = _weights(spec)
    absent = _masters(_loaded(_folder(tmp_path / "absent", weights), spec))
    equal = _masters(_loaded(_folder(tmp_path / "equal", weights | {HEAD: weights[EMBED].clone()}), spec))
    assert torch.equal(absent[EMBED], equal[EMBED])
    different = weights[EMBED].clone()
    different[-1, -1] += 1
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word"):
        _loaded(_folder(tmp_path / "different", weights | {HEAD: different}), spec)
    with pytest.raises(ModelError, match="differs"):
        _loaded(_folder(tmp_path / "dtype", weights | {HEAD: weights[EMBED].half()}), spec)
    with pytest.raises(ModelError, match="no embedding has the same"):
        _loaded(_folder(tmp_path / "shape", weights | {HEAD: weights[EMBED].T.contiguous()}), spec)


def test_an_untied_head_is_needed(tmp_path: Path):
    weights = _weights(tiny_spec())
    del weights[HEAD]
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is in none of its files"):
        _loaded(_folder(tmp_path / "m", weights), tiny_spec())


# ---- misfits


def test_unexpected_and_misshaped_tensors_are_named(tmp_path: Path):
    spec = tiny_spec()
    weights = _weights(spec)
    extra = weights | {"model.layers.2.mlp.up_proj.weight": torch.zeros(2), "z": torch.zeros(1)}
    with pytest.raises(
        ModelError, match=r"m/model\.safetensors: tensor model\.layers\.2\S* is no part.*nor are 1 others"
    ):
        _loaded(_folder(tmp_path / "m", extra), spec)
    weights["model.norm.weight"] = torch.zeros(HIDDEN + 1)
    with pytest.raises(
        ModelError, match=r"tensor model\.norm\.weight has shape \(17,\), the model's config asks for \(16,\)"
    ):
        _loaded(_folder(tmp_path / "m", weights), spec)


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path: Path):
    spec = tiny_spec()
    weights = _weights(spec)
    old = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert torch.equal(_masters(_loaded(_folder(tmp_path / "m", old), spec))[EMBED], weights[EMBED])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype):
    weights = _weights(tiny_spec())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is (F64|F8_E4M3|I8); full-precision"):
        _loaded(_folder(tmp_path / "m", weights), tiny_spec())


def test_pickles_and_empty_folders_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        _loaded(tmp_path, tiny_spec())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        _loaded(tmp_path, tiny_spec())


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", 7, ""])
def test_shard_names_must_be_plain_file_names(tmp_path: Path, shard: object):
    index = {"weight_map": {EMBED: shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is no plain"):
        _loaded(tmp_path, tiny_spec())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "c"}}'])
def test_broken_indexes_are_refused(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        _loaded(tmp_path, tiny_spec())


def test_shards_that_disagree_with_the_index_are_refused(tmp_path: Path):
    spec = tiny_spec()
    folder = _folder(tmp_path / "m", _weights(spec), shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    original = index.read_text()
    mapped = json.loads(original)
    mapped["weight_map"]["ghost"] = first.name
    index.write_text(json.dumps(mapped))
    with pytest.raises(ModelError, match="tensor ghost is not in model-00001"):
        _loaded(folder, spec)
    index.write_text(original)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"is in .*00001-of-00002\S* and in .*00002-of-00002"):
        _loaded(folder, spec)
    second.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors cannot be read: No such file"):
        _loaded(folder, spec)


def test_symbolic_links_are_not_followed(tmp_path: Path):
    folder = _folder(tmp_path / "m", _weights(tiny_spec()))
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is a symbolic link, which is not followed"):
        _loaded(folder, tiny_spec())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]):
    """A pipe without a writer would else be waited for, for ever."""
    folder = _folder(tmp_path / "m", _weights(tiny_spec()))
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: it is no regular file"):
        _loaded(folder, tiny_spec())


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path):
    folder = _folder(tmp_path / "m", _weights(tiny_spec()))
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"m/model\.safetensors"):
            _loaded(folder, tiny_spec())


def test_a_read_error_names_tensor_and_file(tmp_path: Path):
    class Failing(Files):
        def read(self, fd: int, buffer: bytes | bytearray | memoryview, offset_bytes: int) -> int:
            if offset_bytes > 3000:
                raise OSError(5, "Input/output error")
            return super().read(fd, buffer, offset_bytes)

    spec = tiny_spec()
    folder = _folder(tmp_path / "m", _weights(spec))
    with pytest.raises(ModelError, match=r"tensor \S+weight: .*model\.safetensors cannot be read: Input/output error"):
        load_weights(folder, make_store(spec, "bf16"), spec, Failing())


def test_files_are_closed(tmp_path: Path):
    spec = tiny_spec()
    folder = _folder(tmp_path / "m", _weights(spec), shards=3)
    before = len(os.listdir("/proc/self/fd"))
    _loaded(folder, spec)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- experts


def _moe_spec() -> ModelSpec:
    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"model.layers.0.mlp.{name}", name, shape, True, True)

    tensors = (
        tensor("gate.weight", 3, HIDDEN),
        tensor("experts.gate_up_proj", 3, 2 * FFN, HIDDEN),
        tensor("experts.down_proj", 3, HIDDEN, FFN),
    )
    return ModelSpec("X", (SegmentSpec("L000", "block", tensors),), False, HIDDEN, VOCAB, (), 0, 8)


@pytest.mark.parametrize(
    ("layer", "names"),
    [("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))],
)
def test_one_tensor_an_expert_becomes_the_fused_tensors(tmp_path: Path, layer: str, names: tuple[str, str, str]):
    spec = _moe_spec()
    generator = torch.Generator().manual_seed(5)
    at = f"model.layers.0.{layer}."
    weights = {f"{at}gate.weight": torch.randn(3, HIDDEN, generator=generator)}
    for expert in range(3):
        for name, shape in zip(names, ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)), strict=True):
            weights[f"{at}experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator)
    masters = _masters(_loaded(_folder(tmp_path / "m", weights), spec))
    for expert in range(3):
        gate, up, down = (weights[f"{at}experts.{expert}.{name}.weight"] for name in names)
        assert torch.equal(masters["model.layers.0.mlp.experts.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(masters["model.layers.0.mlp.experts.down_proj"][expert], down)
    del weights[f"{at}experts.1.{names[2]}.weight"]
    with pytest.raises(ModelError, match=r"experts\.down_proj is in none"):
        _loaded(_folder(tmp_path / "m", weights), spec)


def test_a_fused_checkpoint_is_taken_as_it_is(tmp_path: Path):
    spec = _moe_spec()
    weights = _weights(spec)
    masters = _masters(_loaded(_folder(tmp_path / "m", weights), spec))
    assert all(torch.equal(masters[name], values) for name, values in weights.items())


def test_expert_parts_tile_the_fused_tensor():
    for tensor in _moe_spec().segments[0].tensors[1:]:
        for parts in candidates(tensor):
            elements = [e for part in parts for e in range(part.start, part.start + _size(part.shape))]
            assert elements == list(range(tensor.num_elements))


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# ---- memory

_MEASURE = """
import sys, torch
from pathlib import Path
from tests.checkpoint.checkpoint_cases import make_store
from megatrain.checkpoint import load_weights
from megatrain.memory import peak_rss_bytes, reset_peak_rss
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
tensors = tuple(TensorSpec(f"t{i}", f"t{i}", (1000, 12800), True, True) for i in range(4))
spec = ModelSpec("X", (SegmentSpec("L000", "block", tensors),), False, 1, 1, (), 0, 1)
store = make_store(spec, "bf16")
reset_peak_rss()
before = peak_rss_bytes()
load_weights(Path(sys.argv[1]), store, spec)
assert store.flat("L000", "w")[-1].item() == 3.0
print(peak_rss_bytes() - before)
"""


def test_loading_takes_little_memory_beside_the_store(tmp_path: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({f"t{i}": torch.full((1000, 12800), float(i)) for i in range(4)}, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size > 200_000_000
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 128 << 20, f"{int(done.stdout):,} bytes"


# ---- values no step could start from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float
):
    monkeypatch.setattr("megatrain.checkpoint.load_hf.CHUNK_ELEMENTS", 5)
    spec = tiny_spec()
    for index, name in enumerate((EMBED, "model.norm.weight")):
        weights = _weights(spec, dtype)
        weights[name].view(-1)[-1] = value
        where = f"tensor {name} holds {value} at element {weights[name].numel() - 1:,};"
        with pytest.raises(ModelError, match=re.escape(where)):
            _loaded(_folder(tmp_path / f"m{index}", weights, 1 + 2 * index), spec)


def test_the_largest_finite_values_load(tmp_path: Path):
    spec = tiny_spec()
    weights = _weights(spec)
    weights["model.norm.weight"][:2] = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    _loaded(_folder(tmp_path / "m", weights), spec)


def test_headers_are_checked_without_reading_a_weight(tmp_path: Path):
    spec = tiny_spec()
    weights = _weights(spec)
    weights["model.norm.weight"][0] = float("nan")
    check_weights(_folder(tmp_path / "m", weights), spec)
    del weights[EMBED]
    with pytest.raises(ModelError, match=f"tensor {EMBED} is in none of its files"):
        check_weights(_folder(tmp_path / "n", weights), spec)
