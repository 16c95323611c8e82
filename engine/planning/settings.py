"""What the engine runs with: each option that was left open gets its value, by the model, the device and its memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...kernels.linear.linear_hopper import even_rows
from ..cache.kv_format import KVSettings
from ..describe.divide import check_stages, context_cost, patch_cost, stage_layers
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..families.layer_spec import MoESpec
from ..link.messages import EngineInfo
from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig
from ..options.speculation import Speculation
from .drafts import choose_speculation
from .machine import Machine
from .memory import MemoryPlan
from .state_slots import check_state_heads, choose_state_dtype, seqs_beside_chunk, state_dtype
from .step_sizes import (
    default_backlog_steps,
    default_chunk,
    large_mixed_tokens,
    resolve_limits,
    resolve_max_mixed_tokens,
)

# Of an engine that reads whole texts, by the kind of device.
STEP_TOKENS = {"cuda": 16384, "cpu": 1024}
STEP_TEXTS = {"cuda": 1024, "cpu": 128}


@dataclass(frozen=True, kw_only=True)
class Settings(SchedulerConfig):
    """An engine's settings before its memory is planned, of which the scheduler reads those that it declares.

    Options that are left open, or become something else, stand here by their names; all others are in `config`.
    """

    config: EngineConfig
    machine: Machine
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    exact: bool  # one more precise than bfloat16 was named: on the CPU no product with codes computes in less
    model_impl: str  # vserve or transformers
    mamba_ssm_cache_dtype: str  # of recurrent states, where there are any
    kv_cache_dtype: str  # the activations' type, fp8_e4m3 or fp8_e5m2
    calculate_kv_scales: bool
    pipeline_layer_partition: str  # layers of the stages, as they are; "" of one
    speculative_config: str  # as it was given; "": no drafts
    speculation: Speculation
    enforce_eager: bool
    max_logprobs: int
    lora_dtype: torch.dtype
    mm_encoder_cache_tokens: int  # 0: the model sees nothing
    largest_picture: int = 0  # patches of it
    reduced: tuple[str, ...] = ()  # options that became less than the model or the device would allow
    notices: tuple[str, ...] = ()  # for the log

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def state_dtype(self) -> torch.dtype:
        """Of recurrent states, where there are any."""
        return state_dtype(self.mamba_ssm_cache_dtype)

    @property
    def mixed_step(self) -> int:
        """Most tokens of a step with prompts beside decodes, where no long queue waits."""
        return min(self.max_mixed_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def uses_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.enforce_eager

    def named_as_in(self, names: Iterable[str]) -> dict[str, Any]:
        mine = {spec.name for spec in dataclasses.fields(self)}
        return {name: getattr(self, name) for name in names if name in mine}

    def drafted_by(self, method: str) -> Settings:
        """The same with what the drafting checkpoint turned out to be: /server_info shows it."""
        asked = json.dumps(json.loads(self.speculative_config) | {"method": method})
        return dataclasses.replace(self, speculative_config=asked)

    def fit(self, plan: MemoryPlan) -> Fitted:
        """The same with what fits the memory."""
        cut: tuple[str, ...] = ("max_model_len",) if plan.max_model_len < self.max_model_len else ()
        states, seqs, slots = plan.states, self.max_num_seqs, 0
        notices, seed, format = plan.notices, self.prefix_cache_seed, plan.layout.format
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < plan.max_model_len:
            notices += (
                f"chunked prefill is off: prompts are limited to max_num_batched_tokens={self.max_num_batched_tokens}; "
                f"raise it to {plan.max_model_len} to use the whole context",
            )
        if seed and format.code:  # equal keys are to mean equal bytes in all engines of a fleet
            seed = f"{seed}\0{format.code}{format.token_scales:d}"
        if states is not None:
            slots, seqs = states.count, min(seqs, states.running)
        if seqs < self.max_num_seqs:
            cut += ("max_num_seqs",)
            notices += (
                f"max_num_seqs lowered to {seqs}: that many recurrent states take a third of the cache; "
                "name --max-num-seqs for more",
            )
        fitted = {
            "max_model_len": plan.max_model_len,
            "max_num_seqs": seqs,
            "num_state_slots": slots,
            "num_blocks": plan.num_blocks,
            "windows": plan.layout.windows,
            "prefix_cache_seed": seed,
            "reduced": (*cut, *self.reduced),
            "notices": notices,
        }
        return Fitted(**(vars(self) | fitted), plan=plan)


@dataclass(frozen=True, kw_only=True)
class Fitted(Settings):
    """An engine's settings once memory was planned: the scheduler's configuration, and what EngineInfo is a view of."""

    plan: MemoryPlan

    def options(self) -> dict[str, bool | int | float | str]:
        """Options as they are in effect, by name; none that is a secret, or still left open."""
        public = {name: value for name, value in vars(self.config).items() if name not in SECRETS}
        changed = self.named_as_in(public) | {
            "dtype": _name(self.dtype),
            "lora_dtype": _name(self.lora_dtype),
            "lora_target_modules": " ".join(self.config.lora_target_modules),
            "device": self.machine.name,
            "cpu_threads": self.machine.cpu_threads,
            "kv_cache_memory_bytes": self.plan.cache + self.plan.state_bytes,
            "num_gpu_blocks_override": self.plan.num_blocks - 1,
        }
        return {name: value for name, value in (public | changed).items() if value is not None}

    def info(self, startup_seconds: dict[str, float], quantization: dict[str, str | int], **more: Any) -> EngineInfo:
        """What other processes are told. `more`: fields of EngineInfo that the model says."""
        plan, options = self.plan, self.options()
        if quantization:
            options["quantization"] = quantization["method"]
        told = self.named_as_in(EngineInfo.__struct_fields__) | {
            "num_blocks": plan.num_blocks - 1,
            "dtype": options["dtype"],
            "memory": {
                "weights": plan.weights,
                "activations": plan.activations,
                "graphs": plan.graphs,
                "other": plan.other,
                "kv_cache": plan.cache,
                **({"states": plan.state_bytes} if plan.states is not None else {}),
                **({"encoder_cache": plan.pictures} if plan.pictures else {}),
            },
            "kv_cache": {
                "dtype": self.kv_cache_dtype,
                "scales": plan.layout.format.scales,
                "block_bytes": plan.layout.block_bytes(self.dtype.itemsize),
            },
        }
        return EngineInfo(
            **(told | more), num_kv_tokens=plan.num_tokens, num_kv_groups=len(plan.layout.groups),
            device=self.machine.name, startup_seconds=startup_seconds, settings=options, quantization=quantization,
            fitted=self.reduced,
        )  # fmt: skip


SECRETS = {spec.name for spec in dataclasses.fields(EngineConfig) if spec.metadata["secret"]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve(
    config: EngineConfig, model: ModelConfig, machine: Machine, largest: tuple[int, int] = (0, 0)
) -> Settings:  # fmt: skip
    """`largest`: patches and tokens of the largest picture that the model takes. Raises ConfigError for options that
    contradict the model or each other."""
    device = machine.device
    mixture = any(isinstance(layer.mlp, MoESpec) for layer in model.layers)
    stages = config.pipeline_parallel_size
    check_stages(model, stages, config.stage_layers)
    tokens, seqs, reduced, notices = resolve_limits(config, machine, mixture)
    if device.type == "cuda":
        check_state_heads(model)
    if model.has_state and (fewer := seqs_beside_chunk(config, tokens, seqs)) < seqs:
        notices += (f"max_num_seqs lowered to {fewer}: a step of {tokens} tokens has room for a prompt's beside these",)
        seqs, reduced = fewer, (*reduced, "max_num_seqs")
    if config.enable_expert_parallel and not mixture and model.foreign is None:
        notices += ("--enable-expert-parallel changes nothing: this model has no experts",)
    length = choose_max_model_len(config, model)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    codes = model.quantization is not None and machine.codes and dtype.itemsize <= 2
    chunk = default_chunk(mixture, codes, drafts=config.speculative_config is not None)
    mixed = resolve_max_mixed_tokens(config, device.type, tokens, chunk)
    loras = config.adapter_slots if config.enable_lora else 0
    names = {spec.name for spec in dataclasses.fields(Settings)}
    asked = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config) if spec.name in names}
    found = {
        "config": config,
        "machine": machine,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "dtype": dtype,
        "exact": config.dtype != "auto" and dtype != torch.bfloat16,
        **vars(KVSettings.of(config, model, _name(dtype))),
        "mamba_ssm_cache_dtype": choose_state_dtype(config, model),
        "pipeline_layer_partition": _partition(config, model),
        "context_cost": context_cost(model) if stages > 1 else 0.0,
        "max_loras": loras,
        "max_cpu_loras": max(loras, config.max_cpu_loras or 2 * loras) if loras else 0,
        "lora_dtype": dtype if config.lora_dtype == "auto" else getattr(torch, config.lora_dtype),
        "model_impl": "vserve" if model.foreign is None else "transformers",
        "max_model_len": length,
        "max_logprobs": model.vocab_size if config.max_logprobs < 0 else config.max_logprobs,
        "prefix_cache_seed": config.prefix_cache_seed or "",
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "max_mixed_tokens": mixed,
        "large_mixed_tokens": large_mixed_tokens(mixed, tokens, partial(even_rows, device)),
        "max_num_partial_prefills": config.max_num_partial_prefills or 0,
        "max_long_partial_prefills": config.max_long_partial_prefills or 0,
        "long_prefill_token_threshold": choose_long_prefill(config, length),
        "backlog_steps": config.backlog_steps or default_backlog_steps(chunk),
        "speculative_config": config.speculative_config or "",
        "speculation": (speculation := choose_speculation(config, model, tokens, seqs)),
        "draft_depths": speculation.depths,
        "max_drafts": max((drafts for _, drafts in speculation.depths), default=0),
        "drafts_with_grammars": not speculation.acceptance,
        "depth": stages + 1 if stages > 1 else steps_in_flight(device),
        **pictures(config, model, largest, length, tokens, seqs),
        "reduced": reduced,
        "notices": notices,
    }
    if not model.causal:
        found |= whole_texts(config, length, machine.device.type)
    return Settings(**(asked | found))


ENCODER_CACHE_TOKENS = 16_384


def pictures(
    config: EngineConfig, model: ModelConfig, largest: tuple[int, int], length: int, num_tokens: int, num_seqs: int
) -> dict[str, Any]:
    """Settings of a model that sees pictures, the largest of which has so many patches and tokens. length: of the
    context; num_tokens: of a step; num_seqs: requests that may run."""
    vision = model.vision
    if vision is None or not model.causal:
        return {"mm_encoder_cache_tokens": 0}
    patches, tokens = min(largest[0], length * vision.merge**2), min(largest[1], length)  # what a context holds
    kept = config.mm_encoder_cache_tokens or max(ENCODER_CACHE_TOKENS, tokens)
    return {
        "mm_encoder_cache_tokens": kept,
        "encoder_cache_tokens": kept,
        "largest_picture": patches,
        "media_tokens": (vision.image_token, -1 if vision.video_token is None else vision.video_token),
        "media_merge": vision.merge,
        "media_axes": vision.mrope is not None,
        "patch_cost": patch_cost(model),
        "media_whole": bool(vision.bidirectional),
        "longest_media": max(0, min(tokens, num_tokens - num_seqs + 1)) if vision.bidirectional else 0,
    }


def steps_in_flight(device: torch.device) -> int:
    """On a GPU the next step is launched before the last is over; on the CPU, launching is computing."""
    return 2 if device.type == "cuda" else 1


def _partition(config: EngineConfig, model: ModelConfig) -> str:
    if config.pipeline_parallel_size == 1:
        return ""
    parts = stage_layers(model, config.pipeline_parallel_size, config.stage_layers)
    return ",".join(str(len(part)) for part in parts)


def step_limits(config: EngineConfig, found: Settings) -> str:
    """For the log: which of the options that limit a step acts. "" where none was given."""
    if config.max_num_batched_tokens is None and config.max_mixed_tokens is None:
        return ""
    most = f"a step computes at most {found.max_num_batched_tokens} tokens"
    if found.mixed_step == found.max_num_batched_tokens:
        return f"{most}, beside decodes as well (--max-num-batched-tokens)"
    waiting = f", up to {found.large_mixed_tokens[-1]} while many prompts wait" if found.large_mixed_tokens else ""
    return f"{most} (--max-num-batched-tokens), {found.mixed_step} beside decodes (--max-mixed-tokens){waiting}"


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    # A checkpoint in float32 is served in bfloat16 on a GPU: half the memory, and its tensor cores.
    return torch.bfloat16 if checkpoint is torch.float32 else checkpoint


def choose_long_prefill(config: EngineConfig, max_model_len: int) -> int:
    """vLLM's 4 % of the context where long prompts are limited, and nothing says what is long."""
    if config.max_long_partial_prefills and not config.long_prefill_token_threshold:
        return max(1, max_model_len // 25)
    return config.long_prefill_token_threshold


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        window = config.disable_sliding_window and model.max_model_len == model.longest
        limit = "window holds, and --disable-sliding-window" if window else "config.json"
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the {model.max_model_len} tokens that the model's "
            f"{limit} allows; set it to {model.max_model_len} or less"
        )
    return config.max_model_len


def whole_texts(config: EngineConfig, length: int, kind: str) -> dict[str, Any]:
    """Settings of an engine that reads whole texts: each is computed in one step, which has as many as it holds, and
    nothing is cached.

    `kind`: of the device, "cuda" or "cpu".
    Raises ConfigError for a step that is shorter than the longest text.
    """
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: this model reads texts whole and has no cache: leave it out"
        )
    tokens = config.max_num_batched_tokens
    if tokens is not None and config.max_model_len is not None and tokens < config.max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}: this model reads a text in one step, and --max-model-len is "
            f"{config.max_model_len}; raise the first or lower the second"
        )
    length = min(length, tokens or length)
    tokens = tokens or max(length, STEP_TOKENS[kind])
    return {
        "max_model_len": length,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(config.max_num_seqs or STEP_TEXTS[kind], tokens),
        "max_mixed_tokens": 0,
        "large_mixed_tokens": (),
        "max_num_partial_prefills": 0,
        "max_long_partial_prefills": 0,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "block_size": length,  # a text takes one block, of nothing
        "reduced": (),
        "notices": (),
    }
