"""Two machines, two models: every number that `plan` prints is worked out again here, from shapes and rates alone.

Nothing of the planner is used but the choices it made (how many segments live where, how many rounds) and the shares it
states in docs/planning.md. Seconds come from a step that is played by hand (step_by_hand.py). Legend: D hidden, V
vocabulary, T tokens of a micro-batch, L blocks, M micro-batches of a step, R rounds.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bench import planning
from megatrain.cli.main import main
from megatrain.hardware.described import FOLDER
from megatrain.schedule.build import build
from megatrain.schedule.plan import Plan, SegmentPlan
from tests.planner.large_models import CHUNK, DATA, Model, T, dense, gpt_oss
from tests.planner.step_by_hand import Hand, Played, play

MIB = 1 << 20
PER_CENT = 0.01


@dataclass(frozen=True)
class Case:
    folder: str
    machine: str
    length: int
    rows: int
    model: Model
    words: tuple[str, ...]


CASES = [
    Case("gpt-oss-120b", "h200-1.5tb", 8192, 64, gpt_oss(8192), ("save_strategy=no",)),
    Case("dense-175b", "b200-192gb", 2048, 256, dense(2048), ()),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.folder)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def shown(case: Case) -> dict[str, Any]:
    """The JSON that `plan` prints, with the choices counted."""
    capture = pytest.MonkeyPatch()
    printed: list[str] = []
    words = [f"max_length={case.length}", f"train_batch_size={case.rows}", "max_steps=1000", *case.words]
    capture.setattr("sys.argv", ["megatrain", "plan", str(DATA / case.folder), *words, "--machine", case.machine,
                                 "--json"])  # fmt: skip
    capture.setattr("builtins.print", lambda text, **_: printed.append(text))
    with pytest.raises(SystemExit) as ended:
        main()
    capture.undo()
    assert ended.value.code == 0
    table = json.loads("\n".join(printed))
    segments = table["plan"]["segments"]
    places = {
        "hbm": [s for s in segments if s["state"] == "hbm"],
        "ram": [s for s in segments if s["state"] == "ram"],
        "disk": [s for s in segments if s["state"] == "disk"],
    }
    assert all(s["weights_home"] == "ram" for s in segments)
    assert all(s["activations"] != "keep" for s in segments)
    return {**table, "places": places, "M": case.rows * case.length // T}


def rates_of(case: Case) -> dict[str, Any]:
    return json.loads((FOLDER / f"{case.machine}.json").read_text())["rates"]


def step_of(case: Case, shown: dict[str, Any], *, at_once: int) -> Played:
    """The whole step of the plan that was printed; one op stands for `at_once` micro-batches."""
    plan = Plan(**{**shown["plan"], "segments": tuple(SegmentPlan(**s) for s in shown["plan"]["segments"])})
    plan = replace(plan, round_micro_batches=plan.round_micro_batches // at_once)
    ops = build(plan, "train", shown["M"] // at_once, pending_update=True)
    return play(ops, Hand(case.model, rates_of(case), at_once))


@pytest.fixture(scope="module")
def played(case: Case, shown: dict[str, Any]) -> Played:
    """The step as it is said to be simulated: what a visit of a segment does for a round is one op."""
    return step_of(case, shown, at_once=shown["plan"]["round_micro_batches"])


def step_by_hand_s(case: Case, played: Played) -> float:
    """With what passes between two steps."""
    return played.step_s + rates_of(case)["step_s"]


def parameters(model: Model, segments: list[dict[str, Any]]) -> int:
    sizes = {"embed": model.embed, "block": model.block, "head": model.head}
    return sum(sizes[segment["kind"]] for segment in segments)


def offloaded(shown: dict[str, Any]) -> tuple[int, int]:
    """(blocks whose inputs wait in RAM or pass through the shared slots, slots)."""
    return sum(s["activations"] == "offload" for s in shown["plan"]["segments"]), shown["plan"]["act_slots"]


def attention_kept(shown: dict[str, Any]) -> list[int]:
    """Blocks (from 0) that keep what their attention gives."""
    return [i for i, s in enumerate(shown["plan"]["segments"], -1) if s["activations"] == "keep_attention"]


def away_from(shown: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments whose state is not in HBM."""
    return [*shown["places"]["ram"], *shown["places"]["disk"]]


def waiting(shown: dict[str, Any]) -> int:
    """Blocks whose inputs go to RAM and back: a second pass comes back to those that were in slots at the turn."""
    aside, slots = offloaded(shown)
    return aside if two_passes(shown) and aside >= 2 * slots else max(0, aside - slots)


