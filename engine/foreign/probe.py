"""One forward of a few tokens without numbers (on meta), to see what a model of transformers does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ..describe.model_config import Layout
from ..errors import ModelError, one_line
from ..families.layer_spec import AttentionSpec, LayerSpec, MLPSpec
from .build import CALLED, body_of
from .modules import with_plan

_TOKENS = 37  # a number that nothing else in a model is likely to be
# What some models hand to attention and the kernels do not have. Others (dropout, positions, …) change nothing here.
_BEYOND = (
    "position_bias",
    "attention_bias",
    "alibi",
    "score_mod",
    "block_mask",
    "head_mask",
    "indices",
    "topk_indices",
)


@dataclass
class Probe:
    """Everything that a forward of `model`, on meta, tells. Raises ModelError where it cannot be served."""

    model: PreTrainedModel
    specs: dict[str, AttentionSpec] = field(default_factory=dict)  # path of a caller of attention → what it computes
    _inputs: dict[str, Tensor] = field(default_factory=dict)  # path → what was multiplied or normed, kept so that
    # no other tensor gets its id

    def __post_init__(self) -> None:
        body = body_of(self.model)
        if body is self.model or self.model.get_output_embeddings() is None:
            raise self._refused("it has no head that makes logits")
        accepted = inspect.signature(body.forward).parameters
        if "position_ids" not in accepted:
            raise self._refused("it takes no position_ids, and so cannot tell the requests of a batch apart")
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        positions = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        seen = _Seen(positions)
        try:
            with torch.no_grad(), self._watched(), seen:
                output = body(input_ids=ids, position_ids=positions, use_cache=False)
        except ModelError:
            raise
        except Exception as error:  # whatever code of others does
            raise self._refused(
                f"a forward without numbers ends with {type(error).__name__}: {one_line(error)}; it looks at the "
                "numbers it computes, or does not fit this release of transformers"
            ) from error
        if not self.specs:
            raise self._refused("its attention does not go through transformers' attention interface")
        if not seen.found:
            raise self._refused("it does not read position_ids, and so cannot tell the requests of a batch apart")
        if seen.counted:
            raise self._refused("it counts the tokens of a batch by itself, as if they were of one request")
        self.hidden_size = int(output[0].shape[-1])

    def _watched(self) -> Any:
        """All modules report: which calls attention, and which multiplies what."""
        stack = _Undo()
        for path, module in self.model.named_modules():
            module.__dict__[CALLED] = partial(self._record, path, module)
            stack.calls.append(partial(module.__dict__.pop, CALLED, None))
            if type(module) is nn.Linear or may_be_norm(module):
                stack.calls.append(module.register_forward_pre_hook(partial(self._called, path)).remove)
        return stack

    def _called(self, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) == 1 and path not in self._inputs:
            self._inputs[path] = inputs[0]
        else:  # called twice, or in a way of its own: it stays as it is
            self._inputs[path] = torch.empty(0, device="meta")

    def _record(
        self, path: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: Any
    ) -> Tensor:
        if path in self.specs:
            raise self._refused(f"{path} attends twice in one forward, and there is one cache for it")
        if beyond := [name for name in _BEYOND if given.get(name) is not None]:
            raise self._refused(f"its attention wants {beyond[0]}, which the attention kernels do not have")
        if mask is not None:
            raise self._refused("it makes a mask of its own for its attention, which the attention kernels do not have")
        if given.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise self._refused("its attention is not causal")
        (_, heads, _, size), kv_heads, value_size = query.shape, key.shape[1], value.shape[-1]
        scale = given.get("scaling")
        self.specs[path] = AttentionSpec(
            heads,
            kv_heads,
            size,
            None,
            window=int(given.get("sliding_window") or 0),
            scale=size**-0.5 if scale is None else float(scale),
            soft_cap=float(given.get("softcap") or 0.0),
            sinks=given.get("s_aux") is not None,
            value_dim=value_size,
        )
        return query.new_empty(1, query.shape[2], heads, value_size)

    def layers(self) -> tuple[LayerSpec, ...]:
        """One a call of attention; the widest product counts for every layer's memory."""
        head = self.model.get_output_embeddings()
        products = (m for m in self.model.modules() if type(m) is nn.Linear and m is not head)
        config = self.model.config
        inner = max((m.out_features for m in products), default=self.hidden_size)
        chosen = getattr(config, "num_experts_per_tok", 0) or 0
        inner = max(inner, chosen * (getattr(config, "moe_intermediate_size", 0) or inner) if chosen else 0)
        return tuple(LayerSpec(spec, MLPSpec(inner)) for spec in self.specs.values())

    def longest(self) -> int:
        """Tokens of a context beyond which a window counts that the model applies by a mask alone; 0: no such window.

        For an attention that it does not know, transformers makes no mask.
        """
        config, specs = self.model.config, list(self.specs.values())
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", None) is False:
            window = None
        chunk = getattr(config, "attention_chunk_size", None)
        if kinds is None or len(kinds) != len(specs):
            expected = [window, chunk] if not any(spec.window for spec in specs) else []
        else:
            masked = {kind for kind, spec in zip(kinds, specs, strict=True) if not spec.window}
            expected = [
                window if "sliding_attention" in masked else None,
                chunk if "chunked_attention" in masked else 0,
            ]
        return min((int(size) for size in expected if size), default=0)

    def layout(self) -> Layout:
        kept = self._kept_in_fp32()
        multiplied = {path: x for path, x in self._inputs.items() if not kept(path)}
        modules = {path: self.model.get_submodule(path) for path in multiplied}
        groups: dict[Any, list[str]] = {}
        for path, x in multiplied.items():
            module = modules[path]
            if type(module) is nn.Linear:
                parent = path.rpartition(".")[0]
                groups.setdefault((parent, id(x), module.bias is None), []).append(path)
        norms = {}
        measured: dict[Any, tuple[float, bool] | None] = {}
        for path, module in modules.items():
            if type(module) is nn.Linear or multiplied[path].numel() == 0:
                continue
            key = (type(module), self.model.get_parameter(f"{path}.weight").shape, eps_of(module))
            if key not in measured:
                measured[key] = as_rms_norm(module)
            if (found := measured[key]) is not None:
                norms[path] = found
        layout = Layout(
            attention=tuple(self.specs),
            products=tuple(path for path in multiplied if type(modules[path]) is nn.Linear),
            siblings=tuple(tuple(paths) for paths in groups.values() if len(paths) > 1),
            norms=norms,
        )
        body = body_of(self.model)
        prefix = next(path for path, module in self.model.named_modules() if module is body)
        return with_plan(layout, self.model, prefix, self.specs, kept)

    def _kept_in_fp32(self) -> Callable[[str], bool]:
        return kept_in_fp32(self.model, torch.bfloat16)

    def _refused(self, reason: str) -> ModelError:
        return ModelError(f"architecture {type(self.model).__name__} is not served: {reason}; use another model")


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether transformers keeps the parameters below a path in fp32 where others are `dtype`."""
    wanted = list(model._get_dtype_plan(dtype)) if hasattr(model, "_get_dtype_plan") else []

    def kept(path: str) -> bool:
        return any(f".{name}." in f".{path}." or f".{name}." in f".{path}.weight." for name in wanted)

    return kept


class _Seen(TorchDispatchMode):
    """Whether any operator reads a tensor (`found`), and whether tokens are numbered without it (`counted`)."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._storage = tensor.untyped_storage()._cdata
        self.found = self.counted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata == self._storage for x in _flat(values)):
            self.found = True
        if func.overloadpacket is torch.ops.aten.arange and _TOKENS in values:
            self.counted = True
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


class _Undo:
    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for call in self.calls:
            call()


def may_be_norm(module: nn.Module) -> bool:
    """By its shape: one vector of weights and nothing else."""
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and weight is not None
        and weight.dim() == 1
        and len(module._parameters) == 1
        and not module._buffers
        and not module._modules
        and eps_of(module) is not None
    )


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def as_rms_norm(module: nn.Module) -> tuple[float, bool] | None:
    """(eps, whether weights are less one) where it is an RMS norm: it is tried on random numbers."""
    given, eps = module._parameters["weight"], eps_of(module)
    assert given is not None and eps is not None
    size = given.shape[0]
    tried = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, size, generator=generator), torch.randn(size, generator=generator)
    tried._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    try:
        with torch.no_grad():
            found = tried(x)
            tiny = tried(x * 1e-4)
    except Exception:
        return None
    for offset in (0.0, 1.0):
        if all(
            isinstance(got, Tensor) and torch.allclose(got, _rms(x, weight + offset, eps), rtol=1e-4, atol=1e-5)
            for got, x in ((found, x), (tiny, x * 1e-4))
        ):
            return eps, bool(offset)
    return None


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
