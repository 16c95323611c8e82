"""Attention over the paged KV cache: where the kernels meet the step's batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ...kernels.attention.attention import DecodeWorkspace, PrefillWork, decode_attention, prefill_attention
from ...kernels.attention.attention_beside import MIN_DECODES, attend_beside
from ...kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from ...kernels.attention.attention_prefill_hopper import supports, takes
from ...kernels.attention.kv_unpack import PromptPages, UnpackedPrompts
from ...kernels.attention.latent_prompts import ExpandedPrompts
from ...kernels.attention.rope_kv import rope_write_kv
from ...kernels.state.step import StateStep
from ..families.layer_spec import KVSpec
from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, frozen
from .norm import RMSNorm
from .picture_tokens import PictureTokens
from .rope import RotaryEmbedding


@dataclass(slots=True)
class AttentionBatch:
    """The device's view of one step, made by the runner; the same objects for all layers.

    B requests with T tokens in all. The first `num_decodes` requests have `decode_query_len` tokens each and go to the
    decode kernel, the others to the prefill kernel.
    """

    num_decodes: int
    decode_query_len: int
    max_query_len: int  # longest of the others, 0 when there are none
    rows: Tensor  # int32 [B], row of the block tables
    seq_lens: Tensor  # int32 [B], context including this step's tokens
    query_start: Tensor  # int32 [B + 1], first token of each request
    # Per KV group, int32 [T]: where a token's key goes (block · page + offset), -1 = nowhere (padding).
    slots: list[Tensor]
    workspace: DecodeWorkspace | None = None
    beside: bool = False  # decodes and prompts, both there, at the same time where that pays: for CUDA graphs
    prompt_pages: PromptPages | None = None  # where prompts' codes are unpacked
    expanded: ExpandedPrompts | None = None  # the prompts, where layers with latent attention are to expand them
    state: StateStep | None = None  # where some layers keep states
    # What tokens have for each layer beside the residual stream, [T, layers, size]: the model makes it.
    token_vectors: Tensor | None = None
    pictures: PictureTokens | None = None  # where some tokens are of pictures
    # fp32 [T, rotated elements], cosines and sines of each token in turn, which then has its index for a position:
    # where tokens are turned by three axes. None: layers look positions up in their own tables.
    cos_sin: Tensor | None = None
    # What the kernels are told of them, made once here rather than once a layer.
    num_decode_tokens: int = field(init=False)
    decodes: UniformBatch = field(init=False)
    prompts: RaggedBatch = field(init=False)
    prefill_work: PrefillWork = field(init=False)
    last_work: PrefillWork = field(init=False)
    _unpacked: UnpackedPrompts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        n, query_len = self.num_decodes, self.decode_query_len
        self.num_decode_tokens = n * query_len
        self.decodes = UniformBatch(self.rows[:n], self.seq_lens[:n], query_len)
        self.prompts = RaggedBatch(self.rows[n:], self.seq_lens[n:], self.query_start[n:], self.max_query_len)
        self.prefill_work, self.last_work = PrefillWork(self.prompts), PrefillWork(self.prompts, last_only=True)

    def unpacked(self, cache: PagedCache) -> UnpackedPrompts:
        """The prompts, for layers whose codes are unpacked; made when the first one asks."""
        if self._unpacked is None:
            assert self.prompt_pages is not None
            self._unpacked = UnpackedPrompts(self.prompts, self.prompt_pages, cache.block_table.shape[1])
        return self._unpacked


class Attention(nn.Module):
    """One layer: head norm where the family has one, rotary, the write into the cache, scaled dot-product attention.

    q_norm and k_norm, both or neither: over each head, before the rotation. shared: the values are the first value_dim
    elements of the keys, and stored once. reads_earlier: it has no keys and values, and reads the cache of a layer that
    has it among its `readers`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        rotary: RotaryEmbedding,
        scoring: Scoring,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        value_dim: int | None = None,
        shared: bool = False,
        sinks: Sinks | None = None,
        reads_earlier: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.layer = num_heads, layer
        self.rotary, self.scoring, self.q_norm, self.k_norm = rotary, scoring, q_norm, k_norm
        self.spec = KVSpec(num_kv_heads, head_dim, value_dim or head_dim, scoring.window, shared)
        self.sinks, self.reads_earlier = sinks, reads_earlier
        self.readers: list[Attention] = []
        self.code_scales: tuple[Tensor, Tensor] | None = None  # fp32 [KV], of the checkpoint, for a cache of codes
        self.cache: PagedCache | None = None
        self.group = 0

    def bind(self, cache: PagedCache | None, group: int = 0) -> None:
        """Use this cache, with the block table of this KV group; None takes it away."""
        self.cache, self.group = cache, group
        if self.sinks is not None:  # which are loaded by now
            self.scoring = replace(self.scoring, sinks=self.sinks.weight)
        for reader in self.readers:
            reader.bind(cache, group)

    def reads_numbers(self, page: int) -> bool:
        """Whether a kernel takes this layer's prompts that reads no codes: of those, it needs numbers."""
        spec, scoring = self.spec, self.scoring
        plain = not scoring.window and not scoring.soft_cap and self.sinks is None
        return plain and takes(self.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, page)

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

        query is overwritten, and key may be. The step's keys and values go into the cache first. last_only: nothing
        needs more than the results of each request's last token; the others may be undefined.

        Without a cache (the memory profiling run) nothing is attended to: zeros of the right shape.
        """
        cache = self.cache
        if cache is None:
            return query.new_zeros(query.shape[0], self.num_heads * self.spec.value_dim)
        q_norm, k_norm = self.q_norm, self.k_norm
        keys, values, key_scales, value_scales = cache.keys, cache.values, cache.key_scales, cache.value_scales
        if self.reads_earlier:  # queries alone
            key = value = query[:, :0]
            keys, values, key_scales, value_scales = keys[:, :, :0], values[:, :, :0], None, None
        rope_write_kv(
            query,
            key,
            value,
            positions,
            self.rotary.cos_sin if batch.cos_sin is None else batch.cos_sin,
            keys,
            values,
            batch.slots[self.group],
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            key_scales,
            value_scales,
        )
        self.rotary.scale(query, positions)
        return self.attend(query, cache, batch, last_only)

    def attend(self, query: Tensor, cache: PagedCache, batch: AttentionBatch, last_only: bool = False) -> Tensor:
        """query [T, H, D], rotated where it has to be → [T, H·Dv]; the step's keys and values are in the cache."""
        num_tokens, scoring = query.shape[0], self.scoring
        out = query.new_empty(num_tokens, self.num_heads, self.spec.value_dim)
        prompts, prompt_cache = batch.prompts, cache
        work = batch.last_work if last_only else batch.prefill_work
        if (unpacked := self._unpacked(query, cache, batch, out)) is not None:
            prompts, prompt_cache = unpacked.inside, unpacked.unpack(cache)
            work = unpacked.last_work if last_only else unpacked.work
        if batch.beside and batch.num_decodes >= MIN_DECODES and supports(query, prompt_cache, scoring, out):
            attend_beside(
                query, cache, batch.decodes, prompts, scoring, workspace=batch.workspace, work=work, out=out,
                prompt_cache=prompt_cache,
            )  # fmt: skip
        else:
            if decodes := batch.num_decode_tokens:
                decode_attention(
                    query[:decodes], cache, batch.decodes, scoring, workspace=batch.workspace, out=out[:decodes]
                )
            if batch.max_query_len:
                prefill_attention(query, prompt_cache, prompts, scoring, work=work, out=out)
        if unpacked is not None:
            unpacked.attend_outside(query, cache, scoring, out)
        return out.view(num_tokens, -1)

    def _unpacked(self, query: Tensor, cache: PagedCache, batch: AttentionBatch, out: Tensor) -> UnpackedPrompts | None:
        """Where the cache has codes, and the kernel that wants numbers would take these prompts."""
        pages = batch.prompt_pages
        if cache.key_scales is None or pages is None or not batch.max_query_len:
            return None
        return batch.unpacked(cache) if supports(query, pages.like(cache), self.scoring, out) else None


class Sinks(nn.Module):
    """fp32, as scores are; in a checkpoint they stand below the attention, without a module of their own."""

    weight: nn.Parameter

    def __init__(self, num_heads: int, place: Placement, name: str = "sinks") -> None:
        super().__init__()
        self.num_heads, self.place, self.name = num_heads, place, name
        self.span = place.span(num_heads)

    def choose(self, formats: Mapping[str, Format]) -> None:
        pass  # no format stores vectors, whatever one says of all modules

    def expected(self, part: str) -> dict[str, Stored]:
        return {self.name: Stored((self.num_heads,), FLOATS)}

    def create(self) -> None:
        self.weight = frozen(torch.empty(self.span[1], dtype=torch.float32, device=self.place.device))

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(tensors[self.name].narrow(0, *self.span))

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(generator=generator)
