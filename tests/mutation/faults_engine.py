"""Faults in the engine."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

ENGINE = "tests/engine/test_identity.py -k smollm2-fp32"
ENGINE_BF16 = "tests/engine/test_identity.py -k smollm2-bf16"
FAULTS = "tests/engine/test_identity.py -k non_finite"
CHAOS = "tests/engine/test_identity.py -k chaos_changes_no_bit"
KEPT = "tests/engine/test_identity.py -k smollm2-kept"
STREAMED_STATE = "tests/engine/test_identity.py -k smollm2-state"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "engine/handlers.py",
        ENGINE,
        (
            "gradients are not sent home",
            "copy_in_pieces(self._gradient(op.writes[0], op.segment), self.places.flat(op.reads[0], op.segment))",
            "pass",
        ),
        (
            "weights are not fetched",
            "copy_in_pieces(self.places.flat(op.writes[0], op.segment), self.places.flat(op.reads[0], op.segment))",
            "pass",
        ),
        ("gradient slots are not zeroed", "target.zero_()", "pass"),
        ("the tied sums are not added", ".add_(self.places.tied_grad())", ".add_(0)"),
        (
            "the update does nothing",
            "rule.update(layout, w, state, g, self.cell.scalars)",
            "pass",
        ),
        ("a hidden gradient is not passed on", "dh.copy_(dx)", "pass"),
        (
            "norm without the last tensor",
            "norm = optim.total_norm([sums[name] for name in names])",
            "norm = optim.total_norm([sums[name] for name in names[:-1]])",
        ),
        (
            "the clip coefficient is always 1",
            "coefficient = optim.clip_coefficient(norm, self.step.max_norm)",
            "coefficient = 1.0",
        ),
    ),
    *of(
        "engine/handlers.py",
        FAULTS,
        ("a non-finite step is applied", "finite = bool(np.isfinite(norm) and np.isfinite(loss_sum))", "finite = True"),
        (
            "a bad tensor is not named",
            "bad = next((name for name in names if not np.isfinite(sums[name])), None)",
            "bad = None",
        ),
    ),
    *of(
        "engine/engine.py",
        ENGINE,
        (
            "mean of micro-batches instead of the step's tokens",
            "inv_denominator=1.0 / num_supervised",
            "inv_denominator=1.0 / (num_supervised + 1)",
        ),
        ("the step count does not advance", "self.applied_steps += self._handlers.cell.applies", "pass"),
        ("a pending update is forgotten", 'self._pending = program == "train"', "self._pending = False"),
    ),
    *of(
        "engine/places.py",
        "tests/engine -k (smollm2-three)or(places)or(chaos_changes_no_bit)",
        ("micro-batches share one slot", "micro_batch=place.micro_batch % self._round_micro_batches", "micro_batch=0"),
    ),
    *of(
        "engine/executor.py",
        "tests/engine/test_executor.py",
        (
            "lanes do not wait",
            "                    told, mark = mail.get()\n                    marks[told] = mark\n",
            "                    marks[name] = 0.0\n",
        ),
    ),
    *of(
        "engine/rules.py",
        ENGINE,
        (
            "decay on norms too",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=span.decay",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=True",
        ),
        ("m and v are swapped", "for t in (w, m, v, g))", "for t in (w, v, m, g))"),
    ),
    *of(
        "engine/rules.py",
        ENGINE_BF16,
        (
            "only the first span is updated",
            "for span in layout.spans:\n            cut = slice(span.start, span.stop)\n            wn",
            "for span in layout.spans[:1]:\n            cut = slice(span.start, span.stop)\n            wn",
        ),
    ),
    *of(
        "engine/executor.py",
        "tests/engine/test_executor.py tests/engine/test_cancel.py",
        (
            "a lane goes on when what it waited for has failed",
            "            if run.errors:\n                return\n",
            "",
        ),
        (
            "a failed lane leaves the others waiting",
            '            mail.put(("", 0.0))\n',
            "            pass\n",
        ),
        (
            "errors of a lane are swallowed",
            "if run.errors:\n            raise run.errors[0]",
            "if False:\n            raise run.errors[0]",
        ),
        ("done before the other lanes are", "            while left:\n", "            while left and left.clear():\n"),
        (
            "an interrupt leaves lanes waiting",
            "                run.fail(KeyboardInterrupt())\n",
            "                pass\n",
        ),
        (
            "a failed lane does not drain",
            "(lambda: self._run_lane(run, lane, device), device.drain):",
            "(lambda: (self._run_lane(run, lane, device), device.drain()),):",
        ),
    ),
    *of(
        "engine/handlers.py",
        KEPT,
        (
            "all micro-batches keep one graph",
            "self.step.kept.pop((op.segment, m), None)",
            "self.step.kept.get((op.segment, 0))",
        ),
    ),
    *of(
        "engine/handlers.py",
        STREAMED_STATE,
        ("updated weights stay in their slot", "Kind.STORE: self.move_weights,", "Kind.STORE: lambda op: None,"),
        ("state does not travel", "            copy_in_pieces(target, source[kind])", "            pass"),
    ),
    *of(
        "engine/places.py",
        "tests/models/test_families_train.py -k (test_three_steps)and(qwen3_next)",
        ("views are those of another segment", "key = (place, segment)", 'key = (place, "")'),
    ),
    *of(
        "engine/scalars.py",
        "tests/engine/test_identity.py -k (evaluation)or(smollm2-fp32)",
        (
            "numbers by name get mixed up",
            "parts = [self._values[name] for name in names]",
            "parts = [self._values[name] for name in sorted(names)]",
        ),
    ),
    *of(
        "engine/lend.py",
        "tests/engine/test_lend.py",
        ("the next block overwrites the one lent", "self._fetch(following, 1 - slot)", "self._fetch(following, slot)"),
        (
            "a block is fetched to where another lies",
            "            self._fetch(name, 0)\n        slot",
            "            self._fetch(following, 0)\n        slot",
        ),
    ),
    *of(
        "engine/chaos.py",
        "tests/engine/test_executor.py tests/engine/test_chaos.py -k (last_read)or(poison)or(played_again)",
        ("one set of dice for all lanes", 'random.Random(f"{self._seed} {lane}")', "random.Random(self._seed)"),
        (
            "chaos poisons what two lanes still read",
            "len({op.lane for op in readers[place]}) == 1",
            "len({op.lane for op in readers[place]}) >= 1",
        ),
        ("chaos never poisons", "found[id(readers[place][-1])].append(place)", "pass"),
    ),
    *of(
        "store/master.py",
        "tests/store/test_store.py",
        ("hi of a tie towards zero", "(bits + 0x8000) >> 16", "(bits + 0x7FFF) >> 16"),
        ("a NaN master rounds to Inf", "(bits >> 16) | 0x40", "bits >> 16"),
        ("a NaN master loses its lower half", "bits.to(torch.int16)", "bits.to(torch.int16).masked_fill(nan, 0)"),
    ),
    *of(
        "memory/disk.py",
        "tests/memory/test_disk.py",
        ("extents overlap", "self.num_bytes += padded(size_bytes)", "self.num_bytes += size_bytes // 2"),
        ("what was never written is what lay there", "np.frombuffer(piece.buffer, dtype=np.uint8).fill(0)", "pass"),
    ),
    *of(
        "store/disk.py",
        "tests/store/test_disk_store.py",
        (
            "landing slots share their place",
            "return self._offsets[kind] + slot * self._slot_bytes[kind]",
            "return self._offsets[kind]",
        ),
    ),
    *of(
        "engine/handlers.py",
        "tests/engine/test_identity.py -k disk",
        (
            "nothing is spilled to disk",
            "        self.store.spill(op.segment, self.places.landing_slots(op.reads))",
            "        pass",
        ),
        (
            "nothing is loaded from disk",
            "        self.store.load(op.segment, self.places.landing_slots(op.writes))",
            "        pass",
        ),
    ),
    *of(
        "engine/handlers.py",
        "tests/engine/test_disk.py -k late",
        (
            "the next step decides what is written",
            "if op.segment not in self._changed:",
            "if self.cell is None or not self.cell.applies:",
        ),
    ),
    *of(
        "engine/handlers.py",
        "tests/engine/test_identity.py -k (no_placement)and(gemma3)and(offload)",
        (
            "inputs are not sent to wait",
            "copy_in_pieces(self._waiting(op.writes[0]), self.places.hidden(op.reads[0]).flatten())",
            "pass",
        ),
        (
            "inputs do not come back",
            "copy_in_pieces(self.places.hidden(op.writes[0]).flatten(), self._waiting(op.reads[0]))",
            "pass",
        ),
    ),
    *of(
        "engine/handlers.py",
        "tests/engine/test_identity.py -k (no_placement)and(gemma3)and(offload)",
        (
            "all micro-batches wait in one place",
            "return self.waiting.flat(int(place.key), place.micro_batch)",
            "return self.waiting.flat(int(place.key), 0)",
        ),
    ),
    *of(
        "store/waiting.py",
        "tests/engine/test_identity.py -k (no_placement)and(gemma3)and(offload)",
        ("waiting inputs overlap", "self._arena.view(index * one_bytes,", "self._arena.view(index // 2 * one_bytes,"),
    ),
    *of(
        "schedule/slots.py",
        "tests/schedule/test_build.py",
        (
            "an input comes back to the slot of its neighbour",
            'return Place("h", self._turn[block] % self._num_slots, micro_batch)',
            'return Place("h", self._turn[block] // 2 % self._num_slots, micro_batch)',
        ),
        (
            "an input comes back a layer late",
            "(self._turn[other] - turn) % self._num_slots == 0",
            "(self._turn[other] - turn) % self._num_slots == 1",
        ),
    ),
)
