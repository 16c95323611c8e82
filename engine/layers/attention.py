"""Attention over the paged KV cache: where the kernels meet the step's batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from ...kernels.attention import DecodeWorkspace, PrefillWork, decode_attention, prefill_attention
from ...kernels.attention_beside import MIN_DECODES, attend_beside
from ...kernels.attention_prefill_hopper import supports
from ...kernels.rope_kv import rope_write_kv
from ..model_config import KVSpec
from .norm import RMSNorm
from .rope import RotaryEmbedding


@dataclass(slots=True)
class AttentionBatch:
    """The device's view of one step, made by the runner; the same objects for all layers.

    B requests with T tokens in all. The first `num_decodes` requests have `decode_query_len` tokens each and go to the
    decode kernel, the others to the prefill kernel.
    """

    num_decodes: int
    decode_query_len: int  # 1, or 1 + drafts
    max_query_len: int  # longest of the others, 0 when there are none
    rows: Tensor  # int32 [B], row of the block table
    seq_lens: Tensor  # int32 [B], context including this step's tokens
    query_start: Tensor  # int32 [B + 1], first token of each request
    slots: list[
        Tensor
    ]  # per KV group, int32 [T]: where a token's key goes (block · page + offset), -1 = nowhere (padding)
    block_tables: list[Tensor]  # per KV group, int32 [num_rows, max_blocks]
    workspace: DecodeWorkspace | None = None
    beside: bool = False  # decodes and prompts, both there, at the same time where that pays: for CUDA graphs
    # Views made once here rather than once a layer.
    num_decode_tokens: int = field(init=False)
    decode_rows: Tensor = field(init=False)
    decode_seq_lens: Tensor = field(init=False)
    prefill_rows: Tensor = field(init=False)
    prefill_seq_lens: Tensor = field(init=False)
    prefill_query_start: Tensor = field(init=False)
    prefill_work: PrefillWork = field(init=False)
    last_work: PrefillWork = field(init=False)

    def __post_init__(self) -> None:
        n = self.num_decodes
        self.num_decode_tokens = n * self.decode_query_len
        self.decode_rows, self.decode_seq_lens = self.rows[:n], self.seq_lens[:n]
        self.prefill_rows, self.prefill_seq_lens = self.rows[n:], self.seq_lens[n:]
        self.prefill_query_start = self.query_start[n:]
        prompts = self.prefill_rows, self.prefill_seq_lens, self.prefill_query_start
        self.prefill_work, self.last_work = PrefillWork(*prompts), PrefillWork(*prompts, last_only=True)


class Attention(nn.Module):
    """One layer: head norm where the family has one, rotary, the write into the cache, scaled dot-product attention.

    q_norm and k_norm, both or neither: over each head, before the rotation.
    window: a query at q sees the keys at p with q - window < p <= q; 0 = all of them.
    scale multiplies the scores, soft_cap > 0 bounds them (cap · tanh(score / cap)); sinks: fp32 [H] or None.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        rotary: RotaryEmbedding,
        *,
        scale: float,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.layer = num_heads, layer
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.scale, self.window, self.soft_cap, self.sinks = scale, window, soft_cap, sinks
        self.spec = KVSpec("full", num_kv_heads, head_dim, value_dim or head_dim)
        self.key_cache: Tensor | None = None
        self.value_cache: Tensor | None = None

    def bind(self, key_cache: Tensor | None, value_cache: Tensor | None) -> None:
        """Use these caches, [num_blocks, page, KV, D] and [num_blocks, page, KV, Dv]; None takes them away."""
        self.key_cache, self.value_cache = key_cache, value_cache

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        last_only: bool = False,
    ) -> Tensor:
        """query [T, H, D], key [T, KV, D], value [T, KV, Dv], positions int32 [T] → [T, H·Dv].

        query is overwritten, and key may be. The step's keys and values go into the cache first. last_only: nobody
        needs more than the results of each request's last token; the others may be undefined.

        Without a cache (the memory profiling run) nothing is attended to: zeros of the right shape.
        """
        num_tokens, spec = query.shape[0], self.spec
        if self.key_cache is None or self.value_cache is None:
            return query.new_zeros(num_tokens, self.num_heads * spec.value_dim)
        table = batch.block_tables[spec.group]
        q_norm, k_norm = self.q_norm, self.k_norm
        rope_write_kv(
            query,
            key,
            value,
            positions,
            self.rotary.cos_sin,
            self.key_cache,
            self.value_cache,
            batch.slots[spec.group],
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        out = query.new_empty(num_tokens, self.num_heads, spec.value_dim)
        work = batch.last_work if last_only else batch.prefill_work
        decodes = batch.num_decode_tokens
        if (
            batch.beside
            and batch.num_decodes >= MIN_DECODES
            and supports(query, self.key_cache, self.value_cache, self.window, self.soft_cap, self.sinks, out)
        ):
            attend_beside(
                query,
                self.key_cache,
                self.value_cache,
                table,
                batch.decode_rows,
                batch.decode_seq_lens,
                batch.prefill_rows,
                batch.prefill_seq_lens,
                batch.prefill_query_start,
                query_len=batch.decode_query_len,
                scale=self.scale,
                workspace=batch.workspace,
                work=work,
                out=out,
            )
            return out.view(num_tokens, -1)
        if decodes:
            decode_attention(
                query[:decodes],
                self.key_cache,
                self.value_cache,
                table,
                batch.decode_rows,
                batch.decode_seq_lens,
                query_len=batch.decode_query_len,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
                workspace=batch.workspace,
                out=out[:decodes],
            )
        if batch.max_query_len:
            prefill_attention(
                query,
                self.key_cache,
                self.value_cache,
                table,
                batch.prefill_rows,
                batch.prefill_seq_lens,
                batch.prefill_query_start,
                max_query_len=batch.max_query_len,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
                work=work,
                out=out,
            )
        return out.view(num_tokens, -1)
