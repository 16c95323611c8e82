"""Where the tokens of requests are on the device: in pages beside their keys and values, the newest ones in a ring.

A block of the KV cache that holds all tokens of a sequence has a page for their ids too, found through the same block
table: so histories take what the cache holds, a prefix that is shared is there once, and nothing has to hand out
memory for them. A token gets its page when a step computes it, as its keys and values do. What is sampled, or drafted
behind that, has no block yet; it waits in a ring of the request's own row, which no other ever has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class History:
    """Of row r, of which c tokens are computed: the one at position p < c is pages[table[r, p // PAGE], p % PAGE], the
    next one, which is not computed yet, and drafts behind it are recent[r, p % RING]. Once build_inputs has run, those
    that are being computed are in pages as well. All int32, on one device; tokens at max_len and beyond do not
    count."""

    pages: torch.Tensor  # [N, PAGE], contiguous; those that table entries of nobody name hold tokens too: any ids
    table: torch.Tensor  # [R + 1, W], W · PAGE ≥ max_len
    recent: torch.Tensor  # [R + 1, RING], contiguous; RING is a power of two
    given: torch.Tensor  # [R + 1], of any stride: tokens that the host sends, to the pages before they are computed
    max_len: int

    @property
    def page(self) -> int:
        return self.pages.shape[1]

    @property
    def ring(self) -> int:
        return self.recent.shape[1]

    def computed(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens at positions of rows, of shapes that broadcast, where they are in pages; any ids elsewhere."""
        entry = torch.div(positions, self.page, rounding_mode="floor").clamp(0, self.table.shape[1] - 1)
        return self.pages[self.table[rows, entry], positions % self.page]

    def read(self, rows: torch.Tensor, positions: torch.Tensor, num_computed: torch.Tensor) -> torch.Tensor:
        """The same of all tokens that there are: from num_computed on, which broadcasts too, of the rings."""
        recent = self.recent[rows, positions % self.ring]
        return torch.where(positions < num_computed, self.computed(rows, positions), recent)

    def tokens(self, row: int, length: int, num_computed: int) -> torch.Tensor:
        """The first `length` of a row, as [length]."""
        position = torch.arange(length, device=self.pages.device)
        return self.read(torch.full_like(position, row), position, torch.full_like(position, num_computed))


def ring_for(num_drafts: int) -> int:
    """Places that a row's ring needs: a sample that is thrown away, its drafts and those of what takes its place."""
    return max(16, 1 << (4 * (1 + num_drafts) - 1).bit_length())


def read_tokens(
    history: History, rows: torch.Tensor, num_computed: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int32 [N]: the token at positions[i] of rows[owners[i]], from pages before num_computed[owners[i]], from the ring
    behind.

    rows and num_computed int32 [B]; owners (integers) and positions int32 [N].
    """
    read = read_tokens_triton if history.pages.is_cuda else read_tokens_torch
    return read(history, rows, num_computed, owners, positions)


def read_tokens_torch(
    history: History, rows: torch.Tensor, num_computed: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return history.read(rows[owners], positions, num_computed[owners])


def read_tokens_triton(
    history: History, rows: torch.Tensor, num_computed: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    found = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    if count := len(positions):
        _read_kernel[(triton.cdiv(count, 256),)](
            history.pages, history.table, history.recent, rows, num_computed, owners, positions, found,
            history.table.stride(0), history.table.shape[1], count, PAGE=history.page, RING=history.ring, BLOCK=256,
            num_warps=4,
        )  # fmt: skip
    return found


@triton.jit
def page_places(table_ptr, position, inside, PAGE: tl.constexpr):
    """Where the tokens at these positions of the row whose table begins at table_ptr are in the pages, as int64."""
    page = tl.load(table_ptr + position // PAGE, mask=inside, other=0)
    return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def load_tokens(pages_ptr, table_ptr, recent_ptr, position, num_paged, inside, PAGE: tl.constexpr, RING: tl.constexpr):
    """Of the row whose table and ring begin there, of which num_paged tokens are in pages; 0 where not inside."""
    is_paged = inside & (position < num_paged)
    token = tl.load(pages_ptr + page_places(table_ptr, position, is_paged, PAGE), mask=is_paged, other=0)
    newest = tl.load(recent_ptr + position % RING, mask=inside & (position >= num_paged), other=0)
    return tl.where(is_paged, token, newest)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows_ptr", "num_computed_ptr"])
def _read_kernel(
    pages_ptr, table_ptr, recent_ptr, rows_ptr, num_computed_ptr, owners_ptr, positions_ptr, found_ptr,
    table_stride, width, count, PAGE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    owner = tl.load(owners_ptr + place, mask=inside, other=0)
    row = tl.load(rows_ptr + owner, mask=inside, other=0).to(tl.int64)
    num_computed = tl.load(num_computed_ptr + owner, mask=inside, other=0)
    position = tl.load(positions_ptr + place, mask=inside, other=0)
    inside = inside & (position >= 0) & ((position >= num_computed) | (position // PAGE < width))
    token = load_tokens(
        pages_ptr, table_ptr + row * table_stride, recent_ptr + row * RING, position, num_computed, inside, PAGE, RING
    )
    tl.store(found_ptr + place, token, mask=place < count)
