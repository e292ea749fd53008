"""A config file is read to the letter: every mistake is a ConfigError with its line, nothing is guessed or ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import FP32_KEYS, RunConfig, allowed_keys, changed_keys, fp32, group_of, read_config, resolved
from megatrain.config_spellings import ALIASES, HINTS, keys_of
from megatrain.config_values import format_size, parse_size
from megatrain.errors import ConfigError

WRITE_A_SIZE = 'write a size with its unit, one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB: for example "24GiB"'
BASE = "model: a\ndataset: b\n"


def read(tmp_path: Path, text: str, *words: str) -> RunConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text, "utf-8")
    return read_config(path, words)


def test_defaults_and_yaml_1_2_scalars(tmp_path: Path) -> None:
    config = read(tmp_path, BASE + "learning_rate: 1e-5\nsave_strategy: no\nweight_decay: 0\n")
    assert config.learning_rate == 1e-5
    assert config.save_strategy == "no"
    assert config.weight_decay == 0.0
    assert config.max_length == 2048


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_lands_on_its_key(tmp_path: Path, alias: str) -> None:
    values = {"model": "x", "dataset": "x", "eval_dataset": "x", "output_dir": "x", "max_length": "64"}
    values |= {"packing": "false", "lr_scheduler_type": "linear", "learning_rate": "0.5", "num_train_epochs": "2"}
    values |= {"adam_epsilon": "0.5", "max_grad_norm": "0.5", "train_batch_size": "3"}
    values |= {"train_roles": "[user, assistant]", "label_smoothing_factor": "0.1"}
    values |= {"neftune_noise_alpha": "5", "router_aux_loss_coef": "0.5"}
    key = ALIASES[alias]
    base = "".join(line for line in (BASE.splitlines(keepends=True)) if not line.startswith(f"{key}:"))
    config = read(tmp_path, f"{base}{alias}: {values[key]}\n")
    assert config == read(tmp_path, f"{base}{key}: {values[key]}\n")
    assert key in config.model_fields_set


def test_batch_factors_multiply(tmp_path: Path) -> None:
    text = BASE + "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"
    assert read(tmp_path, text).train_batch_size == 32
    assert read(tmp_path, text, "train_batch_size=5").train_batch_size == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 3\n", "line 3: unknown key 'learnin_rate'; did you mean 'learning_rate'?"),
        ("qqq: 3\n", "line 3: unknown key 'qqq'; docs/config.md lists the keys"),
        ("trust_remote_code: true\n", "line 3: key 'trust_remote_code' is refused"),
        ("model: c\n", "line 3: key 'model' is given twice (first at"),
        ("lr: 1\nlearning_rate: 2\n", "line 4: 'learning_rate' and a line before it both set"),
        ("packing: yes\n", "line 3: packing is 'yes'"),
        ("learning_rate: '1e-5'\n", "line 3: learning_rate is '1e-5'"),
        ("max_steps: 1.5\n", "line 3: max_steps is 1.5"),
        ("max_steps: true\n", "line 3: max_steps is True"),
        ("seed: -1\n", "line 3: seed is -1"),
        ("learning_rate: .inf\n", "line 3: learning_rate is inf"),
        ("memory: {hbm: 24}\n", f"line 3: memory.hbm is 24; {WRITE_A_SIZE}"),
        ("memory: {ram: 10PiB}\n", f"line 3: memory.ram is '10PiB'; {WRITE_A_SIZE}"),
        ("memory: {ram: 1kB}\n", f"line 3: memory.ram is '1kB'; {WRITE_A_SIZE}"),
        ("memory: {ram: 24G}\n", f"line 3: memory.ram is '24G'; {WRITE_A_SIZE}"),
        ("memory: {ram: -5GiB}\n", f"line 3: memory.ram is '-5GiB'; it may not be negative; {WRITE_A_SIZE}"),
        ("memory: {ram: -5}\n", f"line 3: memory.ram is -5; it may not be negative; {WRITE_A_SIZE}"),
        ("memory: {disk_tbw: 0TB}\n", "line 3: memory.disk_tbw is 0; input should be greater than 0"),
        ("memory: {disk_tbw: 0.5B}\n", "line 3: memory.disk_tbw is 0; input should be greater than 0"),
        ("dataset_format: x\n", "line 3: unknown key 'dataset_format'"),
        ("lora_r: 8\n", "line 3: key 'lora_r' has no place here: MegaTrain trains every parameter"),
        ("use_ema: true\n", "line 3: key 'use_ema' has no place here: ema_decay: 0.999 keeps an average"),
        ("output_dir:\n", "line 3: output_dir is None; it may not be empty: give a value, or leave the key out"),
        ("memory: 5\n", "line 3: memory is 5; write its members in braces, for example {hbm: 40GiB"),
        ("resume_from_checkpoint: run/step-4\n", "should be 'auto' or 'never' (auto: go on from the newest valid"),
        ("ema_decay: 1\n", "line 3: ema_decay is 1; input should be less than 1"),
        ("ema_decay: 0\n", "line 3: ema_decay is 0; input should be greater than 0"),
        ("ema_decay: 0.99999999\n", "line 3: ema_decay is 0.99999999, which is 1.0 in fp32"),
        ("save_strategy: no\nema_decay: 0.9\n", "save_strategy is no, but only checkpoints hold the average"),
        ("early_stopping_patience: 3\n", "line 3: early_stopping_patience counts evaluations; set eval_dataset and"),
        ("save_strategy: best\n", "line 3: save_strategy is best, but nothing is evaluated; set eval_dataset"),
        ("warmup_steps: 3\nwarmup_ratio: 0.1\n", "line 4: warmup_steps and warmup_ratio both size the warm-up"),
        ("report_to: mlflow\n", "line 3: report_to.0 is 'mlflow'; input should be 'tensorboard', 'trackio' or 'wandb'"),
        ("train_roles: []\n", "line 3: train_roles is ()"),
        ("label_smoothing: 1\n", "line 3: label_smoothing_factor is 1"),
        ("memory: {vram: 24GiB}\n", "unknown key 'memory.vram'; memory has hbm, ram, disk, disk_tbw and"),
        ("memory: {ram: 1GiB, ram: 2GiB}\n", "key 'ram' is given twice"),
        ("save_total_limit: 1\n", "line 3: save_total_limit is 1"),
        ("freeze: ['(']\n", "line 3: freeze has '(', not a regular expression"),
        ("gradient_accumulation_steps: 2\n", "line 3: give train_batch_size"),
        ("micro_batch_size: 0\n", "line 3: micro_batch_size is 0"),
        ("train_batch_size: 2\nmicro_batch_size: 2\n", "both size the batch"),
        ("seed: &a 1\n", "line 3: anchors and aliases"),
        ("freeze: !!python/name:os.system [a]\n", "line 3: tag"),
        ("max_steps: " + "9" * 400 + "\n", "has 400 digits"),
        ("num_train_epochs: 1e308\n", "line 3: num_train_epochs is 1e+308; input should be less than or equal to 10"),
        ("optimizer_threads: 1000000000\n", "line 3: optimizer_threads is 1000000000; input should be less than or"),
        ("memory: {ram: 1" + "0" * 400 + "TiB}\n", "give at most 1000000000TiB, or leave it out"),
        ("memory: {disk_tbw: 1000000001TiB}\n", "line 3: memory.disk_tbw is '1000000001TiB'; give at most 1000000"),
        ("freeze: " + "[" * 40 + "\n", "nested deeper than"),
        ("freeze: [\n", "not YAML"),
        ("? [a]\n: b\n", "a key must be a word"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, BASE + text)
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("", "key 'model' is missing"), ("- a\n", "lines of 'key: value'")])
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: 5\n", "line 2: dataset is 5; input should be a valid string"),
        ("dataset: []\n", "line 2: dataset is (); it may not be empty"),
        ("dataset: [{format: text}]\n", "line 2: dataset.0.path is missing"),
        ("dataset: [{path: a, repeat: 0}]\n", "line 2: dataset.0.repeat is 0; input should be greater than 0"),
        ("dataset: [{path: a, repeat: 1e308}]\n", "line 2: dataset.0.repeat is 1e+308; input should be less than or"),
        ("dataset: [{path: a, weight: 1e308}]\n", "line 2: dataset.0.weight is 1e+308; input should be less than or"),
        ("dataset: [{path: a, rows: 3}]\n", "line 2: unknown key 'dataset.0.rows'; a dataset has path, format,"),
        ("dataset: [{path: a, weight: 1}, b]\n", "line 2: dataset b has no weight, and others have one"),
        ("dataset: [{path: a, weight: 1, repeat: 2}]\n", "dataset a has a repeat (2), and weights share this epoch"),
    ],
)
def test_mistakes_in_a_list_of_datasets(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "model: a\n" + text)
    assert message in str(error.value)


def test_lists_of_datasets_survive_a_round_trip(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    text = f"model: a\ndataset: [{tmp_path}/a.jsonl, {{path: b, repeat: 0.5, format: text}}]\nreport_to: wandb\n"
    config = resolved(read(tmp_path, text), "cpu", 1)
    assert not isinstance(config.dataset, str)
    assert [(part.path, part.repeat, part.format) for part in config.dataset] == [
        (f"{tmp_path}/a.jsonl", None, None),
        ("b", 0.5, "text"),
    ]
    assert config.report_to == ("wandb",)
    assert read(tmp_path, config.to_yaml()) == config
    assert read(tmp_path, BASE + "report_to: none\n").report_to == ()
    assert read(tmp_path, BASE + "report_to: [wandb, tensorboard]\n").report_to == ("wandb", "tensorboard")


def test_unknown_key_ignored_unsloth_10452(tmp_path: Path) -> None:
    """No key is passed over: neither a misspelt one, nor another tool's that means nothing here."""
    for key in ("neftune_alfa", "learning_rte", *HINTS):
        with pytest.raises(ConfigError, match=f"line 3: (unknown key|key) '{key}'"):
            read(tmp_path, BASE + f"{key}: 1\n")


