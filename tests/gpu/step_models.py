"""Tiny models whose attention layers differ, and an oracle: the same in fp32 and plain torch, with its own attention.

A model is put together of the engine's own blocks. Its weights are such that activations stay about 1 and a query looks
at some tens of its keys: with a softmax over a thousand random keys, one lost key would be lost in the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.cache.batch import WANTED, BatchBuilder, Shape
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.families.layer_spec import AttentionSpec, LayerSpec, MLPSpec
from vserve.engine.families.rope_config import RopeConfig
from vserve.engine.layers import attention as attention_layer
from vserve.engine.layers import norm
from vserve.engine.link.plan import StepPlan
from vserve.engine.models.blocks import CausalLM
from vserve.engine.parallel import group
from vserve.engine.quant import unquantized
from vserve.engine.quant.weights import Placement
from vserve.engine.weights.matching import choose_formats
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.attention.rope_kv import rope_write_kv_torch
from vserve.kernels.norm.activation import silu_mul_torch
from vserve.kernels.norm.norm import add_rms_norm_torch, rms_norm_torch

HIDDEN, INNER, VOCAB, KV_HEADS, MAX_LEN = 256, 512, 512, 2, 8192
SHARPNESS = 2.0  # standard deviation of the scores
CHUNK = 256  # query tokens that the oracle attends at once


def make_model(architecture: str, layers: Sequence[Any], place: Placement) -> CausalLM:
    """A layer for each of `layers` (size, group, window, cap, sinks)."""
    config = ModelConfig(
        architecture=architecture, vocab_size=VOCAB, hidden_size=HIDDEN, norm_eps=1e-5, tie_word_embeddings=False,
        layers=tuple(LayerSpec(_attention(architecture, layer), MLPSpec(INNER)) for layer in layers),
        max_position_embeddings=MAX_LEN, dtype=torch.bfloat16, eos_token_ids=(),
    )  # fmt: skip
    model = CausalLM(config, place, MAX_LEN)
    for holder in choose_formats(model):
        holder.create()
    for layer, attention in zip(layers, model.attention_layers(), strict=True):
        sinks = torch.zeros(attention.num_heads, dtype=torch.float32, device=place.device) if layer.sinks else None
        attention.scoring = replace(attention.scoring, soft_cap=layer.cap, sinks=sinks)
    return model.requires_grad_(False).eval()


def _attention(architecture: str, layer: Any) -> AttentionSpec:
    return AttentionSpec(
        layer.group * KV_HEADS, KV_HEADS, layer.size, RopeConfig(), layer.window,
        qkv_bias=architecture == "Qwen2ForCausalLM", qk_norm="head" if architecture == "Qwen3ForCausalLM" else "",
    )  # fmt: skip


def fill(model: CausalLM, seed: int) -> None:
    """Random weights, and what the loader does when they are there."""
    generator = torch.Generator(model.place.device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0.0, 1.0 if name.startswith("embedding") else weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.normal_(0.0, 0.1, generator=generator)
            if not name.endswith("bias"):  # of a norm
                weight.add_(1.0)
    for layer in model._layers:
        attention = layer.mixer.attention
        if attention.q_norm is not None:
            attention.q_norm.weight.mul_(SHARPNESS)
        else:
            layer.mixer.qkv.method.weight[: attention.num_heads * attention.spec.head_dim].mul_(SHARPNESS)
        if (sinks := attention.scoring.sinks) is not None:
            sinks.normal_(2.0, 1.0, generator=generator)
    finish(model)


def finish(model: CausalLM) -> None:
    for holder in {id(holder): holder for holder, _ in model.weight_map().values()}.values():
        holder.finish()


def caches_of(model: CausalLM) -> list[Tensor]:
    """Keys and values of the first layer, then of the next."""
    caches = [layer.cache for layer in model.attention_layers()]
    return [tensor for cache in caches if cache is not None for tensor in (cache.keys, cache.values)]


class Oracle:
    """The model in fp32, with a cache of the same content and the same block tables."""

    def __init__(self, architecture: str, layers: Sequence[Any], model: CausalLM, pristine: list[Tensor]) -> None:
        self.model = make_model(architecture, layers, replace(model.place, dtype=torch.float32))
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
        for ours, theirs in zip(self.model.attention_layers(), model.attention_layers(), strict=True):
            ours.scoring = theirs.scoring
        finish(self.model)
        self.pristine = pristine
        copies = iter([cache.float() for cache in pristine])
        for ours, theirs in zip(self.model.attention_layers(), model.attention_layers(), strict=True):
            assert theirs.cache is not None
            ours.bind(PagedCache(next(copies), next(copies), theirs.cache.block_table))

    def __call__(self, builder: BatchBuilder, plan: StepPlan) -> tuple[Tensor, list[Tensor]]:
        """→ hidden states of the tokens that are sampled, and the caches after the step. Its rows have been written."""
        caches = caches_of(self.model)
        for cache, pristine in zip(caches, self.pristine, strict=True):
            cache.copy_(pristine)
        shape = Shape.of(plan)
        header = builder.header(plan, shape).to(self.model.place.device)
        batch = builder.gather(header, shape, beside=False)
        with plain_torch():
            hidden = self.model(
                batch.input_ids, batch.positions, batch.attention, wanted=header[WANTED, : len(plan.sampled)]
            )
        return hidden, caches


@contextmanager
def plain_torch() -> Iterator[None]:
    """Instead of the kernels, and of whatever a test has planted in their place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_layer, "rope_write_kv", rope_write_kv_torch)
        patch.setattr(attention_layer, "decode_attention", _decode)
        patch.setattr(attention_layer, "prefill_attention", _prefill)
        patch.setattr(norm, "rms_norm", rms_norm_torch)
        patch.setattr(group, "add_rms_norm", add_rms_norm_torch)
        patch.setattr(unquantized, "silu_mul", silu_mul_torch)
        yield


