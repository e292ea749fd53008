"""Places: the device memory behind the names that ops read and write.

Legend: T tokens of a micro-batch, D hidden size, M micro-batches of a round, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.memory.device import DeviceArena
from megatrain.models.attention import Attended
from megatrain.models.layout import embedding_of
from megatrain.models.spec import ModelSpec
from megatrain.planner.sizes import slot_bytes
from megatrain.schedule.ops import TIED_GRAD, Place
from megatrain.schedule.plan import Plan
from megatrain.store.store import SegmentStore


class Places:
    """Tensors of the named places, on the compute device. Views are made once: binding costs a dict look-up."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        store: SegmentStore,
        device: torch.device,
        compute_dtype: torch.dtype,
        micro_batch_tokens: int,
    ) -> None:
        self._store = store
        self._dtype = compute_dtype
        self._round_micro_batches = plan.round_micro_batches
        self._attention = spec.attention
        self._hidden_shape = (1, micro_batch_tokens, spec.hidden_size)
        self._state_kinds = store.state_kinds
        self._resident = {s.name for s in plan.segments if s.state == "hbm"}
        table = slot_bytes(spec, plan, store.layouts, compute_dtype.itemsize, micro_batch_tokens)
        self.arena = DeviceArena(table, device)
        self.tied = store.layouts["EMBED"][embedding_of(spec).name] if plan.tied else None
        self._views: dict[tuple[Place, str], dict[str, Tensor]] = {}

    def flat(self, place: Place, segment: str) -> Tensor:
        """The flat weights (w, ram.w, land.w) or gradient (g) buffer at `place`, cut to the size of `segment`."""
        layout = self._store.layouts[segment]
        if place.pool == "w":
            if place.key in self._resident:
                return self._store.flat(segment, "w")
            return self.arena.view(str(place), layout.num_elements, self._dtype)
        if place.pool == "ram.w":
            return self._store.flat(segment, "w")
        if place.pool == "land.w":
            return self._store.landing(segment, "w", int(place.key))
        assert place.pool == "g", place
        return self.arena.view(str(place), layout.num_trainable, torch.float32)

    def state(self, place: Place, segment: str) -> dict[str, Tensor]:
        """Kind -> flat buffer of `segment`'s state at `place`: home, own slot or landing slot."""
        if place.pool == "land.state":
            return {kind: self._store.landing(segment, kind, int(place.key)) for kind in self._state_kinds}
        homes = {kind: self._store.flat(segment, kind) for kind in self._state_kinds}
        if place.pool != "s":
            return homes
        return {kind: self.arena.view(f"{place}.{kind}", home.numel(), home.dtype) for kind, home in homes.items()}

    def landing_slots(self, places: Sequence[Place]) -> dict[str, int]:
        """Kind -> landing slot, of those of `places` that are landing slots."""
        slots = {}
        for place in places:
            if place.pool == "land.w":
                slots["w"] = int(place.key)
            elif place.pool == "land.grad":
                slots["grad"] = int(place.key)
            elif place.pool == "land.state":
                slots |= dict.fromkeys(self._state_kinds, int(place.key))
        return slots

    def views(self, place: Place, segment: str) -> dict[str, Tensor]:
        """Local name -> view of `segment`'s tensors at `place`."""
        key = (place, segment)
        if key not in self._views:
            self._views[key] = self._store.views(self.flat(place, segment), segment, place.pool == "g")
        return self._views[key]

    def tied_grad(self) -> Tensor:
        """The head's gradient sum for a tied embedding, (V, D) fp32."""
        assert self.tied is not None
        tensor = self.tied.tensor
        return self.arena.view(str(TIED_GRAD), tensor.num_elements, torch.float32).view(tensor.shape)

    def hidden(self, place: Place) -> Tensor:
        """A boundary activation or its gradient, (1, T, D)."""
        assert place.pool in ("act", "h", "dact"), place
        count = self._hidden_shape[1] * self._hidden_shape[2]
        return self.arena.view(self._slot(place), count, self._dtype).view(self._hidden_shape)

    def attended(self, place: Place) -> Attended:
        """What the attention of a block gave for a micro-batch, undefined until it has been through its forward."""
        assert place.pool == "attn", place
        out_elements, num_heads = self._attention[int(place.key)].kept_elements
        tokens, slot = self._hidden_shape[1], self._slot(place)
        out = self.arena.view(f"{slot}.out", tokens * out_elements, self._dtype)
        lse = self.arena.view(f"{slot}.lse", tokens * num_heads, torch.float32)
        return Attended(out.view(1, tokens, num_heads, -1), lse.view(1, num_heads, tokens))

    def poison(self, place: Place) -> None:
        """For tests: fill a slot nobody will read again with NaN. Homes in HBM (state "hbm") are left alone."""
        slots = self.landing_slots([place])
        if slots and self._store.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the last read may be a copy that is only queued
        for kind, slot in slots.items():
            self._store.poison_landing(kind, slot)
        if slots:
            return
        if place.pool == "s":
            for kind in self._state_kinds:
                self.arena.poison(f"{place}.{kind}")
        elif place.pool == "attn":
            for part in Attended._fields:
                self.arena.poison(f"{self._slot(place)}.{part}")
        elif place.key not in self._resident:
            self.arena.poison(self._slot(place))

    def _slot(self, place: Place) -> str:
        """The arena's name of `place`: micro-batches of different rounds share their slots."""
        if place.micro_batch is None:
            return str(place)
        return str(place._replace(micro_batch=place.micro_batch % self._round_micro_batches))
