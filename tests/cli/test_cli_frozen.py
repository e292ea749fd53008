"""The command line changes only on purpose: verbs, options and config keys are compared with a committed list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from megatrain.cli.main import app
from megatrain.config import RunConfig

LIST = Path(__file__).with_name("verbs.txt")


def verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(full name, command) of a command and all below it."""
    yield name, command
    if isinstance(command, typer.core.TyperGroup):
        for verb in sorted(command.commands):
            yield from verbs(command.commands[verb], f"{name} {verb}")


def described() -> list[str]:
    """One line a verb with its arguments and options, one line a key."""
    lines = []
    for name, command in verbs(typer.main.get_command(app), "megatrain"):
        words = [p.opts[0] if p.param_type_name == "option" else p.name.upper() for p in command.params]
        lines.append(" ".join([name, *words]))
    return [*lines, *(f"key {key}" for key in RunConfig.model_fields)]


def test_verbs_options_and_keys_are_the_committed_ones() -> None:
    assert described() == LIST.read_text("utf-8").splitlines(), "changed on purpose? then change tests/cli/verbs.txt"


def test_every_verb_says_what_it_does() -> None:
    for name, command in verbs(typer.main.get_command(app), "megatrain"):
        assert command.help, name
        assert command.help.strip().endswith("."), name
