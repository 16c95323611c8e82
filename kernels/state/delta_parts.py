"""What the kernels of states share on the device."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64  # tokens of a prompt at once: positions between two multiples of it
L2_EPS = 1e-6  # beside the sum of squares of a key or a query

_L2_EPS = tl.constexpr(L2_EPS)


@triton.jit
def chunk_at(
    place, query_start_ptr, start_ptr, slots_ptr, num_rows, search_steps,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's row, first token, that token's position, and number of tokens, which is 0 where there is no chunk.

    Row b has the places from (query_start[b] - query_start[0]) // CHUNK + 2 b on, as many as it has chunks or up to two
    more: the number of places, tokens // CHUNK + 2 rows, is known before the lengths are.
    """
    first = tl.load(query_start_ptr)
    row = place * 0
    for step in range(search_steps):
        candidate = row + (1 << (search_steps - 1 - step))
        begin = tl.load(query_start_ptr + candidate, mask=candidate < num_rows, other=0)
        before = (begin - first) // CHUNK + 2 * candidate <= place
        row = tl.where((candidate < num_rows) & before, candidate, row)
    begin, end = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    start = tl.load(start_ptr + row)
    index = place - (begin - first) // CHUNK - 2 * row
    position = tl.maximum(start, (start // CHUNK + index) * CHUNK)
    last = tl.minimum((start // CHUNK + index + 1) * CHUNK, start + end - begin)
    count = tl.maximum(last - position, 0)
    count = tl.where(tl.load(slots_ptr + row) == 0, 0, count)
    return row, begin + position - start, position, count


@triton.jit
def weight_tile(weight_ptr, channels, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """The convolution's weights of these channels, [TAPS, channels] in fp32: WIDTH of them, and zeros."""
    tap = tl.arange(0, TAPS)[:, None]
    return tl.load(weight_ptr + channels[None, :] * WIDTH + tap, mask=tap < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def ring_tile(
    ring_ptr, channels, end, start, ROW: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """The inputs of the WIDTH positions before `end`, zeros for those that are not in the ring, which ends at start."""
    position = end - WIDTH + tl.arange(0, TAPS)[:, None]
    place = ring_ptr + (position & (RING - 1)) * ROW + channels[None, :]
    # What is below 0 or behind start is masked, not multiplied by 0: a slot holds what another request has left.
    inside = (position >= 0) & (position < tl.minimum(start, end))
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def own_tile(raw_ptr, raw_token, channels, end, start, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """The others, which the step brings: those of position start are at raw_ptr."""
    position = end - WIDTH + tl.arange(0, TAPS)[:, None]
    place = raw_ptr + (position - start) * raw_token + channels[None, :]
    return tl.load(place, mask=(position >= start) & (position < end), other=0.0).to(tl.float32)


@triton.jit
def ring_sum(
    ring_ptr, weight_ptr, channels, end, start, ROW: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """The convolution at position end - 1 over what ring_tile has, one tap after the other."""
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        position = end - WIDTH + tap
        place = ring_ptr + (position & (RING - 1)) * ROW + channels
        inside = (position >= 0) & (position < tl.minimum(start, end)) & (channels >= 0)
        weight = tl.load(weight_ptr + channels * WIDTH + tap).to(tl.float32)
        total += weight * tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def own_sum(raw_ptr, raw_token, weight_ptr, channels, end, start, WIDTH: tl.constexpr):
    """The same over what own_tile has."""
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        position = end - WIDTH + tap
        place = raw_ptr + (position - start) * raw_token + channels
        weight = tl.load(weight_ptr + channels * WIDTH + tap).to(tl.float32)
        total += weight * tl.load(place, mask=(position >= start) & (channels >= 0), other=0.0).to(tl.float32)
    return total


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def unit(x):
    """x of length one: over the last dimension."""
    axis: tl.constexpr = len(x.shape) - 1
    scale = tl.rsqrt(tl.sum(x * x, axis) + _L2_EPS)
    if axis == 0:
        return x * scale
    else:
        return x * scale[:, None]


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits where it is next to nothing."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    logarithm = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / (one_more - 1.0 + (one_more == 1.0))))
    return tl.maximum(x, 0.0) + logarithm


@triton.jit
def log_decay(a, rate, bias):
    """-exp(A_log) · softplus(a + dt_bias), rate being exp(A_log)."""
    return -rate * softplus(a.to(tl.float32) + bias)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def fold_pending(
    state, first, end, ring_ptr, weight_ptr, keys, values, rate, bias, head,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The state [K, columns] after the positions first … end - 1, whose inputs are in the ring."""
    ROW: tl.constexpr = CHANNELS + 2 * HEADS
    for position in range(first, end):
        # Keys come as tiles, for a sum that stands between load and use: else they would be loaded in the state's
        # layout, by every thread that needs some. Values are wanted in that layout, a few a thread; as a tile they
        # would have one of their own, and the state would be brought into it.
        weight = weight_tile(weight_ptr, keys, WIDTH, TAPS)
        k = unit(silu(tl.sum(ring_tile(ring_ptr, keys, position + 1, end, ROW, WIDTH, RING, TAPS) * weight, 0)))
        v = silu(ring_sum(ring_ptr, weight_ptr, values, position + 1, end, ROW, WIDTH, RING))
        place = ring_ptr + (position & (RING - 1)) * ROW + CHANNELS + head
        beta = sigmoid(tl.load(place))
        state *= tl.exp(log_decay(tl.load(place + HEADS), rate, bias))
        state += k[:, None] * (beta * (v - tl.sum(state * k[:, None], 0)))[None, :]
    return state
