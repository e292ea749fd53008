"""Text: what prints parses, and what does not parse is named with its line."""

from __future__ import annotations

import pytest

from megatrain.schedule import Kind, Lane, Op, Place, ScheduleTextError, build, parse, to_text
from tests.schedule.plans import plan_of


def test_every_program_round_trips_and_is_canonical() -> None:
    plan = plan_of(tied=True, keep=["L001"], keep_attention=["L000"], round_micro_batches=1)
    for program in ("train", "eval", "save", "flush"):
        schedule = build(plan, program, 2, True)
        text = to_text(schedule)
        assert parse(text) == schedule
        assert to_text(parse(text)) == text
    assert parse("") == parse("\n  # a comment\n\n") == ()
    assert to_text(()) == ""


def test_a_line_says_everything() -> None:
    op = Op(
        Kind.BACKWARD,
        "L003",
        5,
        Lane.COMPUTE,
        (Place("w", 1), Place("act", 3, 5), Place("call", "", 5), Place("dact", "", 5), Place("g", 0)),
        (Place("dact", "", 5), Place("g", 0)),
        ("f1", "d2"),
        "b9",
    )
    line = "BACKWARD  L003  m5  @compute  r:w.1,act.3.5,call.5,dact.5,g.0  w:dact.5,g.0  wait:f1,d2  -> b9\n"
    assert to_text([op]) == line
    assert parse(line) == (op,)
    assert parse("CLIP - @host r:norm.L000,loss.0 w:cell")[0].segment == ""


GOOD = "FETCH  L000  @h2d  r:ram.w.L000  w:w.0  wait:u1  -> f2"


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("FETCH", "the line ends before a segment"),
        ("fetch L000 @h2d", "'fetch' is not a kind"),
        ("FETHC L000 @h2d", "unknown kind 'FETHC'; known are FETCH, "),
        ("FETCH l000 @h2d", "'l000' is not a segment"),
        ("FETCH L000 h2d", "'h2d' is not a lane"),
        ("FETCH L000 @h3d", "unknown lane 'h3d'; known are compute, "),
        ("FETCH L000 @h2d r:ram.w", "'ram.w' is not a place"),
        ("FETCH L000 @h2d r:ram.w.L000.1", "'ram.w.L000.1' is not a place"),
        ("FETCH L000 @h2d r:act.1", "'act.1' is not a place"),
        ("FETCH L000 @h2d r:act.a.1", "'act.a.1' is not a place"),
        ("FETCH L000 @h2d r:loss", "'loss' is not a place"),
        ("FETCH L000 @h2d r:cell.1", "'cell.1' is not a place"),
        ("FETCH L000 @h2d r:w.0,", "'' is not a place"),
        ("FETCH L000 @h2d w:w.0 r:ram.w.L000", "'r:ram.w.L000' is not expected here"),
        ("FETCH L000 @h2d ->", "the line ends before a token"),
        ("FETCH L000 @h2d -> F!", "'F!' is not a token"),
        ("FETCH L000 @h2d wait:a,,b", "'wait:a,,b' is not expected here"),
        (GOOD + " more", "'more' is not expected here"),
    ],
)
def test_a_bad_line_is_named(bad: str, complaint: str) -> None:
    with pytest.raises(ScheduleTextError) as error:
        parse(f"{GOOD}\n\n{bad}\n")
    assert str(error.value).startswith("line 3: ")
    assert complaint in str(error.value)
    assert bad in str(error.value)
