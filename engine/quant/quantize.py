"""Matrices quantised on the way in: round to nearest, no calibration. Errors are those of the codes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .bitsandbytes import NF4
from .codes import Codes

FP8_MAX = 448.0  # of e4m3
TILE = 128


def to_int4(weights: Tensor, group: int = 128) -> Codes:
    """[N, K] → 4 bits with a whole zero point a group.

    Asymmetric, for the range of a group is seldom even: 15 steps from its lowest value to its highest are shorter than
    15 around zero that reach the larger of both. Normal weights in groups of 128 come a tenth closer. Zero keeps a code
    of its own, so that the zero point is one of the codes.
    """
    grouped = _grouped(weights, group)
    low, high = grouped.amin(2, keepdim=True).clamp_(max=0), grouped.amax(2, keepdim=True).clamp_(min=0)
    scales = _positive((high - low) / 15)
    zeros = (-low / scales).round_()
    codes = (grouped / scales).round_().add_(zeros).clamp_(0, 15).to(torch.uint8)
    return Codes(_matrix(codes, weights), scales.squeeze(2), _size(group, weights), 4, zeros=zeros.squeeze(2))


def to_int8(weights: Tensor) -> Codes:
    """[N, K] → int8, a scale a row, even around zero."""
    weights = weights.float()
    scales = _positive(weights.abs().amax(1, keepdim=True) / 127)
    codes = (weights / scales).round_().clamp_(-127, 127).to(torch.int8)
    return Codes(codes, scales, weights.shape[1], 8)


def to_fp8(weights: Tensor) -> Codes:
    """[N, K] → e4m3, a scale a row."""
    weights = weights.float()
    scales = _positive(weights.abs().amax(1, keepdim=True) / FP8_MAX)
    return Codes(_e4m3(weights / scales), scales, weights.shape[1], 8)


def to_fp8_blocks(weights: Tensor) -> Codes:
    """[N, K] → e4m3, a scale for 128 x 128, which each of its rows repeats. Blocks at the edges are smaller."""
    rows = weights.shape[0]
    grouped = _grouped(weights, TILE)
    amax = grouped.abs().amax(2)  # [N, groups]
    amax = torch.nn.functional.pad(amax, (0, 0, 0, -rows % TILE)).view(-1, TILE, amax.shape[1]).amax(1)
    scales = _positive(amax / FP8_MAX).repeat_interleave(TILE, dim=0)[:rows]
    codes = _e4m3(grouped / scales.unsqueeze(2))
    return Codes(_matrix(codes, weights), scales, _size(TILE, weights), 8)


def to_nf4(weights: Tensor, block: int = 64) -> Codes:
    """[N, K] → indices into NF4's table, the nearest value each, scaled by the largest of the block.

    Blocks end where rows do. bitsandbytes flattens the matrix first: the same where `block` divides K.
    """
    grouped = _grouped(weights, block)
    scales = _positive(grouped.abs().amax(2, keepdim=True))
    table = torch.tensor(NF4, device=weights.device)
    codes = torch.bucketize(grouped / scales, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    return Codes(_matrix(codes, weights), scales.squeeze(2), _size(block, weights), 4, table=table)


def _grouped(weights: Tensor, group: int) -> Tensor:
    """[N, K] → fp32 [N, groups, columns of a group], the last of them filled up with zeros."""
    rows, columns = weights.shape
    group = _size(group, weights)
    return torch.nn.functional.pad(weights.float(), (0, -columns % group)).view(rows, -1, group)


def _size(group: int, weights: Tensor) -> int:
    return min(group, weights.shape[1])


def _matrix(codes: Tensor, weights: Tensor) -> Tensor:
    """[N, groups, columns of a group] → [N, K]."""
    return codes.flatten(1)[:, : weights.shape[1]].contiguous()


def _positive(scales: Tensor) -> Tensor:
    """Where all weights are zero, any scale is right but zero. One that is no number stays none: it will be refused."""
    return torch.where(scales == 0, 1, scales)


def _e4m3(values: Tensor) -> Tensor:
    """Older torch casts what is out of range to NaN."""
    return values.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
