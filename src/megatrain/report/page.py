"""The page: a Record as one self-contained HTML document. No script, no link to anything outside the run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from megatrain.config import RunConfig, group_of, yaml_scalar
from megatrain.planner.table import gib
from megatrain.report.charts import Part, Series, bar, line_chart, smooth
from megatrain.report.record import Record
from megatrain.report.style import STYLE

LANES = {"compute": "s1", "h2d": "s3", "d2h": "s4", "host": "s2", "disk": "s6", "disk_read": "s5"}
LANE_WORDS = {
    "compute": "compute",
    "h2d": "h2d: to the device",
    "d2h": "d2h: from the device",
    "host": "host: optimizer",
    "disk": "disk: written",
    "disk_read": "disk: read",
}
TIERS = {"hbm": "GPU memory (hbm)", "ram": "host memory (ram)", "disk": "disk"}
PALETTE = ("s1", "s2", "s3", "s4", "s5", "s7", "s8", "s6")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
BADGES = {"FITS": "good", "TIGHT": "warn", "NO": "bad"}


def page(record: Record) -> str:
    """The whole document."""
    name = record.path.resolve().name
    cards = [_loss(record), *_curves(record), _lanes(record), _memory(record), _samples(record)]
    cards += [_checkpoints(record), _environment(record), _config(record.config)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · MegaTrain</title><style>{STYLE}</style></head><body><main>\n"
        f'{_head(record, name)}{_tiles(record)}<div class="grid">\n{"".join(cards)}</div>\n'
        "<footer>Written by <code>megatrain report</code>; every figure is from this run folder.</footer>"
        "</main></body></html>\n"
    )


def _head(record: Record, name: str) -> str:
    plan = record.plan or {}
    badges = []
    if plan:
        badges.append(f'<span class="badge {BADGES.get(plan["verdict"], "")}">plan: {escape(plan["verdict"])}</span>')
    skipped = sum(not row.get("applied", True) for row in record.steps)
    if skipped:
        badges.append(f'<span class="badge bad">{skipped} steps not applied: not finite</span>')
    facts = [Path(record.config.model).name]
    if plan:
        facts += [plan["architecture"], f"{plan['num_parameters']:,} parameters", plan["machine"]["device_name"]]
    facts.append(f"{record.config.precision} compute, exact fp32 masters")
    return f'<header><h1>{escape(name)}</h1>{"".join(badges)}</header><p class="sub">{escape(" · ".join(facts))}</p>'


def _tiles(record: Record) -> str:
    rows, evals, config = record.steps, record.evals, record.config
    tiles = [
        _tile("steps", f"{rows[-1]['step']:,}" if rows else "0", f"of {config.max_steps:,}" if config.max_steps else "")
    ]
    if rows:
        tiles.append(_tile("training loss", f"{rows[-1]['loss']:.3f}", f"first step {rows[0]['loss']:.3f}"))
    if evals:
        low = min(evals, key=lambda row: row["eval_loss"])
        note = f"before {evals[0]['eval_loss']:.3f} · lowest {low['eval_loss']:.3f} at {low['step']:,}"
        tiles.append(_tile("eval loss", f"{evals[-1]['eval_loss']:.3f}", note))
    if rows:
        tokens, spent = sum(row["tokens"] for row in rows), sum(row["step_s"] for row in rows)
        speed = median(row["tokens_per_s"] for row in rows)
        tiles.append(
            _tile("tokens trained", _count(tokens), f"{_count(sum(r['supervised_tokens'] for r in rows))} supervised")
        )
        tiles.append(_tile("tokens/s", _count(speed), "median of steps, padding left out"))
        tiles.append(_tile("time in steps", _duration(spent), f"{spent / len(rows):.2f} s a step"))
    return f'<div class="tiles">{"".join(tiles)}</div>\n'


def _tile(name: str, value: str, note: str) -> str:
    small = escape(note) or "&nbsp;"
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{small}</small></div>'


def _card(title: str, body: str, *, note: str = "", wide: bool = False) -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{said}{body}</section>\n'


def _legend(items: Sequence[tuple[str, str]]) -> str:
    marks = "".join(f'<span class="{style}"><i></i><b>{escape(name)}</b></span>' for name, style in items)
    return f'<p class="legend">{marks}</p>'


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]


def _loss(record: Record) -> str:
    losses, evals = _points(record.steps, "loss"), _points(record.evals, "eval_loss")
    window = max(2, len(losses) // 20)
    series = [Series("training loss", "s1", losses, "faint" if len(losses) > 8 else "line")]
    items = [("training loss", "s1")]
    if len(losses) > 8:
        series.append(Series(f"mean of {2 * window + 1} steps", "s1", smooth(losses, window)))
        items = [(f"training loss, each step and the mean of {2 * window + 1}", "s1")]
    if evals:
        series += [Series("eval loss", "s2", evals), Series("eval loss", "s2", evals, "dots")]
        items.append(("eval loss", "s2"))
    chart = line_chart(series, lambda y: f"{y:.4g}", label="Loss over steps", width=1140, height=330)
    return _card("Loss", _legend(items) + chart, note="per supervised token, over optimizer steps", wide=True)


def _curves(record: Record) -> list[str]:
    rows = record.steps
    speed = Series("tokens/s", "s3", _points(rows, "tokens_per_s"))
    norm = Series("gradient norm", "s4", _points(rows, "grad_norm"))
    rate = Series("learning rate", "s5", _points(rows, "lr"))
    clip = record.config.max_grad_norm
    shape = f"{record.config.lr_scheduler_type}, peak {_scientific(record.config.learning_rate)}"
    charts = [
        ("Learning rate", shape, rate, _scientific),
        ("Gradient norm", f"before clipping at {clip:g}" if clip else "not clipped", norm, _plain),
        ("Tokens per second", "real tokens: padding is left out", speed, _count),
    ]
    return [
        _card(title, line_chart([series], show, label=f"{title} over steps", from_zero=True), note=note)
        for title, note, series, show in charts
    ]


def _lanes(record: Record) -> str:
    rows = [row for row in record.steps if "lanes" in row]
    used = [lane for lane in LANES if any(row["lanes"].get(lane, 0.0) > 0 for row in rows)]
    series = [Series("whole step", "s6", _points(rows, "step_s"), "faint" if "compute" in used else "line")]
    series += [Series(lane, LANES[lane], [(row["step"], row["lanes"].get(lane, 0.0)) for row in rows]) for lane in used]
    items = [("whole step", "s6")]
    total = sum(row["step_s"] for row in rows) or 1.0
    for lane in used:
        share = sum(row["lanes"].get(lane, 0.0) for row in rows) / total
        items.append((f"{LANE_WORDS[lane]} {share:.0%}", LANES[lane]))
    chart = line_chart(series, lambda y: f"{y:.3g} s", label="Busy seconds of each lane over steps", from_zero=True)
    note = "busy seconds a step, and their share of it; lanes overlap"
    return _card("Time by lane", _legend(items) + chart, note=note)


def _memory(record: Record) -> str:
    """Planned parts of each tier on a track as long as its budget, and the peak that was measured."""
    if record.plan is None:
        return ""
    measured = {
        "hbm": max((row.get("peak_hbm_bytes") or 0 for row in record.steps), default=0),
        "ram": max((row.get("peak_ram_bytes") or 0 for row in record.steps), default=0),
        "disk": sum(checkpoint.num_bytes for checkpoint in record.checkpoints),
    }
    body = []
    for tier, words in TIERS.items():
        rows = sorted((r for r in record.plan["memory"] if r["tier"] == tier), key=lambda r: -r["num_bytes"])
        if not rows:
            continue
        parts = [Part(r["component"], PALETTE[min(i, len(PALETTE) - 1)], r["num_bytes"]) for i, r in enumerate(rows)]
        planned, budget = record.plan["totals"][tier], record.plan["budgets"][tier]
        found = measured[tier]
        said = f"planned {gib(planned)} of {gib(budget)}" + (f", measured {gib(found)}" if found else "")
        body.append(f'<p class="tier"><b>{escape(words)}</b><span>{escape(said)}</span></p>')
        # a plan far below its budget would be a sliver: the track then ends soon behind it
        whole = min(budget, 1.25 * max(planned, found))
        body.append(bar(parts, whole, found or None, _bytes, label=f"{words}: {said}"))
        body.append(_legend([(f"{part.name} {gib(int(part.value))}", part.style) for part in parts]))
    note = (
        "planned parts, and a mark at the peak that was measured; a track is as long as the budget, or shorter where "
        "little of it is used"
    )
    return _card("Memory by tier", "".join(body), note=note, wide=True)


def _samples(record: Record) -> str:
    if not record.samples:
        return ""
    body = []
    for prompt in dict.fromkeys(sample.prompt for sample in record.samples):
        answers = sorted((s for s in record.samples if s.prompt == prompt), key=lambda s: s.step)
        body.append(f'<p class="asked"><b>{escape(prompt)}</b></p><div class="said">')
        for sample in answers:
            when = "before" if sample.step == 0 else f"after step {sample.step:,}"
            body.append(f"<div><small>{when}</small>{escape(sample.text.strip()) or '(nothing)'}</div>")
        body.append("</div>")
    return _card("Samples", "".join(body), note="the likeliest words of the model, before and after", wide=True)


def _checkpoints(record: Record) -> str:
    if not record.checkpoints:
        return _card("Checkpoints", '<p class="none">none kept</p>')
    losses = {row["step"]: row["eval_loss"] for row in record.evals}
    rows = []
    for saved in record.checkpoints:
        link = escape(f"../{saved.path.as_posix()}/model/", quote=True)
        loss = f"{losses[saved.step]:.4f}" if saved.step in losses else "–"
        mark = (
            ' <span class="badge good">lowest</span>'
            if saved.step == record.best and len(record.checkpoints) > 1
            else ""
        )
        rows.append(
            f'<tr><td><a href="{link}">step {saved.step:,}</a>{mark}</td><td class="n">{loss}</td>'
            f'<td class="n">{gib(saved.num_bytes)}</td></tr>'
        )
    head = '<tr><th>checkpoint</th><th class="n">eval loss</th><th class="n">size</th></tr>'
    note = "each link is a folder that transformers opens unchanged"
    return _card("Checkpoints", f"<table>{head}{''.join(rows)}</table>", note=note)


def _environment(record: Record) -> str:
    """Versions and machine, one line a fact."""
    facts: dict[str, object] = {}
    for key, value in (record.environment or {}).items():
        facts |= value if isinstance(value, dict) else {key: value}
    rows = []
    for key, value in facts.items():
        if key.startswith("hbm") and not value:
            continue
        shown = "none" if value is None else str(value)
        if isinstance(value, int) and key.endswith("_bytes"):
            shown = gib(value)
        words = key.removesuffix("_bytes").replace("_", " ")
        rows.append(f'<tr><td>{escape(words)}</td><td class="value">{escape(shown)}</td></tr>')
    return _card("Environment", f"<table>{''.join(rows)}</table>") if rows else ""


def _config(config: RunConfig) -> str:
    """Every key, those that differ from their defaults in bold, one table a group."""
    defaults = RunConfig(model="-", dataset="-").model_dump(mode="json")
    table = config.model_dump(mode="json")
    groups: dict[str, list[str]] = {}
    for key, value in table.items():
        mark = ' class="set"' if value != defaults[key] else ""
        shown = escape(yaml_scalar(value))
        row = f'<tr{mark}><td class="key">{escape(key)}</td><td class="value key">{shown}</td></tr>'
        groups.setdefault(group_of(key), []).append(row)
    body = "".join(f"<table><tr><th colspan=2>{name}</th></tr>{''.join(rows)}</table>" for name, rows in groups.items())
    note = "as resolved before step 0; bold: not the default"
    return _card("Config", f'<div class="columns">{body}</div>', note=note, wide=True)


def _bytes(value: float) -> str:
    return gib(int(value))


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _scientific(value: float) -> str:
    if not value:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _count(value: float) -> str:
    """1234567 -> "1.23M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 10 or (value >= size and size > 1e3):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.1f} min"
    hours = math.floor(minutes / 60)
    return f"{hours:,} h {round(minutes - hours * 60)} min"
