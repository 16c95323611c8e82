"""Attention as most models have it, between its products: one makes q, k and v, one the output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention.attention_parts import Scoring
from ...kernels.linear.fp8_rows import Fp8Rows
from ..describe.model_config import ModelConfig
from ..families.layer_spec import AttentionSpec
from ..layers.attention import Attention, AttentionBatch, Sinks
from ..layers.linear import Linear
from ..layers.norm import Norm, RMSNorm, UnitNorm, make_norm, norm_divided
from ..layers.rope import RotaryEmbedding, halves_first
from ..quant.weights import Placement, WeightMap, keep_at_hand


class AttentionBlock(nn.Module):
    """Fused q, k, v projection; attention, with norms of q and k where the spec has them; output projection.

    Of q, k and v, those are missing that the spec has made of others, or read of an earlier layer.
    """

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
        dim, value_dim = spec.head_dim, spec.value_dim or spec.head_dim
        queries = spec.num_heads * dim
        gated = spec.output_gate  # the file has a gate behind each head's query
        sizes = {"q": (1 + gated) * queries, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * value_dim}
        if spec.keys_are_values:
            del sizes["v"]
        if spec.reads_earlier:
            sizes = {"q": sizes["q"]}
        # Neighbours that are rotated together become halves, as the kernels have them: scores stay the same when q and
        # k change their places alike.
        turned = spec.interleaved and spec.rope is not None and place.device.type != "meta"  # where nothing is loaded
        head = halves_first(dim, spec.rotary_dim) if turned else None
        order: dict[str, Tensor] = (
            {} if head is None else {part: _of_heads(head, sizes[part]) for part in ("q", "k") if part in sizes}
        )
        if gated:  # all queries, then all gates: what a rank has of each lies together
            assert not turned and not spec.fused and len(sizes) == 3 and value_dim == dim, "no model has it so"
            order["q"] = torch.arange(2 * queries).view(-1, 2, dim).transpose(0, 1).flatten()
        self.qkv = Linear(
            input_size or config.hidden_size,
            {"qkv": sum(sizes.values())} if spec.fused else sizes,
            place=place,
            rule="column",
            unit=dim,
            bias=spec.qkv_bias,
            row_order=_in_one(order, sizes) if spec.fused and order else order,
            pieces={"qkv": tuple(sizes.values()), **({"q": (queries, queries)} if gated else {})},
            units={"v": value_dim},
        )
        dims = {"q": dim, "k": dim, "v": value_dim}
        # Of this rank: q, its gates, k, v, or some.
        self.heads = [place.span(size, dims[part])[1] // dims[part] for part, size in sizes.items()]
        if gated:
            self.heads[:1] = [place.span(queries, dim)[1] // dim] * 2
        self.dims = [dims[part] for part in sizes]
        self.head_dim, self.alike = dim, len(sizes) == 3 and value_dim == dim
        self.value_norm = UnitNorm(value_dim, config.norm_eps, place) if spec.value_norm else None
        self.value_scale, self.temperature = spec.value_scale, spec.temperature
        self.qk_norm, self.clip, self.group = spec.qk_norm, spec.clip, place.group
        assert not spec.clip or spec.qk_norm != "head", "norms of heads are fused with what comes behind the clamp"
        norms: list[Norm | None] = [_qk_norm(spec, config, size, head, place) for size in (queries, sizes.get("k", 0))]
        if spec.reads_earlier:
            norms[1] = norms[0]  # it has no keys
        fused = spec.qk_norm in ("head", "unit")
        fused_norms = [norm if isinstance(norm, RMSNorm) and fused else None for norm in norms]
        self.q_norm, self.k_norm = norms if fused_norms == [None, None] else (None, None)
        self.attention = Attention(
            self.heads[0],
            place.span(spec.num_kv_heads * dim, dim)[1] // dim,
            dim,
            layer,
            rotary,
            Scoring(spec.scale or dim**-0.5, spec.window, spec.soft_cap, chunked=spec.chunked),
            q_norm=fused_norms[0],
            k_norm=fused_norms[1],
            value_dim=value_dim,
            sinks=Sinks(spec.num_heads, place, spec.sinks_name) if spec.sinks else None,
            reads_earlier=spec.reads_earlier,
            sees_pictures=_sees_pictures(spec, config),
        )
        self.gate: Linear | None = None
        if spec.gate:
            wide = spec.gate == "element"
            rows, unit = (spec.num_heads * value_dim, value_dim) if wide else (spec.num_heads, 1)
            self.gate = Linear(config.hidden_size, {"g": rows}, place=place, rule="column", unit=unit)
        self.output = Linear(
            spec.num_heads * value_dim, {"out": config.hidden_size}, place=place, rule="row", unit=value_dim,
            bias=spec.output_bias,
        )  # fmt: skip
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.{part}_proj": (self.qkv, part) for part in self.qkv.shape.parts}
        found[f"{prefix}.o_proj"] = (self.output, "out")
        q_norm, k_norm = self.q_norm or self.attention.q_norm, self.k_norm or self.attention.k_norm
        if q_norm is not None and k_norm is not None and not isinstance(q_norm, UnitNorm):
            found[f"{prefix}.q_norm"] = (q_norm, "")
            if k_norm is not q_norm:
                found[f"{prefix}.k_norm"] = (k_norm, "")
        if self.gate is not None:
            found[f"{prefix}.g_proj"] = (self.gate, "g")
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
        output_gate: list[Tensor] = []
        if self.alike:
            heads = self.qkv(x).view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1)
            query, *output_gate, key, value = heads
        else:
            query, key, value = self._parts(self.qkv(x))
        if self.value_norm is not None:
            value = self.value_norm.of(value)
        if self.value_scale != 1.0:
            value.mul_(self.value_scale)
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
        if self.temperature is not None:
            rate, length = self.temperature
            query *= (1 + rate * torch.log1p((positions + 1) // length))[:, None, None]
        attended = self.attention(query, key, value, positions, batch, last_only=wanted is not None)
        if output_gate:
            attended *= torch.sigmoid(output_gate[0].reshape(attended.shape))
        if self.gate is not None:
            assert isinstance(x, Tensor), "the norm before it is told of no reader"
            gates = functional.softplus(self.gate(x).float()).to(attended.dtype)
            attended = (attended.view(len(x), gates.shape[1], -1) * gates[:, :, None]).view(len(x), -1)
        if wanted is not None:
            return self.output(attended.index_select(0, wanted))
        return self.output.add_to(residual, attended)

    def _parts(self, products: Tensor) -> list[Tensor]:
        """products [T, of q, k and v, or some] → queries, keys and values [T, heads, dim]; of a layer that reads an
        earlier one's, keys and values are queries that nobody asks for."""
        widths = [heads * dim for heads, dim in zip(self.heads, self.dims, strict=True)]
        found = [
            part.unflatten(1, (-1, dim)) for part, dim in zip(products.split(widths, dim=1), self.dims, strict=True)
        ]
        return [*found, *[found[-1]] * (3 - len(found))]


def _qk_norm(
    spec: AttentionSpec, config: ModelConfig, size: int, order: Tensor | None, place: Placement
) -> Norm | None:
    """size: of the queries or keys of all ranks."""
    dim, kind = spec.head_dim, config.frame.norm
    if spec.qk_norm == "unit":
        return UnitNorm(dim, config.norm_eps, place)
    if spec.qk_norm == "width":
        assert order is None, "one vector of all heads keeps its order"
        assert kind.startswith("rms"), "the ranks exchange no means"
        return make_norm(kind, (size,), config.norm_eps, place, span=place.span(size, dim))
    if spec.qk_norm == "each":
        return make_norm(kind, (size // dim, dim), config.norm_eps, place, order=order, span=place.span(size // dim))
    return make_norm(kind, (dim,), config.norm_eps, place, order=order) if spec.qk_norm else None


def _sees_pictures(spec: AttentionSpec, config: ModelConfig) -> bool:
    """Whether a picture's tokens see all of it in such a layer."""
    where = "" if config.vision is None else config.vision.bidirectional
    return where == "all" or (where == "sliding" and spec.window > 0)


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
