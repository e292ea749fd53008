"""Placement of a benchmark's step: as the command line says, or as the planner chooses; and a plan back in words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args

from megatrain.config import RunConfig, resolved
from megatrain.hardware.described import likely_rates, read_machine
from megatrain.hardware.probe import probe
from megatrain.memory import available_ram_bytes
from megatrain.models.spec import ModelSpec
from megatrain.planner import Question, memory_table, predict, question_of, search
from megatrain.schedule.plan import Activations, Plan, SegmentPlan, Tier

HOMES = ("resident", "device_update", "state_disk", "weights_disk", "own_weights")
ACTIVATIONS: tuple[Activations, ...] = ("offload", "keep", "keep_attention")
PLACES = (*HOMES, *(f"{way}_blocks" if way == "keep" else way for way in ACTIVATIONS))
COUNTS = ("slots", "grad_slots", "disk_slots", "round")
PLANNED = "planned"  # the placement of a system that the planner places


def make_plan(spec: ModelSpec, args: argparse.Namespace, micro_batches: int) -> Plan:
    """The placement asked for by `placed` (segments whose state is in HBM, or updated there …), --keep and --slots."""
    names = {place: set(vars(args)[place].split(",")) - {""} for place in PLACES}
    two_pass = args.clip_mode == "two-pass"

    def chosen(place: str, name: str) -> bool:
        return bool({name, "all"} & names[place])

    def activations_of(name: str) -> Activations:
        if args.keep:
            return "keep"
        ways = zip(ACTIVATIONS, PLACES[len(HOMES) :], strict=True)
        return next((way for way, place in ways if chosen(place, name)), "recompute")

    segments = []
    for segment in spec.segments:
        name, block = segment.name, segment.kind == "block"
        at_home = chosen("resident", name)
        updated = name in names["device_update"]
        own = at_home or not block or chosen("own_weights", name)
        tier = "hbm" if at_home else "disk" if chosen("state_disk", name) else "ram"
        segments.append(
            SegmentPlan(
                name=name,
                kind=segment.kind,
                trainable=True,
                weights="own" if own else "pool",
                grads="own" if own and not (two_pass and block) else "pool",
                state=cast(Tier, tier),
                weights_home="disk" if not at_home and chosen("weights_disk", name) else "ram",
                activations=activations_of(name) if block else "recompute",
                update="device" if updated else "home",
            )
        )
    disk = names["state_disk"] or names["weights_disk"]
    return Plan(
        tuple(segments), spec.tied, args.slots, args.grad_slots, args.round or micro_batches,
        disk_slots=args.disk_slots if disk else 0,
        act_slots=2 if names["offload"] else 0,
        clip_mode=args.clip_mode,
        grad_landing_slots=2 if two_pass else 0,
        state_slots=min(2, len(names["device_update"])),
    )  # fmt: skip


def plan_of(spec: ModelSpec, args: argparse.Namespace, system: str, micro_batches: int) -> Plan:
    """What a system does: plain PyTorch has everything in HBM, and keeps its gradients until their norm is known."""
    if system.startswith("megatrain"):
        return make_plan(spec, args, micro_batches)
    plain = {**dict.fromkeys(PLACES, ""), "resident": "all", "clip_mode": "deferred", "keep": system.endswith("keep")}
    return make_plan(spec, argparse.Namespace(**vars(args) | plain), micro_batches)


def in_words(plan: Plan) -> dict[str, str | int]:
    """The arguments that `make_plan` makes `plan` of."""
    own = [s for s in plan.blocks if s.weights == "own" and s.state != "hbm"]
    found = {
        "resident": [s.name for s in plan.segments if s.state == "hbm"],
        "device_update": [s.name for s in plan.segments if s.streams_state],
        "state_disk": [s.name for s in plan.segments if s.state_on_disk],
        "weights_disk": [s.name for s in plan.segments if s.weights_on_disk],
        "own_weights": [s.name for s in own],
    }
    for way, place in zip(ACTIVATIONS, PLACES[len(HOMES) :], strict=True):
        found[place] = [s.name for s in plan.blocks if s.activations == way]
    counts = {"slots": plan.weight_slots, "grad_slots": plan.grad_slots, "round": plan.round_micro_batches}
    return {
        **{place: ",".join(names) for place, names in found.items()},
        **counts,
        "disk_slots": plan.disk_slots,
        "clip_mode": plan.clip_mode,
    }


def question(spec: ModelSpec, args: argparse.Namespace) -> Question:
    """What the planner is asked: this machine within --hbm-gib, --ram-gib and --disk-gib, or the one of --machine."""
    scratch = Path(args.scratch)
    if args.machine:
        described = read_machine(args.machine)
        machine, rates = described.machine, described.rates
    else:
        machine = probe(args.device, scratch, available_ram_bytes())
        rates = likely_rates(machine)
    asked = {"hbm": args.hbm_gib, "ram": args.ram_gib, "disk": args.disk_gib}
    config = RunConfig(
        model=args.model, dataset="random", max_length=args.seq, train_batch_size=args.tokens // args.seq,
        micro_batch_tokens=args.micro_batch_tokens, loss_chunk_tokens=args.loss_chunk, precision=args.precision,
        compile=not args.eager, save_strategy="no", round_micro_batches=args.round or None,
        clip_mode=args.clip_mode if args.clip_mode == "two-pass" else "auto",
        memory={tier: f"{int(gib * 1024)}MiB" for tier, gib in asked.items() if gib},
    )  # fmt: skip
    return question_of(spec, resolved(config, machine.device, os.cpu_count() or 1), machine, rates)


def planned(spec: ModelSpec, args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the placement that the planner chooses; what it says of it is printed."""
    asked = question(spec, args)
    plan = search(asked)
    table = memory_table(asked, plan)
    made = predict(asked.work, plan)
    on_disk = sum(segment.state_on_disk for segment in plan.segments)
    totals = ", ".join(
        f"{tier} {table.total_bytes(tier) / 2**30:.1f} of {table.budgets[tier] / 2**30:.1f} GiB {table.verdict(tier)}"
        for tier in get_args(Tier)
    )
    lanes = ", ".join(f"{lane} {seconds:.1f}" for lane, seconds in made.lanes_s.items())
    print(f"planned: {plan.clip_mode}, {on_disk} states on disk in {plan.disk_slots} slots; {totals}", flush=True)
    print(f"predicted: {made.step_s:.2f} s a step; lanes: {lanes} ({asked.work.rates.source})", flush=True)
    words = {**in_words(plan), "predicted_step_s": made.step_s}
    return argparse.Namespace(**vars(args) | words)


def placed(args: argparse.Namespace, placement: str) -> argparse.Namespace:
    """`args` with homes as a system's placement says."""
    words = dict(word.split("=") for word in placement.split("/") if word and word != PLANNED)
    places = {key: ",".join(named(words.get(key, ""))) for key in PLACES}
    if args.trace:
        places["trace"] = str(Path(args.trace).with_suffix("")) + "".join(f"-{word}" for word in words) + ".jsonl"
    return argparse.Namespace(**vars(args) | places)


def named(text: str) -> Iterator[str]:
    """EMBED+L000-L003 -> EMBED, L000, L001, L002, L003."""
    for word in filter(None, text.split("+")):
        first, _, last = word.partition("-")
        yield from (f"L{i:03d}" for i in range(int(first[1:]), int(last[1:]) + 1)) if last else (first,)
