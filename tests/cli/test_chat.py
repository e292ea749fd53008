"""`megatrain chat`: the words of transformers' own greedy generate, wherever the layers are; one answer or a talk."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli.chat import Talker, Writer, talker_of
from megatrain.cli.main import main
from megatrain.cli.opened import sources_of
from megatrain.cli.pointed import config_of
from megatrain.config import RunConfig
from megatrain.models.generate import Sampling, _BorrowingLayer
from tests.families import tiny_config

PROMPT = "the cat sat on"


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps of the tiny model: its words are no longer those of its base."""
    from tests.conftest import write_rows  # noqa: PLC0415 - a test module of its own

    folder = tmp_path_factory.mktemp("chat")
    write_rows(folder / "train.jsonl", 40)
    config = folder / "run.yaml"
    config.write_text(
        f"model: {tiny_model}\ndataset: {folder}/train.jsonl\noutput_dir: {folder}/run\nmax_length: 64\n"
        "train_batch_size: 3\nmax_steps: 60\nlearning_rate: 5e-3\nsave_steps: 30\ndevice: cpu\n"
    )
    assert megatrain("train", config) == 0
    return folder / "run"


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def talker(request: pytest.FixtureRequest, trained: Path) -> Iterator[Talker]:
    """The newest checkpoint, its layers used where they lie, or copied through the two slots."""
    (source,) = sources_of(trained, ["latest"])
    talker = talker_of(config_of(trained, ()), source, raw=False, through_slots=request.param)
    assert bool(talker.lender._next) is request.param
    yield talker
    talker.close()


