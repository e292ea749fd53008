"""The shapes of two large models, from their config.json alone: what test_large.py makes every number of.

Legend: D hidden, V vocabulary, T tokens of a micro-batch, L blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
T, CHUNK = 16384, 2048


@dataclass(frozen=True)
class Model:
    """Parameters of each part, and what a token meets of a block."""

    embed: int
    block: int
    head: int
    active: int  # of a block, that a token is multiplied with
    experts: int  # of those, in experts
    widths: int  # Σ (inputs + outputs) of a block's matrices, for one token
    saved: int  # elements that autograd saves of a block for one token, without lse
    widest: int  # of a block's matrices, for one token
    chosen: int  # experts of a token
    largest: int  # gradients that are in the compute dtype at one time, elements
    tensor: int  # the largest of a block
    hidden: int
    vocab: int
    blocks: int
    attention: tuple[int, ...]  # forward operations of each block over one micro-batch
    attended: int  # bytes that the attention of a block gives for one token: out in bf16, lse in fp32
    attended_width: int  # elements of out
    rotary: int  # bytes of the rotary tables for one token: cos and sin for each kind of attention
    tied: bool

    @property
    def total(self) -> int:
        return self.embed + self.blocks * self.block + self.head


def gpt_oss(length: int) -> Model:
    c = json.loads((DATA / "gpt-oss-120b/config.json").read_text())
    d, v, e, k, f = (c[name] for name in ("hidden_size", "vocab_size", "num_local_experts", "num_experts_per_tok",
                                          "intermediate_size"))  # fmt: skip
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    attention = d * q + q + 2 * (d * kv + kv) + q * d + d + c["num_attention_heads"]
    expert = d * 2 * f + 2 * f + f * d + d
    rest = attention + 2 * d + e * d + e
    pairs = [w * (w + 1) // 2 + (length - w) * w for w in (c["sliding_window"], length)]
    return Model(
        embed=v * d,
        block=rest + e * expert,
        head=v * d + d,
        active=rest + k * expert,
        experts=k * expert,
        widths=2 * (d + q) + 2 * (d + kv) + (d + e) + k * (d + 2 * f + f + d),
        # q k v, what they read, what attention gives, h behind it, what the router reads and gives; experts
        saved=q + 2 * kv + d + q + d + (d + e) + 4 * e + k * (d + 2 * f + f + d),
        widest=k * 2 * f,
        chosen=k,
        largest=0,
        tensor=e * d * 2 * f,
        hidden=d,
        vocab=v,
        blocks=c["num_hidden_layers"],
        attention=tuple(4 * q * pairs[i % 2] * (T // length) for i in range(c["num_hidden_layers"])),
        attended=2 * q + 4 * c["num_attention_heads"],
        attended_width=q,
        rotary=2 * 2 * 2 * c["head_dim"],
        tied=False,
    )


def dense(length: int) -> Model:
    c = json.loads((DATA / "dense-175b/config.json").read_text())
    d, f, v, n = (c[name] for name in ("hidden_size", "ffn_dim", "vocab_size", "num_hidden_layers"))
    block = 4 * (d * d + d) + d * f + f + f * d + d + 4 * d
    return Model(
        embed=v * d + (c["max_position_embeddings"] + 2) * d,
        block=block,
        head=2 * d,
        active=block,
        experts=0,
        widths=4 * 2 * d + 2 * (d + f),
        saved=4 * d + d + d + d + f + f,  # q k v and what they read, attention, h behind it, three of the MLP
        widest=f,
        chosen=0,
        largest=d * f,
        tensor=d * f,
        hidden=d,
        vocab=v,
        blocks=n,
        attention=tuple(4 * d * (length * (length + 1) // 2) * (T // length) for _ in range(n)),
        attended=2 * d + 4 * c["num_attention_heads"],
        attended_width=d,
        rotary=2 * 2 * d // c["num_attention_heads"],
        tied=True,
    )
