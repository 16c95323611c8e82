"""Attention over the paged KV cache: the two public functions and their plain-torch twins.

Both read keys and values from the cache only; `rope_write_kv` has put the step's own tokens there before. CUDA tensors
go to the Triton kernels (attention_decode.py, attention_prefill.py) or, for most prompts on a Hopper GPU, to that of
attention_prefill_hopper.py, others to the twins below, the CPU path. attention_parts.py says what all of them take.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_decode import decode_attention_triton
from .attention_parts import DecodeWorkspace, PagedCache, RaggedBatch, Scoring, UniformBatch
from .attention_prefill import prefill_attention_triton
from .attention_prefill_hopper import prefill_attention_hopper, supports
from .kv_fp8 import decode
from .prefill_work import PrefillWork

__all__ = [
    "DecodeWorkspace",
    "PrefillWork",
    "decode_attention",
    "decode_attention_torch",
    "prefill_attention",
    "prefill_attention_torch",
]

# Below this many gathered key elements (512 KB in fp32) one padded batch beats a loop over the requests; above it, the
# loop's small buffers stay in the cache while the batch's big ones are paged in afresh at every call.
_BATCH_ELEMENTS = 1 << 17
# Rows (query tokens x heads) of which _attend_to_one_head has all scores at a time.
_ONE_HEAD_ROWS = 4096


def decode_attention(
    query: torch.Tensor,
    cache: PagedCache,
    batch: UniformBatch,
    scoring: Scoring,
    *,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a uniform batch.

    query [B * query_len, H, D] in fp32, fp16 or bf16, last dimension contiguous; H is a multiple of the cache's KV.
    workspace: scratch for split results, allocated by the call when None.
    Returns out, or a new tensor, [B * query_len, H, Dv]; in a new one, rows of padding are undefined.
    """
    if query.is_cuda:
        return decode_attention_triton(query, cache, batch, scoring, workspace=workspace, out=out)
    return decode_attention_torch(query, cache, batch, scoring, out=out)


def prefill_attention(
    query: torch.Tensor,
    cache: PagedCache,
    batch: RaggedBatch,
    scoring: Scoring,
    *,
    work: PrefillWork | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch.

    query [T, H, D], the rest as in `decode_attention`. work: made of the same batch, so that the layers of a step share
    it. Returns out, or a new tensor, [T, H, Dv]; in a new one, rows of tokens outside all ranges are undefined.
    """
    if batch.last_seen is None and supports(query, cache, scoring, out):
        return prefill_attention_hopper(query, cache, batch, scoring, work=work, out=out)
    if query.is_cuda:
        return prefill_attention_triton(query, cache, batch, scoring, out=out)
    return prefill_attention_torch(query, cache, batch, scoring, out=out)


def decode_attention_torch(
    query: torch.Tensor, cache: PagedCache, batch: UniformBatch, scoring: Scoring, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`decode_attention` in plain torch: many short contexts as one padded batch, others request by request."""
    keys, values, table = cache.keys, cache.values, cache.block_table
    rows, seq_lens, query_len = batch.rows, batch.seq_lens, batch.query_len
    lengths = seq_lens.tolist()
    if not lengths:
        return query.new_empty(0, query.shape[1], values.shape[3]) if out is None else out
    page, num_kv_heads, key_size = keys.shape[1:]
    plain = query_len == 1 and not scoring.soft_cap and scoring.sinks is None and not scoring.window
    if (
        plain
        and cache.key_scales is None
        and len(lengths) > 1
        and min(lengths) > 0
        and len(lengths) * max(lengths) * num_kv_heads * key_size <= _BATCH_ELEMENTS
        and keys.stride(0) == page * keys.stride(1)
        and values.stride(0) == page * values.stride(1)
    ):
        result = _attend_short(query, cache, table.index_select(0, rows), seq_lens, max(lengths), scoring.scale)
    else:
        results = [
            _attend_request(tokens, cache, table[row], length, scoring)
            for tokens, row, length in zip(query.split(query_len), rows.tolist(), lengths, strict=True)
        ]
        result = torch.cat(results) if len(results) > 1 else results[0]
    if out is None:
        return result
    if min(lengths) > 0:
        return out.copy_(result)
    written = (seq_lens > 0).repeat_interleave(query_len)
    out[written] = result[written]
    return out


def prefill_attention_torch(
    query: torch.Tensor, cache: PagedCache, batch: RaggedBatch, scoring: Scoring, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`prefill_attention` in plain torch, request by request."""
    if out is None:
        out = query.new_empty(query.shape[0], query.shape[1], cache.values.shape[3])
    rows, lengths, starts = batch.rows.tolist(), batch.seq_lens.tolist(), batch.query_start.tolist()
    for row, length, start, end in zip(rows, lengths, starts[:-1], starts[1:], strict=True):
        if end > start:
            seen = None if batch.last_seen is None else batch.last_seen[start:end]
            out[start:end] = _attend_request(query[start:end], cache, cache.block_table[row], length, scoring, seen)
    return out


def _tokens(
    cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, start: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Tokens start to end of these blocks, [num_tokens, KV, D]: as they are, or in `dtype` where they are codes."""
    found = _pages(cache, blocks)[start:end]
    return found if scales is None else decode(found, _pages(scales, blocks)[start:end], dtype)


def _pages(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, page, ...] → the tokens of these blocks, [num_tokens, ...]; a view where they are neighbours."""
    ids = blocks.tolist()
    first = ids[0]
    if ids == list(range(first, first + len(ids))):
        return cache[first : first + len(ids)].flatten(0, 1)
    return cache.index_select(0, blocks).flatten(0, 1)


def _attend_request(
    query: torch.Tensor, cache: PagedCache, blocks: torch.Tensor, length: int, scoring: Scoring,
    last_seen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One request: query [q, H, D] are the last tokens of its context of `length`, last_seen [q] theirs. Returns
    [q, H, Dv]."""
    scale, window, soft_cap, sinks = scoring.scale, scoring.window, scoring.soft_cap, scoring.sinks
    query_len, num_heads, key_size = query.shape
    page, num_kv_heads, value_size = cache.values.shape[1:]
    if length < query_len:  # a padding row, or query tokens at negative positions: they see nothing
        result = query.new_zeros(query_len, num_heads, value_size)
        if length > 0:
            seen = None if last_seen is None else last_seen[query_len - length :]
            result[query_len - length :] = _attend_request(
                query[query_len - length :], cache, blocks, length, scoring, seen
            )
        return result

    # Gather whole pages, then cut to the keys that some query token sees.
    first = max(scoring.first_seen(length - query_len), 0) if window else 0
    first_page = first // page
    used = blocks[first_page : (length + page - 1) // page]
    start, end = first - first_page * page, length - first_page * page
    key = _tokens(cache.keys, cache.key_scales, used, start, end, query.dtype)
    value = _tokens(cache.values, cache.value_scales, used, start, end, query.dtype)
    num_keys = end - start

    causal = query_len > 1
    mask = None
    special = soft_cap or sinks is not None or last_seen is not None
    if causal and (query_len < num_keys or 0 < window < num_keys or special):
        causal = False
        key_position = torch.arange(num_keys, device=query.device)
        position = key_position[num_keys - query_len :, None]
        mask = key_position <= (position if last_seen is None else last_seen[:, None] - first)
        if window:
            mask &= key_position + first >= scoring.first_seen(position + first)
    if soft_cap or sinks is not None:
        return _attend_explicitly(query, key, value, mask, scoring)
    if num_kv_heads == 1 and key_size != value_size and query_len > 1 and last_seen is None:
        return _attend_to_one_head(query, key[:, 0], value[:, 0], scoring)
    if query_len == 1:  # the grouped heads become the rows of one small matrix
        packed = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, key_size)
        result = scaled_dot_product_attention(
            packed, key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0), scale=scale
        )
        return result.reshape(1, num_heads, value_size)
    result = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)


