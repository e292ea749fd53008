"""`megatrain export`: every dtype, shards, the card; and a run that goes on in plain torch from a DCP folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from megatrain.cli.main import main
from megatrain.store import join_master, split_master
from tests.families import tiny_config


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def state_of(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter -> master, m, v, as the checkpoint's own files hold them."""
    folder = run / f"checkpoints/step-{step}"
    weights = {n: t for f in folder.glob("model/*.safetensors") for n, t in load_file(f).items()}
    state = {n: t for f in folder.glob("state/*.safetensors") for n, t in load_file(f).items()}
    masters = {n: join_master(w, state[f"lo.{n}"]) if f"lo.{n}" in state else w.float() for n, w in weights.items()}
    moments = {n: {k: state[f"{k}.{n}"] for k in "mv" if f"{k}.{n}" in state} for n in weights}
    return {n: {"master": masters[n], **moments[n]} for n in weights}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("word", ["bf16", "fp16", "fp32", None])
def test_every_dtype_is_the_rounded_master(run_config: Path, tmp_path: Path, precision: str, word: str | None) -> None:
    assert megatrain("train", run_config, "max_steps=2", f"precision={precision}") == 0
    run, out = tmp_path / "run", tmp_path / "out"
    assert megatrain("export", run, out, *(("--dtype", word) if word else ())) == 0
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(word or "", torch.bfloat16)
    saved = load_file(out / "model.safetensors")
    for name, held in state_of(run, 2).items():
        assert saved[name].dtype == dtype
        rounded = split_master(held["master"])[0] if dtype == torch.bfloat16 else held["master"].to(dtype)
        assert torch.equal(saved[name], rounded), name
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == dtype
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_shards_and_steps(run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert megatrain("train", run_config) == 0
    run = tmp_path / "run"
    monkeypatch.setattr("megatrain.cli.exported.MIN_SHARD_BYTES", 1)
    assert megatrain("export", run, tmp_path / "out", "--shard-size", "20KB", "--step", "4", "--dtype", "fp32") == 0
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    held = state_of(run, 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, held[name]["master"]) for name, tensor in model.named_parameters())
    assert "step 4" in (tmp_path / "out/README.md").read_text()


def test_the_card_says_what_the_run_recorded(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config, "freeze=embed_tokens", "run_name=null") == 0
    run, out = tmp_path / "run", tmp_path / "out"
    assert megatrain("export", run, out) == 0
    text = (out / "README.md").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in rows if row["step"] == 6 and "eval_loss" in row)
    manifest = json.loads((run / "checkpoints/step-6/manifest.json").read_text())
    tokens = sum(row["tokens"] for row in rows if "loss" in row)
    for fact in (
        "| base model | `tiny` (name of its folder) |",
        "| optimizer steps | 6 |",
        f"| tokens trained on | {tokens:,}, of which",
        f"| eval loss | {last['eval_loss']:.4f} over {last['eval_tokens']:,} held-out tokens (base model: ",
        f"| data fingerprint | `{manifest['run']['data']}` |",
        "| weights in this folder | bf16 |",
        "all parameters but those matching `embed_tokens`",
        "learning_rate: 0.01",
        "train_batch_size: 3",
        f"torch {torch.__version__}",
    ):
        assert fact in text, fact
    assert str(tmp_path) not in text, "no path of this machine is told"
    assert text.startswith("---\nlibrary_name: transformers\n")


def test_a_step_that_was_not_evaluated_claims_no_loss(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config) == 0
    assert megatrain("export", tmp_path / "run", tmp_path / "out", "--step", "4") == 0
    text = (tmp_path / "out/README.md").read_text()
    assert "eval loss" not in text
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first = [row for row in rows if "loss" in row and row["step"] <= 4]
    assert f"| tokens trained on | {sum(row['tokens'] for row in first):,}, of which" in text
    assert f"| training loss of the last step | {first[-1]['loss']:.4f} |" in text


