"""Attention as most models have it, between its products: one makes q, k and v, one the output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.attention.attention_parts import Scoring
from ...kernels.linear.fp8_rows import Fp8Rows
from ..describe.model_config import ModelConfig
from ..families.layer_spec import AttentionSpec
from ..layers.attention import Attention, AttentionBatch, Sinks
from ..layers.linear import Linear
from ..layers.norm import Norm, RMSNorm, make_norm, norm_divided
from ..layers.rope import RotaryEmbedding, halves_first
from ..quant.weights import Placement, WeightMap, keep_at_hand


class AttentionBlock(nn.Module):
    """Fused q, k, v projection; attention, with norms of q and k where the spec has them; output projection."""

    name = "self_attn"  # in the checkpoint
    q_norm: Norm | None  # those that come before the rotation; others are fused with it
    k_norm: Norm | None

    def __init__(
        self,
        spec: AttentionSpec,
        config: ModelConfig,
        layer: int,
        rotary: RotaryEmbedding,
        place: Placement,
        input_size: int = 0,
    ) -> None:
        """input_size: of what it reads, where that is not as wide as what it adds to."""
        super().__init__()
        dim, queries = spec.head_dim, spec.num_heads * spec.head_dim
        sizes = {
            "q": (2 if spec.output_gate else 1) * queries,
            "k": spec.num_kv_heads * dim,
            "v": spec.num_kv_heads * dim,
        }
        # Neighbours that are rotated together become halves, as the kernels have them: scores stay the same when q and
        # k change their places alike.
        turned = spec.interleaved and spec.rope is not None and place.device.type != "meta"  # where nothing is loaded
        head = halves_first(dim, spec.rotary_dim) if turned else None
        order = {} if head is None else {part: _of_heads(head, sizes[part]) for part in ("q", "k")}
        if spec.output_gate:  # all queries, then all gates: what a rank has of each lies together
            assert not turned and not spec.fused, "no model has it so"
            order["q"] = torch.arange(2 * queries).view(-1, 2, dim).transpose(0, 1).flatten()
        self.qkv = Linear(
            input_size or config.hidden_size,
            {"qkv": sum(sizes.values())} if spec.fused else sizes,
            place=place,
            rule="column",
            unit=dim,
            bias=spec.qkv_bias,
            row_order=_in_one(order, sizes) if spec.fused and order else order,
            pieces={"qkv": tuple(sizes.values()), **({"q": (queries, queries)} if spec.output_gate else {})},
        )
        parts = [queries, *([queries] if spec.output_gate else []), sizes["k"], sizes["v"]]
        self.heads = [place.span(size, dim)[1] // dim for size in parts]  # of this rank: q, its gates, k, v
        self.head_dim = dim
        self.qk_norm, self.clip, self.group = spec.qk_norm, spec.clip, place.group
        assert not spec.clip or spec.qk_norm != "head", "norms of heads are fused with what comes behind the clamp"
        norms: list[Norm | None] = [_qk_norm(spec, config, size, head, place) for size in (queries, sizes["k"])]
        fused_norms = [norm if isinstance(norm, RMSNorm) and spec.qk_norm == "head" else None for norm in norms]
        self.q_norm, self.k_norm = norms if fused_norms == [None, None] else (None, None)
        self.attention = Attention(
            self.heads[0],
            self.heads[-1],
            dim,
            layer,
            rotary,
            Scoring(spec.scale or dim**-0.5, spec.window, spec.soft_cap),
            q_norm=fused_norms[0],
            k_norm=fused_norms[1],
            sinks=Sinks(spec.num_heads, place) if spec.sinks else None,
        )
        self.output = Linear(
            spec.num_heads * dim, {"out": config.hidden_size}, place=place, rule="row", unit=dim, bias=spec.output_bias
        )
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.{part}_proj": (self.qkv, part) for part in self.qkv.shape.parts}
        found[f"{prefix}.o_proj"] = (self.output, "out")
        q_norm, k_norm = self.q_norm or self.attention.q_norm, self.k_norm or self.attention.k_norm
        if q_norm is not None and k_norm is not None:
            found |= {f"{prefix}.q_norm": (q_norm, ""), f"{prefix}.k_norm": (k_norm, "")}
        if self.attention.sinks is not None:
            found[prefix] = (self.attention.sinks, "")
        return found

    def forward(
        self,
        x: Tensor | Fp8Rows,
        residual: Tensor | None,
        positions: Tensor,
        batch: AttentionBatch,
        wanted: Tensor | None,
    ) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        query, *gate, key, value = self.qkv(x).view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            pairs = [(self.q_norm, query), (self.k_norm, key)]
            if self.qk_norm == "width":
                pairs = [(norm, heads.view(len(heads), -1)) for norm, heads in pairs]
            if self.qk_norm == "width" and self.group.size > 1:
                norm_divided(pairs, self.group)
            else:
                for norm, heads in pairs:
                    norm.in_place(heads)
        if self.clip:
            for heads in (query, key, value):
                heads.clamp_(-self.clip, self.clip)
        attended = self.attention(query, key, value, positions, batch, last_only=wanted is not None)
        if gate:
            attended *= torch.sigmoid(gate[0].reshape(attended.shape))
        if wanted is not None:
            return self.output(attended.index_select(0, wanted))
        return self.output.add_to(residual, attended)


def _qk_norm(
    spec: AttentionSpec, config: ModelConfig, size: int, order: Tensor | None, place: Placement
) -> Norm | None:
    """size: of the queries or keys of all ranks."""
    dim, kind = spec.head_dim, config.frame.norm
    if spec.qk_norm == "width":
        assert order is None, "one vector of all heads keeps its order"
        assert kind.startswith("rms"), "the ranks exchange no means"
        return make_norm(kind, (size,), config.norm_eps, place, span=place.span(size, dim))
    if spec.qk_norm == "each":
        return make_norm(kind, (size // dim, dim), config.norm_eps, place, order=order, span=place.span(size // dim))
    return make_norm(kind, (dim,), config.norm_eps, place, order=order) if spec.qk_norm else None


def _of_heads(order: Tensor, size: int) -> Tensor:
    """The rows of all heads, each with its own in this order; int64 [size]."""
    first = torch.arange(0, size, len(order))
    return (first[:, None] + order).flatten()


def _in_one(order: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The rows of q, k and v one after the other."""
    rows, start = [], 0
    for part, size in sizes.items():
        rows.append(start + order.get(part, torch.arange(size)))
        start += size
    return {"qkv": torch.cat(rows)}
