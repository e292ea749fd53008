"""Watch: what held-out losses say of a run: which saved step is best, and whether it still gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Watch:
    """Held-out losses so far. `patience` evaluations in a row that are not lower than the least before them by more
    than `threshold` exhaust it; None: never. A NaN is never lower. The best step is the saved one of least loss."""

    def __init__(self, patience: int | None, threshold: float, state: Mapping[str, Any]) -> None:
        """`state`: what `saving` gave, of the checkpoint the run goes on from; empty for a new run."""
        self._patience = patience
        self._threshold = threshold
        self._least: float | None = state.get("least_eval_loss")
        self._num_worse: int = state.get("num_worse_evals", 0)
        self._last: tuple[int, float] | None = None
        self.best_step: int | None = state.get("best_step")
        self.best_loss: float | None = state.get("best_loss")

    @property
    def exhausted(self) -> bool:
        """Whether patience is at an end."""
        return self._patience is not None and self._num_worse >= self._patience

    def see(self, step: int, loss: float) -> bool:
        """Take in the held-out loss after `step` steps. Whether it is better than all before."""
        self._last = (step, loss)
        better = loss < float("inf") if self._least is None else loss < self._least - self._threshold
        if better:
            self._least = loss
        self._num_worse = 0 if better else self._num_worse + 1
        return better

    def saving(self, step: int) -> dict[str, Any]:
        """What to save with `step`, so that a resumed run goes on watching; names the best step, this one included."""
        if self._last is not None and self._last[0] == step:
            loss = self._last[1]
            if loss < (float("inf") if self.best_loss is None else self.best_loss):
                self.best_step, self.best_loss = step, loss
        state = {
            "least_eval_loss": self._least,
            "num_worse_evals": self._num_worse,
            "best_step": self.best_step,
            "best_loss": self.best_loss,
        }
        return {key: value for key, value in state.items() if value is not None}

    def verdict(self) -> str:
        """Why a run ends early, in one sentence."""
        return (
            f"early stop: {self._num_worse} evaluations in a row without a loss below {self._least}"
            + (f" by more than {self._threshold}" if self._threshold else "")
            + f" (early_stopping_patience is {self._patience})"
        )