def greedy(folder: Path, ids: list[int], max_tokens: int, stop_ids: list[int]) -> list[int]:
    """What transformers' generate appends to `ids`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=stop_ids,
    )
    return out[0, len(ids) :].tolist()


def test_greedy_words_are_those_of_transformers(talker: Talker, trained: Path) -> None:
    folder = trained / "checkpoints/step-60/model"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    ids = talker.prompt_ids(messages)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert ids == asked["input_ids"]
    for _ in range(2):  # a second answer starts afresh
        writer = talker.answer(messages, Sampling(24), io.StringIO())
        assert writer.ids == greedy(folder, ids, 24, talker.stop_ids)
    assert len(writer.ids) > 4


def test_the_prompt_is_read_once(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    forward = _BorrowingLayer.forward

    def spy(self: _BorrowingLayer, hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        lengths.append(hidden.shape[1])
        return forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(_BorrowingLayer, "forward", spy)
    messages = [{"role": "user", "content": PROMPT}]
    writer = talker.answer(messages, Sampling(6), io.StringIO())
    assert len(writer.ids) > 2
    prompt = len(talker.prompt_ids(messages))
    assert lengths == [length for length in (prompt, *[1] * (len(writer.ids) - 1)) for _ in range(2)]


def test_a_mixture_of_experts_with_one_travelling_block_too(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - only this test needs them

    folder = tmp_path / "moe"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4}
    config = Qwen3MoeConfig(
        vocab_size=320, num_hidden_layers=3, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=0, **sizes,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (source,) = sources_of(folder, [])
    config_words = config_of(folder, ["device=cpu", "allow_unproven=true"])
    said = []
    for through_slots in (False, True):
        talker = talker_of(config_words, source, raw=True, through_slots=through_slots)
        said.append(talker.answer([{"role": "user", "content": PROMPT}], Sampling(16), io.StringIO()).ids)
        talker.close()
    ids = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    assert said[0] == said[1] == greedy(folder, ids, 16, [2])


def test_score_corrections_of_routers_are_heeded(tmp_path: Path, tiny_model: Path) -> None:
    config = tiny_config("deepseek_v3", vocab_size=320, bos_token_id=None)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    said = []
    for scale in (0.0, 1.0):
        folder = tmp_path / str(scale)
        shutil.copytree(tiny_model, folder)
        model.get_buffer(name).copy_(scale * torch.linspace(-1.0, 1.0, 8))
        model.save_pretrained(folder)
        (source,) = sources_of(folder, [])
        talker = talker_of(config_of(folder, ["device=cpu", "max_length=8"]), source, raw=True, through_slots=True)
        said.append(talker.answer([{"role": "user", "content": PROMPT}], Sampling(12), io.StringIO()).ids)
        assert said[-1] == greedy(folder, AutoTokenizer.from_pretrained(folder).encode(PROMPT), 12, talker.stop_ids)
        talker.close()
    assert said[0] != said[1]


def test_an_answer_ends_at_the_end_of_its_turn(talker: Talker) -> None:
    end = talker.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in talker.stop_ids
    newline = talker.tokenizer.encode("\n")[0]
    out = io.StringIO()
    ids = talker.prompt_ids([{"role": "user", "content": PROMPT}])
    first = talker.answer([{"role": "user", "content": PROMPT}], Sampling(1), out).ids[0]
    seen: list[int] = []
    talker.model.generate(ids, Sampling(8), seen.append, [first, end])
    assert seen == [first]
    writer = Writer(talker.tokenizer, io.StringIO(), [end])
    for token in (newline, end):
        writer.put(token)
    writer.finish()
    assert writer.ids == [newline, end]
    assert "im_end" not in writer.text


def test_sampling_is_seeded_and_can_be_narrowed(talker: Talker) -> None:
    def said(**how: float) -> list[int]:
        sampling = Sampling(12, **how)
        return talker.answer([{"role": "user", "content": PROMPT}], sampling, io.StringIO()).ids

    state = torch.get_rng_state()
    hot = said(temperature=1.5, seed=1)
    assert said(temperature=1.5, seed=1) == hot
    assert said(temperature=1.5, seed=2) != hot
    assert torch.equal(torch.get_rng_state(), state), "the generator of the process is left alone"
    assert said(temperature=1.5, seed=1, top_p=1e-6) == said() == said(temperature=0.0, seed=7)


def test_the_folder_says_how_its_model_samples(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained / "checkpoints/step-60/model", folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 1.7, "top_k": 9, "top_p": 0.8, "eos_token_id": [2, 5]})
    )
    (source,) = sources_of(folder, [])
    talker = talker_of(config_of(folder, ["device=cpu"]), source, raw=False)
    choice = talker.model._choice(Sampling(4))
    assert choice == {"do_sample": True, "temperature": 1.7, "top_p": 0.8, "top_k": 9}
    assert talker.model._choice(Sampling(4, temperature=0.3, top_p=0.5)) == choice | {"temperature": 0.3, "top_p": 0.5}
    assert talker.model._choice(Sampling(4, temperature=0.0))["do_sample"] is False
    assert {2, 5} <= set(talker.stop_ids)
    talker.close()


def test_text_comes_out_whole_and_harmless(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "checkpoints/step-60/model")
    text = "über 東京 🎉 \x1b[31mred\x07\ttab\nline"
    pieces: list[str] = []

    class Out(io.StringIO):
        def write(self, piece: str) -> int:
            pieces.append(piece)
            return len(piece)

    writer = Writer(tokenizer, Out(), [])
    ids = tokenizer.encode(text)
    assert len(ids) > 30, "bytes, not words: characters come in parts"
    for token in ids:
        writer.put(token)
    writer.finish()
    assert writer.text == text
    assert "".join(pieces) == "über 東京 🎉 [31mred\ttab\nline"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 15, "it streams"


def test_one_answer_on_stdout_and_its_speed_on_stderr(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("chat", trained, "--prompt", PROMPT, "--max-tokens", "6") == 0
    first = capsys.readouterr()
    assert first.out.strip()
    assert "tokens/s]" in first.err
    assert megatrain("chat", trained, "--step", "base", "--prompt", PROMPT, "--max-tokens", "6") == 0
    assert capsys.readouterr().out != first.out


def test_piped_lines_are_turns_and_a_dash_takes_them_whole(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    answer = Talker.answer

    def spy(self: Talker, messages: list[dict[str, str]], sampling: Sampling, out: io.StringIO) -> Writer:
        asked.append([message["content"] for message in messages])
        return answer(self, messages, sampling, out)

    def piped(text: str, *words: str) -> int:
        asked.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return megatrain("chat", trained, *words, "--max-tokens", "4")

    monkeypatch.setattr(Talker, "answer", spy)
    assert piped(PROMPT, "--prompt", PROMPT) == 0
    alone = capsys.readouterr().out
    assert piped(f"{PROMPT}\n\n/new\n{PROMPT}\na log\n/exit\nfar\n") == 0
    shown = capsys.readouterr().out
    assert [len(messages) for messages in asked] == [1, 1, 3], "an empty line is no turn; /new forgets, /exit ends"
    assert shown.startswith(alone * 2)
    assert PROMPT not in shown
    assert "you>" not in shown
    assert piped("the cat\nsat on\n", "--prompt", "-") == 0
    assert asked == [["the cat\nsat on"]]
    capsys.readouterr()
    assert piped("\n/new\n") == 2
    assert "standard input holds no prompt; give one a line" in capsys.readouterr().err
    assert piped("rain " * 200 + "\nfar\n") == 2
    assert "the model knows 128 positions" in capsys.readouterr().err
    assert len(asked) == 1, "a script is told, and not answered as if nothing were missing"


def test_input_without_end_or_text_is_refused(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1000

    class Endless(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            assert size is not None
            assert 0 < size <= most + 1, "all of it would be read"
            return "a" * size

        readline = read

    monkeypatch.setattr("megatrain.cli.prompts.MOST_CHARACTERS", most)
    asking: tuple[object, ...] = ("chat", tiny_model, "device=cpu")
    cases: dict[tuple[str, ...], tuple[io.StringIO, str]] = {
        (): (Endless(), "a line of standard input is longer than 1,000 characters; give one prompt a line"),
        ("--prompt", "-"): (Endless(), "standard input is longer than 1,000 characters; give a shorter prompt"),
        ("--raw",): (io.StringIO("cat\n\udcff\n"), "is not UTF-8 text (character 1); convert it to UTF-8\n"),
        ("--prompt", "a\udcff"): (io.StringIO(), "is not UTF-8 text (character 2); convert it to UTF-8\n"),
        ("--prompt", "a", "--system", "\udcff"): (io.StringIO(), "is not UTF-8 text (character 1)"),
    }
    for words, (given, said) in cases.items():
        monkeypatch.setattr(sys, "stdin", given)
        assert megatrain(*asking, *words, "--max-tokens", "1") == 2, words
        assert said in capsys.readouterr().err.splitlines(keepends=True)[-1]
    monkeypatch.setattr(sys, "stdin", Terminal("the\udcff cat\n/exit\n"))
    assert megatrain(*asking) == 0, "whoever types goes on"
    assert "is not UTF-8 text (character 4)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 99 + "\n"))
    assert megatrain(*asking, "--max-tokens", "1") == 0


def test_a_stream_that_is_closed_leads_nowhere(tmp_path: Path) -> None:
    program = """
