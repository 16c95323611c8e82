"""A model without weights and the headers of a checkpoint held against each other: what each module gets."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from ..errors import ModelError, and_more
from ..files.checkpoint import Checkpoint
from ..foreign.modules import Plain
from ..layers.delta import Vectors
from ..layers.head import Projection
from ..layers.linear import TowerLinear
from ..layers.norm import Norm
from ..models.model import Loadable
from ..quant.format import FLOATS, Format, TensorInfo, named
from ..quant.online import ROUTERS
from ..quant.scheme import check_claims
from ..quant.weights import WeightHolder
from ..vision.tower import PatchProduct

# Scales of a quantised cache and of attention's inputs, under all of the names that they have had: no module's tensors.
_CACHE_SCALE = re.compile(r"\.(q|k|v|kv|prob|prob_output|output)_(scale|zero_point)$")


def claims_of(model: Loadable, headers: dict[str, TensorInfo]) -> str | None:
    needed = {name: info.dtype for name, info in headers.items() if not model.is_ignorable(name)}
    return check_claims(model.config.quantization, model.weight_map(), needed)


def by_module(model: Loadable, headers: dict[str, TensorInfo], prefix: str) -> dict[str, dict[str, TensorInfo]]:
    """Module path → suffix → tensor; `prefix`: what the checkpoint's names lack at their beginning."""
    paths = model.weight_map().keys()
    found: dict[str, dict[str, TensorInfo]] = {path: {} for path in paths}
    for name, info in headers.items():
        path = prefix + name
        while path and path not in paths:
            path = path.rpartition(".")[0]
        if path:
            found[path][(prefix + name)[len(path) + 1 :]] = info
    return found


def choose_formats(model: Loadable, stored: dict[str, dict[str, TensorInfo]] | None = None) -> list[WeightHolder]:
    """→ each module with weights once, though several parts of a checkpoint may go to it; each knows its formats.

    `stored`: module path → suffix → tensor; None: there are no files.
    """
    scheme = model.config.quantization
    formats: dict[int, dict[str, Format]] = {}
    holders: dict[int, WeightHolder] = {}
    for path, (holder, part) in model.weight_map().items():
        holders[id(holder)] = holder
        chosen = formats.setdefault(id(holder), {})
        # No format quantises these.
        plain = isinstance(holder, (Norm, Plain, Vectors, PatchProduct)) or (stored is None and named(path, ROUTERS))
        if isinstance(holder, TowerLinear):  # unless the files have codes of it
            plain = stored is None or all(tensor.dtype in FLOATS for tensor in stored[path].values())
        if scheme is not None and not plain:
            described = None if stored is None else {name: (t.dtype, t.shape) for name, t in stored[path].items()}
            if (format := scheme.format(path, described)) is not None:
                chosen[part] = format
    for key, holder in holders.items():
        holder.choose(formats[key])
    return list(holders.values())


@dataclass
class Load:
    """The tensors of one part, and where they go."""

    holder: WeightHolder
    part: str
    names: dict[str, str] = field(default_factory=dict)  # suffix → name in the checkpoint
    num_bytes: int = 0


def match(model: Loadable, checkpoint: Checkpoint, prefix: str) -> list[Load]:
    """Pair what the model expects with what the checkpoint has; what is missing, left over or misshapen is an error.

    `prefix`: what the checkpoint's names lack at their beginning.
    """
    headers = checkpoint.headers
    loads: list[Load] = []
    missing: list[str] = []
    lacking: list[WeightHolder] = []
    for path, (holder, part) in model.weight_map().items():
        load = Load(holder, part)
        try:
            expected = holder.expected(part)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        for suffix, stored in expected.items():
            name = f"{path}.{suffix}".removeprefix(prefix)
            info = headers.get(name)
            if info is None:
                if not stored.optional:
                    missing.append(name)
                    lacking.append(holder)
                continue
            if info.shape != stored.shape:
                raise ModelError(
                    f"{name} has shape {list(info.shape)} in {info.file.name}, config.json makes it "
                    f"{list(stored.shape)}: the weights and the config are not of one model, download both again"
                )
            if info.dtype not in stored.dtypes:
                raise ModelError(
                    f"{name} is stored as {info.dtype} in {info.file.name}, expected {' or '.join(stored.dtypes)}: the "
                    "weights do not fit config.json, download both again"
                )
            load.names[suffix] = name
            load.num_bytes += info.num_bytes
        if load.names:
            loads.append(load)
    if missing and all(isinstance(holder, Projection) for holder in lacking):
        raise ModelError(
            f"the checkpoint lacks {missing[0]}{and_more(missing)}: it has no head that classifies; leave out --task "
            "and --convert, or, where they are not given, download it again"
        )
    if missing:
        raise ModelError(
            f"the checkpoint lacks {missing[0]}{and_more(missing)}{_found_instead(missing[0], headers)}: the weights "
            "are incomplete or do not fit config.json, download both again"
        )
    taken = {name for load in loads for name in load.names.values()}
    extra = [name for name in headers if name not in taken and not model.is_ignorable(name)]
    if model.config.quantization is not None:
        extra = [name for name in extra if not _CACHE_SCALE.search(name) and not _is_zero_bias(checkpoint, name)]
    if extra:
        raise ModelError(
            f"the checkpoint has {extra[0]}{and_more(extra)}, which {model.config.architecture} has no place for: the "
            "weights do not fit config.json, download both again"
        )
    return loads


def _found_instead(missing: str, headers: Collection[str]) -> str:
    """The name that a file has in the place of one that is missing: with more at its beginning, as wrappers of training
    leave it there, or with less; else the names that there are."""
    for name in headers:
        if name.endswith(f".{missing}"):
            more = name.removesuffix(missing)
            return f", and has {name}: its names begin with {more!r}, save it without that, or"
        if missing.endswith(f".{name}"):
            return f", and has {name}: its names lack {missing.removesuffix(name)!r} at their beginning, or"
    names = sorted(headers)[:3]
    return (
        f", and has {', '.join(names)}{', …' if len(headers) > len(names) else ''}" if names else ", and has no tensor"
    )


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Some libraries that quantise give every module a bias, whether the model has one or not."""
    info = checkpoint.headers[name]
    return name.endswith(".bias") and info.dtype in FLOATS and not checkpoint.read(name).any()
