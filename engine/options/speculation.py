"""What `--speculative-config` asks for: read, refused where it is not here, and resolved to what a step may draft."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError

NAME = "--speculative-config"
NGRAM = ("ngram", "ngram_gpu", "[ngram]")
MAX_DRAFTS = 15  # of a request in a step
DEFAULT_DRAFTS = 7
DEFAULT_NGRAM = 5
# Up to so many requests that decode, at most so many drafts each: weights that are read once serve a few hundred tokens
# as fast as one; beyond, wrong drafts take the time of right ones.
DEPTHS = ((8, MAX_DRAFTS), (32, 3), (64, 1))
# Ways to verify that keep the model's distribution: here, where a draft holds that is drawn, they are one.
_EXACT = ("standard", "block", "strict", "probabilistic", "rejection_sampler")
_LOSSY = "it accepts tokens that the model would not have sampled; drafts here never change an answer"
_INSTEAD = 'use {"method": "ngram"}, which needs no weights, or leave speculation out: the answers are the same'
MODELS = ("eagle", "eagle3", "mtp", "draft_model")  # whose drafts a model makes
DEFAULT_DRAFTS_OF_MODELS = 3
_REFUSED = {
    "medusa": "heads of Medusa",
    "mlp_speculator": "MLP speculators",
    "suffix": "drafts by suffix decoding",
    "dflash": "drafts of DFlash",
    "dspark": "drafts of DSpark",
    "custom_class": "classes of others, whose code would run in the engine,",
}
_HEADS = ("medusa", "mlp_speculator", "dflash", "dspark")  # that were trained for one model
# Of drafts by a model; those behind, which nobody needs here, may say whatever they like.
_OF_MODELS = (
    "draft_tensor_parallel_size", "quantization", "max_model_len", "kv_cache_dtype", "draft_sample_method", "revision",
    "code_revision", "disable_padded_drafter_batch", "parallel_drafting", "enforce_eager", "attention_backend",
    "moe_backend", "use_heterogeneous_vocab",
)  # fmt: skip
_OLD = ("acceptance_method", "disable_logprobs", "disable_mqa_scorer", "posterior_alpha", "posterior_threshold")


@dataclass(frozen=True)
class Speculation:
    """Drafts of n-grams: where the last `max_ngram` tokens (or fewer, `min_ngram` at least) stood before, what came
    then is likely to come now. Or of a model."""

    num_drafts: int
    min_ngram: int
    max_ngram: int
    depths: tuple[tuple[int, int], ...]  # (up to so many requests, drafts of each), the former growing
    method: str = "ngram"  # or one of MODELS, or "": what the model's folder says
    model: str = ""  # a folder, or a name of the hub's; of "mtp" the target itself
    revision: str | None = None
    quantization: str | None = None  # of the model that drafts
    max_model_len: int = 0  # tokens of a context up to which it drafts; 0: all
    greedy_drafts: bool = False  # the most likely token, not the one that the request's noise draws
    acceptance: tuple[float, ...] = ()  # imposed: how often the drafts up to each hold; (): as many as do
    num_ranks: int = 0  # that share who drafts: 1, where each has all of it; 0: as many as the target

    @property
    def by_model(self) -> bool:
        return self.method != "ngram"

    def within(self, max_num_seqs: int, max_num_batched_tokens: int, steps: int = 2) -> Speculation:
        """With depths that a step has room for: where a row of the table asks for more, the requests beyond that room
        get the next smaller number of the table that fits, or none. `steps`: at once, which share what windows keep."""
        room = max_num_batched_tokens
        levels = sorted({min(drafts, max(0, room // steps - 1)) for _, drafts in self.depths} | {0}, reverse=True)
        depths: list[tuple[int, int]] = []
        last = 0
        for most, asked in self.depths:
            most = min(most, max_num_seqs)
            for drafts in (level for level in levels if level <= asked):
                if (end := min(most, room // (1 + drafts))) > last:
                    depths.append((end, drafts))
                    last = end
        while depths and not depths[-1][1]:
            depths.pop()  # beyond the table there are none anyway
        return replace(self, depths=tuple(depths))


NO_DRAFTS = Speculation(0, 0, 0, ())


def problem(text: str) -> str | None:
    """What is wrong with the text of --speculative-config, in words that follow its name."""
    try:
        read_speculation(text)
    except ConfigError as error:
        return str(error)
    return None


def read_speculation(text: str | None) -> Speculation | None:
    """None: no drafts. Raises ConfigError, without the option's name."""
    if text is None:
        return None
    try:
        asked = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'it is no JSON ({error}): give an object such as \'{{"method": "ngram"}}\'') from None
    if not isinstance(asked, dict):
        raise ConfigError('it must be a JSON object such as \'{"method": "ngram"}\'')
    return _read({key.replace("-", "_"): value for key, value in asked.items() if value is not None})


