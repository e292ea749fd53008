"""Op, Place, Schedule: the words in which a step is written down. No torch, no seconds, no device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

# "train" leaves its update to the program after it, or, in two passes, goes through the layers for the coefficient
# alone and then computes every gradient again and uses it up at once.
Program = Literal["train", "eval", "flush", "save"]


class Lane(StrEnum):
    """Something that runs ops in order: CUDA streams (compute, h2d, d2h), CPU workers (host), file I/O: what is written
    (disk) and what is read (disk_read)."""

    __hash__ = str.__hash__  # Enum's own is slow, and every table of the planner is looked up by lane or kind

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    DISK = "disk"
    DISK_READ = "disk_read"


class Kind(StrEnum):
    """What an op does. The reads and writes of each kind, in this order, are the contract of builder and handlers.

    A gradient slot that is added into stands in reads and in writes; a frozen segment has none, so it is left out.
    [..] marks what else may be absent. `weights` is the slot of the segment itself.

    LOAD        r: disk.w.S                                 w: land.w.k
    LOAD_STATE  r: disk.state.S                             w: land.state.k
    SPILL       r: land.state.k, land.w.j                   w: disk.state.S, disk.w.S (what of the two lives on disk)
    FETCH       r: ram.w.S, or land.w.k if from disk        w: its weight slot
    FETCH_STATE r: ram.state.S                              w: s.k                    (for the update to come)
    FETCH_GRAD  r: ram.grad.S                               w: its gradient slot      (round 2 on: the sum goes on; or
                complete, for the update of a segment whose state came)
    ZERO        r:                                          w: its gradient slot, or tied.grad (segment EMBED)
    EMBED       r: weights                                  w: act.0.m, call.m        (recorded layer calls)
    FORWARD     r: weights, act.i.m, call.m                 w: act.i+1.m [, kept.i.m or attn.i.m]
    OFFLOAD     r: h.k.m                                    w: ram.act.i.m            (the input of block i = S)
    RELOAD      r: ram.act.i.m                              w: h.k.m
    HEAD        r: weights [, w.EMBED if tied], act.L.m, gradient slot [, tied.grad]
                w: dact.m [, loss.m], gradient slot [, tied.grad]   (tied.grad: if tied and the embedding is trained;
                no loss in a second pass: it is known)
    LOSS        r: weights [, w.EMBED if tied], act.L.m     w: loss.m                 (evaluation: no backward)
    BACKWARD    r: weights, act.i.m, call.m, dact.m, gradient slot [, kept.i.m or attn.i.m]
                w: dact.m, gradient slot
                (wherever act.i.m stands, it is h.k.m if block i has activations "offload")
    EMBED_BACKWARD r: weights, dact.m, gradient slot        w: gradient slot
    MERGE       r: tied.grad, embedding gradient slot       w: embedding gradient slot (tied: two sums added once)
    NORM        r: gradient slot                            w: norm.S                 (per-tensor sums of squares)
    DRAIN       r: gradient slot                            w: ram.grad.S, or land.grad.k in two passes
    CLIP        r: norm.S in segment order, loss.m in order w: cell                   (coefficient, apply or skip)
    UPDATE      r: gradient, cell, state, weights           w: state, weights         (at home, in slots, landed)
    STORE       r: weights                                  w: ram.w.S                (home from the slot of an update)
    STORE_STATE r: s.k                                      w: ram.state.S
    SAVE        r: weights [, state]                        w: file.S                 (at home, or where they landed)
    """

    __hash__ = str.__hash__

    FETCH = "FETCH"
    FETCH_STATE = "FETCH_STATE"
    FETCH_GRAD = "FETCH_GRAD"
    ZERO = "ZERO"
    EMBED = "EMBED"
    FORWARD = "FORWARD"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    HEAD = "HEAD"
    LOSS = "LOSS"
    BACKWARD = "BACKWARD"
    EMBED_BACKWARD = "EMBED_BACKWARD"
    MERGE = "MERGE"
    NORM = "NORM"
    DRAIN = "DRAIN"
    CLIP = "CLIP"
    UPDATE = "UPDATE"
    STORE = "STORE"
    STORE_STATE = "STORE_STATE"
    LOAD = "LOAD"
    LOAD_STATE = "LOAD_STATE"
    SPILL = "SPILL"
    SAVE = "SAVE"


class Place(NamedTuple):
    """A named piece of memory that ops read and write. Printed with dots: Place("act", 1, 0) is "act.1.0".

    Weights:   w.0 w.1 …    shared slots;    w.EMBED        an own slot in HBM
    Gradients: g.0 g.1 …    shared slots;    g.EMBED        an own slot;  tied.grad  the head's sum for a tied embedding
    State:     s.0 s.1 …    shared slots for lo, m, v of segments with update "device"
    Homes:     ram.w.L000  ram.state.L000  ram.grad.L000  hbm.state.L000  (state "hbm": weights home is w.L000 itself)
               disk.w.L000  disk.state.L000
    Landing:   land.w.0 land.w.1 …  land.state.0 …    slots in RAM for what comes from disk and goes there
               land.grad.0 …  for gradients on their way to an update, where they have no home
    Flow:      act.i.m (input of block i; i = number of blocks: input of HEAD), dact.m, call.m, loss.m
               kept.i.m (autograd's saved tensors), attn.i.m (what the attention of block i gave)
               h.0.m h.1.m …  slots shared by the inputs of offloaded blocks;  ram.act.i.m  where those wait
    Scalars:   norm.L000, cell;  file.L000 on disk
    Micro-batches count from 0 over the whole step. Where only a micro-batch follows the pool, it is `micro_batch`, and
    `key` stays "": Place("loss", "", 3) is "loss.3".  Place("tied.grad") and Place("cell") are complete as they are.
    Between programs only homes keep their content: ram.*, disk.*, hbm.state.*, file.*, cell; w.S, g.S if `state` is
    "hbm". After a step in two passes, also the landing slots of `Plan.spilled_late`.
    """

    pool: str  # "w", "g", "act", "ram.w", …
    key: str | int = ""
    micro_batch: int | None = None

    def __str__(self) -> str:
        return ".".join(str(p) for p in self if p != "" and p is not None)


@dataclass(frozen=True, slots=True)
class Op:
    """One thing to do. `waits` are tokens of ops on other lanes that must be done; `records` is this op's own token."""

    kind: Kind
    segment: str  # "EMBED", "L000", …, "HEAD", or "" (CLIP)
    micro_batch: int | None
    lane: Lane
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    waits: tuple[str, ...] = ()
    records: str | None = None


Schedule = tuple[Op, ...]

CELL = Place("cell")
TIED_GRAD = Place("tied.grad")