def test_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{n}: &{n} [*{p}, *{p}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True))
    with pytest.raises(ConfigError, match="line 1: anchors and aliases"):
        read(tmp_path, bomb)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file .*; give a YAML file; megatrain init"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 10"):
        read_config(tmp_path / "latin.yaml")


def test_overrides(tmp_path: Path) -> None:
    words = ("learning_rate=2e-5", "memory.hbm=3GiB", "cutoff_len=64", "max_grad_norm=", "freeze=[a, b]", "model=other")
    config = read(tmp_path, BASE + "lr: 1\nmax_length: 8\nmemory: {ram: 1GiB, hbm: 1GiB}\n", *words)
    assert (config.learning_rate, config.max_length, config.model) == (2e-5, 64, "other")
    assert (config.memory.hbm, config.memory.ram) == (3 << 30, 1 << 30)
    assert config.max_grad_norm is None
    assert config.freeze == ("a", "b")
    for word in ("lr", "=3"):
        with pytest.raises(ConfigError, match="write key=value"):
            read(tmp_path, BASE, word)


@given(st.integers(min_value=0, max_value=2**60))
def test_sizes_round_trip(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_resolved_has_no_auto_and_reads_back(tmp_path: Path) -> None:
    config = read(tmp_path, BASE + "train_batch_size: 4\nmax_length: 256\nmax_grad_norm: 0\nmemory: {ram: 1.5GiB}\n")
    cpu = resolved(config, "cpu", 2)
    assert (cpu.device, cpu.precision, cpu.micro_batch_tokens, cpu.loss_chunk_tokens) == ("cpu", "fp32", 1024, 512)
    assert cpu.max_grad_norm is None
    assert cpu.compile is False
    assert resolved(cpu, "cpu", 8) == cpu
    assert read(tmp_path, cpu.to_yaml()) == cpu
    gpu = resolved(config.model_copy(update={"train_batch_size": 512}), "cuda", 2)
    assert (gpu.precision, gpu.micro_batch_tokens, gpu.compile) == ("bf16", 16384, True)
    long = resolved(config.model_copy(update={"max_length": 40_000}), "cuda", 2)
    assert long.micro_batch_tokens == 40_000


def test_a_micro_batch_is_whole_rows_unless_a_user_says_otherwise(tmp_path: Path) -> None:
    """Packed rows are full, so a piece of one more would be computed for nothing: 128 of 2048 tokens a micro-batch."""
    config = read(tmp_path, BASE + "train_batch_size: 64\nmax_length: 384\n")
    assert resolved(config, "cpu", 2).micro_batch_tokens == 5 * 384
    assert resolved(config, "cuda", 2).micro_batch_tokens == 42 * 384
    assert resolved(config.model_copy(update={"train_batch_size": 3}), "cuda", 2).micro_batch_tokens == 3 * 384
    unpacked = config.model_copy(update={"packing": False})
    assert resolved(unpacked, "cpu", 2).micro_batch_tokens == 2048, "rows that are not filled fit as they come"
    asked = config.model_copy(update={"micro_batch_tokens": 2048})
    assert resolved(asked, "cpu", 2).micro_batch_tokens == 2048


def test_wishes_that_cannot_be_honoured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens is 64, less than max_length 2048"):
        resolved(read(tmp_path, BASE + "micro_batch_tokens: 64\n"), "cpu", 2)
    with pytest.raises(ConfigError, match="compile is true"):
        resolved(read(tmp_path, BASE + "compile: true\n"), "cpu", 2)
    with pytest.raises(ConfigError, match=r"memory\.hbm is 1GiB, but the layers run on a CPU"):
        resolved(read(tmp_path, BASE + "memory: {hbm: 1GiB}\n"), "cpu", 2)
    emptied = read(tmp_path, BASE + "memory: {hbm: 1GiB}\n", "memory.hbm=")
    assert resolved(emptied, "cpu", 2).memory.hbm is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adam_epsilon: 1e-60\n", "line 3: adam_epsilon is 1e-60, which is 0.0 in fp32"),
        ("learning_rate: 1e-50\n", "line 3: learning_rate is 1e-50, which is 0.0 in fp32"),
        ("learning_rate: 1e39\n", "line 3: learning_rate is 1e+39, which is inf in fp32"),
        ("adam_beta1: 0.99999999\n", "line 3: adam_beta1 is 0.99999999, which is 1.0 in fp32"),
        ("adam_beta2: 0.99999999\n", "line 3: adam_beta2 is 0.99999999, which is 1.0 in fp32"),
        ("weight_decay: 1e-60\n", "line 3: weight_decay is 1e-60, which is 0.0 in fp32"),
        ("max_grad_norm: 1e-60\n", "line 3: max_grad_norm is 1e-60, which is 0.0 in fp32"),
        ("lr: 1e-6\nweight_decay: 0.01\n", "line 4: weight_decay is 0.01; at learning_rate 1e-06 a step would"),
    ],
)
def test_numbers_that_fp32_cannot_hold(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, BASE + text)
    assert message in str(error.value)


