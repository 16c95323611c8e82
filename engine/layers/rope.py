"""Rotary position embedding (Su et al., arXiv:2104.09864) and the ways to stretch it, as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..families.rope_config import RopeConfig


class RotaryEmbedding:
    """One table of cosines and sines for all layers of a head size.

    cos_sin: fp32 [max_len, head_dim]: row p holds cos(p·f) for the head_dim/2 frequencies f, then sin(p·f). Without
    rope it is [max_len, 2] and turns the first pair by nothing.
    query_scale: fp32 [max_len], what queries at each position are multiplied by; None: by 1, all of them.
    """

    def __init__(self, rope: RopeConfig | None, head_dim: int, max_len: int, device: torch.device) -> None:
        self.rope, self.head_dim, self.device = rope, head_dim, device
        self.cos_sin, self.query_scale = self._table(max_len), self._scales(max_len)

    def fit(self, max_len: int) -> None:
        """For contexts of another length, once it is known what memory holds: some frequencies follow it."""
        self.cos_sin, self.query_scale = self._table(max_len), self._scales(max_len)

    def composed(self, positions: Tensor, axes: Tensor) -> Tensor:
        """fp32 [T, head_dim]: rows as in cos_sin, of tokens whose pairs are each turned by the position on an axis.
        positions int32 [3, T]; axes int64 [head_dim / 2], each pair's."""
        rows = self.cos_sin[positions]  # [3, T, head_dim]
        index = axes.repeat(2).expand(1, rows.shape[1], -1)
        return rows.gather(0, index)[0]

    def scale(self, query: Tensor, positions: Tensor) -> None:
        """query [T, H, D], overwritten; positions int32 [T]."""
        if self.query_scale is not None:
            query.mul_(self.query_scale.index_select(0, positions)[:, None, None])

    def _scales(self, max_len: int) -> Tensor | None:
        rope = self.rope
        if rope is None or not rope.growth or max_len <= rope.original_length:
            return None
        stretches = torch.arange(max_len, dtype=torch.int64, device=self.device) // rope.original_length
        return 1.0 + rope.growth * stretches.float().log1p()

    def _table(self, max_len: int) -> Tensor:
        rope, device = self.rope, self.device
        if rope is None:
            return torch.tensor([1.0, 0.0], device=device).expand(max_len, 2).contiguous()
        if device.type == "meta":  # nothing is computed, and config.json may name any size
            return torch.empty(max_len, self.head_dim, device=device)
        frequencies, magnitude = inverse_frequencies(rope, self.head_dim, max_len)
        positions = torch.arange(max_len, dtype=torch.float32, device=device)
        angles = positions[:, None] * frequencies.to(device)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return table if magnitude == 1.0 else table.mul_(magnitude)


def halves_first(head_dim: int, rotary_dim: int) -> Tensor:
    """Of a head whose rotated pairs are neighbours (0 and 1, 2 and 3, …), the elements in the order of kernels: pairs
    are (i, i + rotary_dim / 2); int64 [head_dim]."""
    return torch.cat(
        (torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim))
    )


def inverse_frequencies(rope: RopeConfig, dim: int, max_len: int) -> tuple[Tensor, float]:
    """Frequencies in radians a position, fp32 [dim / 2] on the CPU, and the factor on cosine and sine (yarn's
    temperature). `max_len` fixes the base of the dynamic type, and which factors longrope has (Ding et al.,
    arXiv:2402.13753): a key rotated once stays in the cache, so the frequencies cannot follow the sequence's length as
    they do in transformers."""
    base = rope.theta
    if rope.type == "dynamic":  # NTK-aware scaling, by reddit users bloc97 and emozilla
        length = max(max_len, rope.original_length)
        base *= (rope.factor * length / rope.original_length - (rope.factor - 1)) ** (dim / (dim - 2))
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if rope.type == "linear":
        return 1.0 / powers / rope.factor, 1.0
    if rope.type == "proportional":
        pairs = torch.arange(dim // 2, device="cpu")
        return torch.where(pairs < int(rope.share * dim // 2), 1.0 / powers / rope.factor, 0.0), 1.0
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / powers), 1.0
    if rope.type == "longrope":
        factors = rope.long_factor if max_len > rope.original_length else rope.short_factor
        return 1.0 / (torch.tensor(factors, device="cpu") * powers), _longrope_magnitude(rope)
    if rope.type == "yarn":
        return _yarn(rope, powers, dim), _yarn_magnitude(rope)
    return 1.0 / powers, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are divided by the factor, short ones kept, those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_length / wavelengths  # within the original length
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > rope.original_length / rope.low_freq_factor, frequencies / rope.factor, between)
    return torch.where(wavelengths < rope.original_length / rope.high_freq_factor, frequencies, scaled)


def _yarn(rope: RopeConfig, powers: Tensor, dim: int) -> Tensor:
    """YaRN (Peng et al., arXiv:2309.00071): fast dimensions are kept, slow ones interpolated, a ramp between."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a length
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_magnitude(rope: RopeConfig) -> float:
    """YaRN's attention temperature, folded into cosine and sine (so it acts on both query and key)."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope_magnitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length)) if rope.factor > 1 else 1.0
