"""From a model's folder to a model on its device: found, checked by its headers, then copied tensor by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch

from ..adapters.adapter import Adapter
from ..adapters.merged import MergedCheckpoint
from ..describe.divide import check_divides
from ..describe.model_config import ModelConfig
from ..errors import ModelError
from ..files.checkpoint import Checkpoint, has_own_head, open_checkpoint
from ..layers.attention import Sinks
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..models.blocks import CausalLM
from ..models.encoder import Encoder
from ..models.mlp import has_experts, with_stored_experts
from ..models.model import Loadable, Model
from ..models.packed import attend_both_ways
from ..parallel.group import ALONE, Group, SingleGroup
from ..parallel.pipeline import WHOLE, Stage
from ..quant.format import TensorInfo
from ..quant.kv_scales import read_cache_scales
from ..quant.weights import LinearShape, Placement, WeightHolder
from .matching import Load, by_module, choose_formats, claims_of, match

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_LOADER_THREADS = 4  # reading and copying overlap; more only fight over the disk


def load_model(
    model_path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    max_model_len: int,
    seed: int = 0,
    progress: Progress | None = None,
    admit: Callable[[int, int], None] | None = None,
    group: Group = ALONE,
    whole_experts: bool = False,
    stage: Stage = WHOLE,
    adapter: Adapter | None = None,
    exact: bool = False,
) -> Model:
    """The model of `model_path` on `device`, its weights in `dtype`, frozen, ready for contexts up to `max_model_len`.

    `group`: its ranks; this rank takes its part of each matrix. `whole_experts`: and of the experts some, all
    of each. `stage`: or of some layers alone. Raises ModelError where the model cannot be divided over so many.
    `admit` gets (parameters, bytes in the checkpoint), of what this rank has of them, before anything is allocated, and
    raises what is too large.
    `adapter` is merged into the weights as they are read. `exact`: see Placement.
    load_format "dummy" needs no weights: N(0, 0.02), norms 1, seeded. Raises ModelError, before anything is allocated
    where the fault is in a file and before anything is copied where the checkpoint does not fit config.json.
    """
    check_divides(config, group.size, whole_experts)
    place = Placement(dtype, torch.device(device), group, whole_experts, stage, exact)
    report = progress or (lambda done, total: None)
    with torch.no_grad():
        found = _prepared(model_path, config, place, load_format, max_model_len, adapter)
        model, checkpoint, holders, loads = found.model, found.checkpoint, found.holders, found.loads
        config = model.config
        if found.note:
            logger.warning("%s", found.note)
        if admit is not None:
            parameters = count_parameters(config, group.size, whole_experts, stage)
            admit(parameters, int(found.stored * (parameters / count_parameters(config))))
        for holder in holders:
            holder.create()
        if checkpoint is None:
            fill_with_noise(model, seed, report)
        else:
            _load(checkpoint, loads, report)
            _load_cache_scales(checkpoint, model)
        if (head := model.pooling_head) is not None:
            head.load_modules(torch.Generator(place.device).manual_seed(seed) if checkpoint is None else None)
        for holder in holders:
            holder.finish()
    group.prepare(config.hidden_size * dtype.itemsize)
    if config.quantization is not None:
        _give_back()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if isinstance(model, CausalLM) and not config.causal:
        attend_both_ways(model)
    return model


def check_files(model_path: Path, config: ModelConfig, load_format: str = "auto") -> str | None:
    """What `load_model` says of the files before it allocates anything: raises ModelError, → what it warns of. Of a
    model that transformers' code computes that is known only where it is loaded."""
    if config.foreign is not None or load_format == "dummy":
        return None
    with torch.no_grad():
        place = Placement(config.dtype, torch.device("meta"))
        return _prepared(model_path, config, place, load_format, 1, None).note


@dataclass
class _Prepared:
    """A model without weights, and what each of its modules gets."""

    model: Model
    checkpoint: Checkpoint | None
    holders: list[WeightHolder]
    loads: list[Load]
    stored: int  # bytes of the files
    note: str | None  # for the log


