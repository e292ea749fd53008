"""`megatrain plan`: for a config, a model folder or its config.json alone, for this machine or another, as text, JSON
and a picture; and `train --plan` follows an edited plan."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatrain.hardware.described import machine_names, read_machine, to_json
from tests.cli.test_verbs import bits, megatrain
from tests.families import tiny_config

SVG = "{http://www.w3.org/2000/svg}"
DATA = Path(__file__).parents[1] / "planner" / "data"
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with nothing but its config.json."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SMALL))
    return tmp_path / "model"


def test_a_config_json_alone_is_planned_for_another_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("max_length=4096", "train_batch_size=16", "max_steps=100", "--machine", "24gb-64gb")
    for target in (folder, folder / "config.json"):
        assert megatrain("plan", target, *words) == 0
        shown = capsys.readouterr().out
        for what in ("not this machine: a 24 GB consumer card", "bytes/parameter", "peak phase", "verdict: FITS",
                     "checkpoint: ", "3 on disk at the most", "tokens/s", "compute", "s of work", "bound: ",
                     "critical path: ", "run: 100 steps", "8.08 GB written to disk"):  # fmt: skip
            assert what in shown, what


def test_a_family_without_one_graph_is_not_compiled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be compiled for nearly every micro-batch, until there are too many graphs."""

    def planned(*words: str) -> str:
        assert megatrain("plan", folder, "--machine", "24gb-64gb", "max_length=64", "--json", *words) == 0
        return capsys.readouterr().out

    assert planned() != planned("compile=false"), "a Llama is compiled"
    (folder / "config.json").write_text(json.dumps(tiny_config("jetmoe").to_dict()))
    assert planned() == planned("compile=false")
    assert megatrain("plan", folder, "--machine", "24gb-64gb", "max_length=64", "compile=true") == 2
    said = capsys.readouterr().err
    assert "compile is true, but in a layer of JetMoeForCausalLM shapes follow" in said
    assert said.endswith("; set compile to false\n")


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_plans(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("plan", folder, "--machine", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "FITS"
    assert shown["price"]["step_s"] > 0
    assert shown["described"]
    assert shown["rates"]["h2d_Bps"] > 0


def test_what_does_not_fit_ends_with_what_would_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("plan", DATA / "gpt-oss-120b", "--machine", "24gb-64gb", "save_strategy=no") == 1
    shown = capsys.readouterr().out
    assert "verdict: NO" in shown
    last = shown.splitlines()[-1]
    assert "; take a GPU that has " in last, "no key makes more of what is all in use"
    assert "GiB free in a machine with " in last
    hbm_gib = float(last.split("take a GPU that has ")[1].split(" GiB")[0])
    assert 24 < hbm_gib < 80, "what the slots take, not all that RAM cannot hold"


def test_a_plan_against_the_config_is_refused_before_a_larger_machine_is_sought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No machine is large enough for two passes in several rounds: there is none to name."""
    words = ("plan", DATA / "gpt-oss-120b", "--machine", "24gb-64gb", "save_strategy=no", "micro_batch_tokens=2048")
    assert megatrain(*words, "clip_mode=deferred", "--json") == 1
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert megatrain(*words, "clip_mode=two-pass", "round_micro_batches=1", "--plan", tmp_path / "plan.json") == 2
    error = capsys.readouterr().err
    assert "plan.json has clip_mode deferred, the config asks for two-pass; change one of them" in error
    assert error.count("\n") == 1


def test_a_picture_is_drawn(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("plan", folder, "--machine", "24gb-64gb", "--plot", tmp_path / "step.svg") == 0
    root = ET.fromstring((tmp_path / "step.svg").read_text("utf-8"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) > 50
    capsys.readouterr()
    assert megatrain("plan", folder, "--machine", "24gb-64gb", "--plot", tmp_path / "step.bmp") == 2
    assert "step.bmp is no .svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machine", "cray"), "'cray' is no machine that is shipped and no file that can be read"),
        (("--machine", DATA / "gpt-oss-120b/config.json"), "is no machine file: "),
        (("--machine", "24gb-64gb", "device=cpu"), "device is cpu, but the machine plans for cuda"),
        (("--plan", "none.json"), "--plan: none.json cannot be read"),
    ],
)
def test_a_wrong_wish_is_one_sentence(
    words: tuple[object, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("plan", folder, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_plan_that_was_printed_is_planned_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", folder, "--machine", "24gb-64gb", "--json")
    assert megatrain(*words) == 0
    first = json.loads(capsys.readouterr().out)
    first["plan"]["round_micro_batches"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(first))
    assert megatrain(*words, "--plan", tmp_path / "plan.json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"] == first["plan"]
    assert again["num_parameters"] == first["num_parameters"]


def test_training_follows_an_edited_plan_to_the_same_bits(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("plan", run_config, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    for segment in table["plan"]["segments"]:
        if segment["kind"] == "block":
            kept = segment["activations"] == "keep"
            segment["activations"] = "recompute" if kept else "keep"
    table["plan"]["round_micro_batches"] = 1
    (tmp_path / "mine.json").write_text(json.dumps(table))
    short = ("max_steps=2", "eval_steps=2")
    assert megatrain("train", run_config, *short, f"output_dir={tmp_path}/usual") == 0
    assert megatrain("train", run_config, *short, f"output_dir={tmp_path}/mine", "--plan", tmp_path / "mine.json") == 0
    followed = json.loads((tmp_path / "mine/plan.json").read_text())["plan"]
    assert followed == table["plan"]
    assert followed != json.loads((tmp_path / "usual/plan.json").read_text())["plan"]
    usual, mine = bits(tmp_path / "usual", 2), bits(tmp_path / "mine", 2)
    assert usual.keys() == mine.keys()
    assert all(bool((usual[name] == mine[name]).all()) for name in usual)


def test_a_real_step_is_laid_beside_the_simulated_one(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run keeps the ops of a warm step: its chart shows each where it ran, and rates fitted to it predict it."""
    assert megatrain("train", run_config, "max_steps=4", "eval_steps=4", "save_steps=4") == 0
    run, picture = tmp_path / "run", tmp_path / "real.svg"
    rows = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    capsys.readouterr()
    beside = ("--plan", run / "plan.json", "--trace", run / "trace.jsonl", "--plot", picture)
    assert megatrain("plan", run_config, "max_steps=4", *beside) == 0
    shown = capsys.readouterr().out
    whole_s = max(row["end_s"] for row in rows) - min(row["start_s"] for row in rows)
    assert f"trace: {whole_s:.3f} s; simulated at the rates fitted to it: " in shown
    bars = [rect for rect in ET.parse(picture).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == len(rows)
    assert {"FORWARD", "HEAD", "BACKWARD", "UPDATE", "FETCH", "DRAIN"} <= {row["kind"] for row in rows}


def test_a_machine_whose_rates_name_no_kind_of_op_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(to_json(read_machine("24gb-64gb")))
    table["rates"]["scale"] = {"FORWARD": 1.1, "Backward": 1.2}
    (tmp_path / "mine.json").write_text(json.dumps(table))
    assert megatrain("plan", folder, "--machine", tmp_path / "mine.json") == 2
    told = capsys.readouterr().err
    assert "rates.scale.Backward of the machine is 1.2, but no kind of op is called so; leave it out, or name " in told
    table["rates"]["scale"] = {"BACKWARD": 1.2}
    (tmp_path / "mine.json").write_text(json.dumps(table))
    assert megatrain("plan", folder, "--machine", tmp_path / "mine.json") == 0


def test_a_plan_file_that_does_not_fit_is_what_the_advice_is_about(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("plan", folder, "--machine", "h200-125gb", "--json") == 0
    (tmp_path / "roomy.json").write_text(capsys.readouterr().out)
    words = ("plan", folder, "--machine", "24gb-64gb", "memory.hbm=4GiB", "--plan", tmp_path / "roomy.json")
    assert megatrain(*words) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"by --plan {tmp_path}/roomy.json the run needs ")
    assert last.endswith("; or leave --plan out: the planner's own plan fits")
    assert megatrain(*words[:-2]) == 0


def test_a_plan_that_writes_more_than_allowed_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", folder, "--machine", "24gb-64gb", "max_steps=1000")
    assert megatrain(*words, "memory.disk_max_written=10TB") == 0
    capsys.readouterr()
    assert megatrain(*words, "memory.disk_max_written=10GB") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the run would write ")
    assert "memory.disk_max_written is 10 GB; raise it" in last
    assert megatrain(*words, "memory.disk_max_written=10GB", "--json") == 1
    assert json.loads(capsys.readouterr().out)["misfit"] == last


def test_a_run_in_two_passes_has_the_same_bits(run_config: Path, tmp_path: Path) -> None:
    short = ("max_steps=2", "eval_steps=2")
    assert megatrain("train", run_config, *short, f"output_dir={tmp_path}/one", "clip_mode=deferred") == 0
    assert megatrain("train", run_config, *short, f"output_dir={tmp_path}/two", "clip_mode=two-pass") == 0
    assert json.loads((tmp_path / "two/plan.json").read_text())["plan"]["clip_mode"] == "two-pass"
    one, two = bits(tmp_path / "one", 2), bits(tmp_path / "two", 2)
    assert one.keys() == two.keys()
    assert all(bool((one[name] == two[name]).all()) for name in one)
    assert megatrain("eval", tmp_path / "two", "round_micro_batches=1") == 0, "what is read has no gradients to clip"
