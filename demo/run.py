"""The demo: `make demo`. Fetch, train every parameter for a few minutes, and show what changed.

Before and after: the loss on conversations the model has not seen, and its answer to the same sentence.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import torch
from prepare import prepare
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

ROOT = Path(".demo")
RUN = ROOT / "run"
QUESTION = "Hey! How was your weekend?"
MEGATRAIN = ".venv/bin/megatrain"  # as a reader types it, from the root of the tree
BARS = "▁▂▃▄▅▆▇█"
CHART_WIDTH = 60


def answer(folder: Path) -> str:
    """What the model in `folder` says to `QUESTION`, word by most likely word."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True).strip()


def chart(losses: list[float]) -> str:
    """The losses as one line of bars, each the mean of its neighbours so that the trend shows through the noise."""
    reach = max(2, len(losses) // 10)
    smooth = [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - reach) : i + reach + 1])]
    low, high = min(smooth), max(smooth)
    step = max(1, len(smooth) // CHART_WIDTH)
    return "".join(BARS[round((x - low) / (high - low or 1.0) * (len(BARS) - 1))] for x in smooth[::step])


def report(before: str, after: str, model: Path) -> None:
    """Print the result."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    print(f"\ntraining loss  {losses[0]:.2f} {chart(losses)} {losses[-1]:.2f}  ({len(losses)} steps)")
    print(f"held-out loss  {held_out[0]:.3f} -> {held_out[-1]:.3f}  (conversations it never saw)")
    print(f"\nasked          {QUESTION}")
    print(f"before         {before}")
    print(f"after          {after}")
    print(f"\nthe model      {model}  (transformers opens it as it is)")
    print(f"the run        {RUN}  (metrics.jsonl, log.txt, plan.json)")
    print(f"talk to it     {MEGATRAIN} chat {RUN}")


def exit_code_of(command: list[str]) -> int:
    """Run `command` to its end. Ctrl-C reaches both processes, and training ends by itself once all is saved: this one
    waits for it, and is not the one that kills it.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a handler, not SIG_IGN, which the command would inherit
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Prepare, train, report. A demo that was stopped goes on where it was; one that is done only reports."""
    disable_progress_bar()
    prepare(ROOT)
    kept = ROOT / "before.txt"
    if not kept.exists():
        kept.write_text(answer(ROOT / "smollm2-135m"), "utf-8")
    ended = exit_code_of([str(Path(sys.executable).with_name("megatrain")), "train", "demo/config.yaml"])
    if ended:
        if ended == 128 + signal.SIGINT:
            print("\nstopped; go on with: make demo")
        raise SystemExit(ended)
    model = RUN / (RUN / "LATEST").read_text("utf-8").strip() / "model"
    report(kept.read_text("utf-8"), answer(model), model)


if __name__ == "__main__":
    main()