import sys
from megatrain.cli.streams import make_streams_usable
make_streams_usable()
print("seen", flush=True), print("seen", file=sys.stderr)
open(sys.argv[1], "w").write(repr((sys.stdin.read(), sys.stdin.isatty())))
"""
    for closed in (" <&-", " >&-", " 2>&-", " <&- >&- 2>&-"):
        call = ["sh", "-c", f'"$@"{closed}', "sh", sys.executable, "-c", program, str(tmp_path / "told")]
        done = subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "told").read_text() == "('', False)"
        assert (done.stdout, done.stderr) == tuple("" if mark in closed else "seen\n" for mark in (" >&-", " 2>&-"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_remembers_until_it_starts_anew(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, str]]] = []
    answer = Talker.answer

    def spy(self: Talker, messages: list[dict[str, str]], sampling: Sampling, out: io.StringIO) -> Writer:
        asked.append(messages)
        return answer(self, messages, sampling, out)

    monkeypatch.setattr(Talker, "answer", spy)
    monkeypatch.setattr(sys, "stdin", Terminal("the cat\n\nthe dog\n/new\na log\n" + "rain " * 200 + "\nfar\n"))
    assert megatrain("chat", trained, "--system", "be brief", "--max-tokens", "5") == 0
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles[:3] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    captured = capsys.readouterr()
    assert asked[1][2]["content"]
    assert "the model knows 128 positions" in captured.err
    assert roles[4] == roles[3], "what was refused is not remembered"


def test_ctrl_c_stops_the_answer(talker: Talker, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    put = Writer.put

    def interrupted(self: Writer, token: int) -> None:
        put(self, token)
        if len(self.ids) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "put", interrupted)
    writer = talker.answer([{"role": "user", "content": PROMPT}], Sampling(50), out)
    assert writer.stopped
    assert len(writer.ids) == 3
    assert megatrain("chat", trained, "--prompt", PROMPT) == 130
    monkeypatch.setattr(sys, "stdin", io.StringIO("far\naway\n"))
    assert megatrain("chat", trained) == 130


def test_mistakes_end_in_one_sentence(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model, plain)
    for name in ("chat_template.jinja", "chat_template.json"):
        (plain / name).unlink(missing_ok=True)
    capsys.readouterr()
    cases = {
        ("chat", plain, "--prompt", "a", "device=cpu"): "has no chat template: it continues text; use --raw",
        ("chat", trained, "--raw", "--system", "s", "--prompt", "a"): "so --system has no place",
        ("chat", trained, "--raw", "--prompt", ""): "the prompt is empty",
        ("chat", trained, "--prompt", "rain " * 200): "the model knows 128 positions",
        ("chat", trained, "--step", "9", "--prompt", "a"): "no checkpoint of step 9",
        ("chat", tiny_model, "--step", "9", "--prompt", "a"): "is a model folder, not a run",
    }
    for words, said in cases.items():
        assert megatrain(*words) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert megatrain("chat", plain, "--raw", "--prompt", PROMPT, "--max-tokens", "3", "device=cpu") == 0


def test_a_run_of_a_gpu_can_be_talked_to_without_one(trained: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    config: RunConfig = config_of(trained, ["device=cuda", "precision=bf16", "compile=true"])
    (source,) = sources_of(trained, ["base"])
    talker = talker_of(config, source, raw=False)
    assert talker.run.device.type == "cpu"
    assert talker.store.dtype("w") == torch.bfloat16
    assert talker.answer([{"role": "user", "content": PROMPT}], Sampling(2), io.StringIO()).ids
    talker.close()
