"""What `python -m bench plans` runs: shapes, lengths and budgets, from all in HBM to all three tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from transformers import CONFIG_MAPPING, PreTrainedConfig

from bench.presets import PRESETS
from megatrain.config import RunConfig
from megatrain.config_values import Memory

SMALL_VOCABULARY = {"vocab_size": 32768}  # where the ends of the model must not be all that a budget holds
PLAIN, PLAIN_KEEP = "pytorch-hbm", "pytorch-hbm-keep"


@dataclass(frozen=True)
class Setting:
    """One run to plan and to measure. `against`: plain PyTorch steps in HBM whose figures this one is held against,
    each measured once for all settings of one shape and step. `by_hand`: numbers of the plan that are not the
    planner's choice; with no state slots no update passes through the GPU. `passes`: False: none
    may, and the planner chooses the best plan without."""

    name: str
    model: str
    layers: int
    max_length: int
    step_tokens: int
    memory: Mapping[str, str] = field(default_factory=dict)  # tier -> budget
    micro_batch_tokens: int | None = None  # None: the default for the step
    fields: Mapping[str, object] = field(default_factory=dict)  # of the model's config, other than the preset's
    against: tuple[str, ...] = ()
    by_hand: Mapping[str, int] = field(default_factory=dict)
    passes: bool = True

    @property
    def shape(self) -> tuple[object, ...]:
        """Settings of one shape and step may share a plain step."""
        return (self.model, *sorted(self.fields.items()), self.layers, self.max_length, self.micro_batch_tokens)

    def model_config(self) -> PreTrainedConfig:
        """The model's own configuration."""
        values = dict(PRESETS[self.model]) | dict(self.fields) | {"num_hidden_layers": self.layers}
        return CONFIG_MAPPING[str(values.pop("model_type"))](**values)

    def run_config(self, model: str, output_dir: str) -> RunConfig:
        """What a user would ask for; not yet resolved."""
        return RunConfig(
            model=model,
            dataset="random",
            output_dir=output_dir,
            max_length=self.max_length,
            train_batch_size=self.step_tokens // self.max_length,
            micro_batch_tokens=self.micro_batch_tokens,
            memory=Memory(**self.memory),  # type: ignore[arg-type]
            save_strategy="no",
            weight_decay=0.1,
        )


def _curve(hbm: str | None) -> Setting:
    """One model and one step under a budget: what HBM buys."""
    budget = {} if hbm is None else {"hbm": hbm}
    name = f"curve-{hbm or 'none'}"
    return Setting(name, "llama-3-8b", 8, 8192, 32768, budget, 8192, SMALL_VOCABULARY)


def _rounds(grad_slots: int) -> Setting:
    """Sums of gradients that travel both ways with every micro-batch: what a third slot for them is worth."""
    by_hand = {"round_micro_batches": 1, "grad_slots": grad_slots}
    name, memory = f"rounds-{grad_slots}-slots", {"hbm": "14GiB", "ram": "34GiB"}
    return Setting(name, "llama-3-8b", 6, 8192, 65536, memory, 8192, SMALL_VOCABULARY, by_hand=by_hand)


PASSING = Setting("passing", "llama-3-8b", 20, 4096, 8192, {"hbm": "16GiB"}, fields=SMALL_VOCABULARY)


# In order of weight: a run that is short of time leaves the last ones out.
SETTINGS: tuple[Setting, ...] = (
    Setting("8b-64k", "llama-3-8b", 8, 8192, 65536, against=(PLAIN, PLAIN_KEEP)),
    Setting("8b-64k-24GiB", "llama-3-8b", 8, 8192, 65536, {"hbm": "24GiB"}, against=(PLAIN,)),
    Setting("8b-8k", "llama-3-8b", 8, 8192, 8192, against=(PLAIN, PLAIN_KEEP)),
    _curve("8GiB"),
    _curve("12GiB"),
    _curve("24GiB"),
    _curve("48GiB"),
    _curve(None),
    Setting("two-pass", "llama-3-8b", 5, 8192, 32768, {"hbm": "16GiB", "ram": "15360MiB"}, fields=SMALL_VOCABULARY),
    Setting("disk", "llama-3.2-1b", 8, 2048, 32768, {"hbm": "8GiB", "ram": "6200MiB"}, fields=SMALL_VOCABULARY),
    Setting("tied", "llama-3.2-1b", 16, 2048, 65536, {"hbm": "12GiB"}),
    Setting("experts", "qwen3-30b-a3b", 2, 8192, 32768, {"hbm": "24GiB"}),
    Setting("8b-128k-16GiB", "llama-3-8b", 2, 8192, 131072, {"hbm": "16GiB"}),
    Setting("7b", "qwen2.5-7b", 4, 8192, 32768, {"hbm": "24GiB"}),
    Setting("8b-seq-32k", "llama-3-8b", 2, 32768, 65536, {"hbm": "16GiB"}, fields=SMALL_VOCABULARY),
    Setting("tied-windows", "gemma-3-4b", 6, 8192, 32768, {"hbm": "24GiB"}),
    Setting("experts-none", "qwen3-30b-a3b", 2, 8192, 32768),
    _rounds(2),
    _rounds(3),
    # A step that waits for the CPU's updates: some pass through the GPU; the same plan with none; the best without any.
    PASSING,
    replace(PASSING, name="passing-none", by_hand={"state_slots": 0}),
    replace(PASSING, name="passing-off", passes=False),
)
