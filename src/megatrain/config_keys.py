"""RunConfig: every key of a run, as one flat, strict, frozen table. No torch. `docs/config.md` is printed from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Discriminator, Field, PlainSerializer, Tag

from megatrain.config_values import STRICT, DatasetPart, Memory, PathText

Group = Literal["run", "data", "optimisation", "numerics", "placement", "output"]
DatasetPath = Annotated[PathText, Tag("path")]
DatasetParts = Annotated[tuple[DatasetPart, ...], Field(min_length=1), Tag("parts")]
Dataset = Annotated[
    DatasetPath | DatasetParts, Discriminator(lambda value: "parts" if isinstance(value, tuple) else "path")
]
Trackers = Annotated[
    tuple[Literal["tensorboard", "trackio", "wandb"], ...], PlainSerializer(lambda names: list(names) or "none")
]
FREE_GROUPS = ("placement", "output")  # keys of these groups may change at resume


def _key(default: Any, group: Group, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, json_schema_extra={"group": group}, **limits)


class RunConfig(BaseModel):
    """Every key of a run. Groups: `placement` and `output` never change a bit of the result, all others may."""

    model_config = STRICT

    model: PathText = _key(..., "run", "folder of a Hugging Face model (config.json, safetensors, tokenizer)")
    dataset: Dataset = _key(
        ..., "data", "file or folder of rows, or a list of {path, format, repeat, weight}; formats are detected"
    )
    eval_dataset: PathText | None = _key(None, "output", "file or folder of held-out rows")
    output_dir: PathText = _key("runs/run", "output", "the run folder; one run owns it")

    max_length: int = _key(
        2048, "data", "tokens of one row; longer samples are cut; left out: fewer if the model knows fewer", ge=8
    )
    packing: bool = _key(True, "data", "fill rows with several samples, each seeing only itself")
    truncation: Literal["keep_start", "keep_end", "drop"] = _key(
        "keep_start", "data", "what happens to a sample longer than max_length; plain text is cut into rows instead"
    )
    assistant_only_loss: bool = _key(True, "data", "train on the turns of train_roles only; false: on every token")
    train_roles: tuple[str, ...] = _key(("assistant",), "data", "roles whose turns are trained", min_length=1)
    train_batch_size: int = _key(8, "data", "rows of one optimizer step (with packing: rows of max_length)", ge=1)
    num_train_epochs: float = _key(1.0, "optimisation", "passes over the data", gt=0, le=1e9)
    max_steps: int | None = _key(None, "optimisation", "optimizer steps; overrides num_train_epochs", ge=1)
    seed: int = _key(42, "data", "seed of the data order, and of NEFTune's, dropout's and routers' noise", ge=0)

    learning_rate: float = _key(1e-5, "optimisation", "peak learning rate", gt=0)
    lr_scheduler_type: Literal["cosine", "cosine_with_min_lr", "linear", "constant", "warmup_stable_decay"] = _key(
        "cosine", "optimisation", "shape of the learning rate after warm-up"
    )
    min_lr_ratio: float = _key(0.1, "optimisation", "floor of cosine_with_min_lr, as a part of the peak", ge=0, le=1)
    decay_ratio: float = _key(0.1, "optimisation", "last part of warmup_stable_decay that decays", ge=0, le=1)
    warmup_steps: int = _key(0, "optimisation", "steps of linear warm-up", ge=0)
    warmup_ratio: float = _key(
        0.0, "optimisation", "warm-up as a part of all steps; used when warmup_steps is 0", ge=0, le=1
    )
    weight_decay: float = _key(0.0, "optimisation", "decoupled weight decay; never on norms and biases", ge=0)
    adam_beta1: float = _key(0.9, "optimisation", "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = _key(0.999, "optimisation", "AdamW beta 2", ge=0, lt=1)
    adam_epsilon: float = _key(1e-8, "optimisation", "AdamW epsilon", gt=0)
    max_grad_norm: float | None = _key(1.0, "optimisation", "exact global-norm clip; 0 or null: off", ge=0)
    label_smoothing_factor: float = _key(
        0.0, "optimisation", "part of each target spread over the whole vocabulary; evaluation has none", ge=0, lt=1
    )
    neftune_noise_alpha: float | None = _key(
        None, "optimisation", "NEFTune: noise on embeddings while training, 5 is usual; null: none", gt=0
    )
    ema_decay: float | None = _key(
        None,
        "optimisation",
        "decay of a running average of the fp32 masters, 0.999 is usual; `export --ema` writes it; null: none is kept",
        gt=0,
        lt=1,
    )
    router_aux_loss_coef: float | None = _key(
        None, "optimisation", "weight of the routers' balancing loss; null: as the model's config.json asks", ge=0
    )
    freeze: tuple[str, ...] = _key((), "optimisation", "regular expressions; matching parameters are not trained")
    early_stopping_patience: int | None = _key(
        None, "output", "evaluations in a row without a better loss after which the run ends; null: never", ge=1
    )
    early_stopping_threshold: float = _key(0.0, "output", "how much lower a loss must be to count as better", ge=0)
    on_nan: Literal["stop", "skip"] = _key(
        "stop", "optimisation", "what a step with a NaN or Inf does; it never applies"
    )

    precision: Literal["auto", "bf16", "fp32"] = _key(
        "auto", "numerics", "compute precision; masters are exact fp32 in both; auto: bf16 on a GPU, fp32 on a CPU"
    )
    micro_batch_tokens: int | None = _key(
        None,
        "numerics",
        "tokens of one micro-batch; null: whole rows up to 16384 on a GPU, 2048 on a CPU, a step's tokens if fewer",
        ge=8,
    )
    loss_chunk_tokens: int | None = _key(
        None, "numerics", "tokens whose logits exist at one time; null: 2048 on a GPU, 512 on a CPU", ge=1
    )
    deterministic: bool = _key(True, "numerics", "same bits in every run; false: fastest attention kernels")
    compile: bool | None = _key(None, "numerics", "compile layers; null: on a GPU, but of few families; not on a CPU")
    allow_unproven: bool = _key(False, "numerics", "train an architecture that the parity suite does not cover")

    device: Literal["auto", "cpu", "cuda"] = _key("auto", "numerics", "where layers are computed")
    memory: Memory = _key(Memory(), "placement", "budgets, for example {hbm: 40GiB, ram: 400GiB}")
    activations: Literal["auto", "recompute", "keep"] = _key(
        "auto", "placement", "keep a layer's saved tensors, or compute them again in the backward"
    )
    weight_slots: int | None = _key(None, "placement", "shared weight slots (advanced)", ge=2)
    round_micro_batches: int | None = _key(
        None, "placement", "micro-batches that go through the layers together (advanced)", ge=1
    )
    optimizer_threads: int | None = _key(None, "placement", "threads of the CPU update; null: all cores", ge=1, le=4096)
    clip_mode: Literal["auto", "deferred", "two-pass"] = _key(
        "auto",
        "placement",
        "exact clipping: deferred: gradients wait for their norm, 4 bytes a parameter; two-pass: computed twice",
    )

    logging_steps: int = _key(1, "output", "steps between two printed lines; metrics.jsonl has every step", ge=1)
    eval_steps: int | None = _key(None, "output", "steps between two evaluations; null: only before and after", ge=1)
    save_steps: int = _key(500, "output", "steps between two checkpoints; the last step is always saved", ge=1)
    save_total_limit: int = _key(2, "output", "checkpoints kept, beside the best one that was evaluated", ge=2)
    save_strategy: Literal["steps", "best", "no"] = _key(
        "steps",
        "output",
        '"best": also at each evaluation better than all before; "no": nothing can be resumed; '
        "only the final model is written",
    )
    resume_from_checkpoint: Literal["auto", "never"] = _key(
        "auto", "output", "auto: go on from the newest valid checkpoint in output_dir, if there is one"
    )
    report_to: Trackers = _key(
        (), "output", "none, or some of tensorboard, trackio, wandb; metrics.jsonl is always written"
    )
    run_name: str | None = _key(None, "output", "the run's name in trackers; null: that of output_dir", min_length=1)

    def to_yaml(self) -> str:
        """The whole table as YAML that `read_config` reads back to an equal RunConfig."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def group_of(key: str) -> str:
    """The group of a key of RunConfig."""
    extra = RunConfig.model_fields[key].json_schema_extra
    assert isinstance(extra, dict), f"{key} was not declared with _key"
    return str(extra["group"])
