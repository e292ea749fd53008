"""Trackers get every number of metrics.jsonl, ask nothing, and are named where they are missing. Fake packages."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatrain.cli.main import main
from megatrain.config import RunConfig
from megatrain.errors import ConfigError
from megatrain.train import trackers


class Fake(ModuleType):
    """A tracker package of any kind that writes down how it is called."""

    class Error(Exception):
        """What wandb raises."""

    def __init__(self, *, fails: int = 0) -> None:
        super().__init__("fake")
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            self.calls.append((name, args or words))
            if name == "init" and self.fails:
                self.fails -= 1
                raise self.Error("no network\nmore")
            return self

        return call

    def named(self, name: str) -> list[Any]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(model="m", dataset="d", output_dir=str(tmp_path), report_to=("wandb",), run_name="mine")


@pytest.fixture(autouse=True)
def no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", *trackers.OFFLINE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def opened(name: str, fake: Fake, config: RunConfig) -> tuple[Any, list[str]]:
    said: list[str] = []
    [tracker] = trackers.open_trackers({name: fake}, config, Path(config.output_dir), said.append)
    return tracker, said


def test_rows_become_numbers_and_a_nan_is_one() -> None:
    """NaN filtered from the log (trl 6702): not here."""
    row = {"step": 3, "loss": "nan", "grad_norm": "inf", "applied": False, "mfu": None, "lanes": {"compute": 0.5}}
    numbers = trackers.numbers_of(row)
    assert math.isnan(numbers.pop("loss"))
    assert numbers == {"grad_norm": math.inf, "applied": 0.0, "lanes/compute": 0.5}


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_one_sentence_that_names_the_extra(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, trackers.MODULES[name], None)
    asked = config.model_copy(update={"report_to": (name,)})
    with pytest.raises(ConfigError, match=rf"report_to is {name}, which is not installed; pip install 'megatrain\["):
        trackers.load_trackers(asked)


def test_wandb_without_a_key_is_offline_and_says_so(config: RunConfig) -> None:
    fake = Fake()
    tracker, said = opened("wandb", fake, config)
    [asked] = fake.named("init")
    assert (asked["mode"], asked["name"], asked["project"], asked["resume"]) == (
        "offline",
        "mine",
        "megatrain",
        "allow",
    )
    assert asked["dir"] == config.output_dir
    assert "offline" in said[0]
    tracker.log(4, {"loss": 1.0})
    tracker.close()
    assert fake.named("log") == [({"loss": 1.0},)]
    assert fake.named("finish")
    opened("wandb", fake, config)
    assert fake.named("init")[1]["id"] == asked["id"], "a resumed run goes on in the same chart"


def test_wandb_goes_online_with_a_key_unless_forbidden(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    Path(config.output_dir, "netrc").write_text("machine api.wandb.ai login user password x\n")
    for name, value in ((None, None), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "disabled")):
        if name is not None:
            monkeypatch.setenv(name, value)
        fake = Fake()
        opened("wandb", fake, config)
        modes.append(fake.named("init")[0]["mode"])
    assert modes == ["online", "offline", "disabled"]


def test_wandb_without_a_network_goes_on_offline(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    fake = Fake(fails=1)
    _, said = opened("wandb", fake, config)
    assert [asked["mode"] for asked in fake.named("init")] == ["online", "offline"]
    assert said[0] == "wandb: no network; going on offline"


def test_trackio_is_local_and_resumes(config: RunConfig) -> None:
    fake = Fake()
    tracker, said = opened("trackio", fake, config)
    [asked] = fake.named("init")
    assert (asked["project"], asked["name"], asked["resume"]) == ("megatrain", "mine", "allow")
    assert "space_id" not in asked
    assert "trackio show" in said[0]
    tracker.close()
    assert fake.named("finish")


def test_a_run_reports_every_row(run_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[int, set[str]] = {}
    closed = []
    writer = SimpleNamespace(
        add_text=lambda *_: None,
        add_scalar=lambda name, _value, step: rows.setdefault(step, set()).add(name),
        close=lambda: closed.append(True),
    )
    fake = ModuleType("fake")
    fake.SummaryWriter = lambda _path: writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    sys.argv = ["megatrain", "train", str(run_config), "max_steps=3", "report_to=tensorboard"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert sorted(rows) == [0, 1, 2, 3]
    assert "eval_loss" in rows[0] & rows[3]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "lanes/compute", "peak_ram_bytes"} <= rows[2]
    assert closed == [True]
