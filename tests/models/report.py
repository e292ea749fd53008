"""Writes docs/models.md and docs/models.json from a run of the families' tests: `python -m tests.models.report`.

Takes a few minutes. What a test did not prove in this run is not in the report.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
import transformers

from megatrain.models.families import FAMILIES, REFUSED, Family
from megatrain.models.meta import architecture_of
from megatrain.models.spec_of import model_spec
from tests.families import CASES, tiny_config

ROOT = Path(__file__).parents[2]
FILES = tuple(
    f"tests/models/test_{name}.py"
    for name in ("families", "families_train", "features", "router_loss", "dropout", "rotary_tables")
)
MARKDOWN, JSON = ROOT / "docs/models.md", ROOT / "docs/models.json"

_NOT_COMPILED = " and ".join(f"`{family.architecture}`" for family in FAMILIES.values() if not family.one_graph)
_INTRODUCTION = f"""# Models

Which architectures MegaTrain trains, and what proves it. This page and `models.json` are written by
`python -m tests.models.report` from a test run; a test fails when the program accepts anything else.

Accepted means, for tiny models of the real configuration class with everything special about the family alive, in fp32
and in bf16:

- streamed logits are the logits of the model's own forward pass, bit for bit;
- loss and every gradient, with recomputed and with kept activations, are those of whole-model autograd, bit for bit,
  and no tensor is without a gradient;
- three steps of the engine end with the reference's weights, m and v, bit for bit;
- a document in a pack gives what it gives alone under the framework's own attention code (within 1e-4 in fp32), and
  other documents of its pack do not reach it;
- every special setting, switched off, changes the logits;
- a folder that is written opens in `transformers` with every tensor equal; one that `transformers` writes, in the names
  and pieces of published checkpoints, is read and written alike (not of OLMo Hybrid, Lara Mini and Kimi Linear, whose
  published tensors are cut otherwise: they are refused at loading, by name).

What holds for all:

- The attention operator takes documents, windows, chunks, sinks and soft-caps as numbers; no T x T mask is built.
- *by document*: recurrent and convolutional mixers, and attention that counts positions from the start of the pack, run
  once for each document of a pack; the rest of their layer sees the whole pack. They use the library's PyTorch code.
- Experts are parameters of their block; the grouped and the plain code of the library are used, never `batched_mm`. A
  matrix product over the tokens of an expert may round by how many they are, so other tokens in one document can change
  the last bits of another's logits: by 1.3e-6 or less where logits reach 4.5, in 10 of 41 tiny models (fp32, CPU).
  Nothing else passes: with products of one row at a time every one of them keeps documents apart bit for bit.
- The router loss of transformers (`load_balancing_loss_func`) is added where the config sets `output_router_logits`,
  times `router_aux_loss_coef`: one loss over all layers of a micro-batch, weighted by its supervised tokens. Documents
  without a label, such as the padded tail, do not count. Evaluation has none. It is refused for families whose loss in
  transformers has none (DeepSeek, GLM and others balance by a score correction, which is not updated here).
- Dropout of hidden states, residuals and embeddings, and router jitter, are drawn anew for each (seed, step,
  micro-batch, layer): the same masks when a layer is recomputed and in any placement. Evaluation has none.
- On a GPU layers are compiled, each kind of layer once. Not of {_NOT_COMPILED}:
  shapes inside their layers follow where tokens are routed, and they would be compiled for nearly every micro-batch.
  They run as plain PyTorch, and `compile: true` is refused.
- Every weight is computed with in the run's precision, also those that the library would hold in fp32 in a bf16 model.
  Buffers that a checkpoint holds (score corrections of routers) keep their own dtype.
- Rotary tables that depend on the length of a text (LongRoPE of Phi 3, dynamic scaling) are made for each document by
  its own length, as if it were alone and the first.
- Refused in the config of any family: dropout in attention (the operator has none), layers left out at random
  (`layerdrop`), a loss on the size of logits (`z_loss_coefficient`), `residual_in_fp32` with precision bf16, windows of
  Qwen2-MoE (its code does not hand them over).