def drafts_by_model(text: str | None) -> bool:
    """Whether a valid --speculative-config names a model, or a head, that drafts."""
    found = read_speculation(text or None)
    return found is not None and found.by_model


def _read(asked: dict[str, Any]) -> Speculation | None:
    known = (
        "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
        "num_speculative_tokens_per_batch_size", "disable_by_batch_size", "rejection_sample_method",
        "synthetic_acceptance_rates", "synthetic_acceptance_length",
    )  # fmt: skip
    for key in asked:
        if key not in (*known, *_OF_MODELS, *_OLD) and not key.startswith("suffix_decoding_"):
            raise ConfigError(f"it has {key!r}: it may have {', '.join((*known, *_OF_MODELS))}")
    method = _check_method(asked)
    default_drafts = DEFAULT_DRAFTS if method == "ngram" else DEFAULT_DRAFTS_OF_MODELS
    drafts = _number(asked, "num_speculative_tokens", default_drafts, 0, MAX_DRAFTS)
    least, most = asked.get("prompt_lookup_min"), asked.get("prompt_lookup_max")
    default = least if most is None else most
    max_ngram = _number(asked, "prompt_lookup_max", DEFAULT_NGRAM if default is None else default, 1, 15)
    min_ngram = _number(asked, "prompt_lookup_min", max_ngram, 1, 15)
    if min_ngram > max_ngram:
        raise ConfigError(f"its prompt_lookup_min {min_ngram} is above its prompt_lookup_max {max_ngram}")
    if not drafts:
        _acceptance(asked, 1)
        return None
    of_model = {} if method == "ngram" else _of_model(asked, method)
    acceptance = _acceptance(asked, drafts)
    return Speculation(drafts, min_ngram, max_ngram, _depths(asked, drafts), acceptance=acceptance, **of_model)


def _check_method(asked: dict[str, Any]) -> str:
    """One of MODELS or "ngram"; "": what the model says."""
    method, model = asked.get("method"), asked.get("model")
    if method is None:
        method = "ngram" if model is None or model in NGRAM else ""
    if method in NGRAM:
        return "ngram"
    if not isinstance(method, str):
        raise ConfigError(f"its method is {method!r}: it must be a text such as ngram")
    name = "mtp" if method.endswith("_mtp") else method
    if name in _REFUSED:
        nearest = 'use {"method": "eagle3", "model": HEAD}, the nearest, or ' if name in _HEADS else ""
        instead = nearest + (_INSTEAD.removeprefix("use ") if nearest else _INSTEAD)
        raise ConfigError(f"its method is {method!r}: {_REFUSED[name]} are not served yet; {instead}")
    if name and name not in MODELS:
        raise ConfigError(f"its method is {method!r}: it must be ngram, {', '.join(MODELS[:-1])} or {MODELS[-1]}")
    if name != "mtp" and not (isinstance(model, str) and model):
        raise ConfigError(f"its model is {model!r}: it must be the folder, or the hub's name, of who is to draft")
    if not isinstance(model, str | None):
        raise ConfigError(f"its model is {model!r}: it must be a folder, or a name of the hub's")
    return name


