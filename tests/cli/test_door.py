"""What meets a user before the first step and after the last: a mistake is one sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.cli import assemble, shortage, training
from megatrain.cli.main import main
from megatrain.hardware import Machine
from megatrain.hardware.probe import probe
from tests.conftest import write_rows

SHORT = ("max_steps=2", "eval_steps=null")
Captured = pytest.CaptureFixture[str]


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def sentence(capsys: Captured) -> str:
    """What stands on standard error: one line of ours."""
    error = capsys.readouterr().err
    assert error.startswith("megatrain: "), error
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may harm."""
    return Path(shutil.copytree(tiny_model, tmp_path / "base"))


def with_bad_weight(folder: Path, name: str, value: float) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name].view(-1)[7] = value
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_with_nan_or_inf_are_refused(
    run_config: Path, base: Path, tmp_path: Path, capsys: Captured, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with_bad_weight(base, name, value)
    assert megatrain("train", run_config, f"model={base}", "on_nan=skip") == 2
    error = sentence(capsys)
    assert f"tensor {name} holds {value} at element 7;" in error
    assert not (tmp_path / "run").exists()


def test_a_run_that_applied_no_step_does_not_end_well(
    run_config: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = training.engine_of

    def poisoned(run: training.Planned, store: training.SegmentStore) -> object:
        store.flat("L000", "w")[0] = float("nan")
        return before(run, store)

    monkeypatch.setattr(training, "engine_of", poisoned)
    assert megatrain("train", run_config, "on_nan=skip", *SHORT) == 2
    assert "none of the 2 steps could be applied" in sentence(capsys)


def test_a_run_that_diverged_says_so_at_its_end(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ("learning_rate=1e30", "eval_steps=null", "eval_dataset=", "save_strategy=no", "on_nan=skip")
    assert megatrain("train", run_config, *words, "max_steps=4") == 2
    shown = capsys.readouterr()
    told = "the last 3 of 4 steps could not be applied: each had a NaN or Inf, and on_nan is skip; the model is what "
    told += "it was after step 1"
    assert shown.err == f"megatrain: {told}: lower learning_rate, or look at the data\n"
    assert shown.out.splitlines()[-1] == told
    assert told in (tmp_path / "run/log.txt").read_text()
    assert (tmp_path / "run/model/config.json").is_file(), "what there is, is written"
    assert megatrain("report", tmp_path / "run") == 0
    assert "3 steps not applied" in (tmp_path / "run/report/index.html").read_text()
    two = (*words, "max_steps=3", f"output_dir={tmp_path}/two")
    assert megatrain("train", run_config, *two) == 0, "two may be the rows' fault"
    capsys.readouterr()
    assert megatrain("train", run_config, *words[:-1], f"output_dir={tmp_path}/three") == 2
    assert "are not finite" in sentence(capsys), "on_nan is stop"


def test_resume_needs_no_base_model(run_config: Path, base: Path, tmp_path: Path, capsys: Captured) -> None:
    words = (f"model={base}", "lr_scheduler_type=constant", "save_total_limit=3")
    assert megatrain("train", run_config, *words) == 0
    (tmp_path / "run").rename(tmp_path / "whole")
    assert megatrain("train", run_config, *words, "max_steps=2") == 0
    shutil.rmtree(base)
    capsys.readouterr()
    assert megatrain("resume", tmp_path / "run", "max_steps=6", "save_total_limit=2", "--allow", "max_steps") == 0
    shown = capsys.readouterr().out
    assert f"model {base} is not there any more; config and tokenizer: {tmp_path}/run/checkpoints/step-2/model" in shown
    assert not (tmp_path / "run/checkpoints/step-2").exists(), "pruned while it is the source"
    for file in sorted((tmp_path / "whole/checkpoints/step-6").glob("**/*")):
        if file.is_file() and file.name != "manifest.json":
            other = tmp_path / "run" / file.relative_to(tmp_path / "whole")
            assert other.read_bytes() == file.read_bytes(), file
    assert megatrain("export", tmp_path / "run", tmp_path / "out") == 0


def test_the_newest_checkpoint_is_damaged_and_the_base_model_gone(
    run_config: Path, base: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert megatrain("train", run_config, f"model={base}") == 0
    shutil.rmtree(base)
    (tmp_path / "run/checkpoints/step-6/model/tokenizer.json").write_text("{}")
    capsys.readouterr()
    assert megatrain("resume", tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert f"config and tokenizer: {tmp_path}/run/checkpoints/step-4/model" in shown
    assert "going on after step 4" in shown


def test_words_that_a_verb_cannot_heed_are_refused(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    for words, message in (
        (
            ("resume", run, f"output_dir={tmp_path}/b"),
            "output_dir on the command line would change nothing here: a",
        ),
        (("resume", run, "output_path=b"), "output_dir on the command line would change nothing here"),
        (("resume", run, "learnin_rate=1"), "unknown key 'learnin_rate'; did you mean 'learning_rate'?"),
        (("resume", run, "--allow", "max_step"), "--allow max_step: nothing is called so; did you mean 'max_steps'?"),
        (("train", run_config, "--allow", "versoins"), "did you mean 'versions'?"),
        (("eval", run, "learning_rate=1"), "learning_rate on the command line would change nothing here: leave it out"),
        (("chat", run, "--prompt", "a", "max_length=64"), "max_length on the command line would change nothing here"),
        (("eval", run / "config.yaml"), "is a file, neither a run folder"),
        (("eval", tmp_path / "none"), "is not there: neither a run folder"),
        (("export", run, tmp_path / "o", "--step", "all"), "an export takes one checkpoint"),
        (("train", run_config, "memory.hbm=1GiB"), "memory.hbm is 1GiB, but the layers run on a CPU"),
    ):
        assert megatrain(*words) == 2
        assert message in sentence(capsys)
    assert not (tmp_path / "b").exists()


def test_a_run_of_a_gpu_is_read_without_one(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    """What only a GPU has is dropped with it; what is asked for beside it is not."""
    assert megatrain("train", run_config, *SHORT) == 0
    run = tmp_path / "run"
    text = (run / "config.yaml").read_text().replace("device: cpu", "device: cuda").replace("hbm: null", "hbm: 3GiB")
    (run / "config.yaml").write_text(text.replace("compile: false", "compile: true"))
    assert megatrain("eval", run, "device=cpu") == 0
    assert megatrain("eval", run, "device=cpu", "compile=false") == 0
    assert megatrain("export", run, tmp_path / "out") == 0
    assert megatrain("chat", run, "--prompt", "a", "--max-tokens", "1") == 0
    capsys.readouterr()
    assert megatrain("eval", run, "device=cpu", "compile=true") == 2
    assert "compile is true" in sentence(capsys)
    assert megatrain("eval", run, "device=cpu", "memory.hbm=2GiB") == 2
    assert "memory.hbm is 2GiB" in sentence(capsys)
    assert megatrain("eval", run) == 2
    assert "set device to cpu" in sentence(capsys)


def test_mistakes_of_eval_dataset_say_so_and_cost_nothing(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, f"eval_dataset={tmp_path}/none.jsonl") == 2
    assert sentence(capsys).startswith(f"megatrain: eval_dataset {tmp_path}/none.jsonl does not exist")
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_found_before_data_are_tokenised(
    run_config: Path, base: Path, tmp_path: Path, capsys: Captured
) -> None:
    os.truncate(base / "model.safetensors", 5000)
    assert megatrain("train", run_config, f"model={base}") == 2
    assert "the file is cut short or damaged" in sentence(capsys)
    assert not (tmp_path / "cache").exists()


def test_a_model_named_from_here_is_still_there_when_a_run_goes_on(
    run_config: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(base.parent)
    assert megatrain("train", run_config, *SHORT, f"model={base.name}") == 0
    capsys.readouterr()
    assert megatrain("train", run_config, *SHORT, f"model={base.name}") == 0
    shown = capsys.readouterr().out
    assert "going on after step 2" in shown
    assert "is not there any more" not in shown


def test_a_run_that_is_done_says_so(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    assert megatrain("resume", run) == 0
    shown = capsys.readouterr().out
    assert "all 2 steps are done; for more, raise max_steps" in shown
    assert "predicted:" not in shown, "of no steps there is nothing to predict"
    assert megatrain("resume", run, "max_steps=1", "--allow", "max_steps") == 2
    assert "is to have 1 steps, but 2 are done" in sentence(capsys)
    assert "max_steps: 2" in (run / "config.yaml").read_text()


def outputs(tmp_path: Path) -> dict[str, Path]:
    """Folders that no run may take."""
    return {
        "the model's": tmp_path / "base",
        "inside the model's": tmp_path / "base/run",
        "around the model's": tmp_path,
        "another model's": tmp_path / "other",
        "the data's": tmp_path / "data",
        "a project's": tmp_path / "project",
        "inside the data's": tmp_path / "data/run",
    }


@pytest.mark.parametrize("which", outputs(Path()))
def test_a_run_shares_its_folder_with_nothing(
    run_config: Path, base: Path, tmp_path: Path, capsys: Captured, which: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "project/src").mkdir(parents=True)
    write_rows(tmp_path / "data/a.jsonl", 40)
    shutil.copytree(base, tmp_path / "other")
    out = outputs(tmp_path)[which]
    mode, before = tmp_path.stat().st_mode, sorted(tmp_path.rglob("*"))
    assert megatrain("train", run_config, f"model={base}", f"dataset={tmp_path}/data", f"output_dir={out}") == 2
    assert "a run owns its folder: choose a new one" in sentence(capsys)
    assert sorted(tmp_path.rglob("*")) == before
    assert tmp_path.stat().st_mode == mode


def test_where_a_run_lies_already(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    run = tmp_path / "run"
    assert megatrain("train", run_config, f"output_dir={run}/checkpoints/mine") == 2
    assert f"lies among the files of the run {run}" in capsys.readouterr().err
    for target, message in (
        (run / "checkpoints/out", f"lies among the files of the run {run}"),
        (run / "model", f"lies among the files of the run {run}"),
        (tmp_path / "no/such", "is no folder; make it first"),
        (tmp_path, "is already there; give a new folder"),
    ):
        assert megatrain("export", run, target) == 2
        assert message in sentence(capsys)
    assert megatrain("export", run, run / "out") == 0, "a folder of the user's own"


def test_a_run_without_checkpoints_names_its_model(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT, "save_strategy=no") == 0
    capsys.readouterr()
    assert megatrain("export", tmp_path / "run", tmp_path / "out") == 2
    assert f"its final model is {tmp_path}/run/model, a Hugging Face folder" in sentence(capsys)


def test_what_is_left_of_a_run(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    assert megatrain("resume", run / "checkpoints/step-2") == 2
    assert f"is a checkpoint, no run folder; give {run}" in sentence(capsys)
    assert megatrain("resume", tmp_path / "none") == 2
    assert "it is not there; give the output_dir of a run" in sentence(capsys)
    kept = (run / "config.yaml").read_text()
    (run / "config.yaml").unlink()
    for words in (("resume", run), ("train", run_config, *SHORT), ("eval", run), ("export", run, tmp_path / "out")):
        assert megatrain(*words) == 2
        error = sentence(capsys)
        assert "has checkpoints but no config.yaml" in error
        assert f"model: {run}/checkpoints/step-2/model" in error
    (run / "config.yaml").write_text(kept)
    for file in run.glob("checkpoints/step-*/model/config.json"):
        file.write_text("{}")
    assert megatrain("resume", run) == 2
    assert "put one back from a copy, or start again in another output_dir" in sentence(capsys)


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a log"])
@pytest.mark.parametrize("words", [("dataset=none.jsonl",), ("model=none",), ("memory.ram=1MiB",)])
def test_a_start_that_fails_leaves_nothing(
    run_config: Path, tmp_path: Path, capsys: Captured, words: tuple[str, ...], there: str
) -> None:
    out = tmp_path / "deep/er/run"
    if there != "nothing":
        out.mkdir(parents=True)
    if there == "a log":
        (out / "slurm.out").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    assert megatrain("train", run_config, f"output_dir={out}", *words) == 2
    sentence(capsys)
    cache = tmp_path / "cache"
    assert [path for path in sorted(tmp_path.rglob("*")) if cache not in (path, *path.parents)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_first_step_leaves_nothing(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(training, "load_weights", lambda *_: signal.raise_signal(number))
    before = {other: signal.getsignal(other) for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    assert megatrain("train", run_config) == 128 + number
    assert not (tmp_path / "run").exists()
    assert {other: signal.getsignal(other) for other in before} == before


def test_a_process_told_to_end_while_it_starts(run_config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatrain", "train", str(run_config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # the first line of the header: nothing is loaded yet
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "Traceback" not in error
    steps = sorted((tmp_path / "run").glob("checkpoints/step-*"))
    assert steps or not (tmp_path / "run").exists(), "whole or not there"


def running_out(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"), "hbm"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "hbm"),
        (MemoryError(), "ram"),
        (OSError(12, "Cannot allocate memory"), "ram"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "ram"),
    ],
)
def test_memory_that_runs_out_is_one_sentence(
    run_config: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, error: Exception, tier: str
) -> None:
    monkeypatch.setattr(training, "train", running_out(error))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 3 << 30)
    assert megatrain("train", run_config) == 2
    shown = sentence(capsys)
    assert shown.startswith(f"megatrain: {tier} ran out: the plan counts ")
    assert " of a budget of " in shown
    assert f"set memory.{tier} to " in shown
    assert ("reached 3.00 GiB" in shown) == (tier == "hbm")


def test_other_failures_stay_what_they_are() -> None:
    assert shortage.tier_of(RuntimeError("shapes differ")) is None
    assert shortage.tier_of(OSError(28, "No space left on device")) is None


def test_a_full_disk_and_no_memory_anywhere_are_sentences(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.cli.main.app", running_out(OSError(28, "No space left on device", "/x")))
    assert megatrain("plan", "my.yaml") == 2
    assert "No space left on device: '/x'; free disk space" in sentence(capsys)
    for number, remedy in (
        (13, "check that you may read and write there"),
        (12, "end other programs, or raise the memory limit"),
        (5, "check that the file is there and may be"),
    ):
        monkeypatch.setattr("megatrain.cli.main.app", running_out(OSError(number, "it failed", "/x")))
        assert megatrain("plan", "my.yaml") == 2
        error = sentence(capsys)
        assert error.startswith(f"megatrain: it failed: '/x'; {remedy}")
        assert "disk space" not in error
    monkeypatch.setattr("megatrain.cli.main.app", running_out(MemoryError()))
    assert megatrain("plan", "my.yaml") == 2
    assert "host memory ran out" in sentence(capsys)


def test_a_copied_run_is_read_where_it_is_now(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first place may be another user's, or on a disk that is not there."""
    assert megatrain("train", run_config, *SHORT) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    asked = []

    def probed(device: str, out: Path, ram_bytes: int) -> Machine:
        asked.append(out)
        return probe(device, out, ram_bytes)

    monkeypatch.setattr(assemble, "probe", probed)
    chat = ("chat", "--prompt", "a", "--max-tokens", "1")
    for words in (("plan",), ("eval",), ("export", tmp_path / "out"), chat):
        assert megatrain(words[0], tmp_path / "copy", *words[1:]) == 0
        assert set(asked) == {tmp_path / "copy"}


def test_a_quantized_model_is_refused_by_name(run_config: Path, base: Path, capsys: Captured) -> None:
    members = json.loads((base / "config.json").read_text())
    members["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(members))
    assert megatrain("train", run_config, f"model={base}") == 2
    error = sentence(capsys)
    assert "quantization_config says the weights are quantized (fp8)" in error
    assert "take the unquantized original" in error


def test_the_token_cache_is_shown_and_its_troubles_named(
    run_config: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  tokens: ")]
    assert line.startswith(f"  tokens: {tmp_path}/cache/megatrain/tokens/")
    assert "KiB), kept for later runs" in line
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert megatrain("train", run_config, f"output_dir={tmp_path}/two") == 2
    assert "set XDG_CACHE_HOME to a folder that can be written" in sentence(capsys)


def test_checkpoints_that_are_there_are_not_asked_for_again(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that holds what a run keeps, and no more, lets it be resumed."""
    assert megatrain("train", run_config, *SHORT) == 0
    (tmp_path / "run/checkpoints/ballast").write_bytes(b"\1" * (96 << 20))
    monkeypatch.setattr("megatrain.hardware.probe.disk_free_bytes", lambda _: 1 << 20)
    assert megatrain("resume", tmp_path / "run") == 0
    (tmp_path / "run/checkpoints/ballast").unlink()
    assert megatrain("resume", tmp_path / "run") == 2


OFFLINE = """
import socket, sys
from megatrain.cli.main import main
from megatrain.hardware import Machine
from megatrain.hardware.probe import probe
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
sys.argv = ["megatrain", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
socket.create_connection(server.getsockname()).close()
for attempt in (
    lambda: socket.create_connection(("192.0.2.1", 9), timeout=0.1),
    lambda: socket.getaddrinfo("example.org", 80),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9)),
    lambda: socket.gethostbyname("example.org"),
):
    try:
        attempt()
    except OSError as error:
        print("refused" if "--offline" in str(error) else "tried")
from huggingface_hub import constants
print(constants.HF_HUB_OFFLINE)
"""


@pytest.mark.parametrize("place", ["before", "behind"])
def test_offline_reaches_nobody(place: str) -> None:
    words = ["--offline", "config", "schema"] if place == "before" else ["config", "schema", "--offline"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *words], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-5:] == ["refused"] * 4 + ["True"]


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "megatrain", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("megatrain 0.")


def test_unused_socket_families_stay_open() -> None:
    """Trackers and libraries talk to their own processes over them."""
    left, right = socket.socketpair()
    left.sendall(b"x")
    assert right.recv(1) == b"x"
    left.close()
    right.close()
