"""One step as the scheduler hands it to the runner, and what comes back. Plain ints: a plan can travel."""

from __future__ import annotations

import msgspec

from .request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that starts (or resumes after preemption) on a row of the device tables."""

    row: int
    request_id: int
    token_ids: bytes  # int32, all that is known: the prompt, then outputs
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix hit
    sampling: SamplingParams


class BlockWrite(msgspec.Struct, frozen=True, array_like=True):
    """Block ids appended to a row's table from entry `start` on; entries before the first of a row are never read."""

    row: int
    start: int
    block_ids: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Which row computes how many tokens. Rows of query length one come first (`num_decodes` of them)."""

    step: int
    rows: list[int]
    num_tokens: list[int]  # query length of each row
    num_computed: list[int]  # of each row before this step: an upper bound, the device's count is the truth
    sampled: list[int]  # indexes into rows of those that reach their last token and so sample one
    num_decodes: int
    new_rows: list[NewRow]
    new_blocks: list[list[BlockWrite]]  # one list a KV group
    scored: list[int] = []  # indexes into rows of those whose prompt tokens' log-probabilities are wanted
    pooled: list[int] = []  # of those that become embeddings

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of the raw logits at one position: the sampled token's log-probability, its rank (1 = most likely), the top k."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


# Why a sample or an embedding is worthless: weights or a cached prefix are broken, or float16 has overflowed.
NOT_FINITE = "the model computed NaN or infinite values for this request"
# Why a sample is worthless though the model is sound: its request has excluded every token.
NOTHING_ALLOWED = (
    "no token is left to sample: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar of this request "
    "exclude every one; loosen one of them"
)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled: entry i belongs to row plan.rows[plan.sampled[i]]."""

    step: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None when no row asked
    errors: dict[int, str] = {}  # i → why this row's sample is worthless (NaN logits …): only that request fails
    device_seconds: float = 0.0
    prompt_logprobs: list[list[TokenLogprobs]] = []  # for each of plan.scored, of the prompt tokens that follow those
    # computed in this step
    embeddings: list[bytes | None] = []  # little-endian float32, of those of plan.pooled whose prompt ends in this
    # step; None: not finite
