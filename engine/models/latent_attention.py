"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): absorbed, so that what is cached is read as it is; for
long prompts expanded, where that costs fewer products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.attention.attention import decode_attention
from ...kernels.attention.attention_parts import PagedCache, Scoring
from ...kernels.attention.latent_kv import write_latent
from ...kernels.attention.latent_prompts import expanded_attention
from ...kernels.norm.norm import rms_norm
from ..describe.model_config import ModelConfig
from ..families.layer_spec import LatentAttentionSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding
from ..quant.format import Format, Stored
from ..quant.method import Dequantized
from ..quant.weights import LinearShape, Placement, WeightMap, frozen

INNER_EPS = 1e-6  # of the norms of what is compressed, whatever config.json says of the others


class LatentExpansion(nn.Module):
    """kv_b_proj, which would make each head's key and value of the latent, taken apart into a matrix a head for either.

    However it is stored, what is kept are numbers of the activations' dtype. keys [H, nope, R], values [H, R, Dv].
    """

    keys: nn.Parameter
    values: nn.Parameter

    def __init__(self, spec: LatentAttentionSpec, place: Placement) -> None:
        super().__init__()
        self.nope_dim, head = spec.nope_dim, spec.nope_dim + spec.value_dim
        self.shape = LinearShape(spec.kv_rank, {"out": spec.num_heads * head}, place, "column", head, has_bias=False)
        self.head = head

    def choose(self, formats: Mapping[str, Format]) -> None:
        self.formats = dict(formats)
        self.stored = Dequantized(self.shape, formats)

    def expected(self, part: str) -> dict[str, Stored]:
        return self.stored.expected(part)

    def create(self) -> None:
        self.stored.create()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.stored.load(part, tensors)

    def finish(self) -> None:
        heads = self.stored.weight.view(-1, self.head, self.shape.in_features)
        self.keys = frozen(heads[:, : self.nope_dim].contiguous())
        self.values = frozen(heads[:, self.nope_dim :].transpose(1, 2).contiguous())
        del self.stored

    def randomize(self, generator: torch.Generator) -> None:
        self.stored.randomize(generator)


