"""The report page by its structure: whole, self-contained, harmless, and true to the run folder."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatrain.errors import CheckpointError
from megatrain.report import Record, Sample, best_step, page, read_metrics, read_record
from megatrain.report.charts import MAX_POINTS, Series, line_chart, reduced, smooth, ticks, whole_ticks
from tests.report.runs import eval_row, full_run, step_row, write_run

VOID = {"meta", "br"}


class Parsed(HTMLParser):
    """A page's elements, checked to be closed in order, with its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def svgs(text: str) -> dict[str, ElementTree.Element]:
    """Spoken label -> picture; each is well-formed XML by itself."""
    roots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    return {str(root.get("aria-label")): root for root in roots}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return read_record(full_run(tmp_path / "first"))


def test_one_page_holds_everything(record: Record) -> None:
    text = page(record)
    parsed = Parsed(text)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Loss", "Learning rate", "Gradient norm", "Tokens per second", "Time by lane", "Memory by tier", "Samples",
        "Checkpoints", "Environment", "Config",
    ]  # fmt: skip
    for fact in (
        "first", "Qwen3-8B", "Qwen3ForCausalLM", "8,190,735,360 parameters", "NVIDIA H200", "plan: FITS", "of 120",
        "before 3.910 · lowest 2.309 at 120", "planned 92.00 GiB of 120.00 GiB, measured 97.00 GiB",
        "h2d: to the device 72%", "Quiet! I read a book by the lake.", "after step 120", "cuda", "none",
        "learning_rate", "cosine, peak 2e-5",
    ):  # fmt: skip
        assert fact in parsed.text, fact
    links = [attrs["href"] for tag, attrs in parsed.elements if tag == "a"]
    assert links == ["../checkpoints/step-80/model/", "../checkpoints/step-120/model/"]
    assert all((record.path / "report" / str(link)).is_dir() for link in links)
    assert parsed.text.count("lowest") == 2
    assert record.best == 120


def test_it_needs_nothing_else_and_runs_nothing(record: Record) -> None:
    parsed = Parsed(page(record))
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    attributes = {name for _, attrs in parsed.elements for name in attrs}
    assert not any(name.startswith("on") for name in attributes)
    assert attributes & {"src", "href", "xlink:href", "style"} == {"href"}
    assert "http:" not in page(record)
    assert "https:" not in page(record)
    assert "url(" not in page(record)
    policy = next(attrs for tag, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_every_colour_is_there_for_light_and_for_dark(record: Record) -> None:
    style = re.findall(r"<style>(.*?)</style>", page(record), re.DOTALL)[0]
    used = set(re.findall(r"var\((--\w+)\)", style))
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    for part in (light, dark):
        assert used <= set(re.findall(r"(--\w+):#", part))
    classes = {name for _, attrs in Parsed(page(record)).elements for name in (attrs.get("class") or "").split()}
    assert all(f".{name}{{" in style for name in classes if re.fullmatch(r"s\d", name))


def test_what_people_and_models_wrote_cannot_become_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=y>&amp;'
    run = full_run(tmp_path / "a<b>&'c")
    samples = {"samples": [{"step": 0, "prompt": evil, "text": evil}]}
    (run / "report/samples.json").write_text(json.dumps(samples))
    plan = json.loads((run / "plan.json").read_text())
    plan["memory"][0]["component"] = plan["verdict"] = plan["machine"]["device_name"] = evil
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "env.json").write_text(json.dumps({evil: evil}))
    text = page(read_record(run))
    parsed = Parsed(text)
    assert not {tag for tag, _ in parsed.elements} & {"script", "img", "b>"}
    assert parsed.text.count("<script>alert(1)</script>") >= 5
    svgs(text)


