"""Training checkpoints: exact round trips, newest valid wins, every damage found and named, refusals."""

from __future__ import annotations

import json
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Files,
    checkpoint_bytes,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from megatrain.checkpoint.commit import verify
from megatrain.errors import CheckpointError
from megatrain.models.spec import ModelSpec
from megatrain.store import SegmentStore
from megatrain.store.store import Precision
from tests.checkpoint.checkpoint_cases import (
    fill_random,
    make_store,
    stores_equal,
    tiny_config,
    tiny_spec,
    tokenizer_folder,
)


def _writer(run_dir: Path, store: SegmentStore, spec: ModelSpec, *, keep: int = 2, **more: object) -> CheckpointWriter:
    run_dir.mkdir(exist_ok=True)
    config = tiny_config(tied=spec.tied)
    facts = {"config_sha256": "c0ffee", "data": {"rows": 3}}
    return CheckpointWriter(run_dir, store, spec, config, None, keep=keep, run_facts=facts, **more)  # type: ignore[arg-type]


def _save(writer: CheckpointWriter, spec: ModelSpec, step: int) -> Path:
    def write_parts(write_segment: Callable[[str], None]) -> None:
        for segment in spec.segments:
            write_segment(segment.name)

    return save_checkpoint(writer, step, write_parts, {"step": step, "data": {"row": 7 * step}, "seed": 1.5})


def _loaded(run_dir: Path) -> Checkpoint:
    checkpoint = load_checkpoint(run_dir, "auto")
    assert checkpoint is not None
    return checkpoint


def _run(run_dir: Path, *steps: int, keep: int = 2) -> tuple[SegmentStore, ModelSpec]:
    """A run folder with these steps saved from one random store."""
    spec = tiny_spec(layers=1)
    store = make_store(spec, "bf16")
    fill_random(store, 1)
    writer = _writer(run_dir, store, spec, keep=keep)
    for step in steps:
        _save(writer, spec, step)
    return store, spec


def _names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# ---- round trips


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("hbm_before", "hbm_after"), [(False, False), (True, False), (False, True)])
def test_every_bit_comes_back_at_any_placement(
    tmp_path: Path, precision: Precision, tied: bool, hbm_before: bool, hbm_after: bool
):
    spec = tiny_spec(tied=tied)
    store = make_store(spec, precision, hbm=hbm_before)
    fill_random(store, 1)
    path = _save(_writer(tmp_path / "run", store, spec), spec, 3)
    assert path == tmp_path / "run/checkpoints/step-3"
    checkpoint = _loaded(tmp_path / "run")
    assert checkpoint.path == path
    assert checkpoint.step == 3
    assert checkpoint.trainer_state == {"step": 3, "data": {"row": 21}, "seed": 1.5}
    assert checkpoint.manifest["run"] == {"config_sha256": "c0ffee", "data": {"rows": 3}}
    assert checkpoint.manifest["versions"]["torch"] == torch.__version__
    assert checkpoint.skipped == ()
    back = make_store(spec, precision, hbm=hbm_after)
    assert not stores_equal(back, store)
    restore(back, checkpoint)
    assert stores_equal(back, store)


def test_special_bits_survive(tmp_path: Path):
    """NaN payloads, infinities, denormals and negative zeros, in every kind."""
    spec = tiny_spec(layers=1)
    store = make_store(spec, "bf16")
    patterns = torch.tensor([0x7FA00001, -1, 0x7F800000, -0x800000, 1, -0x80000000], dtype=torch.int32)
    for kind in ("w", "lo", "m", "v"):
        store.flat("L000", kind)[:12].view(torch.int32)[:6] = patterns
    _save(_writer(tmp_path / "run", store, spec), spec, 1)
    back = make_store(spec, "bf16")
    restore(back, _loaded(tmp_path / "run"))
    assert stores_equal(back, store)


def test_frozen_tensors_have_weights_only(tmp_path: Path):
    spec = tiny_spec(freeze_embed=True)
    store = make_store(spec, "bf16")
    fill_random(store, 4)
    path = _save(_writer(tmp_path / "run", store, spec), spec, 1)
    assert "EMBED.safetensors" not in _names(path / "state")
    back = make_store(spec, "bf16")
    restore(back, _loaded(tmp_path / "run"))
    assert stores_equal(back, store)


