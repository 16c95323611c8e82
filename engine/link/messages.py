"""What the API process and the engine process say to each other: msgpack over a Unix socket."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from .media import MediaItem
from .plan import TokenLogprobs
from .sampling_params import SamplingParams


# ---- API process → engine ----
class EngineStart(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message: the options of EngineConfig."""

    options: dict[str, Any]


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """`n` requests for one prompt, which travels once: their ids are `id` … `id + n - 1`, and what each samples by is
    SamplingParams.of_choice(0) … (n - 1)."""

    id: int  # the engine's own id, chosen by the API process, never the client's
    prompt: bytes  # see pack_tokens
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival: float = 0.0  # time.monotonic(), one clock for all processes of a host
    n: int = 1
    tenant: int = 0  # among whom the queue is shared: a number made of a key or an address, never itself
    media: tuple[MediaItem, ...] = ()  # of the prompt, in its order


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """As int32, in the byte order of the host, which both processes share. Raises OverflowError for what is none."""
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
    return ids.tobytes()


def unpack_tokens(prompt: bytes) -> array[int]:
    token_ids = array("i")
    token_ids.frombytes(prompt)
    return token_ids


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    ids: list[int]
    unless_begun: bool = False  # leave all of them alone when one has left the queue


class SetVocabulary(msgspec.Struct, frozen=True, array_like=True, tag="vocabulary"):
    """Before the first AddGrammar: what grammars are made of, in a form that is read without a loop over tokens."""

    lengths: bytes  # uint32 [V], bytes of each token; 0: no grammar may use it, as it is special or unused
    text: bytes  # the tokens one after another
    stop_token_ids: tuple[int, ...]
    markers: tuple[int, ...] = ()  # special tokens that only some grammars may use
    xgrammar: bytes = b""  # the same as xgrammar reads it; the compiler of grammars adds it: see grammar.prepare