def test_charts_show_the_points_that_were_recorded(record: Record) -> None:
    pictures = svgs(page(record))
    assert set(pictures) >= {"Loss over steps", "Learning rate over steps", "Busy seconds of each lane over steps"}
    loss = pictures["Loss over steps"]
    lines = loss.findall("polyline")
    assert [line.get("class") for line in lines] == ["line faint s1", "line line s1", "line line s2"]
    counts = [len(str(line.get("points")).split()) for line in lines]
    assert counts == [120, 120, 4]
    width, height = (float(x) for x in str(loss.get("viewBox")).split()[2:])
    for line in lines:
        places = [tuple(map(float, point.split(","))) for point in str(line.get("points")).split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
        assert [x for x, _ in places] == sorted(x for x, _ in places)
    first, last = str(lines[2].get("points")).split()[0], str(lines[2].get("points")).split()[-1]
    assert float(first.split(",")[1]) < float(last.split(",")[1]), "a loss that fell goes down on the page"
    assert any("step 40: 2.739" in str(title.text) for title in loss.iter("title"))


def test_values_that_are_no_numbers_are_marked_not_dropped(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(1, 11)]
    rows[4] = step_row(5, loss="nan", grad_norm="inf", applied=False)
    text = page(read_record(write_run(tmp_path / "run", rows)))
    loss = svgs(text)["Loss over steps"]
    assert len([line for line in loss.findall("polyline") if "faint" in str(line.get("class"))]) == 2, "a gap"
    (mark,) = loss.findall("path")
    assert mark.findtext("title") == "training loss, step 5: nan"
    assert "1 steps not applied: not finite" in Parsed(text).text


@pytest.mark.parametrize("rows", [[], [eval_row(0, 3.0)], [step_row(1)], [step_row(1, loss="nan")]])
def test_a_young_run_has_a_page_too(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    run = write_run(tmp_path / "run", rows)
    text = page(read_record(run))
    Parsed(text)
    svgs(text)
    assert "none kept" in text
    (run / "metrics.jsonl").unlink()
    Parsed(page(read_record(run)))


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step_row(1), step_row(2)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss"')
    assert [row["step"] for row in read_metrics(run)[0]] == [1, 2]


def test_a_long_run_stays_a_small_page_and_keeps_its_spike(tmp_path: Path) -> None:
    rows = [step_row(step, loss=900.0 if step == 31234 else 2.0 + 1 / step) for step in range(1, 50001)]
    text = page(read_record(write_run(tmp_path / "run", rows)))
    assert len(text) < 400_000
    points = str(svgs(text)["Loss over steps"].findall("polyline")[0].get("points")).split()
    assert len(points) <= MAX_POINTS + 2
    heights = [float(point.split(",")[1]) for point in points]
    assert min(heights) < 60 < sorted(heights)[1], "one point, alone at the top"


def test_the_best_checkpoint_is_the_named_one_or_the_lowest_kept(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(1, 5)] + [eval_row(2, 1.0), eval_row(3, 2.0), eval_row(4, "nan")]
    run = write_run(tmp_path / "run", rows)
    assert best_step(run, read_metrics(run), [2, 3, 4]) == 2
    assert best_step(run, read_metrics(run), [3, 4]) == 3
    (run / "BEST").write_text("checkpoints/step-3\n")
    assert best_step(run, read_metrics(run), [2, 3, 4]) == 3
    assert best_step(run, read_metrics(run), [2, 4]) == 2, "what BEST names may be gone"
    with pytest.raises(CheckpointError, match="none is best; it keeps 4: name one"):
        best_step(run, read_metrics(run), [4])


def test_numbers_on_axes() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(2.13, 4.9, 5)[0] <= 2.13
    assert ticks(3.0, 3.0, 5)[0] < 3.0 < ticks(3.0, 3.0, 5)[-1]
    assert ticks(0.0, 0.0, 5)[0] < 0.0
    assert whole_ticks(1, 40, 7) == [10, 20, 30, 40]
    assert whole_ticks(5, 5, 7) == [5]
    assert whole_ticks(1, 3, 7) == [1, 2, 3]
    for low, high in ((1e-9, 3e-5), (-5.0, 12345.6), (0.999, 1.001)):
        found = ticks(low, high, 5)
        assert found[0] <= low + 1e-15
        assert found[-1] >= high - 1e-9
        assert 4 <= len(found) <= 9


def test_smoothing_is_a_mean_and_reduction_keeps_both_ends() -> None:
    points = [(float(x), float(x % 2)) for x in range(10)]
    assert smooth(points, 1)[3] == (3.0, pytest.approx((0 + 1 + 0) / 3))
    assert smooth(points, 1)[0] == (0.0, 0.5)
    assert [x for x, _ in smooth([*points, (10.0, math.nan)], 1)] == [x for x, _ in points]
    many = [(float(x), float(x == 777)) for x in range(10000)]
    assert max(y for _, y in reduced(many)) == 1.0
    assert reduced(points) == points


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing recorded yet" in line_chart([Series("a", "s1", [])], str, label="a")


def test_samples_keep_their_order(record: Record) -> None:
    assert record.samples[0] == Sample(0, "How was your weekend?", "As an AI I have no weekend.")
    text = page(record)
    assert text.index("As an AI") < text.index("Quiet! I read")
