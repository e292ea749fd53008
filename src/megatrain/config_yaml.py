"""YAML as this program reads it: plain data with line numbers, and nothing that can surprise. No torch.

YAML 1.2 scalars (`1e-5` is a number, `no` is a word), no anchors and aliases, no tags, no duplicate keys,
bounded size and depth. Every mistake is a ConfigError that names its line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import yaml

from megatrain.errors import ConfigError

MAX_DEPTH = 8
MAX_BYTES = 1 << 20  # a config is a page; data, a disk or /dev/zero given in its place is not read to its end


class ConfigValue(NamedTuple):
    """A value and the place it came from: "config.yaml line 3"."""

    value: object
    where: str


def read_bytes(path: Path) -> bytes:
    """What a config file holds; ConfigError, with what stands there in its place, if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}; {_instead_of(path)}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"config file {path} is longer than {MAX_BYTES >> 20} MiB; {_instead_of(path)}")
    return content


def _instead_of(path: Path) -> str:
    """What to do about a config that cannot be read."""
    if (path / "config.yaml").is_file():
        return f"it is a run's folder, {path / 'config.yaml'} is its config; megatrain resume {path} goes on with it"
    if (path / "config.json").is_file():
        return f"it is a model's folder: megatrain init my.yaml --model {path} writes a config to start from"
    return "give a YAML file; megatrain init my.yaml writes one to start from"


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses anchors, aliases and deep nesting while composing."""

    depth = 0
    yaml_implicit_resolvers = {}  # noqa: RUF012 - replaced below; the base class's YAML 1.1 table must not leak in

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor is not None):
            raise ConfigError(f"line {line}: anchors and aliases (& and *) are refused; write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"line {line}: nested deeper than {MAX_DEPTH} levels; a config is flat")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("bool", r"true|false|True|False|TRUE|FALSE", "tfTF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


def _plain(node: yaml.Node, source: str) -> object:
    """The value of a node: None, bool, int, float, str, list or dict."""
    where = f"{source} line {node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        return {name: item.value for name, item in _mapping(node, source).items()}
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_plain(child, source) for child in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where}: tag {node.tag} is refused; write plain values")
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return _whole(node.value, where)
        case "float":
            return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case "str":
            return node.value
        case _:
            raise ConfigError(f"{where}: tag {node.tag} is refused; write plain values")


def _whole(text: str, where: str) -> int:
    if len(text) > 19:
        raise ConfigError(f"{where}: {text[:8]}… has {len(text)} digits; no key takes a number that large")
    return int(text)


def _mapping(node: yaml.MappingNode, source: str) -> dict[str, ConfigValue]:
    if node.tag != "tag:yaml.org,2002:map":
        raise ConfigError(f"{source} line {node.start_mark.line + 1}: tag {node.tag} is refused; write plain values")
    table: dict[str, ConfigValue] = {}
    for key_node, value_node in node.value:
        where = f"{source} line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be a word")
        if key_node.value in table:
            raise ConfigError(
                f"{where}: key '{key_node.value}' is given twice (first at {table[key_node.value].where})"
            )
        table[key_node.value] = ConfigValue(_plain(value_node, source), where)
    return table


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"{source} line {line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{source} {error}") from None


def parse_mapping(content: bytes, source: str) -> dict[str, ConfigValue]:
    """The keys of one YAML file with the lines they stand on. An empty file is an empty table."""
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{source} has {len(content)} bytes; a config has at most {MAX_BYTES}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text at byte {error.start}") from None
    node = _compose(text, source)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source} line {node.start_mark.line + 1}: a config is lines of 'key: value'")
    return _mapping(node, source)


def parse_value(text: str, where: str) -> object:
    """One value as it would stand after `key: ` in a file; an empty text is null."""
    node = _compose(text, where)
    return None if node is None else _plain(node, where)
