"""A decoder of transformers as the engine wants models: paged attention, packed requests, vserve's products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...kernels.attention.attention_parts import Scoring
from ...kernels.sampling.argmax import best_of_pieces, of_pieces
from ..describe.model_config import Cut, Foreign, Layout, ModelConfig
from ..errors import ModelError
from ..families.layer_spec import AttentionSpec, KVSpec, MoESpec, RoutingSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import Experts
from ..layers.head import Head as PoolingHead
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.state import StateLayer
from ..quant.weights import Placement, WeightHolder, WeightMap
from .build import CALLED, CODED, OwnRotation, are_gated_by_silu, body_of, build, expert_sizes, stacked_experts
from .modules import Norm, Part, Plain, Product, SharedInput, own_tensors, put
from .probe import Probe, kept_in_fp32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Step:
    """The batch of the forward that runs, for every call of attention."""

    positions: Tensor
    batch: AttentionBatch


class PagedAttention:
    """What answers when a layer calls attention: the cache is written, and read."""

    def __init__(self, attention: Attention, step: Step) -> None:
        self._attention, self._step = attention, step

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]) -> Tensor:
        """As hooks.attend, without the None."""
        attention = self._attention
        sinks = given.get("s_aux")
        if sinks is not attention.scoring.sinks:
            attention.scoring = replace(attention.scoring, sinks=sinks)
        tokens = query.shape[2]
        out = attention(_rows(query), _rows(key), _rows(value), self._step.positions, self._step.batch)
        return out.view(1, tokens, attention.num_heads, -1)


def _rows(heads: Tensor) -> Tensor:
    """[1, heads, T, D] → [T, heads, D] with neighbouring elements: a view where they are."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 and 0 not in rows.stride() else rows.contiguous()


@dataclass
class Output(ModelOutput):
    """Of the model below the head: whatever a class looks for beside hidden states is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """In the place of the model below the head: hidden states that were computed before."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> Output:
        return Output(last_hidden_state=self.hidden)


class Head(nn.Module):
    """In the place of the output matrix."""

    def __init__(self, lm_head: LMHead) -> None:
        super().__init__()
        self.lm_head = lm_head

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.lm_head.method.weight  # type: ignore[attr-defined]
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """[1, N, hidden] → fp32 [1, N, vocab]."""
        return self.lm_head(input[0])[None]