class LatentAttentionBlock(nn.Module):
    """All heads attend to one row of the cache a token, [latent | rotated key]; the values are its latent part.

    q · (W_k c) = (W_kᵀ q) · c: the key's expansion moves to the query, and the value's behind the attention.
    """

    name = "self_attn"  # in the checkpoint

    def __init__(
        self, spec: LatentAttentionSpec, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        self.spec, self.rotary = spec, rotary
        hidden, rank, row = config.hidden_size, spec.kv_rank, spec.kv_rank + spec.rope_dim
        head = spec.nope_dim + spec.rope_dim
        self.q_norm: RMSNorm | None = None
        if spec.q_rank:
            self.down = Linear(hidden, {"q": spec.q_rank, "kv": row}, place=place, bias=spec.bias)
            self.q_norm = RMSNorm((spec.q_rank,), INNER_EPS, place)
        else:
            self.down = Linear(hidden, {"kv": row}, place=place, bias=spec.bias)
        self.query = Linear(spec.q_rank or hidden, {"q": spec.num_heads * head}, place=place, rule="column", unit=head)
        self.kv_norm = RMSNorm((rank,), INNER_EPS, place)
        self.expansion = LatentExpansion(spec, place)
        self.num_heads = self.query.shape.rows // head  # of this rank
        self.attention = Attention(
            self.num_heads, 1, row, layer, rotary, Scoring(spec.scale, spec.window), value_dim=rank, shared=True
        )
        self.output = Linear(
            spec.num_heads * spec.value_dim,
            {"out": hidden},
            place=place,
            rule="row",
            unit=spec.value_dim,
            bias=spec.bias,
        )

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {
            f"{prefix}.kv_a_proj_with_mqa": (self.down, "kv"),
            f"{prefix}.kv_a_layernorm": (self.kv_norm, ""),
            f"{prefix}.kv_b_proj": (self.expansion, "out"),
            f"{prefix}.o_proj": (self.output, "out"),
        }
        if self.q_norm is None:
            return found | {f"{prefix}.q_proj": (self.query, "q")}
        return found | {
            f"{prefix}.q_a_proj": (self.down, "q"),
            f"{prefix}.q_a_layernorm": (self.q_norm, ""),
            f"{prefix}.q_b_proj": (self.query, "q"),
        }

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None
    ) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        spec, num_tokens, row = self.spec, x.shape[0], self.attention.spec.head_dim
        latent = self.down(x)
        if self.q_norm is not None:
            compressed, latent = latent.split([spec.q_rank, row], dim=1)
            x = rms_norm(compressed, self.q_norm.weight, self.q_norm.eps)
        query = self.query(x).view(num_tokens, self.num_heads, -1)
        self.rotary.scale(query, positions)
        cache = self.attention.cache
        if cache is not None and batch.expanded is not None:
            values = self._expand(query, latent, positions, batch, cache)
            if wanted is not None:
                values = values.index_select(0, wanted)
        else:
            attended = self._attend(query, latent, positions, batch, last_only=wanted is not None)
            if wanted is not None:
                attended = attended.index_select(0, wanted)
            values = self._values(attended, x.new_empty(len(attended), self.num_heads, spec.value_dim))
        if wanted is not None:
            return self.output(values.flatten(1))
        return self.output.add_to(residual, values.flatten(1))

    def _attend(
        self, query: Tensor, latent: Tensor, positions: Tensor, batch: AttentionBatch, last_only: bool
    ) -> Tensor:
        """query [T, H, nope + rope], latent [T, R + rope], neither normed nor rotated → [T, H, R]."""
        spec, cache = self.spec, self.attention.cache
        plain, rotary = query.split([spec.nope_dim, spec.rope_dim], dim=2)
        absorbed = self._absorb(plain)
        if cache is None:  # the memory profiling run
            return query.new_zeros(len(query), self.num_heads, spec.kv_rank)
        self._write(rotary, absorbed[..., spec.kv_rank :], latent, positions, batch, cache)
        return self.attention.attend(absorbed, cache, batch, last_only).view(len(query), self.num_heads, spec.kv_rank)

    def _expand(
        self, query: Tensor, latent: Tensor, positions: Tensor, batch: AttentionBatch, cache: PagedCache
    ) -> Tensor:
        """As `_attend`, with each head's keys and values of the prompts made of latents → [T, H, Dv]."""
        spec, decodes, attention = self.spec, batch.num_decode_tokens, self.attention
        rotated, values = torch.empty_like(query), query.new_empty(len(query), self.num_heads, spec.value_dim)
        plain, rotary = query.split([spec.nope_dim, spec.rope_dim], dim=2)
        self._write(rotary, rotated[..., spec.nope_dim :], latent, positions, batch, cache)
        if decodes:
            absorbed = self._absorb(plain[:decodes])
            absorbed[..., spec.kv_rank :] = rotated[:decodes, :, spec.nope_dim :]
            attended = decode_attention(absorbed, cache, batch.decodes, attention.scoring, workspace=batch.workspace)
            self._values(attended, values[:decodes])
        rotated[decodes:, :, : spec.nope_dim] = plain[decodes:]
        assert batch.expanded is not None
        expansion = self.expansion
        expanded_attention(rotated, cache, batch.expanded, expansion.keys, expansion.values, attention.scoring, values)
        return values

    def _absorb(self, plain: Tensor) -> Tensor:
        """What is not rotated of queries, [T, H, nope] → [T, H, R + rope], of which the last part is yet to come."""
        absorbed = plain.new_empty(len(plain), self.num_heads, self.attention.spec.head_dim)
        into = absorbed[..., : self.spec.kv_rank].transpose(0, 1)
        torch.bmm(plain.transpose(0, 1), self.expansion.keys, out=into)
        return absorbed

    def _values(self, attended: Tensor, out: Tensor) -> Tensor:
        """Sums of latents [T, H, R] → out [T, H, Dv]."""
        torch.bmm(attended.transpose(0, 1), self.expansion.values, out=out.transpose(0, 1))
        return out

    def _write(
        self, rotary: Tensor, rotated: Tensor, latent: Tensor, positions: Tensor, batch: AttentionBatch,
        cache: PagedCache,
    ) -> None:  # fmt: skip
        write_latent(
            rotary,
            rotated,
            latent,
            positions,
            self.rotary.cos_sin,
            cache.keys,
            batch.slots[self.attention.group],
            self.kv_norm.weight,
            self.kv_norm.eps,
            self.spec.interleaved,
        )