def test_the_model_folder_opens_in_transformers(tmp_path: Path):
    spec = tiny_spec(tied=True)
    store = make_store(spec, "bf16")
    fill_random(store, 1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    source = tokenizer_folder(tmp_path / "source")
    writer = CheckpointWriter(run_dir, store, spec, tiny_config(tied=True), source, keep=2, run_facts={})
    path = _save(writer, spec, 1)
    assert (path / "model/chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()
    (path / "model/generation_config.json").unlink()  # the source's is nonsense on purpose
    model, report = AutoModelForCausalLM.from_pretrained(path / "model", output_loading_info=True)  # type: ignore[misc]
    assert not any(report.values()), report
    assert torch.equal(model.state_dict()["model.norm.weight"], store.flat("HEAD", "w")[:16])


def test_segments_may_come_in_any_order_but_all_must(tmp_path: Path):
    spec = tiny_spec(layers=1)
    store = make_store(spec, "bf16")
    fill_random(store, 1)
    writer = _writer(tmp_path / "run", store, spec)
    writer.begin(1)
    for segment in ("HEAD", "L000", "EMBED"):
        writer.write_segment(segment)
    writer.commit({"step": 1})
    back = make_store(spec, "bf16")
    restore(back, _loaded(tmp_path / "run"))
    assert stores_equal(back, store)
    writer.begin(2)
    writer.write_segment("HEAD")
    with pytest.raises(AssertionError, match="L000"):
        writer.commit({"step": 2})
    writer.abort()
    assert _names(tmp_path / "run/checkpoints") == {"step-1"}
    writer.abort()


def test_the_trainer_states_step_must_agree(tmp_path: Path):
    _, spec = _run(tmp_path / "run", 1)
    writer = _writer(tmp_path / "run", make_store(spec, "bf16"), spec)

    def write_parts(write_segment: Callable[[str], None]) -> None:
        for segment in spec.segments:
            write_segment(segment.name)

    with pytest.raises(ValueError, match="of step 3, the checkpoint of 2"):
        save_checkpoint(writer, 2, write_parts, {"step": 3})
    assert _names(tmp_path / "run/checkpoints") == {"step-1"}


def test_everything_written_is_private(tmp_path: Path):
    _run(tmp_path / "run", 1)
    for path in (tmp_path / "run/checkpoints").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_checkpoint_bytes_is_the_size_of_the_tensors(tmp_path: Path):
    store, _ = _run(tmp_path / "run", 1)
    written = sum(p.stat().st_size for p in (tmp_path / "run/checkpoints").rglob("*.safetensors"))
    assert checkpoint_bytes(store) <= written < checkpoint_bytes(store) + 20_000
    parameters = sum(e.tensor.num_elements for layout in store.layouts.values() for e in layout.entries)
    assert checkpoint_bytes(store) == 12 * parameters


# ---- which checkpoint


def test_the_newest_by_number_wins_and_old_ones_go(tmp_path: Path):
    run_dir = tmp_path / "run"
    _run(run_dir, 9, 90, 100, 101, keep=3)
    assert _names(run_dir / "checkpoints") == {"step-90", "step-100", "step-101"}
    assert _loaded(run_dir).step == 101
    assert (run_dir / "LATEST").read_text() == "checkpoints/step-101\n"
    shutil.rmtree(run_dir / "checkpoints/step-101")
    assert _loaded(run_dir).step == 100  # whatever the hint says


def test_a_run_without_checkpoints_has_none(tmp_path: Path):
    assert load_checkpoint(tmp_path, "auto") is None
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-5.tmp-" + "0" * 32, "step-007", "step-x", "best"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert load_checkpoint(tmp_path, "auto") is None


def test_a_damaged_newest_is_passed_over_and_said(tmp_path: Path):
    run_dir = tmp_path / "run"
    _run(run_dir, 1, 2)
    _flip(run_dir / "checkpoints/step-2/state/L000.safetensors", 20_000)
    checkpoint = _loaded(run_dir)
    assert checkpoint.step == 1
    assert len(checkpoint.skipped) == 1
    assert "step-2/state/L000.safetensors is damaged" in checkpoint.skipped[0]
    _flip(run_dir / "checkpoints/step-1/manifest.json", 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is valid: .*step-2.*step-1/manifest\.json"):
        load_checkpoint(run_dir, "auto")


def test_pruning_counts_whole_checkpoints_only(tmp_path: Path):
    run_dir = tmp_path / "run"
    store, spec = _run(run_dir, 1, 2)
    (run_dir / "checkpoints/step-2/state/HEAD.safetensors").unlink()
    writer = _writer(run_dir, store, spec)
    _save(writer, spec, 3)
    assert _names(run_dir / "checkpoints") == {"step-1", "step-2", "step-3"}
    _save(writer, spec, 4)
    assert _names(run_dir / "checkpoints") == {"step-3", "step-4"}


def test_pruning_does_not_count_what_was_passed_over_at_resume(tmp_path: Path):
    """A flipped bit leaves sizes and manifest right: only that a lower step is saved again tells."""
    run_dir = tmp_path / "run"
    store, spec = _run(run_dir, 2, 4, 8)
    _flip(run_dir / "checkpoints/step-8/state/L000.safetensors", 20_000)
    assert _loaded(run_dir).step == 4
    _save(_writer(run_dir, store, spec), spec, 5)
    assert _names(run_dir / "checkpoints") == {"step-4", "step-5", "step-8"}
    _flip(run_dir / "checkpoints/step-5/state/L000.safetensors", 20_000)
    assert _loaded(run_dir).step == 4, "two valid ones were kept: one may be lost"
    _save(_writer(run_dir, store, spec), spec, 8)
    assert _names(run_dir / "checkpoints") == {"step-5", "step-8"}


def test_a_path_is_that_checkpoint_or_an_error(tmp_path: Path):
    run_dir = tmp_path / "run"
    _run(run_dir, 1, 2)
    one, two = run_dir / "checkpoints/step-1", run_dir / "checkpoints/step-2"
    assert load_checkpoint(run_dir, two).step == 2  # type: ignore[union-attr]
    assert load_checkpoint(tmp_path / "other", one).step == 1  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="already has step-2, newer than"):
        load_checkpoint(run_dir, one)
    _flip(two / "state/trainer.json", 3)
    with pytest.raises(CheckpointError, match=r"state/trainer\.json is damaged"):
        load_checkpoint(run_dir, two)
    with pytest.raises(CheckpointError, match=r"nowhere/manifest\.json cannot be read: No such file"):
        load_checkpoint(run_dir, tmp_path / "nowhere")


def test_a_renamed_checkpoint_is_refused(tmp_path: Path):
    _run(tmp_path / "run", 1, 2)
    (tmp_path / "run/checkpoints/step-2").rename(tmp_path / "run/checkpoints/step-30")
    checkpoint = _loaded(tmp_path / "run")
    assert checkpoint.step == 1
    assert "is of step 2; the folder was renamed" in checkpoint.skipped[0]


def test_saving_a_step_again(tmp_path: Path):
    run_dir = tmp_path / "run"
    store, spec = _run(run_dir, 1, 2)
    writer = _writer(run_dir, store, spec)
    with pytest.raises(CheckpointError, match="step-2 is already there and valid"):
        _save(writer, spec, 2)
    assert _loaded(run_dir).step == 2
    _flip(run_dir / "checkpoints/step-2/model/config.json", 1)
    _save(writer, spec, 2)
    assert _loaded(run_dir).step == 2


def test_leftovers_of_killed_runs_are_swept(tmp_path: Path):
    run_dir = tmp_path / "run"
    store, spec = _run(run_dir, 1)
    left = run_dir / ("checkpoints/step-7.tmp-" + "a" * 32)
    (left / "model").mkdir(parents=True)
    (left / "model/x").write_text("x")
    (outside := tmp_path / "outside").mkdir()
    (outside / "precious").write_text("x")
    (left / "link").symlink_to(outside)
    (run_dir / ("LATEST.tmp-" + "b" * 32)).write_text("x")
    (run_dir / "checkpoints/step-7.tmp-notes").mkdir()
    _save(_writer(run_dir, store, spec), spec, 2)
    assert _names(run_dir / "checkpoints") == {"step-1", "step-2", "step-7.tmp-notes"}
    assert _names(run_dir) == {"checkpoints", "LATEST"}
    assert (outside / "precious").read_text() == "x"


# ---- refusals before a byte is written


def test_fewer_than_two_kept_is_an_error(tmp_path: Path):
    spec = tiny_spec()
    for keep in (1, 0, -1):
        with pytest.raises(CheckpointError, match=f"save_total_limit is {keep}; at least 2"):
            _writer(tmp_path, make_store(spec, "bf16"), spec, keep=keep)


def test_a_full_disk_is_found_first_with_numbers(tmp_path: Path):
    class Small(Files):
        def free_bytes(self, path: Path) -> int:
            assert path.is_dir()
            return 5_000_000

    spec = tiny_spec()
    writer = _writer(tmp_path / "run", make_store(spec, "bf16"), spec, files=Small())
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, 5,000,000 are free .*lower save_total_limit"):
        _save(writer, spec, 1)
    assert not _names(tmp_path / "run/checkpoints")


def test_another_model_or_precision_is_refused_at_restore(tmp_path: Path):
    _run(tmp_path / "run", 1)
    checkpoint = _loaded(tmp_path / "run")
    spec = tiny_spec(layers=1)
    with pytest.raises(CheckpointError, match="saved with precision bf16, not fp32; set precision: bf16"):
        restore(make_store(spec, "fp32"), checkpoint)
    with pytest.raises(CheckpointError, match=r"has no tensor \S*model\.layers\.1\S+; the model or `freeze` changed"):
        restore(make_store(tiny_spec(layers=2), "bf16"), checkpoint)
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is no part of this run"):
        restore(make_store(tiny_spec(layers=1, tied=True), "bf16"), checkpoint)
    with pytest.raises(CheckpointError, match=r"tensor lo\.model\.embed_tokens\.weight is no part"):
        restore(make_store(tiny_spec(layers=1, freeze_embed=True), "bf16"), checkpoint)


# ---- damage


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _tensor_at(path: Path, byte: int) -> str | None:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, member in json.loads(data[8:start]).items():
        if name != "__metadata__" and member["data_offsets"][0] <= byte - start < member["data_offsets"][1]:
            return name
    return None


def _flips_are_found(run_dir: Path, count: int) -> None:
    _run(run_dir, 1)
    path = run_dir / "checkpoints/step-1"
    paths = sorted(p for p in path.rglob("*") if p.is_file())
    assert len(paths) > 8
    chosen = random.Random(0)
    for number in range(count):
        damaged = paths[number % len(paths)]
        bit = chosen.randrange(8 * damaged.stat().st_size)
        tensor = _tensor_at(damaged, bit // 8) if damaged.suffix == ".safetensors" else None
        _flip(damaged, bit)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(run_dir, path)
        assert str(damaged) in str(caught.value), (damaged, bit, str(caught.value))
        if tensor is not None:
            assert str(caught.value).endswith(f"tensor {tensor}"), (damaged, bit, str(caught.value))
        _flip(damaged, bit)
    assert load_checkpoint(run_dir, path) is not None


def test_single_bit_flips_are_all_found_and_named(tmp_path: Path):
    _flips_are_found(tmp_path / "run", 600)


@pytest.mark.slow
def test_ten_thousand_bit_flips_are_all_found_and_named(tmp_path: Path):
    _flips_are_found(tmp_path / "run", 10_000)


def test_every_bit_of_a_manifest_matters(tmp_path: Path):
    _run(tmp_path / "run", 1)
    path = tmp_path / "run/checkpoints/step-1"
    for bit in range(0, 8 * (path / "manifest.json").stat().st_size, 211):
        _flip(path / "manifest.json", bit)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify(Files(), path)
        _flip(path / "manifest.json", bit)


def test_missing_truncated_extended_and_linked_files_are_named(tmp_path: Path):
    _run(tmp_path / "run", 1)
    path = tmp_path / "run/checkpoints/step-1"
    for damaged in sorted(p for p in path.rglob("*") if p.is_file()):
        whole = damaged.read_bytes()
        for data in (whole[:-1], whole + b"\0", b""):
            damaged.write_bytes(data)
            with pytest.raises(CheckpointError, match=damaged.name):
                verify(Files(), path)
        damaged.unlink()
        with pytest.raises(CheckpointError, match=damaged.name):
            verify(Files(), path)
        (tmp_path / "elsewhere").write_bytes(whole)
        damaged.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=f"{damaged.name} is a symbolic link"):
            verify(Files(), path)
        damaged.unlink()
        damaged.write_bytes(whole)
    assert verify(Files(), path)["step"] == 1