def _attend_to_one_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Causal attention of all query heads to one key head, key [n, D] and value [n, Dv]: products of plain matrices.

    scaled_dot_product_attention would repeat keys and values for every head, where both are of different sizes.
    """
    query_len, num_heads, key_size = query.shape
    num_keys = len(key)
    out = query.new_empty(query_len, num_heads, value.shape[1])
    step = max(1, _ONE_HEAD_ROWS // num_heads)
    for start in range(0, query_len, step):
        part = query[start : start + step]
        position = torch.arange(len(part), device=query.device)[:, None, None] + (num_keys - query_len + start)
        seen = num_keys - query_len + start + len(part)
        key_position = torch.arange(seen, device=query.device)
        hidden = key_position > position
        if scoring.window:
            hidden |= key_position <= position - scoring.window
        scores = torch.mm(part.reshape(-1, key_size), key[:seen].t()).float().mul_(scoring.scale)
        scores.view(len(part), num_heads, seen).masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).to(value.dtype)
        torch.mm(weights, value[:seen], out=out[start : start + step].view(-1, value.shape[1]))
    return out


def _attend_explicitly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """What scaled_dot_product_attention does not offer: soft cap and sinks. mask: bool [q, n], True = visible."""
    query_len, num_heads, key_size = query.shape
    num_keys, num_kv_heads, value_size = value.shape
    group = num_heads // num_kv_heads
    packed = query.reshape(query_len, num_kv_heads, group, key_size).permute(1, 2, 0, 3)
    packed = packed.reshape(num_kv_heads, group * query_len, key_size)
    scores = torch.bmm(packed.float(), key.permute(1, 2, 0).float()).mul_(scoring.scale)
    if scoring.soft_cap:
        scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    scores = scores.view(num_kv_heads, group, query_len, num_keys)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, query_len, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys].reshape(num_kv_heads, group * query_len, num_keys)
    result = torch.bmm(weights, value.transpose(0, 1).float())
    result = result.view(num_kv_heads, group, query_len, value_size).permute(2, 0, 1, 3)
    return result.reshape(query_len, num_heads, value_size).to(query.dtype)


def _attend_short(
    query: torch.Tensor, cache: PagedCache, blocks: torch.Tensor, seq_lens: torch.Tensor, max_length: int, scale: float
) -> torch.Tensor:
    """Single-token decodes as one padded batch: blocks [B, max_blocks], seq_lens in 1..max_length. Gives [B, H, Dv]."""
    num_requests, num_heads, key_size = query.shape
    page, num_kv_heads, value_size = cache.values.shape[1:]
    position = torch.arange(max_length, dtype=seq_lens.dtype, device=query.device)
    # Positions past the end re-read the last key: what lies behind it may be uninitialised, and a mask keeps NaN.
    safe_position = torch.minimum(position, seq_lens[:, None] - 1)
    block = blocks.gather(1, (safe_position // page).long())
    slots = (block * page + safe_position % page).flatten()
    shape = (num_requests, max_length, num_kv_heads, -1)
    key = cache.keys.flatten(0, 1).index_select(0, slots).view(shape).transpose(1, 2)
    value = cache.values.flatten(0, 1).index_select(0, slots).view(shape).transpose(1, 2)
    mask = (position < seq_lens[:, None])[:, None, None]
    packed = query.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, key_size)
    result = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return result.reshape(num_requests, num_heads, value_size)
