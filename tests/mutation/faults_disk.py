"""Faults on the way to the disk and back."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

FILE = "tests/memory/test_disk.py"
STORE = "tests/store/test_disk_store.py"
ENGINE = "tests/engine/test_identity.py -k disk"
SCHEDULE = "tests/schedule/test_build.py"

MUTANTS: tuple[Mutant, ...] = (
    *of("hardware/disk.py", FILE, ("the file keeps its name", "    os.unlink(path)\n", "")),
    *of(
        "memory/disk.py",
        FILE,
        ("what is read is not compared", "if _checksum(piece) != self._sums[piece.offset_bytes]:", "if False:"),
        (
            "a checksum of the first block alone",
            "return zlib.crc32(piece.buffer)",
            "return zlib.crc32(piece.buffer[:4096])",
        ),
        (
            "a short call counts as whole",
            "moved -= moved % BLOCK_BYTES  # go on at a whole block",
            "moved = piece.buffer.nbytes",
        ),
        ("a short call in the middle of a block", "moved -= moved % BLOCK_BYTES  # go on at a whole block", "pass"),
        ("the end of the file is waited for", "if moved <= 0:", "if moved < 0:"),
        ("a rest is written to the start of its piece", "piece.offset_bytes + done)", "piece.offset_bytes)"),
        (
            "extents overlap by a block",
            "self.num_bytes += padded(size_bytes)",
            "self.num_bytes += padded(size_bytes) - 4096",
        ),
        ("the first error is swallowed", "    for future in begun:\n        future.result()", "    pass"),
        ("no space is taken", "os.posix_fallocate(fd, 0, num_bytes)", "pass"),
        (
            "the descriptor stays open where there is no room",
            "            figures = os.fstatvfs(fd)\n            os.close(fd)\n",
            "            figures = os.fstatvfs(fd)\n",
        ),
    ),
    *of(
        "memory/disk.py",
        FILE,
        ("no checksum at all", "    return zlib.crc32(piece.buffer)", "    return 0"),
        (
            "every extent at the start of the file",
            "self._extents[name] = (self.num_bytes, padded(size_bytes))",
            "self._extents[name] = (0, padded(size_bytes))",
        ),
        (
            "every piece at the start of its extent",
            "_Piece(name, offset_bytes + start,",
            "_Piece(name, offset_bytes,",
        ),
    ),
    *of(
        "store/disk.py",
        STORE,
        (
            "m and v share an extent",
            'return f"{segment}.{kind}"',
            "return f\"{segment}.{kind.replace('v', 'm')}\"",
        ),
        (
            "kinds share their slots",
            "            total_bytes += num_slots * size_bytes\n",
            "            total_bytes += size_bytes\n",
        ),
    ),
    *of(
        "store/store.py",
        STORE,
        ("a visit forgets to write", "        if write:\n            self.spill(segment, slots)\n", ""),
        (
            "a visit that failed is taken for what is on disk",
            "        self._visited = ()\n        with self.at(segment, slots):",
            "        with self.at(segment, slots):",
        ),
        ("every visit is taken for the last one", "if self._visited != this:", "if not self._visited:"),
        (
            "a landed buffer outlives its visit",
            "        finally:\n            self._landed = {}",
            "        finally:\n            pass",
        ),
    ),
    *of(
        "checkpoint/load_hf.py",
        STORE,
        (
            "loaded weights are not kept",
            'with store.visit(segment.name, "w", "lo", "ema", write=True):',
            'with store.visit(segment.name, "w", "lo", "ema"):',
        ),
    ),
    *of(
        "checkpoint/state.py",
        STORE,
        ("restored state is not kept", "for _, home in tensors}, write=True):", "for _, home in tensors}):"),
    ),
    *of(
        "engine/handlers.py",
        "tests/engine/test_disk.py -k skipped",
        (
            "a skipped step is written",
            "        if op.segment not in self._changed:\n            return  # a skipped step changed nothing",
            "        if False:\n            return  # a skipped step changed nothing",
        ),
    ),
    *of(
        "store/disk.py",
        ENGINE,
        (
            "whatever the slot, the first one travels",
            "self._arena.view(self._offset(kind, slot), num_bytes, torch.uint8)",
            "self._arena.view(self._offset(kind, 0), num_bytes, torch.uint8)",
        ),
    ),
    *of(
        "engine/places.py",
        ENGINE,
        (
            "weights of the first landing slot, whichever is meant",
            'self._store.landing(segment, "w", int(place.key))',
            'self._store.landing(segment, "w", 0)',
        ),
    ),
    *of(
        "schedule/landing.py",
        SCHEDULE,
        (
            "one landing slot too many",
            "self._taken[pool] % self._num_slots[pool])",
            "self._taken[pool] % (self._num_slots[pool] + 1))",
        ),
        (
            "weights are not written back",
            '            pairs.append((self.weights(segment), Place("disk.w", segment.name)))\n',
            "            pass\n",
        ),
        (
            "a slot is not asked whose turn it is",
            "        self._taken[pool] += 1\n",
            "",
        ),
        (
            "state that landed in the slot of another segment",
            "if place.pool == pool and name == segment.name)",
            "if place.pool == pool)",
        ),
        (
            "what landed once is taken to be there for ever",
            "        self._holds[slot] = segment.name\n",
            '        self._holds[Place(pool, f"{slot.key}{segment.name}")] = segment.name\n',
        ),
    ),
)