class TransformersModel(nn.Module):
    """Model's surface over transformers' code. `head` computes logits as the class does, with its scales and caps."""

    def __init__(self, config: ModelConfig, place: Placement, max_len: int) -> None:
        super().__init__()
        foreign = config.foreign
        assert foreign is not None and foreign.layout is not None
        self.config, self.place, layout = config, place, foreign.layout
        self.pooling_head: PoolingHead | None = None
        self._step = Step()
        model = build(foreign, place.dtype, place.device, max_len)
        self._ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
        self._map: WeightMap = {}
        self._attention = self._put_attention(model, layout.attention, self._specs(foreign, layout), max_len)
        self._put_head(model)
        self._put_products(model, layout)
        for path, (eps, less_one) in layout.norms.items():
            size = model.get_parameter(f"{path}.weight").shape[0]
            norm = RMSNorm((size,), eps, place, less_one=less_one)
            self._map[path] = norm, ""
            put(model, path, Norm(norm))
        self.experts = expert_sizes(model)
        if foreign.coded_experts:
            self._put_experts(model)
        self._hold_the_rest(model, layout.cuts)
        if place.tp_size > 1:
            for path in layout.summed:
                model.get_submodule(path).register_forward_hook(self._sum)
        self.body, self.given, self.head = body_of(model), Given(), model
        put(model, next(path for path, module in model.named_modules() if module is self.body), self.given)
        self.eval()

    def _specs(self, foreign: Foreign, layout: Layout) -> list[AttentionSpec]:
        """Of each call of attention, on this rank."""
        whole = [layer.attention for layer in self.config.layers if isinstance(layer.attention, AttentionSpec)]
        if self.place.tp_size == 1:
            return whole
        found = specs_of_rank(build(foreign, self.place.dtype, torch.device("meta"), 1), layout, whole, self.place)
        return [replace(spec, window=before.window) for spec, before in zip(found, whole, strict=True)]

    def _sum(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """After the experts of a layer."""
        return self.place.group.all_reduce(output)

    def _put_attention(
        self, model: PreTrainedModel, paths: tuple[str, ...], specs: list[AttentionSpec], max_len: int
    ) -> list[Attention]:
        still = OwnRotation(model, max_len, self.place.device)
        found = []
        for index, (path, spec) in enumerate(zip(paths, specs, strict=True)):
            attention = Attention(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, index, still,
                Scoring(spec.scale, spec.window, spec.soft_cap), value_dim=spec.value_dim,
            )  # fmt: skip
            model.get_submodule(path).__dict__[CALLED] = PagedAttention(attention, self._step)
            found.append(attention)
        return found

    def _put_head(self, model: PreTrainedModel) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        owner: Any = table
        if type(table) is nn.Embedding:
            owner = Embedding(table.num_embeddings, table.embedding_dim, self.place)
            self._map[paths[id(table)]] = owner, ""
            put(model, paths[id(table)], owner)
        path = paths[id(head)]
        tied = owner if self.config.tie_word_embeddings else None
        lm_head = LMHead(head.out_features, head.in_features, self.place, tied, bias=head.bias is not None)
        self._map[path] = lm_head, "out"
        self._tied = f"{path}.weight" if tied is not None else ""
        put(model, path, Head(lm_head))

    def _put_products(self, model: PreTrainedModel, layout: Layout) -> None:
        cuts = layout.cuts if self.place.tp_size > 1 else {}
        together = {path: group for group in layout.siblings for path in group}
        if cuts:  # those alone that are divided alike
            alike = {path: replace(cuts[path], length=0) for path in layout.products if path in cuts}
            together = {
                path: tuple(other for other in group if alike.get(other) == alike.get(path))
                for path, group in together.items()
            }
        paths = [path for path in layout.products if path not in self._map]
        for group in dict.fromkeys(together.get(path, (path,)) for path in paths):
            cut = cuts.get(group[0])
            modules: dict[str, Any] = {path.rpartition(".")[2]: model.get_submodule(path) for path in group}
            first = next(iter(modules.values()))
            parts: dict[str, int] = {name: module.out_features for name, module in modules.items()}
            linear = Linear(
                first.in_features, parts, place=self.place, bias=first.bias is not None,
                rule="replicated" if cut is None else cut.rule, unit=1 if cut is None else cut.unit,
            )  # fmt: skip
            whole = cut is not None and cut.whole
            shared = SharedInput(linear, whole)
            for path, name in zip(group, parts, strict=True):
                self._map[path] = linear, name
                put(model, path, Product(linear, whole) if len(group) == 1 else Part(shared, name))

    def _put_experts(self, model: PreTrainedModel) -> None:
        """Experts that are quantised, a tensor each. Raises ModelError for those that no kernel of ours computes."""
        name, size = type(model).__name__, self.place.tp_size
        if size > 1:
            raise ModelError(
                f"--tensor-parallel-size {size}: quantised experts of {name}, which transformers' code computes, are "
                f"not divided over ranks: leave it out, or take --data-parallel-size {size} for as many that each hold "
                "all of the model"
            )
        for path, module in list(model.named_modules()):
            if (stacked := stacked_experts(module)) is None:
                continue
            if not are_gated_by_silu(module):
                raise ModelError(
                    f"{path} of {name} is quantised, and its experts are no plain SwiGLU, which alone is read as "
                    "codes: use the model in 16 bit"
                )
            num_experts, rows, hidden = stacked.shape
            experts = Experts(MoESpec(rows // 2, RoutingSpec(num_experts, 1)), hidden, self.place)
            module._parameters["gate_up_proj"] = module._parameters["down_proj"] = None
            module.add_module(CODED, experts)
            self._map |= experts.weight_map(path)

    def _hold_the_rest(self, model: PreTrainedModel, cuts: Mapping[str, Cut]) -> None:
        """What no layer of vserve's has taken: experts, routers, layer norms, sinks."""
        taken = {id(module) for holder, _ in self._map.values() for module in (holder, *_modules(holder))}
        in_fp32 = kept_in_fp32(model, self.place.dtype)
        for path, module in model.named_modules():
            if id(module) in taken or not (names := own_tensors(module)):
                continue
            dtypes, mine = {}, {}
            for name in names:
                whole = f"{path}.{name}" if path else name
                dtypes[name] = torch.float32 if in_fp32(whole) else self.place.dtype
                if self.place.tp_size > 1 and whole in cuts:
                    mine[name] = cuts[whole]
            self._map[path] = Plain(module, dtypes, self.place, mine), ""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        embeddings: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As Model has it."""
        self._step.positions, self._step.batch = positions, batch
        given = {"input_ids": input_ids[None].long()} if embeddings is None else {"inputs_embeds": embeddings[None]}
        hidden: Tensor = self.body(**given, position_ids=positions[None].long(), use_cache=False)[0][0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]."""
        self.given.hidden = hidden[None]
        logits: Tensor = self.head(inputs_embeds=self.given.hidden, use_cache=False).logits  # nothing is embedded
        del self.given.hidden
        return logits[0].float()

    def greatest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As Model has it."""
        return of_pieces(best_of_pieces(self.logits(hidden)))  # what comes behind its head, transformers alone knows

    def attention_layers(self) -> list[Attention]:
        return list(self._attention)

    def kv_specs(self) -> list[KVSpec]:
        return [attention.spec for attention in self._attention]

    def state_layers(self) -> list[StateLayer]:
        """None: classes that keep states are refused."""
        return []

    def weight_map(self) -> WeightMap:
        """By the names that transformers' modules have; files.py gives the checkpoint's tensors these names."""
        return self._map

    def is_ignorable(self, name: str) -> bool:
        import re

        if name == self._tied or name.endswith((".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")):
            return True
        return any(re.search(pattern, name) for pattern in self._ignored)


def _modules(holder: WeightHolder) -> list[nn.Module]:
    return list(holder.modules()) if isinstance(holder, nn.Module) else []


class _Shapes(nn.Module):
    """In the place of a product that is divided, on meta: what would come of it."""

    def __init__(self, linear: nn.Linear, cut: Cut, place: Placement) -> None:
        super().__init__()
        mine = place.span(cut.length, cut.unit)[1]
        row = cut.rule == "row"
        self.inputs = mine if row and not cut.whole else linear.in_features
        self.outputs = linear.out_features if row or cut.whole else mine
        self.weight = linear.weight  # for code that looks at its dtype or device

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.inputs:
            raise ValueError(f"a product of {self.inputs} columns gets {x.shape[-1]}")
        return x.new_empty(*x.shape[:-1], self.outputs)


def specs_of_rank(
    model: PreTrainedModel, layout: Layout, whole: Sequence[AttentionSpec], place: Placement
) -> list[AttentionSpec]:
    """What each call of attention has on this rank: seen in a forward of `model`, which is on meta, and is taken apart
    here. `whole`: on one. Raises ModelError where its code does not go along."""
    for path, cut in layout.cuts.items():
        if isinstance(linear := dict(model.named_modules()).get(path), nn.Linear):
            put(model, path, _Shapes(linear, cut, place))
    size = place.tp_size
    try:
        found = list(Probe(model).specs.values())
    except ModelError as error:
        raise _refused(model, size, str(error)) from error
    for path, spec, before in zip(layout.attention, found, whole, strict=True):
        parts = size if layout.is_divided(path) else 1
        heads, keys = before.num_heads // parts, max(1, before.num_kv_heads // parts)
        if (spec.num_heads, spec.num_kv_heads) != (heads, keys) or (spec.sinks and parts > 1):
            raise _refused(model, size, f"{path} has {spec.num_heads} heads over {spec.num_kv_heads} on a rank")
    return found


def _refused(model: PreTrainedModel, size: int, why: str) -> ModelError:
    return ModelError(
        f"--tensor-parallel-size {size}: the code of {type(model).__name__}, which transformers has, does not go along "
        f"with its own plan ({why}): leave it out, or take --data-parallel-size {size} for as many that each hold all "
        "of the model"
    )
