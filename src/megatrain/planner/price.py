"""Price: what a run costs beside memory: seconds, bytes written, and what bounds them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.models.flops import train_flops
from megatrain.planner import sizes
from megatrain.planner.account import Question, kept_checkpoints
from megatrain.planner.landing import loaded_bytes
from megatrain.planner.prediction import Prediction, predict
from megatrain.planner.table import clock, decimal, figure, gib
from megatrain.schedule.plan import Plan

DAY_S = 86400


@dataclass(frozen=True)
class Price:
    """`step_tokens`: of a full step. `num_steps`, and what follows from it, is None if only the data can say it."""

    prediction: Prediction
    rates_source: str
    step_tokens: int
    model_flops: int  # of a step
    checkpoint_bytes: int
    checkpoints: int  # on disk at one time, at most
    step_written_bytes: int  # to the disk, by a step itself
    num_steps: int | None
    run_written_bytes: int | None  # to the disk, with loading and all checkpoints
    disk_tbw_bytes: int | None  # what the drive is rated for, if that is known

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.prediction.step_s

    @property
    def run_s(self) -> float | None:
        return None if self.num_steps is None else self.num_steps * self.prediction.step_s

    @property
    def day_written_bytes(self) -> float:
        """What steps alone write in a day of training."""
        return self.step_written_bytes / self.prediction.step_s * DAY_S

    def lines(self) -> list[str]:
        """The price as text."""
        step_s = self.prediction.step_s
        speed = f"{self.tokens_per_s:,.0f} tokens/s, {figure(self.model_flops / step_s / 1e12)} model TFLOP/s"
        text = [
            f"checkpoint: {gib(self.checkpoint_bytes)}, {self.checkpoints} on disk at the most"
            if self.checkpoints
            else "checkpoint: none (save_strategy: no); the model is written at the end",
            f"step: {step_s:.3f} s, {speed}, simulated (rates: {self.rates_source})",
        ]
        for lane, work_s in self.prediction.work_s.items():
            if work_s:
                busy_s = self.prediction.lanes_s[lane]
                text.append(f"  {lane:<10}{work_s:>10.3f} s of work, busy {busy_s:.3f} s ({busy_s / step_s:.0%})")
        text.append(f"bound: {self.prediction.bound} ({self.prediction.bound_share:.0%} of the critical path)")
        text.append(f"critical path: {self._critical()}")
        if self.step_written_bytes:
            day = f"{decimal(self.day_written_bytes)} a day{self._of_rated(self.day_written_bytes)}"
            text.append(f"written to the disk by each step: {decimal(self.step_written_bytes)}, {day}")
        if self.num_steps is None or self.run_s is None or self.run_written_bytes is None:
            text.append("run: set max_steps to see its time and what it writes")
        else:
            written = f"{decimal(self.run_written_bytes)} written to disk{self._of_rated(self.run_written_bytes)}"
            text.append(f"run: {self.num_steps:,} steps, {clock(self.run_s)}; {written}")
        return text

    def _critical(self) -> str:
        """What the longest chain of ops is made of, largest share first."""
        parts = sorted(self.prediction.critical_s.items(), key=lambda part: -part[1])
        total_s = sum(seconds for _, seconds in parts)
        return ", ".join(f"{kind} {s / total_s:.0%}" for (_, kind), s in parts if s >= total_s / 100)

    def _of_rated(self, num_bytes: float) -> str:
        if self.disk_tbw_bytes is None:
            return ""
        return f" ({num_bytes / self.disk_tbw_bytes:.1%} of the drive's {decimal(self.disk_tbw_bytes)})"

    def table(self) -> dict[str, object]:
        """The price as JSON."""
        critical = {f"{lane} {kind}": seconds for (lane, kind), seconds in self.prediction.critical_s.items()}
        return {
            "step_s": self.prediction.step_s,
            "work_s": {str(lane): seconds for lane, seconds in self.prediction.work_s.items()},
            "lanes_s": {str(lane): seconds for lane, seconds in self.prediction.lanes_s.items()},
            "bound": self.prediction.bound,
            "bound_share": self.prediction.bound_share,
            "critical_path_s": critical,
            "rates": self.rates_source,
            "tokens_per_s": self.tokens_per_s,
            "run_s": self.run_s,
            "day_written_bytes": self.day_written_bytes,
            **{key: value for key, value in vars(self).items() if key not in ("prediction", "rates_source")},
        }


def price_of(question: Question, plan: Plan) -> Price:
    """The price of a plan."""
    config, shapes = question.config, question.shapes
    steps = config.max_steps
    return Price(
        prediction=predict(question.work, plan),
        rates_source=question.work.rates.source,
        step_tokens=config.train_batch_size * config.max_length,
        model_flops=config.train_batch_size * train_flops(shapes.spec, [config.max_length]),
        checkpoint_bytes=shapes.checkpoint_bytes,
        checkpoints=kept_checkpoints(question),
        step_written_bytes=sizes.step_written_bytes(shapes, plan),
        num_steps=steps,
        run_written_bytes=None if steps is None else run_written_bytes(question, plan, range(steps)),
        disk_tbw_bytes=config.memory.disk_tbw,
    )


def run_written_bytes(question: Question, plan: Plan, steps: range) -> int:
    """What `steps`, those to come by index, write to the disk: state and weights that live there, when they are loaded
    and in each step, and all checkpoints or the model alone."""
    config, shapes = question.config, question.shapes
    written = loaded_bytes(plan, shapes.layouts, shapes.compute_bytes, resumed=steps.start > 0)
    written += len(steps) * sizes.step_written_bytes(shapes, plan)
    if config.save_strategy == "no":
        return written + sum(sizes.weights_bytes(shapes, name) for name in shapes.layouts)
    return written + -(-len(steps) // config.save_steps) * shapes.checkpoint_bytes


def wear_misfit(question: Question, plan: Plan, steps: range | None) -> str | None:
    """Why `steps` write too much, if that is more than memory.disk_max_written allows. None: unknown how many."""
    limit = question.config.memory.disk_max_written
    if steps is None or limit is None or (written := run_written_bytes(question, plan, steps)) <= limit:
        return None
    step_bytes = sizes.step_written_bytes(question.shapes, plan)
    share = f"{len(steps):,} steps of {decimal(step_bytes)}, the rest is loading and checkpoints"
    return (
        f"the run would write {decimal(written)} to the disk ({share}), memory.disk_max_written is {decimal(limit)}; "
        "raise it, let less live on disk (more memory.ram, where the planner chooses), or save less often (save_steps)"
    )