def _of_model(asked: dict[str, Any], method: str) -> dict[str, Any]:
    """Fields of Speculation. Raises ConfigError for what would have drafts made in another way."""
    sampled = asked.get("draft_sample_method", "probabilistic")
    if sampled not in ("greedy", "probabilistic"):
        raise ConfigError(f"its draft_sample_method is {sampled!r}: it must be greedy or probabilistic")
    for key in ("parallel_drafting", "use_heterogeneous_vocab"):
        if asked.get(key):
            raise ConfigError(f"its {key} is {asked[key]!r}: drafts are made one after the other, of the model's own "
                              "tokens; leave it out")  # fmt: skip
    for key in ("quantization", "revision"):
        if not isinstance(asked.get(key, ""), str):
            raise ConfigError(f"its {key} is {asked[key]!r}: it must be a text")
    return {
        "method": method,
        "model": asked.get("model") or "",
        "revision": asked.get("revision"),
        "quantization": asked.get("quantization"),
        "num_ranks": _number(asked, key, 1, 1, 1 << 10) if (key := "draft_tensor_parallel_size") in asked else 0,
        "max_model_len": _number(asked, "max_model_len", 0, 0, 1 << 30),
        "greedy_drafts": sampled == "greedy",
    }


def _acceptance(asked: dict[str, Any], drafts: int) -> tuple[float, ...]:
    """(): drafts hold that are right. Otherwise how often the drafts up to each hold, as the synthetic method says."""
    methods = {key: asked.get(key, "standard") for key in ("acceptance_method", "rejection_sample_method")}
    rates, length = (asked.get(f"synthetic_acceptance_{name}") for name in ("rates", "length"))
    for key, method in methods.items():
        if method not in (*_EXACT, "synthetic"):
            raise ConfigError(f"its {key} is {method!r}: {_LOSSY}; leave it out")
    if "synthetic" not in methods.values():
        if rates is not None or length is not None:
            raise ConfigError(
                'it has a synthetic acceptance: say "rejection_sample_method": "synthetic", or leave it out'
            )
        return ()
    if (rates is None) == (length is None):
        raise ConfigError(
            "its rejection_sample_method is 'synthetic': say synthetic_acceptance_length or "
            "synthetic_acceptance_rates, one of them"
        )
    if rates is None:
        if isinstance(length, bool) or not isinstance(length, int | float) or not 1 <= length <= 1 + drafts:
            raise ConfigError(
                f"its synthetic_acceptance_length is {length!r}: it must be a number from 1 to {1 + drafts}"
            )
        return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(drafts))
    if not isinstance(rates, list) or not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"its synthetic_acceptance_rates are {rates!r}: they must be a list of numbers from 0 to 1")
    if len(rates) != drafts or rates != sorted(rates, reverse=True):
        raise ConfigError(
            f"its synthetic_acceptance_rates are {rates!r}: they must be {drafts}, one a draft, and none above the one "
            "before it: how often all drafts up to there hold"
        )
    return tuple(map(float, rates))


def _depths(asked: dict[str, Any], drafts: int) -> tuple[tuple[int, int], ...]:
    table, least = asked.get("num_speculative_tokens_per_batch_size"), asked.get("disable_by_batch_size")
    if least is not None:
        most = _number(asked, "disable_by_batch_size", 0, 1, 1 << 20) - 1
        ends = [0, *(min(up_to, most) for up_to, _ in DEPTHS)]
        return tuple((ends[i + 1], min(drafts, up)) for i, (_, up) in enumerate(DEPTHS) if ends[i + 1] > ends[i])
    if table is None:
        return tuple((up_to, min(drafts, most)) for up_to, most in DEPTHS)
    named = "its num_speculative_tokens_per_batch_size"
    wrong = ConfigError(f"{named} is {table!r}: it must be a list such as [[1, 8, {drafts}], [9, 64, 1]]")
    if not isinstance(table, list):
        raise wrong
    found: list[tuple[int, int]] = []
    last = 0
    for row in table:
        if not (isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row)):
            raise wrong
        begin, end, count = row
        if not last < begin <= end or not 0 <= count <= drafts:
            raise ConfigError(f"{named} has {row}: rows grow, and none has more than {drafts} drafts")
        if found and begin > last + 1:  # what is not named keeps the number before it
            found[-1] = (begin - 1, found[-1][1])
        found.append((end, count))
        last = end
    return tuple(found)


def _number(asked: dict[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = asked.get(key, default)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"its {key} is {value!r}: it must be an integer from {least} to {most}")
    return value
