"""docs/config.md is printed from the code."""

from __future__ import annotations

from pathlib import Path

from megatrain.config_page import config_page

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_of_keys_is_fresh() -> None:
    assert config_page() in PAGE.read_text("utf-8"), (
        "run: python -c 'from megatrain.config_page import …' (docs/config.md)"
    )