def two_passes(shown: dict[str, Any]) -> bool:
    return shown["plan"]["clip_mode"] == "two-pass"


def rows_of(case: Case, shown: dict[str, Any]) -> dict[str, float]:
    """Component -> bytes, worked out again."""
    model, places, plan = case.model, shown["places"], shown["plan"]
    d, v = model.hidden, model.vocab
    ends = [s for s in plan["segments"] if s["kind"] != "block"]
    own_ends = sum(
        parameters(model, [s]) * (16 if s["state"] == "hbm" else 6) for s in ends
    )  # an own slot: weights and gradient; at home in HBM the state too
    resident = [s for s in places["hbm"] if s["kind"] == "block"]
    own = [s for s in away_from(shown) if s["kind"] == "block" and s["weights"] == "own"]
    streams = model.blocks - len(resident) - len(own)
    round_size = plan["round_micro_batches"]
    aside, slots = offloaded(shown)
    saved = T * (2 * model.saved + model.attended - 2 * model.attended_width)  # lse in fp32
    first = T * model.widest * 2 + model.largest * 2
    if model.chosen:  # the gradients of what experts gave, with their weight and without, and where they go
        first = T * (2 * model.widest + 24 * model.chosen) * 2
    working = {
        "backward of a block": max(saved + T * d * 2 + first, 2 * model.block + 16 * T * d),
        "head and loss": CHUNK * v * 2 + max(v * d * 2, CHUNK * v * 2) + CHUNK * d * 2 + 5 * T * d * 2,
        "backward of the embedding": 12 * T * d,
    }
    peak = max(working, key=lambda phase: working[phase])
    away = away_from(shown)
    largest = max(parameters(model, [s]) for s in away)
    landing = plan["disk_slots"] * 10 * max((parameters(model, [s]) for s in places["disk"]), default=0)
    copies = 0 if "save_strategy=no" in case.words else 3
    return {
        "slots and homes of EMBED and HEAD": own_ends,
        "homes of resident blocks": (12 if two_passes(shown) else 16) * parameters(model, resident)
        + (2 if two_passes(shown) else 6) * parameters(model, own),
        "shared weight slots": 2 * 2 * model.block * (streams > 0),
        "shared gradient slots": 2 * 4 * model.block * (streams > 0 or two_passes(shown)),
        "second gradient of the tied embedding": 4 * v * d if model.tied else 0,
        "boundary activations of a round": round_size * (model.blocks + 2 - aside + slots) * T * d * 2,
        "kept attention of a round": round_size * len(attention_kept(shown)) * T * model.attended,
        "block inputs waiting in RAM": round_size * waiting(shown) * T * d * 2,
        f"working memory ({peak})": working[peak],
        "rotary tables of a round": round_size * T * model.rotary,
        "unused pieces of the working memory": max(
            128 * MIB, 0.25 * 2 * max(v * d, CHUNK * v, T * model.widest, model.tensor)
        ),
        "CUDA libraries": 860 * MIB,
        "weights": 2 * parameters(model, away),
        "optimizer state": 10 * parameters(model, places["ram"]),
        "gradients": 4 * (plan["grad_landing_slots"] * largest if two_passes(shown) else parameters(model, away)),
        "landing slots of the disk": landing,
        "optimizer state on disk": 10 * parameters(model, places["disk"]),
        "program and libraries": (1800 + (64 if model.experts else 0)) * MIB,
        "checkpoint writer": 96 * MIB if copies else 0,
        f"checkpoints ({copies})": copies * 12 * model.total,
    }


def test_the_model_has_the_parameters_of_its_name(case: Case, shown: dict[str, Any]) -> None:
    assert shown["num_parameters"] == case.model.total
    assert shown["num_parameters"] == pytest.approx({"gpt-oss-120b": 116.83e9, "dense-175b": 174.6e9}[case.folder],
                                                    rel=0.001)  # fmt: skip


def test_every_row_of_memory_follows_from_shapes(case: Case, shown: dict[str, Any]) -> None:
    expected = {name: size for name, size in rows_of(case, shown).items() if size}
    printed = {row["component"]: row["num_bytes"] for row in shown["memory"]}
    assert printed.keys() == expected.keys()
    for name, size in printed.items():
        assert size == pytest.approx(expected[name], rel=PER_CENT), name