def test_every_number_near_its_limits_in_fp32_is_accepted(tmp_path: Path) -> None:
    tiny = {key: 1e-44 for key in FP32_KEYS if key != "weight_decay"}
    assert all(fp32(value) > 0 for value in tiny.values())
    read(tmp_path, BASE + "".join(f"{key}: {value}\n" for key, value in tiny.items()))
    read(tmp_path, BASE + "adam_beta1: 0.9999999\nadam_beta2: 0.9999999\nlearning_rate: 3e38\nmax_grad_norm: 0\n")
    config = read(tmp_path, BASE + "learning_rate: 1e-6\nweight_decay: 0.1\nreport_to: wandb\nmemory: {ram: 1GiB}\n")
    assert fp32(1 - config.learning_rate * config.weight_decay) < 1


def test_allow_knows_its_words() -> None:
    assert allowed_keys(["lr", "max_steps", "data"], ["data", "versions"]) == {"learning_rate", "max_steps", "data"}
    with pytest.raises(ConfigError, match=r"--allow max_step: nothing is called so; did you mean 'max_steps'\?"):
        allowed_keys(["max_step"], ["data", "versions"])
    with pytest.raises(ConfigError, match=r"--allow version: .*did you mean 'versions'"):
        allowed_keys(["version"], ["data", "versions"])
    with pytest.raises(ConfigError, match=r"--allow xyzzy: .*name a key of docs/config.md, or data or versions"):
        allowed_keys(["xyzzy"], ["data", "versions"])


