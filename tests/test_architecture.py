"""The map is the code: rooms import upwards only, nothing is dead, files stay small, habits stay refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "megatrain"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ROOMS = [
    "errors", "strict_json", "config_yaml", "config_values", "config_spellings", "config_keys", "config", "config_run",
    "config_page",
    "importers", "hardware", "models", "schedule",
    "planner", "memory", "store", "optim", "kernels", "codec",
    "engine", "data", "checkpoint", "train", "report", "cli", "__main__",
]  # fmt: skip
NATIVE = "megatrain._native"  # built from csrc/
TORCH_FREE = (*ROOMS[: ROOMS.index("models")], "schedule", "planner", "report")
DISPATCH = PACKAGE / "cli/main.py"  # the one file whose functions import
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_SRC_LINES = 400, 60, 24_200
SIDE_EFFECTS = {
    "add",
    "append",
    "clear",
    "close",
    "extend",
    "insert",
    "pop",
    "popitem",
    "read",
    "remove",
    "update",
    "write",
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(path: Path, node: ast.AST) -> Iterator[str]:
    """Our modules that one import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "megatrain")
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
        if (node.module or "").split(".")[0] == "megatrain":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def all_imports(path: Path) -> set[str]:
    return {name for node in ast.walk(tree(path)) for name in imported(path, node)}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def ids(paths: list[Path]) -> list[str]:
    return [name_of(path) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        assert not all_imports(path)
        return
    for module in all_imports(path):
        other = room(module)
        if other in ("", own) or module.startswith(NATIVE):
            continue
        assert ROOMS.index(other) < ROOMS.index(own), f"{own} imports {module}, a room below it"


def test_every_module_is_reached_from_the_command_line() -> None:
    reached: set[str] = set()
    waiting = ["megatrain.__main__"]
    while waiting:
        module = waiting.pop()
        if module in reached or module not in MODULES:
            continue
        reached.add(module)
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)]
        waiting += [*parents, *all_imports(MODULES[module])]
    announced = {name for name, path in MODULES.items() if len(tree(path).body) == 1}  # a card, no code yet
    assert sorted(MODULES.keys() - reached - announced) == [], "dead modules"


def packages() -> list[Path]:
    return [path for path in FILES if path.name == "__init__.py"]


@pytest.mark.parametrize("path", packages(), ids=ids(packages()))
def test_a_room_opens_with_its_card_and_only_re_exports(path: Path) -> None:
    module = tree(path)
    card = ast.get_docstring(module) or ""
    lines = [line.strip() for line in card.splitlines()]
    for label in ("Holds:", "Takes -> gives:", "May touch:", "Must never:"):
        assert sum(line.startswith(label) for line in lines) == 1, f"{name_of(path)} has no line '{label}'"
    for node in module.body[1:]:
        is_constant = isinstance(node, ast.Assign) and all(getattr(t, "id", "").startswith("__") for t in node.targets)
        assert isinstance(node, ast.Import | ast.ImportFrom) or is_constant, f"{name_of(path)}:{node.lineno}: code"


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_files_and_functions_stay_small(path: Path) -> None:
    num_lines = len(path.read_text("utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name_of(path)} has {num_lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"


def test_the_whole_program_stays_small() -> None:
    total = sum(len(path.read_text("utf-8").splitlines()) for path in FILES)
    assert total <= MAX_SRC_LINES, f"src has {total} lines: simplify, or raise the budget on purpose"


def refused(path: Path) -> Iterator[str]:
    """What the style sheet refuses, with its line."""
    lines = path.read_text("utf-8").splitlines()
    for node in ast.walk(tree(path)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr":
                yield f"line {line}: hasattr"
            if node.func.id == "getattr" and len(node.args) == 3:
                yield f"line {line}: getattr with a default"
        if isinstance(node, ast.ExceptHandler):
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"BaseException"}
            # One place may catch everything to hand it on: it says so, and why, on its line.
            if names & {"Exception", "BaseException"} and "noqa: BLE001 - " not in lines[line - 1]:
                yield f"line {line}: broad except"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path != DISPATCH:
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            yield from (f"line {n.lineno}: import inside a function" for n in inner)
        if isinstance(node, ast.Assert):
            for part in ast.walk(node):
                called = part.func.attr if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) else ""
                if isinstance(part, ast.NamedExpr | ast.Await | ast.Yield) or called in SIDE_EFFECTS:
                    yield f"line {line}: side effect inside assert"


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_refused_habits_stay_out(path: Path) -> None:
    assert list(refused(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = hasattr(a, 'b')",
        "x = getattr(a, 'b', None)",
        "try:\n    a()\nexcept Exception:\n    b()",
        "try:\n    a()\nexcept:\n    b()",
        "try:\n    a()\nexcept (OSError, BaseException) as e:\n    b()",
        "def f():\n    import os",
        "assert x.pop() == 1",
        "assert (y := 1)",
    ],
)
def test_the_checks_can_fail(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(line + "\n")
    assert len(list(refused(path))) == 1


@pytest.mark.parametrize("name", TORCH_FREE)
def test_decisions_need_no_torch(name: str) -> None:
    """The rooms that only decide import no torch, `hardware/probe.py` (which measures) aside."""
    for path in FILES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == name and path.name != "probe.py":
            names = {a.name.split(".")[0] for n in ast.walk(tree(path)) if isinstance(n, ast.Import) for a in n.names}
            names |= {(n.module or "").split(".")[0] for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom)}
            assert not names & {"torch", "transformers"}, name_of(path)


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_public_things_say_their_contract(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module), f"{name_of(path)} has no docstring"
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}:{node.lineno}: {node.name} has no docstring"