def _prepared(
    model_path: Path, config: ModelConfig, place: Placement, load_format: str, max_model_len: int,
    adapter: Adapter | None,
) -> _Prepared:  # fmt: skip
    """By the headers alone. Raises ModelError where the checkpoint does not fit config.json."""
    checkpoint = None if load_format == "dummy" else open_checkpoint(model_path, load_format)
    if checkpoint is not None and config.foreign is not None:
        from ..foreign.files import converted  # it imports transformers

        checkpoint, config = converted(checkpoint, config)
    headers = {} if checkpoint is None else checkpoint.headers
    stored = sum(info.num_bytes for info in headers.values())
    # Less than eight parameters a byte: of one bit each, and with scales, the densest that checkpoints are.
    if headers and (described := count_parameters(config)) > 8 * stored:
        raise ModelError(
            f"config.json describes {described:,} parameters, the weights have {stored:,} bytes: they are "
            "not of one model, download both again"
        )
    config = _named_as_stored(config, headers)
    if checkpoint is not None and config.tie_word_embeddings and config.encoder is None:
        embedding = config.named("model.embed_tokens.weight").removeprefix(_lacking(config, headers))
        if has_own_head(checkpoint, embedding, config.named("lm_head.weight")):
            config = dataclasses.replace(config, tie_word_embeddings=False)
    if checkpoint is not None and adapter is not None:
        checkpoint = MergedCheckpoint(checkpoint, adapter, config)
        headers = checkpoint.headers
        if checkpoint.unties:
            config = dataclasses.replace(config, tie_word_embeddings=False)
    prefix = _lacking(config, headers)
    head = config.named("lm_head.")
    has_head = any(name.startswith(head) for name in headers)
    if prefix and config.encoder is None and not config.tie_word_embeddings and config.generates and not has_head:
        logger.info("the checkpoint has no output matrix: it makes embeddings, and no text")
        config = dataclasses.replace(config, generates=False)
    if headers and config.pictures and config.generates and not has_head:
        # Whether it is tied, of models of pictures either part of config.json may say alone, or neither.
        config = dataclasses.replace(config, tie_word_embeddings=True)
    if config.tie_word_embeddings and any(name.startswith(head) and name != f"{head}weight" for name in headers):
        config = dataclasses.replace(config, tie_word_embeddings=False)  # it is quantised, so not the embedding's
    if getattr(config.quantization, "experts_alone", False) and not has_experts(config):
        raise ModelError("--quantization experts_int8, but the model has no experts: use --quantization int8")
    config = with_stored_experts(config, {name: info.shape for name, info in headers.items()})
    model = make_model(config, place, max_model_len)
    if adapter is not None:
        modules = model.weight_map()
        adapter.check_complete((path for path, (holder, _) in modules.items() if type(holder) is Linear), modules)
    note = None if checkpoint is None else claims_of(model, headers)
    holders = choose_formats(model, None if checkpoint is None else by_module(model, headers, prefix))
    loads = [] if checkpoint is None else match(model, checkpoint, prefix)
    return _Prepared(model, checkpoint, holders, loads, stored, note)


def load_beside(part: Loadable, checkpoint: Checkpoint) -> str | None:
    """What is built beside a model, such as a head that drafts for it, gets its weights. → what there is to warn of, of
    a checkpoint that has this alone. Raises ModelError, before anything is allocated where the checkpoint does not
    fit."""
    with torch.no_grad():
        note = claims_of(part, checkpoint.headers)
        holders = choose_formats(part, by_module(part, checkpoint.headers, ""))
        loads = match(part, checkpoint, "")
        for holder in holders:
            holder.create()
        _load(checkpoint, loads, lambda done, total: None)
        for holder in holders:
            holder.finish()
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    return note


def make_beside(part: Loadable) -> None:
    """The same without files: made-up weights."""
    with torch.no_grad():
        holders = choose_formats(part)
        for holder in holders:
            holder.create()
        fill_with_noise(part, 0, lambda done, total: None)
        for holder in holders:
            holder.finish()


def make_model(config: ModelConfig, place: Placement, max_len: int) -> Model:
    """Without weights: a decoder of our own blocks, or of transformers' code."""
    if config.encoder is not None:
        return cast(Model, Encoder(config, place, max_len))  # all that is asked of one here, and by EncoderRunner
    if config.foreign is None:
        return CausalLM(config, place, max_len)
    from ..foreign.model import TransformersModel  # it imports transformers

    return TransformersModel(config, place, max_len)


def _lacking(config: ModelConfig, headers: dict[str, TensorInfo]) -> str:
    """What the names lack at their beginning, of a model that was saved without its head, as embedding models are."""
    if config.encoder is None:
        return "model." if "embed_tokens.weight" in headers else ""
    prefix, words = config.encoder.prefix, f"{config.encoder.paths['words']}.weight"
    return prefix if words in headers else ""


def _named_as_stored(config: ModelConfig, headers: dict[str, TensorInfo]) -> ModelConfig:
    """With those of the names that checkpoints of this architecture may have which this one has."""
    for names in config.other_names:
        other = dataclasses.replace(config, names=names)
        if any(name.startswith(other.named("model.embed_tokens.")) for name in headers):
            return other
    return config