"""


class Passed(NamedTuple):
    """Which tests passed, by case; and which did not."""

    by_case: dict[str, list[str]]
    failed: list[str]


def run_tests() -> Passed:
    """Run the tests of the families in a process of their own."""
    passed = Passed({}, [])
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={results}", *FILES]
        subprocess.run(command, cwd=ROOT, check=False)
        for test in ElementTree.parse(results).iter("testcase"):
            name, file = test.attrib["name"], test.attrib["classname"].replace(".", "/")
            if test.find("failure") is not None or test.find("error") is not None:
                passed.failed.append(name)
            elif test.find("skipped") is None and "[" in name:
                parameters = name.split("[", 1)[1].removesuffix("]")
                case = max((case for case in CASES if _names(parameters, case)), key=len, default=None)
                if case is not None:
                    passed.by_case.setdefault(case, []).append(f"{file}.py::{name}")
    return passed


def _names(parameters: str, case: str) -> bool:
    return re.search(rf"(^|-){re.escape(case)}($|-)", parameters) is not None


def attention_path(case: str, family: Family) -> str:
    """How tokens of a pack meet in the layers of a case."""
    attends = any(shape.num_heads for shape in model_spec(tiny_config(case)).attention)
    paths = []
    if attends:
        paths.append("operator, by document" if family.attends_by_document else "operator")
    if family.by_document:
        paths.append("recurrent or convolutional, by document")
    return " + ".join(paths)


def entries(passed: Passed) -> dict[str, Any]:
    """models.json."""
    accepted: dict[str, Any] = {}
    for case, tests in passed.by_case.items():
        family = FAMILIES[architecture_of(tiny_config(case))]
        entry = accepted.setdefault(
            family.architecture,
            {
                "status": "accepted",
                "special": family.special,
                "attention": attention_path(case, family),
                "model_types": [],
                "features_shown_alive": [],
                "tests": [],
                "tokens_per_s": None,
            },
        )
        entry["model_types"] = sorted({*entry["model_types"], CASES[case].model_type})
        entry["features_shown_alive"] = sorted({*entry["features_shown_alive"], *CASES[case].features})
        entry["tests"] = sorted([*entry["tests"], *tests])
    refused = {name: {"status": "refused", "reason": reason} for name, reason in REFUSED.items()}
    return {
        "made_by": "python -m tests.models.report",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "families": dict(sorted((accepted | refused).items())),
    }


def markdown(document: dict[str, Any]) -> str:
    """models.md."""
    families, versions = document["families"], document["versions"]
    accepted = {name: entry for name, entry in families.items() if entry["status"] == "accepted"}
    lines = [_INTRODUCTION, f"## Accepted: {len(accepted)}"]
    lines += [f"Run with {', '.join(f'{name} {version}' for name, version in versions.items())}, on a CPU.", ""]
    lines += ["| architecture | model types | special | tokens of a pack meet by | tests |", "|---|---|---|---|---|"]
    for name, entry in accepted.items():
        types = ", ".join(entry["model_types"])
        lines.append(f"| `{name}` | {types} | {entry['special']} | {entry['attention']} | {len(entry['tests'])} |")
    lines += ["", f"## Refused: {len(families) - len(accepted)}", "", "| architecture | because |", "|---|---|"]
    lines += [f"| `{name}` | {entry['reason']} |" for name, entry in families.items() if entry["status"] == "refused"]
    lines += ["", "Any other is refused as unproven; `allow_unproven: true` runs it without a proof,"]
    lines += ["as if it were laid out as Llama is.", ""]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, write both files; 1, and nothing written, if a test failed."""
    passed = run_tests()
    if passed.failed:
        print(f"not written: {len(passed.failed)} tests failed, the first is {passed.failed[0]}")
        return 1
    document = entries(passed)
    missing = FAMILIES.keys() - document["families"].keys()
    if missing:
        print(f"not written: no test of {', '.join(sorted(missing))} ran")
        return 1
    JSON.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    MARKDOWN.write_text(markdown(document), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
