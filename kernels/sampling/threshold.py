"""The lowest logit that top-k and top-p keep, found exactly and without sorting (Triton functions of sampling.py).

Both filters keep the logits from some float on. Floats can be numbered in their order, so bisecting those numbers finds
the greatest float with enough logits (top-k), or enough mass (top-p), at or above it; it is a logit of the row.
Bisecting over a whole vocabulary would read it some twenty times. But the first pass over the row, which has to find
the maximum anyway, keeps the three greatest logits of every lane, and as long as no lane has a third logit above the
threshold, these decide it in registers. Else the row is read again, each time for a narrower range, until the logits in
range fit into a scratch of the same size.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A float's key is an int32 of the same order; neighbouring floats have neighbouring keys. The keys of -inf and of the
# lowest finite float:
_KEY_INFINITE = tl.constexpr(-2139095041)
_KEY_LOWEST = tl.constexpr(-2139095040)


@triton.jit
def float_key(value):
    bits = tl.where(value == 0, 0, value.to(tl.int32, bitcast=True))  # -0.0 equals 0.0 and has its key
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, index, vocabulary):
    """A tile of logits, with -inf for NaN and beyond the end."""
    logits = tl.load(row_ptr + index, mask=index < vocabulary, other=float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def relative_weights(logits, top, inverse_temperature, min_p):
    """Probabilities relative to the greatest; 0 where min-p drops the token."""
    weights = tl.exp((logits - top) * inverse_temperature)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def tile_masses(row_ptr, limit, top, inverse_temperature, min_p, vocabulary, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of the logits from limit on, summed over each tile → fp32 [TILES]."""
    tiles = tl.arange(0, TILES)
    masses = tl.zeros([TILES], tl.float32)
    for tile in range(0, tl.cdiv(vocabulary, BLOCK)):
        logits = load_logits(row_ptr, tile * BLOCK + tl.arange(0, BLOCK), vocabulary)
        weights = tl.where(logits >= limit, relative_weights(logits, top, inverse_temperature, min_p), 0.0)
        masses = tl.where(tiles == tile, tl.sum(weights, axis=0), masses)
    return masses


