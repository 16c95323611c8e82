"""What the scheduler and the cache go by, every option resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler and the cache need: no None left."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_mixed_tokens: int = 0  # of a step in which some request decodes; 0 = max_num_batched_tokens
    # Sorted; instead of max_mixed_tokens as long as that many tokens wait for each of backlog_steps.
    large_mixed_tokens: tuple[int, ...] = ()
    max_num_partial_prefills: int = 0  # prompts in progress at once, which share a step evenly; 0: as many as it holds
    max_long_partial_prefills: int = 0  # of them, prompts that are long; 0: as many
    long_prefill_token_threshold: int = 0  # a longer prompt is long, and gets no more tokens in a step; 0: none is
    backlog_steps: int = 32  # in which a long queue of prompts should be worked off
    block_size: int = 16
    num_blocks: int = 1024  # the null block included
    windows: tuple[int, ...] = (0,)  # of each KV group: tokens that it keeps of a request; 0: all
    enable_prefix_caching: bool = True
    prefix_cache_seed: str = field(default="", repr=False)  # of the keys; "": a random secret
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    max_loras: int = 0  # adapters that the running requests may have; 0: none is served
    max_cpu_loras: int = 0
    depth: int = 1  # steps in flight
    pipeline_parallel_size: int = 1
    context_cost: float = 0.0  # of a key that a prompt's token sees, in products of a token; for stages
    max_drafts: int = 0  # tokens that are drafted for a request in a step, at most
    draft_depths: tuple[tuple[int, int], ...] = ()  # (up to so many running requests, drafts of each)
    drafts_with_grammars: bool = True  # not where drafts hold whatever the masks say
    num_state_slots: int = 0  # of recurrent state, the null slot included; 0: the model has none
    state_snapshot_tokens: int = 64  # at multiples of which states are kept for later requests
    encoder_cache_tokens: int = 0  # features of pictures that are kept, and a request needs at once; 0: none are read
    media_tokens: tuple[int, int] = (-1, -1)  # that features of pictures, and of spans of videos, stand for
    media_merge: int = 1  # patches a side of each of them
    media_axes: bool = False  # positions are in time, height and width
    media_whole: bool = False  # a picture's tokens see each other, and so are computed in one step
    longest_media: int = 0  # tokens that a picture then may have
    patch_cost: float = 0.0  # of a patch that is encoded, in tokens of a prompt, where steps with decodes are limited

    @property
    def grain(self) -> int:
        """Tokens at multiples of which chunks of prompts end, and prefixes that are found; 1: no recurrent state says
        where, and blocks alone do."""
        return lcm(self.state_snapshot_tokens, self.block_size) if self.num_state_slots else 1

    @property
    def least_chunk(self) -> int:
        """Tokens of a prompt that a step has room for at least, as a smaller chunk may not be possible."""
        return max(self.grain, self.longest_media)
