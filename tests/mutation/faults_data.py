"""Faults in data, checkpoints and the loop."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

BATCHES = "tests/data/test_batches.py"
CHECKPOINT = "tests/checkpoint/test_checkpoint.py"
FAULTS = "tests/checkpoint/test_faults.py"
RENDER = "tests/data/test_render.py"
MIX = "tests/data/test_mix.py"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "data/batches.py",
        BATCHES,
        ("labels not shifted", "np.where(trained, tokens[1:], IGNORED)", "np.where(trained, tokens[:-1], IGNORED)"),
        ("a target crosses a boundary", "labels_T[at:at + length - 1] =", "labels_T[at + 1:at + length] ="),
        ("documents share a number", "document_ids_T[at:at + length] = document", "document_ids_T[at:at + length] = 0"),
        (
            "positions run through",
            "position_ids_T[at:at + length] = np.arange(length)",
            "position_ids_T[at:at + length] = np.arange(at, at + length)",
        ),
        (
            "the trained mask one token off",
            "trained = dataset.trained(start + 1, start + length)",
            "trained = dataset.trained(start, start + length - 1)",
        ),
        (
            "every epoch in one order",
            "order = permutation(self._fixed.num_bins, seed, epoch)",
            "order = permutation(self._fixed.num_bins, seed, 0)",
        ),
        ("padding counted as tokens", "num_tokens=at,", "num_tokens=self._size,"),
    ),
    *of(
        "data/pack.py", BATCHES, ("bins over their capacity", "each = space // length ", "each = space // length + 1 ")
    ),
    *of(
        "checkpoint/state.py",
        CHECKPOINT,
        ("v is not saved", "for kind in store.state_kinds if kind in", "for kind in ('lo', 'm') if kind in"),
    ),
    *of(
        "train/loop.py",
        "tests/cli/test_verbs.py -k resume_has",
        (
            "resume repeats a step",
            "for step in range(run.start_step + 1, run.num_steps + 1):",
            "for step in range(run.start_step or 1, run.num_steps + 1):",
        ),
    ),
    *of(
        "checkpoint/commit.py",
        CHECKPOINT,
        (
            "hashes are not compared",
            "return hashlib.sha256(data).hexdigest() == blocks[index][1]",
            "return bool(hashlib.sha256(data).hexdigest())",
        ),
        ("the oldest checkpoint wins", "return sorted(found, reverse=True)", "return sorted(found)"),
        (
            "one checkpoint less is kept",
            "if whole >= self._keep and path != best:",
            "if whole >= self._keep - 1 and path != best:",
        ),
        ("sizes are not compared", "if file_bytes != saved_bytes:", "if file_bytes < saved_bytes:"),
    ),
    *of(
        "checkpoint/commit.py",
        FAULTS,
        (
            "the folder's rename is not made durable",
            "        files.rename(self.folder, self._final)\n        files.sync_folder(self._parent)\n",
            "        files.rename(self.folder, self._final)\n",
        ),
        (
            "renamed before the manifest is durable",
            "        files.sync_folder(self.folder)\n        files.rename",
            "        files.rename",
        ),
    ),
    *of(
        "checkpoint/fs.py",
        FAULTS,
        (
            "files are not made durable",
            "        files.fsync(fd)\n        drop_page_cache(fd)\n",
            "        drop_page_cache(fd)\n",
        ),
        (
            "a short read is taken for a whole one",
            "        done_bytes += count\n",
            "        done_bytes = data.nbytes\n",
        ),
    ),
    *of(
        "data/encode.py",
        RENDER,
        ("BOS is doubled", "            ids, trained = ids[1:], trained[1:]\n", "            pass\n"),
        ("keep_end keeps the start", "slice(-self._max_length, None)", "slice(0, self._max_length)"),
        (
            "no end of sequence behind a document",
            "            yield i, np.concatenate([front, ids, behind])\n",
            "            yield i, np.concatenate([front, ids])\n",
        ),
        ("tokens end a byte too late", "return (ends - lengths, ends) if", "return (ends - lengths, ends + 1) if"),
    ),
    *of(
        "data/texts.py",
        RENDER,
        (
            "the prompt is trained as well",
            "[len(sample.prompt) if self._assistant_only_loss else 0, len(text)]",
            "[0, len(text)]",
        ),
        ("everything is trained", "        if not self._assistant_only_loss:\n", "        if True:\n"),
    ),
    *of(
        "data/mix.py",
        MIX,
        ("every epoch takes the same rows", "at, end = epoch * quota, (epoch + 1) * quota", "at, end = 0, quota"),
        ("weights are ignored", "round(sum(num_rows) * weight / sum(weights))", "round(sum(num_rows) / len(weights))"),
    ),
    *of(
        "train/loop.py",
        "tests/contracts/test_run_is_reference.py",
        (
            "the learning rate of the next step",
            "hyper = hyper_of(config, schedule, step - 1)",
            "hyper = hyper_of(config, schedule, step)",
        ),
        ("the data of the next step", "batch = run.data.step(step - 1)", "batch = run.data.step(step)"),
        ("weight decay is lost", "weight_decay=config.weight_decay,", "weight_decay=0.0,"),
        ("betas swapped in the loop", "beta1=config.adam_beta1,", "beta1=config.adam_beta2,"),
    ),
    *of(
        "planner/sizes.py",
        "tests/planner/test_planner.py",
        (
            "gradients of two bytes",
            'table[f"g.{segment.name}"] = layout.num_trainable * 4',
            'table[f"g.{segment.name}"] = layout.num_trainable * 2',
        ),
    ),
    *of(
        "planner/sizes.py",
        "tests/models/test_families_train.py -k (test_three_steps)and(qwen3_next)",
        (
            "weight slots as small as the smallest block",
            'f"w.{k}": max(pool) * compute_bytes',
            'f"w.{k}": min(pool) * compute_bytes',
        ),
    ),
)