def test_keys_of_words() -> None:
    words = ["lr=1", "memory.hbm=3GiB", "output_path=x", "micro_batch_size=2", "odd"]
    assert keys_of(words) == {"learning_rate", "memory", "output_dir", "train_batch_size", "odd"}


def test_changed_keys_knows_what_may_change(tmp_path: Path) -> None:
    before = read(tmp_path, BASE)
    moved = read(tmp_path, BASE + "output_dir: c\nsave_steps: 3\nweight_slots: 4\nmemory: {hbm: 1GiB}\n")
    assert changed_keys(before, moved) == ()
    other = read(tmp_path, BASE + "seed: 1\nlearning_rate: 1\nprecision: fp32\n")
    assert changed_keys(before, other) == ("seed", "learning_rate", "precision")


def test_every_key_has_a_group_and_a_meaning() -> None:
    for key, field in RunConfig.model_fields.items():
        assert group_of(key) in ("run", "data", "optimisation", "numerics", "placement", "output")
        assert field.description


def test_two_passes_need_gradients_that_repeat() -> None:
    config = RunConfig(model="m", dataset="d", clip_mode="two-pass", deterministic=False)
    with pytest.raises(ConfigError, match="set deterministic to true, or clip_mode to deferred"):
        resolved(config, "cpu", 2)
