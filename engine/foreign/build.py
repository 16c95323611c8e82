"""A model of transformers without weights, and what it calls in place of its own attention and mixtures of experts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, initialization
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations import moe
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from ...kernels.experts.moe import ExpertWeights, experts
from ..describe.model_config import Foreign
from ..errors import ConfigError, ModelError, one_line
from ..layers.rope import RotaryEmbedding

_PATCHING = threading.Lock()
_FIXED = "rope_type_that_is_fixed"  # attribute of a module whose rope_type no longer says it


def make_config(foreign: Foreign) -> PreTrainedConfig:
    """transformers' config of it. Raises ModelError."""
    values = dict(foreign.values)
    auto_map = values.get("auto_map") or {}
    try:
        if foreign.code is not None and "AutoConfig" in auto_map:
            kind = _remote(auto_map["AutoConfig"], foreign.code)
        else:
            kind = CONFIG_MAPPING[values.get("model_type") or _class(foreign).config_class.model_type]
        config = kind.from_dict(values)
    except ModelError:
        raise
    except Exception as error:  # of a strange config.json, or of a folder's own code
        raise ModelError(
            f"transformers cannot read config.json ({type(error).__name__}: {one_line(error)}): correct the file"
        ) from error
    config._attn_implementation = config._experts_implementation = NAME
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise ModelError(
            f"architecture {foreign.architecture} is not served: it has an encoder or parts beside text; use another "
            "model"
        )
    return config


def build(foreign: Foreign, dtype: torch.dtype, device: torch.device, max_len: int) -> PreTrainedModel:
    """Parameters on meta, tables (rotary frequencies) on `device`, for contexts up to `max_len`. Raises ModelError."""
    register()
    config, kind = make_config(foreign), _class(foreign)
    before = torch.get_default_dtype()
    try:
        with contextlib.ExitStack() as stack:
            if device.type == "meta":
                stack.enter_context(torch.device("meta"))
            else:
                stack.enter_context(_without_parameters())
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(initialization.no_init_weights())
            torch.set_default_dtype(dtype)
            model: PreTrainedModel = kind(config)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build {foreign.architecture} ({type(error).__name__}: {one_line(error)}): the values "
            "of config.json do not fit each other, correct the file"
        ) from error
    finally:
        torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    model.config.pad_token_id = None  # or some models look for it in every batch, and the host waits for the device
    fix_rope(model.modules(), max_len, device)
    _move_tables(model, device)
    return model


class OwnRotation(RotaryEmbedding):
    """Of a model whose own code rotates queries and keys: kernels turn them by nothing more."""

    def __init__(self, model: nn.Module, max_len: int, device: torch.device) -> None:
        super().__init__(None, 0, max_len, device)
        self._modules = [module for module in model.modules() if hasattr(module, _FIXED)]

    def fit(self, max_len: int) -> None:
        super().fit(max_len)
        fix_rope(self._modules, max_len, self.device)


def fix_rope(modules: Iterable[nn.Module], max_len: int, device: torch.device) -> None:
    """Frequencies that follow the longest position of a batch in transformers ("dynamic", "longrope") are those of
    `max_len` from here on: a key rotated once stays in the cache, and a batch has many requests."""
    for module in modules:
        kinds = module.__dict__.get(_FIXED, getattr(module, "rope_type", None))
        if not isinstance(kinds, (str, dict)):
            continue
        module.__dict__[_FIXED] = kinds
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if device.type == "meta" or not (kind == "longrope" or "dynamic" in kind):
                continue
            keys = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=max_len, **keys)
            prefix = "" if layer_type is None else f"{layer_type}_"
            module._buffers[f"{prefix}inv_freq"] = frequencies
            setattr(module, f"{prefix}attention_scaling", scaling)
        module.__dict__["rope_type"] = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"


def _move_tables(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = value.to(device)


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Modules made in it have their parameters on meta; each is made on the CPU first, but nothing is written there."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with _PATCHING:
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _class(foreign: Foreign) -> Any:
    try:
        if foreign.code is not None:
            return _remote(foreign.values["auto_map"]["AutoModelForCausalLM"], foreign.code)
        return getattr(transformers, foreign.architecture)
    except Exception as error:  # of a folder's own code, or of a release of transformers that lacks the class
        raise ModelError(
            f"cannot load the code of {foreign.architecture} ({type(error).__name__}: {one_line(error)}): see whether "
            "it fits this release of transformers"
        ) from error


def _remote(reference: str, folder: Path) -> Any:
    return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder below the head; the model itself where it has none."""
    body: PreTrainedModel = model.get_decoder()
    return getattr(model, "model", model) if body is model else body


NAME = "vserve"  # of both, in a config
CODED = "coded_experts"  # submodule of a mixture: its experts, where they are quantised
CALLED = "paged"  # attribute of a module that calls attention: what is to answer


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **given: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], rotated, key [1, KV, T, D], value [1, KV, T, Dv] → [1, T, H, Dv].

    transformers makes no mask for an implementation that it does not know: attention_mask is None, or the model's own.
    """
    return module.__dict__[CALLED](query, key, value, attention_mask, given), None


def run_experts(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """x [T, hidden], ids int64 and weights [T, k] of each token's experts → [T, hidden].

    The same numbers whatever shares the batch in fp32, no atomics. Most mixtures go to our own kernels, the others to
    torch's grouped product, for which the host does not wait in bf16 on Hopper and later.
    """
    if x.device.type == "meta":
        return x.new_empty(x.shape)
    if (coded := module._modules.get(CODED)) is not None:
        result: Tensor = coded(x.contiguous(), ids.int(), weights.float())
        return result
    if are_gated_by_silu(module):
        matrices = ExpertWeights(module.gate_up_proj, module.down_proj)  # type: ignore[arg-type]
        return experts(x.contiguous(), ids.int(), weights.float(), matrices)
    if x.is_cuda and torch.cuda.is_current_stream_capturing() and not _goes_into_a_graph(x):
        raise ConfigError(
            "these experts, which transformers' code computes, go into CUDA graphs in bfloat16 on Hopper GPUs and "
            "later only: pass --dtype bfloat16 there, or --enforce-eager"
        )
    result = moe.grouped_mm_experts_forward(module, x, ids, weights)
    return result


def expert_sizes(model: nn.Module) -> set[tuple[int, int]]:
    """(experts a token, experts) of the mixtures that our own kernels compute."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    found = set()
    for module in model.modules():
        stacked = stacked_experts(module)
        if stacked is not None and are_gated_by_silu(module):
            found.add((int(chosen), stacked.shape[0]))
    return found


def stacked_experts(module: nn.Module) -> Tensor | None:
    """gate_up_proj [E, 2I, H] of a mixture that transformers' interface computes; None of any other module."""
    stacked = getattr(module, "gate_up_proj", None)
    return stacked if isinstance(stacked, Tensor) and hasattr(module, "has_gate") else None


def are_gated_by_silu(module: Any) -> bool:
    """down(silu(gate(x)) · up(x)) with [E, 2I, H] and [E, H, I], and nothing else."""
    return (
        module.has_gate
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or getattr(module, "has_post_expert_norm", False))
        and type(module)._apply_gate is moe._default_apply_gate
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _goes_into_a_graph(x: Tensor) -> bool:
    """Elsewhere torch's grouped product loops over the groups, for which the host waits."""
    return x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def register() -> None:
    AttentionInterface.register(NAME, attend)
    moe.ExpertsInterface.register(NAME, run_experts)