def _give_back() -> None:
    """What threads needed on the way to the codes, glibc would keep: as much again as a small model."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def count_parameters(config: ModelConfig, size: int = 1, whole_experts: bool = False, stage: Stage = WHOLE) -> int:
    """Of the model as it would be stored without quantisation; a tied output matrix counts once. Allocates nothing.

    size: what the first of so many ranks has, which has most. stage: what it has.
    """
    place = Placement(config.dtype, torch.device("meta"), SingleGroup(0, size), whole_experts, stage)
    model = make_model(dataclasses.replace(config, quantization=None), place, 1)
    holders = choose_formats(model)
    if size > 1:
        for holder in holders:
            holder.create()
        return sum(parameter.numel() for parameter in model.parameters())
    expected = (holder.expected(part) for holder, part in model.weight_map().values())
    return sum(prod(stored.shape) for tensors in expected for stored in tensors.values())


def count_ordered_experts(config: ModelConfig) -> int:
    """Parameters of layers of experts of which some have columns in an order of their own: by the configuration, before
    there are files. Allocates nothing."""
    scheme = config.quantization
    if not getattr(scheme, "orders_columns", False):
        return 0
    place = Placement(config.dtype, torch.device("meta"), SingleGroup(0, 1), False, WHOLE)
    model = make_model(dataclasses.replace(config, quantization=None), place, 1)
    holders = {
        id(holder): holder
        for path, (holder, _) in model.weight_map().items()
        if isinstance(holder, Experts) and scheme.orders(path)  # type: ignore[union-attr]
    }
    return sum(holder.num_experts * holder.spec.expert_size(holder.hidden) for holder in holders.values())


def whole_of(model: Model) -> Model:
    """Itself, or where it is a stage the model that it is of. Allocates nothing."""
    place = model.place
    if place.stage.count == 1:
        return model
    group = SingleGroup(place.tp_rank, place.tp_size)
    place = dataclasses.replace(place, device=torch.device("meta"), group=group, stage=WHOLE)
    return make_model(model.config, place, 1)


def _load_cache_scales(checkpoint: Checkpoint, model: Model) -> None:
    """For a cache of 8 bits, whether there will be one or not: a number or a few a layer."""
    layers, place = model.attention_layers(), model.place
    specs = [layer.attention for layer in model.config.layers]
    heads = [0 if spec is None else spec.kv.num_kv_heads for spec in specs]
    mine = [index for index in place.stage.indices(len(heads)) if heads[index]]
    for layer, scales in read_cache_scales(checkpoint, heads).items():
        if layer in mine:
            keys, values = (scale.narrow(0, *place.span(len(scale))).to(place.device) for scale in scales)
            layers[mine.index(layer)].code_scales = keys, values


def _load(checkpoint: Checkpoint, loads: list[Load], progress: Progress) -> None:
    """From the files straight into the model's modules, a few parts at a time."""
    total = sum(load.num_bytes for load in loads)

    def load_one(load: Load) -> int:
        tensors = {suffix: checkpoint.read(name) for suffix, name in load.names.items()}
        try:
            with torch.no_grad():  # a thread's own setting
                load.holder.load(load.part, tensors)
        except ModelError as error:
            first = next(iter(load.names.values())).rpartition(".")[0]
            raise ModelError(f"{first}: {error}") from None
        return load.num_bytes

    done = 0
    progress(0, total)
    with ThreadPoolExecutor(_LOADER_THREADS, thread_name_prefix="load-weights") as pool:
        try:
            for future in as_completed([pool.submit(load_one, load) for load in loads]):
                done += future.result()
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def fill_with_noise(model: Loadable, seed: int, progress: Callable[[int, int], None]) -> None:
    """Layer by layer on the device, always in the same order: a seed gives the same weights again."""
    device, group = model.place.device, model.place.group
    alike = torch.Generator(device).manual_seed(seed)  # what every rank has
    own = alike if group.size == 1 else torch.Generator(device).manual_seed(seed + 1 + group.rank)
    holders: dict[int, WeightHolder] = {}
    sizes: dict[int, int] = {}
    for holder, part in model.weight_map().values():
        num_elements = sum(prod(stored.shape) for stored in holder.expected(part).values())
        holders[id(holder)] = holder
        sizes[id(holder)] = sizes.get(id(holder), 0) + num_elements * model.place.dtype.itemsize
    done, total = 0, sum(sizes.values())
    progress(0, total)
    for key, holder in holders.items():
        holder.randomize(own if _is_divided(holder) else alike)
        done += sizes[key]
        progress(done, total)


def _is_divided(holder: WeightHolder) -> bool:
    """Whether ranks have parts of it."""
    shape = getattr(holder, "shape", None)
    return isinstance(holder, (Experts, Sinks)) or (isinstance(shape, LinearShape) and shape.rule != "replicated")
