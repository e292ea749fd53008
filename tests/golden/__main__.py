"""python -m tests.golden: play the golden runs and print them as JSON; with --write, commit them for this environment.

Starts itself again with the environment of `PINNED`, because the libraries read it when they load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from tests.golden.runs import FAMILIES, PINNED, STEPS, environment, path_of, train


def main() -> int:
    """Play, and print or write."""
    parser = argparse.ArgumentParser("python -m tests.golden", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS, help="only the first so many")
    parser.add_argument("--write", action="store_true", help="into tests/golden, in the place of what is there")
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in PINNED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.golden", *sys.argv[1:]], os.environ | PINNED)
    if args.write and args.steps != STEPS:
        parser.error(f"--write needs all {STEPS} steps")
    key = environment(args.device)
    runs = {}
    for family in FAMILIES:
        losses, sha256 = train(family, args.device, args.steps)
        runs[family] = {"losses": [loss.hex() for loss in losses], "sha256": sha256}
        print(f"{family}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", file=sys.stderr, flush=True)
    text = json.dumps({"environment": key, "runs": runs}, indent=1)
    if args.write:
        path_of(key).write_text(text + "\n", "utf-8")
        print(f"wrote {path_of(key)}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
