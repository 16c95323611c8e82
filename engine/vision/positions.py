"""Where the tokens of a prompt are that has pictures: in time, in height and in width, for models that turn queries and
keys by all three (M-RoPE, arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..link.media import MediaItem


def merged(item: MediaItem, merge: int) -> tuple[int, int, int]:
    """Frames, rows and columns of its tokens; each is made of `merge` · `merge` patches."""
    frames, rows, columns = item.grid
    return frames, rows // merge, columns // merge


def rope_delta(media: Sequence[MediaItem], merge: int) -> int:
    """What a token behind all of these adds to its index."""
    return sum(max(merged(item, merge)) - item.length for item in media)


def axis_positions(media: Sequence[MediaItem], merge: int, start: int, end: int) -> np.ndarray:
    """int32 [3, end - start], of the tokens from index `start` to `end` of a prompt with these pictures, in its order.

    Text goes on by one on all axes. A picture that begins at p has its tokens at (p + frame, p + row, p + column), and
    what comes behind goes on behind the largest of these.
    """
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    for item in media:
        if item.start >= end:
            break
        shape = merged(item, merge)
        behind = item.start + item.length
        positions[:, max(0, behind - start) :] += max(shape) - item.length
        first, last = max(item.start, start), min(behind, end)
        if first < last:
            inside = np.unravel_index(np.arange(first - item.start, last - item.start), shape)
            begin = item.start + rope_delta([other for other in media if other.start < item.start], merge)
            positions[:, first - start : last - start] = begin + np.stack(inside)
    return positions


def pair_axes(sections: tuple[int, int, int], interleaved: bool, num_pairs: int) -> list[int]:
    """Of each pair of elements of a head that is turned: by time (0), height (1) or width (2).

    sections: pairs of each. One behind the other; or taking turns for as long as height and width have some left, where
    time has the rest.
    """
    if not interleaved:
        assert sum(sections) == num_pairs, "no model has it so"
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [pair % 3 for pair in range(num_pairs)]
    return [axis if pair < 3 * sections[axis] else 0 for pair, axis in enumerate(axes)]