def _decode(
    query: Tensor, cache: PagedCache, batch: UniformBatch, scoring: Scoring, *, workspace: object, out: Tensor
) -> None:
    """`decode_attention` of single tokens without padding, requests of like lengths together."""
    assert batch.query_len == 1
    for part in batch.seq_lens.argsort().split(64):
        blocks = cache.block_table[batch.rows[part].long()]
        out[part] = _attend(query[part, None], cache, blocks, batch.seq_lens[part], scoring)[:, 0]


def _prefill(
    query: Tensor, cache: PagedCache, batch: RaggedBatch, scoring: Scoring, *, work: object, out: Tensor
) -> None:
    rows, starts = batch.rows.tolist(), batch.query_start.tolist()
    for row, length, start, end in zip(rows, batch.seq_lens, starts[:-1], starts[1:], strict=True):
        for first in range(start, end, CHUNK):
            last = min(first + CHUNK, end)
            lengths = (length - (end - last))[None]
            blocks = cache.block_table[row, None]
            out[first:last] = _attend(query[None, first:last], cache, blocks, lengths, scoring)[0]


def _attend(query: Tensor, cache: PagedCache, blocks: Tensor, lengths: Tensor, scoring: Scoring) -> Tensor:
    """query [B, q, H, D], the last tokens of contexts of `lengths` [B], whose pages are `blocks` → [B, q, H, Dv]."""
    num, tokens, heads, _ = query.shape
    page, kv_heads = cache.keys.shape[1:3]
    soft_cap, window, sinks = scoring.soft_cap, scoring.window, scoring.sinks
    at = torch.arange(int(lengths.max()), device=query.device)
    seen = torch.minimum(at, lengths[:, None] - 1)
    slots = blocks.gather(1, seen // page).long() * page + seen % page
    key, value = cache.keys.flatten(0, 1)[slots], cache.values.flatten(0, 1)[slots]
    grouped = query.reshape(num, tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("bqkgd,blkd->bkgql", grouped, key) * scoring.scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = (lengths[:, None] - tokens + torch.arange(tokens, device=query.device))[:, :, None]
    visible = at <= position
    if window:
        visible &= at > position - window
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.view(1, kv_heads, -1, 1, 1).expand(num, -1, -1, tokens, -1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(at)]
    return torch.einsum("bkgql,blkd->bqkgd", weights, value).reshape(num, tokens, heads, -1)