def test_generation_config_and_template_are_kept(run_config: Path, tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.6).save_pretrained(base)
    assert megatrain("train", run_config, "max_steps=1", f"model={base}") == 0
    for kind in ("hf", "dcp"):
        out = tmp_path / kind
        assert megatrain("export", tmp_path / "run", out, "--format", kind) == 0
        assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
        assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_fp16_refuses_what_it_cannot_hold(
    run_config: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = -70000.0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert megatrain("train", run_config, "max_steps=1", "learning_rate=1e-9", f"model={base}") == 0
    capsys.readouterr()
    assert megatrain("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp16") == 2
    error = capsys.readouterr().err
    assert "tensor model.layers.1.mlp.up_proj.weight holds 70000, beyond the 65504 of fp16" in error
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.tmp-*")), "nothing is left behind"
    assert megatrain("export", tmp_path / "run", tmp_path / "out", "--dtype", "bf16") == 0


def fresh(out: Path) -> tuple[PreTrainedModel, torch.optim.AdamW]:
    """An untrained model of the folder's config and a plain AdamW, as somebody else's program would make them."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


def resumed(out: Path, *, flat: bool) -> tuple[PreTrainedModel, torch.optim.AdamW]:
    """The same after loading the folder by torch alone; `flat`: as torchtitan spells optimizer state."""
    model, optimizer = fresh(out)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    whole: dict[str, Any] = {"model": weights, "optim": state}
    dcp.load(whole, checkpoint_id=out, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"], options=options)
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_torch_takes_the_run_over(run_config: Path, tmp_path: Path, precision: str, *, flat: bool) -> None:
    assert megatrain("train", run_config, f"precision={precision}", "adam_beta2=0.97") == 0
    run, out = tmp_path / "run", tmp_path / "dcp"
    assert megatrain("export", run, out, "--format", "dcp") == 0
    model, optimizer = resumed(out, flat=flat)
    held = state_of(run, 6)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == held.keys()
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        assert torch.equal(parameter, held[name]["master"]), name
        assert torch.equal(state["exp_avg"], held[name]["m"]), name
        assert torch.equal(state["exp_avg_sq"], held[name]["v"]), name
        assert state["step"].item() == 6
        assert state["exp_avg_sq"].any(), "there is something to compare"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-2, (0.9, 0.97), 1e-8, 0.0)


def test_going_on_in_torch_is_going_on_here(run_config: Path, tmp_path: Path) -> None:
    """One more step: torch's AdamW from the DCP folder on our gradient against our own next step."""
    words = ("lr_scheduler_type=constant", "max_grad_norm=null", "save_steps=1", "save_total_limit=9")
    assert megatrain("train", run_config, *words, "max_steps=4") == 0
    run, out = tmp_path / "run", tmp_path / "dcp"
    assert megatrain("export", run, out, "--format", "dcp", "--step", "3") == 0
    model, optimizer = resumed(out, flat=False)
    before, after = state_of(run, 3), state_of(run, 4)
    for name, parameter in model.named_parameters():  # m' = b1 m + (1 - b1) g gives our gradient back
        parameter.grad = (after[name]["m"] - 0.9 * before[name]["m"]) / 0.1
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (after[name]["master"] - before[name]["master"]).abs().max()
        assert moved > 1e-5
        assert (parameter - after[name]["master"]).abs().max() < 0.02 * moved, name


def test_what_is_saved_but_not_trained_travels_too(run_config: Path, tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3", vocab_size=320, bos_token_id=None))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.linspace(-1.0, 1.0, 8))
    shutil.copytree(tiny_model, base)
    model.save_pretrained(base)
    assert megatrain("train", run_config, "max_steps=2", f"model={base}") == 0
    out = tmp_path / "dcp"
    assert megatrain("export", tmp_path / "run", out, "--format", "dcp") == 0
    loaded, optimizer = resumed(out, flat=False)
    assert torch.equal(loaded.get_buffer(name), model.get_buffer(name))
    assert len(optimizer.state) == len(list(loaded.parameters()))


def test_frozen_parameters_travel_without_state_and_decay_splits_the_groups(run_config: Path, tmp_path: Path) -> None:
    words = ("freeze=[embed_tokens, layers.0]", "weight_decay=0.1", "max_steps=2")
    assert megatrain("train", run_config, *words) == 0
    run, out = tmp_path / "run", tmp_path / "dcp"
    assert megatrain("export", run, out, "--format", "dcp") == 0
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    frozen = {n for n, _ in model.named_parameters() if "embed_tokens" in n or "layers.0" in n}
    trained = {n: p for n, p in model.named_parameters() if n not in frozen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": 9.0},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 9.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=out, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    held = state_of(run, 2)
    assert all(torch.equal(p, held[n]["master"]) for n, p in model.named_parameters())
    assert all(torch.equal(optimizer.state[p]["exp_avg"], held[n]["m"]) for n, p in trained.items())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    stored = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert not any(name in key for key in stored if key.startswith("optim.") for name in frozen)


def test_mistakes_end_in_one_sentence(
    run_config: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "max_steps=1") == 0
    run, out = tmp_path / "run", tmp_path / "out"
    (tmp_path / "there").mkdir()
    capsys.readouterr()
    cases = {
        ("export", run, tmp_path / "there"): "is already there; give a new folder",
        ("export", run, tmp_path / "there", "--format", "dcp"): "is already there; give a new folder",
        ("export", run, tmp_path / "no/out", "--format", "dcp"): "no is no folder; make it first",
        ("export", run, out, "--dtype", "int8"): "dtype is 'int8'; use bf16, fp16, fp32",
        ("export", run, out, "--dtype", "bf16", "--format", "dcp"): "writes the fp32 masters",
        ("export", run, out, "--format", "gguf"): "format is 'gguf'; use hf or dcp",
        ("export", run, out, "--shard-size", "5"): "shard-size is '5'; write a size with its unit",
        ("export", run, out, "--shard-size", "5B"): "give at least 1MiB",
        ("export", run, out, "--step", "3"): "holds no checkpoint of step 3; it holds 1",
        ("export", run, out, "--step", "base"): "an export takes one checkpoint",
        ("export", tiny_model, out): "is a model folder already",
        ("export", tmp_path, out): "is neither a run folder",
    }
    for words, said in cases.items():
        assert megatrain(*words) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not out.exists()