@triton.jit
def find_threshold(
    row_ptr, scratch_ptr, first, second, third, top, inverse_temperature, top_k, top_p, min_p, vocabulary,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest logit kept, finite. first, second and third [BLOCK]: the greatest logits of every lane."""
    end = float_key(top) + 1
    threshold = tl.full([], _KEY_LOWEST, tl.int32)
    guess = threshold
    total = tl.zeros([], tl.float32)
    # No lane hides a logit greater than this.
    hidden = tl.where(vocabulary > 3 * BLOCK, tl.max(third, axis=0), float("-inf"))
    search_number = tl.zeros([], tl.int32)
    search_mass = tl.zeros([], tl.int32)
    limited = (top_k > 0) & (top_k < vocabulary)
    if limited:
        # At least top_k logits are here or above, so this is the threshold or below it.
        need = top_k.to(tl.float32)
        low = tl.full([], _KEY_INFINITE, tl.int32)
        guess = _bisect(first, second, third, need, low, end, top, inverse_temperature, min_p, False)
        threshold = tl.maximum(guess, threshold)
        if hidden >= key_float(threshold):
            search_number += 1
    if (top_p < 1) & (search_number == 0):
        limit = key_float(threshold)
        if limited:  # then the lanes' greatest are all there is
            weights = tl.where(first >= limit, relative_weights(first, top, inverse_temperature, min_p), 0.0)
            weights += tl.where(second >= limit, relative_weights(second, top, inverse_temperature, min_p), 0.0)
            weights += tl.where(third >= limit, relative_weights(third, top, inverse_temperature, min_p), 0.0)
            total = tl.sum(weights, axis=0)
        else:
            masses = tile_masses(row_ptr, limit, top, inverse_temperature, min_p, vocabulary, TILES, BLOCK)
            total = tl.sum(masses, axis=0)
        need = top_p * total
        guess = _bisect(first, second, third, need, threshold, end, top, inverse_temperature, min_p, True)
        if hidden >= key_float(guess):
            search_mass += 1
        else:
            threshold = guess

    # The searches come last, when the lanes' logits no longer occupy registers.
    if search_number > 0:
        low = tl.full([], _KEY_INFINITE, tl.int32)
        found = _search(
            row_ptr, scratch_ptr, low, threshold, end, top_k.to(tl.float32), top, inverse_temperature, min_p,
            vocabulary, False, BLOCK,
        )  # fmt: skip
        threshold = tl.maximum(found, _KEY_LOWEST)
        if top_p < 1:
            limit = key_float(threshold)
            masses = tile_masses(row_ptr, limit, top, inverse_temperature, min_p, vocabulary, TILES, BLOCK)
            total = tl.sum(masses, axis=0)
            guess = threshold
            search_mass += 1
    if search_mass > 0:
        # Tokens each lighter than total (1 - p) / V are together lighter than what may be dropped.
        light = float_key(top + tl.log((1 - top_p) * total / vocabulary) / inverse_temperature)
        guess = tl.where(guess > threshold, guess, tl.minimum(tl.maximum(light, threshold), end - 1))
        threshold = _search(
            row_ptr, scratch_ptr, threshold, guess, end, top_p * total, top, inverse_temperature, min_p, vocabulary,
            True, BLOCK,
        )  # fmt: skip
    return key_float(threshold)


@triton.jit
def _bisect(first, second, third, need, low, high, top, inverse_temperature, min_p, BY_MASS: tl.constexpr):
    """The greatest key in (low, high) such that the logits from it on number, or weigh, need; low if there is none."""
    if BY_MASS:
        first_weights = relative_weights(first, top, inverse_temperature, min_p)
        second_weights = relative_weights(second, top, inverse_temperature, min_p)
        third_weights = relative_weights(third, top, inverse_temperature, min_p)
    else:
        first_weights = 1.0
        second_weights = 1.0
        third_weights = 1.0
    while low + 1 < high:
        middle = _middle(low, high)
        limit = key_float(middle)
        weights = tl.where(first >= limit, first_weights, 0.0) + tl.where(second >= limit, second_weights, 0.0)
        enough = tl.sum(weights + tl.where(third >= limit, third_weights, 0.0), axis=0) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)  # the mean, without overflow


@triton.jit
def _search(
    row_ptr, scratch_ptr, low, guess, high, need, top, inverse_temperature, min_p, vocabulary,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As _bisect, over the whole row. guess in [low, high) is tried first."""
    capacity: tl.constexpr = 3 * BLOCK
    low_count = tl.zeros([], tl.int32) + vocabulary  # at least the number of logits from low on
    above = tl.zeros([], tl.int32)  # the number of logits from high on
    collected = tl.zeros([], tl.int32)
    step = tl.zeros([], tl.int32)
    searching = low < high
    while searching:
        count, amount, least, greatest = _collect(
            row_ptr, scratch_ptr, key_float(low), key_float(guess), key_float(high), top, inverse_temperature, min_p,
            vocabulary, BY_MASS, BLOCK,
        )  # fmt: skip
        enough = amount >= need
        low_count = tl.where(enough, above + count, low_count)
        above = tl.where(enough, above, above + count)
        # The range shrinks to the logits in it, so that however many equal ones are a range of one key.
        high = tl.where(enough, high, tl.maximum(float_key(greatest) + 1, low))
        low = tl.where(enough, tl.minimum(float_key(least), high - 1), low)
        need = tl.where(enough, need, need - amount)
        collected = tl.where(enough & (count <= capacity), count, 0)
        searching = (collected == 0) & (low + 1 < high)
        # Halving values is quick where the logits lie, halving keys ends in any case: do it now and then. A rest that
        # is known to fit is taken whole.
        halved = tl.where(step % 4 == 3, _middle(low, high), float_key(0.5 * key_float(low) + 0.5 * key_float(high)))
        halved = tl.minimum(tl.maximum(halved, low + 1), high - 1)
        guess = tl.where(low_count - above <= capacity, low, halved)
        step += 1
    if collected > 0:
        lanes = tl.arange(0, BLOCK)
        first = tl.load(scratch_ptr + lanes, mask=lanes < collected, other=float("-inf"))
        second = tl.load(scratch_ptr + BLOCK + lanes, mask=BLOCK + lanes < collected, other=float("-inf"))
        third = tl.load(scratch_ptr + 2 * BLOCK + lanes, mask=2 * BLOCK + lanes < collected, other=float("-inf"))
        low = _bisect(first, second, third, need, low, high, top, inverse_temperature, min_p, BY_MASS)
    return low


@triton.jit
def _collect(
    row_ptr, scratch_ptr, low, guess, high, top, inverse_temperature, min_p, vocabulary, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the logits in [guess, high) to the scratch, as many as fit.

    → their number; their mass, or number again; the least of them; the greatest in [low, guess)
    """
    count = tl.zeros([], tl.int32)
    amounts = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.debug_barrier()  # the scratch may still be being read
    for start in range(0, vocabulary, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = load_logits(row_ptr, index, vocabulary)
        inside = (logits >= guess) & (logits < high) & (index < vocabulary)
        if BY_MASS:
            amounts += tl.where(inside, relative_weights(logits, top, inverse_temperature, min_p), 0.0)
        least = tl.minimum(least, tl.where(inside, logits, float("inf")))
        greatest = tl.maximum(greatest, tl.where((logits >= low) & (logits < guess), logits, float("-inf")))
        place = count + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(scratch_ptr + place, logits, mask=inside & (place < 3 * BLOCK))
        count += tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()  # what one thread stored, another will load
    if BY_MASS:
        amount = tl.sum(amounts, axis=0)
    else:
        amount = count.to(tl.float32)
    return count, amount, tl.min(least, axis=0), tl.max(greatest, axis=0)
