"""Into how many splits decode attention cuts a context, and the scratch for their partial results until the merge."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

MAX_SPLITS = 64


@lru_cache
def processors(device: torch.device) -> int:
    # Off the GPU (interpreter tests) the H200's count stands in.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(maxsize=4096)
def choose_splits(num_requests: int, num_kv_heads: int, num_sms: int, max_context: int) -> tuple[int, int]:
    """How many splits to launch, and the fewest keys worth a split of their own.

    Depends on host constants only, so that a captured CUDA graph stays right for any lengths. Splits are as short as it
    takes for contexts of 1k to fill the card (4 programs an SM), at least 32 keys; longer contexts get more splits, up
    to 8 programs an SM. More would balance uneven lengths better, but surplus programs cost time too. A lone request
    has nothing to balance: two programs on every SM, no more. How many of the splits do work, the kernel decides from
    the request's length.
    """
    programs = num_requests * num_kv_heads
    min_split_tokens = min(max(triton.next_power_of_2(programs * 256 // num_sms), 32), 1024)
    most = max(max_context // min_split_tokens, 1)
    if num_requests == 1:
        return min(max(2 * num_sms // programs, 1), MAX_SPLITS, most), min_split_tokens
    fill = max(6 * num_sms // programs, 1)
    num_splits = min(fill, MAX_SPLITS, most)
    return 1 << (num_splits.bit_length() - 1), min_split_tokens


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch for the partial results of split-KV decoding, made once and used by every layer.

    partial_out: flat fp32, [tokens, heads, splits, value_size] of the call that uses it; partial_lse: the same without
    value_size.
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor

    @classmethod
    def create(
        cls,
        max_rows: int,
        num_heads: int,
        value_size: int,
        device: torch.device | str,
        max_query_len: int = 1,
        num_kv_heads: int = 1,
    ) -> "DecodeWorkspace":
        """Scratch for decode batches of up to max_rows requests with up to max_query_len query tokens each.

        num_kv_heads may be left at 1, the safe side: fewer KV heads mean more splits.
        """
        device = torch.device(device)
        sms = processors(device)
        splits = [choose_splits(rows, num_kv_heads, sms, 1 << 31)[0] for rows in range(1, max_rows + 1)]
        partials = max((rows * count for rows, count in enumerate(splits, 1) if count > 1), default=0)
        return cls.allocate(partials * max_query_len * num_heads, value_size, device)

    @classmethod
    def allocate(cls, num_partials: int, value_size: int, device: torch.device) -> "DecodeWorkspace":
        return cls(
            torch.empty(num_partials * value_size, dtype=torch.float32, device=device),
            torch.empty(num_partials, dtype=torch.float32, device=device),
        )