def test_totals_add_up_and_budgets_are_the_machines(case: Case, shown: dict[str, Any]) -> None:
    machine = json.loads((FOLDER / f"{case.machine}.json").read_text())["machine"]
    budgets = {"hbm": "hbm_free_bytes", "ram": "ram_available_bytes", "disk": "disk_free_bytes"}
    for tier, total in shown["totals"].items():
        assert total == sum(row["num_bytes"] for row in shown["memory"] if row["tier"] == tier)
        assert shown["budgets"][tier] == machine[budgets[tier]]
        assert total <= {"hbm": 0.985}.get(tier, 0.95) * shown["budgets"][tier]
    assert shown["verdict"] == "FITS"
    assert shown["misfit"] is None


def work_of(case: Case, shown: dict[str, Any]) -> dict[str, float]:
    """Seconds of work of each lane: operations or bytes over the machine's rates, as docs/planning.md says."""
    model, plan, M = case.model, shown["plan"], shown["M"]
    rates = rates_of(case)
    R = -(-M // plan["round_micro_batches"])
    places = {tier: parameters(model, segments) for tier, segments in shown["places"].items()}
    streams = [s for s in plan["segments"] if s["weights"] == "pool"]
    own_away = [s for s in plan["segments"] if s["weights"] == "own" and s["state"] != "hbm"]
    away = places["ram"] + places["disk"]
    d, v = model.hidden, model.vocab

    matmul, hbm = rates["matmul_flops_per_s"], rates["hbm_Bps"]
    attention_s = sum(model.attention) / rates["attention_flops_per_s"]
    products_s = 2 * T * ((model.active - model.experts) / 0.88 + model.experts / 0.40) / matmul
    traffic_s = (T * model.widths * 2 + model.block * 2) / hbm
    forward_s = model.blocks * (products_s + traffic_s) + attention_s
    backward_s = (
        model.blocks * (3 * products_s + 3 * traffic_s + 12 * model.block / hbm) + (1 + 2.5 / 0.8) * attention_s
    )
    kept = attention_kept(shown)
    backward_s -= sum(model.attention[i] for i in kept) / rates["attention_flops_per_s"]
    copies_s = 2 * len(kept) * 2 * T * model.attended / hbm  # into its place, and out of it; read and written
    table = v * d
    chunks = T // CHUNK
    head_s = 3 * 2 * table * T / 0.85 / matmul + (T * v * 12 + chunks * table * 12) / hbm
    sums_s = 2 * 4 * model.total / hbm + model.tied * (4 * model.embed + 3 * 4 * model.embed) / hbm
    passes = 2 if two_passes(shown) else 1
    if passes == 2:
        sums_s += 4 * model.total / hbm  # zeroed in both passes, their norm taken in one
    compute = M * (forward_s + copies_s / 2 + passes * (backward_s + copies_s / 2 + head_s))  # copied there and back
    compute += sums_s + 28 * places["hbm"] / hbm

    aside, slots = offloaded(shown)
    one_input_bytes = M * T * d * 2
    back = max(0, aside - slots) + (waiting(shown) if passes == 2 else 0)  # inputs that come back, in all passes
    moves = len(streams) + (2 * R - 1) * (len(streams) - 2) + (passes - 1) * len(streams)
    h2d_bytes = moves * 2 * model.block + 2 * parameters(model, own_away) + (R - 1) * 4 * parameters(model, streams)
    d2h_bytes = R * 4 * parameters(model, streams) + 4 * parameters(model, own_away)
    return {
        "compute": compute,
        "h2d": (h2d_bytes + back * one_input_bytes) / rates["h2d_Bps"],
        "d2h": (d2h_bytes + waiting(shown) * one_input_bytes) / rates["d2h_Bps"],
        "host": away / (1.1 * rates["update_params_per_s"]),
        "disk": 10 * places["disk"] / rates["disk_write_Bps"],
        "disk_read": 10 * places["disk"] / rates["disk_read_Bps"],
    }


def test_the_work_of_every_lane_follows_from_shapes_and_rates(case: Case, shown: dict[str, Any]) -> None:
    expected = work_of(case, shown)
    for lane, work_s in shown["price"]["work_s"].items():
        assert work_s == pytest.approx(expected[lane], rel=PER_CENT), lane
        assert shown["price"]["lanes_s"][lane] >= work_s * (1 - PER_CENT), "sharing can only make it longer"


def test_the_step_its_lanes_and_its_longest_chain_take_what_they_take_by_hand(
    case: Case, shown: dict[str, Any], played: Played
) -> None:
    price, chain_s = shown["price"], played.chain_s()
    busy_s = played.busy_s()
    for lane, lane_s in price["lanes_s"].items():
        assert lane_s == pytest.approx(busy_s[lane], rel=PER_CENT), lane
    assert price["step_s"] == pytest.approx(step_by_hand_s(case, played), rel=PER_CENT)
    assert price["critical_path_s"] == pytest.approx(chain_s, rel=PER_CENT)
    assert sum(chain_s.values()) == pytest.approx(played.step_s), "no gap"
    lanes = Counter[str]()
    for part, seconds in chain_s.items():
        lanes[part.split()[0]] += seconds
    ((longest, longest_s),) = lanes.most_common(1)
    assert price["bound_share"] == pytest.approx(longest_s / played.step_s, rel=PER_CENT)
    assert price["bound"] == {"compute": "the device's arithmetic"}[longest]


def test_micro_batch_by_micro_batch_the_step_takes_as_long(case: Case, shown: dict[str, Any]) -> None:
    one_by_one, price = step_of(case, shown, at_once=1), shown["price"]
    assert price["step_s"] == pytest.approx(step_by_hand_s(case, one_by_one), rel=PER_CENT)
    assert price["lanes_s"] == pytest.approx(one_by_one.busy_s(), rel=1.5 * PER_CENT)


def test_lanes_share_what_they_both_need_or_the_tests_above_prove_less(case: Case, shown: dict[str, Any]) -> None:
    price = shown["price"]
    slower = {lane: price["lanes_s"][lane] / work_s - 1 for lane, work_s in price["work_s"].items()}
    assert min(slower["h2d"], slower["d2h"]) > 3 * PER_CENT, "the link"
    assert (min(slower["disk"], slower["disk_read"]) > 0.5) == (case.folder == "dense-175b"), "the disk"


def test_the_rest_of_the_price_is_arithmetic(case: Case, shown: dict[str, Any], played: Played) -> None:
    price, model = shown["price"], case.model
    tokens, step_s = case.rows * case.length, step_by_hand_s(case, played)
    assert price["step_tokens"] == tokens
    assert price["tokens_per_s"] == pytest.approx(tokens / step_s, rel=PER_CENT)
    assert price["run_s"] == pytest.approx(1000 * step_s, rel=PER_CENT)
    products = model.blocks * model.active + model.vocab * model.hidden
    flops = 3 * (2 * products * tokens + sum(model.attention) * shown["M"])
    assert price["model_flops"] == pytest.approx(flops, rel=PER_CENT)
    assert price["checkpoint_bytes"] == pytest.approx(12 * model.total, rel=PER_CENT)
    written = 10 * parameters(model, shown["places"]["disk"])
    assert price["step_written_bytes"] == pytest.approx(written, rel=PER_CENT)
    at_the_end = 2 * model.total if "save_strategy=no" in case.words else 2 * 12 * model.total
    at_load = 2 * parameters(model, shown["places"]["disk"])  # lo; w is in RAM, m and v are zeros
    assert price["run_written_bytes"] == pytest.approx(at_load + 1000 * written + at_the_end, rel=PER_CENT)
    assert price["checkpoints"] == (0 if "save_strategy=no" in case.words else 3)
    assert price["day_written_bytes"] == pytest.approx(written / step_s * 86400, rel=PER_CENT)


def test_no_number_of_the_table_is_left_out(case: Case, shown: dict[str, Any]) -> None:
    """A number that is added to `plan --json` needs a test above, and a word here."""
    worked_out = {"step_s", "work_s", "lanes_s", "bound", "bound_share", "critical_path_s", "step_tokens", "run_s",
                  "tokens_per_s", "model_flops", "checkpoint_bytes", "checkpoints", "step_written_bytes",
                  "run_written_bytes", "day_written_bytes"}  # fmt: skip
    rest = {key: value for key, value in shown["price"].items() if key not in worked_out}
    assert rest == {"rates": "described", "num_steps": 1000, "disk_tbw_bytes": None}
    known = {"verdict", "num_parameters", "architecture", "memory", "totals", "budgets", "peak_phase", "plan",
             "machine", "described", "rates", "price", "misfit"}  # fmt: skip
    assert set(shown) - {"places", "M"} == known
    working = next(row["component"] for row in shown["memory"] if row["component"].startswith("working memory"))
    assert working == f"working memory ({shown['peak_phase']})"
    machine = json.loads((FOLDER / f"{case.machine}.json").read_text())
    assert shown["machine"] == machine["machine"]


@pytest.mark.slow
def test_the_page_is_what_the_program_prints() -> None:
    assert planning.page() == planning.PAGE.read_text("utf-8"), "run: python -m bench planning --write"
