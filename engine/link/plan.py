"""One step as the scheduler hands it to the runner, and what comes back. Plain ints: a plan can travel."""

from __future__ import annotations

from itertools import islice

import msgspec

from .media import MediaItem
from .sampling_params import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that starts (or resumes after preemption) on a row of the device tables."""

    row: int
    request_id: int
    token_ids: bytes  # int32, all that is known: the prompt, then outputs
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix hit
    sampling: SamplingParams
    slot: int = -1  # of its adapter; -1: none
    state_slot: int = -1  # of its recurrent state; -1: the model has none
    # The slot of a snapshot after exactly num_computed_tokens, which is copied to its own before the step runs; -1:
    # its state begins at nothing, and num_computed_tokens is 0.
    restored_from: int = -1
    rope_delta: int = 0  # of the place at which a token behind its pictures is turned, over its index


class StateExport(msgspec.Struct, frozen=True, array_like=True):
    """A row's recurrent state after its first `boundary` tokens is copied into a slot, as the step's folding passes
    it. If the device's count of certain tokens does not pass it in this step, nothing is written."""

    row: int
    boundary: int  # a multiple of 64
    slot: int


class AdapterCopy(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's matrices go into a slot of the device before the step runs."""

    slot: int
    id: int
    path: str  # for who does not have it in memory


class Encode(msgspec.Struct, frozen=True, array_like=True):
    """The tower computes a picture's features before the step runs, which are kept as this entry until it is
    forgotten."""

    entry: int
    item: MediaItem
    num_features: int


class Embed(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring tokens of a row, which features of an entry stand for in the place of their own embeddings."""

    index: int  # into rows
    first_token: int  # in the row's query
    count: int
    entry: int
    first_feature: int


class AxisPositions(msgspec.Struct, frozen=True, array_like=True):
    """Where a row's tokens of this step are in time, height and width: they are of a picture, or before one."""

    index: int  # into rows
    positions: bytes  # int32 [3, tokens of the row]


class BlockWrite(msgspec.Struct, frozen=True, array_like=True):
    """Block ids appended to a row's table from entry `start` on; entries before the first of a row are never read."""

    row: int
    start: int
    block_ids: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Which row computes how many tokens.

    First come `num_decodes` rows whose next token is sampled: query length 1 + `num_drafts`. With drafts all of these
    sample, 1 + num_drafts tokens each of which the device keeps those that it finds its drafts right for, and one more.
    Rows of query length one that take no drafts are then among the others.
    """

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
    num_drafts: int = 0  # of each of the first `num_decodes` rows
    adapters: list[AdapterCopy] = []
    told: list[int] = []  # indexes into `sampled` of those whose drafts for the step to come the result is to bring
    left: list[int] = []  # rows that a request has left while a part of its prompt was pooled
    exports: list[StateExport] = []
    forget: list[int] = []  # entries of features that no step needs from this one on
    encode: list[Encode] = []
    embeds: list[Embed] = []
    axes: list[AxisPositions] = []  # of models whose positions have three axes

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def num_decode_tokens(self) -> int:
        """Of the first `num_decodes` rows."""
        return self.num_decodes * (1 + self.num_drafts)

    @property
    def num_samples(self) -> int:
        """Tokens sampled, those behind a wrong draft among them."""
        return len(self.sampled) + self.num_decodes * self.num_drafts

    def of_samples(self) -> StepPlan:
        """Of the rows that sample alone, with the same samples: by it, tokens are appended that come late."""
        plan: StepPlan = msgspec.structs.replace(
            self, rows=[self.rows[index] for index in self.sampled], sampled=list(range(len(self.sampled))),
            num_tokens=[self.num_tokens[index] for index in self.sampled], pooled=[], new_rows=[], new_blocks=[],
            exports=[], forget=[], encode=[], embeds=[], axes=[],
            num_decodes=self.num_decodes if self.num_drafts else 0,
        )  # fmt: skip
        return plan


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
    "no token is left to sample: allowed_token_ids, bad_words, logit_bias, min_tokens, the budget of thinking and the "
    "grammar of this request exclude every one; loosen one of them"
)
# Why a request asks for what its adapter has not.
NO_PROMPT_LOGPROBS = (
    "its adapter changes the output matrix, and there are no prompt_logprobs of such; leave prompt_logprobs out"
)
# Why a request with an adapter cannot run, though it and the model are sound. The log says more: its folder's path is
# nothing for clients.
ADAPTER_NOT_LOADED = "its adapter is not loaded"
ADAPTER_UNUSABLE = "its adapter cannot be used: its files are not what was loaded, or are gone"


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled: the tokens kept of row plan.rows[plan.sampled[0]], then those of the next one …"""

    step: int
    token_ids: list[int]  # flat
    logprobs: list[TokenLogprobs | None] | None = None  # None when no row asked
    errors: dict[int, str] = {}  # index into token_ids → why that one is worthless (NaN …): only its request fails
    device_seconds: float = 0.0
    prompt_logprobs: list[list[TokenLogprobs]] = []  # for each of plan.scored, of the prompt tokens that follow those
    # computed in this step
    embeddings: list[bytes | None] = []  # little-endian float32, of those of plan.pooled whose prompt ends in this
    # step; None: not finite
    num_graph_misses: int = 0  # of the ranks so far: decode steps that ran without a CUDA graph though graphs are on
    num_late_compilations: int = 0  # kernels compiled after the engine was ready, so far
    counts: list[int] = []  # tokens kept of each of plan.sampled, one at least; empty: one each
    drafted: list[int] = []  # of each of the first plan.num_decodes rows: drafts that somebody had proposed
    expert_tokens: tuple[int, ...] = ()  # of each expert so far, told once a second
    expert_imbalance: float = 0.0
    num_proposed: int = 0  # rows with drafts that somebody has proposed for the step to come
    drafts: list[list[int]] = []  # of each of plan.told: what they are
    unseen: dict[int, str] = {}  # entry of features → why there are none: the tower has raised that

    def tokens_by_row(self) -> list[list[int]]:
        """Of each of plan.sampled."""
        if not self.counts:
            return [[token] for token in self.token_ids]
        tokens = iter(self.token_ids)
        return [list(islice(tokens, count)) for count in self.counts]