class AddGrammar(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    """A grammar that requests may name by its key from now on."""

    key: str
    backend: str  # xgrammar: compiled and serialised; llguidance: its source
    payload: bytes
    markers: bool = False  # the vocabulary's may be used


class DropGrammars(msgspec.Struct, frozen=True, array_like=True, tag="drop_grammars"):
    keys: list[str]


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """From now on requests may name it; answered by AdapterLoaded."""

    id: int  # of this load, above 0: random, so that keys of cached prefixes differ from those of any other
    path: str  # of its folder
    name: str = ""  # what clients call it
    version: str = ""  # AdapterLoaded's, of what an engine has loaded already: it must be that


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """Nobody will name it any more."""

    id: int


class WatchSteps(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """From now on send StepReports, or no longer."""

    on: bool


class ReadSteps(msgspec.Struct, frozen=True, array_like=True, tag="read_steps"):
    """Send LastSteps: `count` of them, or as many as there are."""

    id: int
    count: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a client that has not started the engine: its number, which no other one ever had."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave now; what is open is dropped."""


# ---- engine → API process ----
class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """While starting: a phase, and how far it is (total 0 = unknown)."""

    phase: str
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="ready"):
    """Sent once, when the engine can serve: every effective setting that others need."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # usable ones, the null block not counted
    num_kv_tokens: int  # of context that these hold, in requests of full length
    num_kv_groups: int = 1  # a token of a short request takes its share of a block in each
    enable_prefix_caching: bool
    scheduling_policy: str
    max_logprobs: int  # -1: no limit
    dtype: str
    device: str
    memory: dict[str, int] = {}  # bytes by purpose
    startup_seconds: dict[str, float] = {}  # by phase
    settings: dict[str, bool | int | float | str] = {}  # options of EngineConfig as they are in effect
    hidden_size: int = 0  # dimensions of an embedding
    tasks: tuple[str, ...] = ("generate", "embed")  # what requests may ask for; also classify, reward
    labels: tuple[str, ...] = ()  # of classes
    activation: str = ""  # what makes probabilities of their logits: sigmoid, softmax; "": nothing
    by_token: bool = False  # each token has classes of its own; steps: of them, those that end a step of reasoning
    steps: bool = False
    reranks: bool = False  # it is Qwen3-Reranker, or one like it: a score is how much likelier "yes" is than "no"
    sees_pictures: bool = False  # requests may have media
    reads_both_ways: bool = False  # no option makes it generate
    quantization: dict[str, str | int] = {}  # of start/described.py; empty: none
    experts: dict[str, str | int] = {}  # of start/described.py; empty: none
    kv_cache: dict[str, str | int] = {}  # dtype, scales, block_bytes
    # The option by which more cards can share the model, what to set it to, and how many times as many tokens the cache
    # would then hold; "": there is none
    more_cards: tuple[str, int, float] = ("", 0, 0.0)
    fitted: tuple[str, ...] = ()  # options that became less than the model or the device would allow


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The engine cannot go on (or cannot start): the cause and the remedy in one line, then it exits."""

    message: str
    is_refusal: bool = False  # of what it was configured with: no other start with it succeeds


# Those of every step cannot be part of a circle: the garbage collector need not look at them.
class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step brought to one request. The last output of a request has a finish reason; nothing follows it."""

    id: int
    token_ids: list[int]  # new ones; the stop token, when one ended it, is the last
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | None = None  # the stop token id; None for EOS and length
    logprobs: list[TokenLogprobs] | None = None  # one a new token, when asked
    num_cached_tokens: int | None = None  # with the first output: prompt tokens taken from the prefix cache
    first_scheduled: float | None = None  # with the first output: time.monotonic() when it left the queue
    error: str | None = None  # with finish_reason "error"
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first output: of prompt tokens 1 …
    embedding: bytes | None = None  # little-endian float32, where pooling was asked for: the only output


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State after a step; the counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0  # whom the last plan had no place for
    num_blocks: int = 0
    num_free_blocks: int = 0  # free ones that still hold a cached prefix included
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed by the step that this reports
    prompt_tokens_computed: int = 0  # total, recomputation after preemption not counted
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    num_graph_misses: int = 0  # decode steps that ran without a CUDA graph though graphs are on
    num_late_compilations: int = 0  # kernels compiled after the engine was ready
    num_corrupted_requests: int = 0  # ended by NaN logits
    num_invariant_violations: int = 0  # times that the books of an idle engine did not balance
    num_drafts: int = 0  # times that drafts of a request were verified
    num_draft_tokens: int = 0  # of them all
    num_accepted_tokens: tuple[int, ...] = ()  # of them those that held, by their position
    expert_tokens: tuple[int, ...] = ()  # that each expert of a mixture got, all layers but the last together
    expert_imbalance: float = 0.0  # no total: lately, a layer's busiest expert's tokens over its average one's
    num_state_slots: int = 0  # of recurrent state; 0: the model has none
    num_state_slots_used: int = 0  # by running requests
    num_state_snapshots: int = 0  # of prefixes, in other slots
    num_state_restores: int = 0  # requests that began with a snapshot
    num_restored_tokens: int = 0  # that therefore were not computed
    num_state_exports: int = 0  # snapshots written
    num_skipped_state_exports: int = 0  # because no slot was free
    num_encoder_tokens: int = 0  # features of pictures that the encoder cache has room for; 0: the model sees none
    num_encoder_tokens_used: int = 0  # by entries, whether a request still needs them or not
    encoder_queries: int = 0  # pictures looked up
    encoder_hits: int = 0  # found
    num_encoded_patches: int = 0  # that the tower has computed


def sum_of(*each: EngineStats) -> EngineStats:
    """Field by field."""
    return EngineStats(*map(_sum, zip(*map(msgspec.structs.astuple, each), strict=True)))


def _sum(values: tuple[Any, ...]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    return sum(values)


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="outputs"):
    """One message a step."""

    outputs: list[RequestOutput]
    stats: EngineStats
    preempted: list[int] = []  # ids, of requests preempted since the last message


HISTORY = 1024  # steps that are remembered, whether somebody watches or not


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """What is known of a step: made when it is launched, whole when its result is in."""

    step: int
    time: float  # time.time() when its result was in
    num_requests: int
    num_tokens: int
    num_decodes: int  # requests that computed one token
    host_seconds: float = 0.0
    device_seconds: float = 0.0


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """A step, for those who watch."""

    record: StepRecord
    rows: list[tuple[int, int, bool]]  # (request id, tokens, whether they are of its prompt), of some of the requests


class LastSteps(msgspec.Struct, frozen=True, array_like=True, tag="last_steps"):
    """The answer to ReadSteps, the latest step last."""

    id: int
    steps: list[StepRecord]


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """The answer to LoadAdapter."""

    id: int
    rank: int = 0
    base: str | None = None  # what its configuration calls its base model
    error: str | None = None  # why it cannot be served, in one line
    version: str = ""  # of its files, the same on any host


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """A part of the cache: blocks in use, and free ones that still hold a cached prefix, cell by cell."""

    num_cells: int  # of the whole map
    blocks_per_cell: int  # the last cell may have fewer
    start: int  # the first cell of this part
    used: list[int]
    cached: list[int]


class StepReports(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """The steps since the last of these, while somebody watches."""

    steps: list[StepReport]
    blocks: BlockMap


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Every second from the event loop that steps, idle or not."""


ToEngine = (
    AddRequest | AbortRequests | SetVocabulary | AddGrammar | DropGrammars | LoadAdapter | DropAdapter | WatchSteps
    | ReadSteps | Shutdown
)  # fmt: skip
FromEngine = Progress | EngineInfo | Failure | StepOutputs | StepReports | LastSteps | AdapterLoaded | Heartbeat
