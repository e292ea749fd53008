"""A name on the Hugging Face hub -> a folder of plain files of one revision, whose hash is in the folder's name.

Only what cannot run is fetched: safetensors, JSON, tokenizers, templates, data files; never code, never a pickle. The
hub library's own cache is used (`HF_HUB_CACHE`, `HF_TOKEN`, `HF_HUB_OFFLINE` mean what they mean there); since its
snapshots are symbolic links, which are not followed here, the files are linked into a folder of ours. A run's resolved
config names that folder, so a resume asks nobody.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from megatrain.errors import DataError, ModelError

Kind = Literal["model", "dataset"]
NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+?))?(?::(?P<inside>[^:]+))?"
)
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst")
FETCHED: Mapping[Kind, tuple[str, ...]] = {
    "model": ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt"),
    "dataset": tuple(f"*{suffix}" for suffix in DATA_SUFFIXES),
}
PASSED_OVER: Mapping[Kind, tuple[str, ...]] = {
    "model": ("*/*", "consolidated*"),  # other forms of the same weights
    "dataset": (".*",),
}
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|val|dev|eval)(?=[/_.-]|$)", re.IGNORECASE)
ERRORS: Mapping[Kind, type[ModelError | DataError]] = {"model": ModelError, "dataset": DataError}


class HubName(NamedTuple):
    """`ORG/NAME`, `ORG/NAME@REVISION`, and for a dataset `ORG/NAME:FOLDER_OR_FILE` of it."""

    repo: str
    revision: str | None
    inside: str | None


def hub_name(text: str) -> HubName | None:
    """The hub name that `text` is; None for what is there as a path, or can only be meant as one."""
    found = NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    if text.lower().endswith(DATA_SUFFIXES) and found["inside"] is None:
        return None  # data/train.jsonl: a mistyped path is not asked for in the world
    if Path(found["repo"]).parent.is_dir():
        return None
    return HubName(found["repo"], found["revision"], found["inside"])


def fetched(name: HubName, kind: Kind, cache: Path) -> Path:
    """A folder below `cache` with the plain files of a repository, fetched unless they are here already.

    ModelError or DataError, with the remedy, where that cannot be done.
    """
    snapshot = _snapshot(name, kind, FETCHED[kind])
    files = _files(snapshot, kind)
    if kind == "dataset":
        files = _one_split(name, files)
    elif not any(file.suffix == ".safetensors" for file in files):
        raise ModelError(
            f"model {name.repo} on the hub holds no safetensors files, and pickles are not read; choose another"
        )
    label = f"{name.repo.replace('/', '--')}@{snapshot.name}"
    if name.inside is not None:
        label += "--" + re.sub(r"[^\w.-]", "-", name.inside)
    target = cache / f"{kind}s" / label
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in files:
        _link(snapshot, file, target / str(file).replace("/", "--"))
    return target


def fetched_config(name: HubName, cache: Path) -> Path:
    """A folder below `cache` with the config.json of a model and nothing else: all that a plan is made from."""
    snapshot = _snapshot(name, "model", ("config.json",))
    if not (snapshot / "config.json").exists():
        raise ModelError(f"model {name.repo} on the hub has no config.json; choose another")
    target = cache / "configs" / f"{name.repo.replace('/', '--')}@{snapshot.name}"
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    _link(snapshot, PurePosixPath("config.json"), target / "config.json")
    return target


def refuse_no_config(folder: Path) -> None:
    """ModelError unless `folder` is a model's: it has a config.json."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {str(folder)!r} is no folder with a config.json; give the folder of a model, or a name on the hub "
            "(ORG/NAME)"
        )


def revision_of(folder: Path) -> str | None:
    """`ORG/NAME@HASH` of a folder that `fetched` made; None for any other."""
    found = re.fullmatch(r"(?P<org>[^@]+?)--(?P<name>[^@]+)@(?P<hash>[0-9a-f]{40})(?:--.*)?", folder.name)
    return found and f"{found['org']}/{found['name']}@{found['hash']}"


def _snapshot(name: HubName, kind: Kind, patterns: Sequence[str]) -> Path:
    refuse = ERRORS[kind]
    command = f"hf download {name.repo}" + (" --repo-type dataset" if kind == "dataset" else "")
    try:
        return Path(snapshot_download(
            name.repo, repo_type=kind, revision=name.revision, allow_patterns=list(patterns),
            ignore_patterns=list(PASSED_OVER[kind]),
        ))  # fmt: skip
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise refuse(
            f"{kind} {name.repo} is no folder here and not in the hub's cache, and the hub cannot be asked; fetch it "
            f"where there is a network ({command}), leave out --offline and HF_HUB_OFFLINE, or give a local path"
        ) from error
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise refuse(
            f"{kind} {name.repo} cannot be fetched from the hub ({reason}); check the name and revision, log in with "
            "`hf auth login` if it is gated, or give a local path"
        ) from error
    except (HFValidationError, OSError) as error:
        raise refuse(f"{kind} {name.repo} cannot be fetched from the hub ({error}); give a local path") from error


def _files(snapshot: Path, kind: Kind) -> list[PurePosixPath]:
    """The files of a snapshot that may be used, by their paths in it."""
    found = [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob("*")) if path.is_file()]
    wanted = [file for file in found if _matches(file, FETCHED[kind]) and not _matches(file, PASSED_OVER[kind])]
    return [file for file in map(PurePosixPath, wanted) if kind == "model" or file.name not in NOT_DATA]


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _one_split(name: HubName, files: Sequence[PurePosixPath]) -> list[PurePosixPath]:
    """What to train on: the files inside what was asked for; of several splits the one named train."""
    shown = ", ".join(map(str, files[:8])) or "no data file"
    if name.inside is not None:
        inside = PurePosixPath(name.inside)
        files = [file for file in files if inside in (file, *file.parents)]
    splits = {file: _split_of(file) for file in files}
    chosen = list(files)
    if any(splits.values()) and len(files) > 1:
        named = {split for split in splits.values() if split}
        wanted = "train" if len(named) > 1 else next(iter(named))
        chosen = [file for file in files if splits[file] == wanted]
    if not chosen or len({file.parent for file in chosen}) > 1 or len({file.suffix for file in chosen}) > 1:
        raise DataError(
            f"dataset {name.repo} holds no single set of files to train on (it has {shown}); name one as "
            f"{name.repo}:FOLDER_OR_FILE"
        )
    return chosen


def _split_of(file: PurePosixPath) -> str | None:
    found = SPLIT.findall(str(file))
    return found[-1].lower() if found else None


def _link(snapshot: Path, file: PurePosixPath, target: Path) -> None:
    """`target` is a plain file of the same bytes: a hard link to the cache's, or a copy on another file system."""
    if target.exists():
        return
    source = (snapshot / file).resolve()
    if snapshot.parent.parent.resolve() not in source.parents:
        raise ModelError(f"{snapshot / file} leads out of the hub's cache; fetch it again")
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:  # another file system, or one without hard links
        partial = target.with_name(f"{target.name}.part-{os.getpid()}")
        shutil.copyfile(source, partial)
        partial.rename(target)
