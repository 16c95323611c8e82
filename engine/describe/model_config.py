"""A model as its config.json describes it, and what computes it: a family of vserve's or transformers' class."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ModelError
from ..families.encoders import EncoderFamily, EncoderSpec, find_encoder
from ..families.family import Family
from ..families.head_spec import HeadSpec
from ..families.layer_spec import AttentionSpec, FrameSpec, KVSpec, LayerSpec, Names, StateSpec
from ..families.raw_config import architectures, model_type
from ..families.refused import refusal
from ..families.registry import find_family, generates_by_name, own_family
from ..families.vision_spec import VisionSpec

if TYPE_CHECKING:
    import torch  # at run time only where a dtype is made: reading the file alone should not wait for torch

    from ..quant.format import Scheme


@dataclass(frozen=True)
class ModelConfig:
    """A transformer as its config.json describes it: what its layers are, and what is around them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    frame: FrameSpec = field(default_factory=FrameSpec)
    names: Names = ()  # of the checkpoint, where they are not llama's
    other_names: tuple[Names, ...] = ()  # that checkpoints of the same architecture have, too
    ignored: tuple[str, ...] = ()  # beginnings of names in the checkpoint that nothing needs
    longest: int = 0  # tokens that a context may have at most, 0: as many as the positions allow
    quantization: Scheme | None = None  # how the checkpoint stores what it has quantised
    head: HeadSpec | None = None  # what is behind the pooled hidden state
    generates: bool = True  # it has an output matrix
    pictures: bool = False  # it is a model of pictures and text
    vision: VisionSpec | None = None  # what looks at them; None: the text alone is loaded
    given_class: str = ""  # that config.json names, where its model_type alone is known
    foreign: Foreign | None = None  # a model that transformers' code computes; None: one of vserve's own families
    causal: bool = True  # a token sees those before it alone; else the whole text: nothing is cached or generated
    encoder: EncoderSpec | None = None  # a model of BERT's shape; None: a decoder

    @property
    def max_model_len(self) -> int:
        """Tokens the model can handle by its own word: linear and dynamic RoPE stretch max_position_embeddings, yarn
        stretches the original length; llama3 and longrope configs already name the stretched one. Of layers that are
        stretched in several ways, the least counts."""
        ropes = {layer.attention.rope for layer in self.layers if layer.attention is not None}
        stretched = [int(rope.original_length * rope.factor) for rope in ropes if rope is not None and rope.stretches]
        length = min(stretched, default=self.max_position_embeddings)
        return min(length, self.longest or length)

    def kv_specs(self) -> list[KVSpec]:
        """Of the layers that keep keys and values."""
        found = (layer.attention.kv for layer in self.layers if layer.attention is not None)
        return [spec for spec in found if spec.num_kv_heads]

    def state_specs(self) -> list[StateSpec]:
        """Of the layers that keep a state in the place of keys and values."""
        return [layer.state for layer in self.layers if layer.state is not None]

    @property
    def has_state(self) -> bool:
        return bool(self.state_specs())

    def log_lines(self, text_is_enough: bool) -> Iterator[str]:
        """What a start says of it. text_is_enough: --language-model-only."""
        if self.given_class:
            yield (
                f"{self.given_class} is no class known here: it is computed as {self.architecture}, by its model_type"
            )
        if self.pictures and self.vision is None and not text_is_enough:
            yield (
                f"{self.architecture}: its text is served, a request with a picture is refused (--language-model-only "
                "leaves this line out)"
            )

    def named(self, path: str) -> str:
        """A path, in llama's names, as the checkpoint names it."""
        for ours, theirs in self.names:
            path = path.replace(ours, theirs)
        return path


def few_layers(config: ModelConfig) -> ModelConfig:
    """The same with a layer of each kind, and the last one again, which does less than others; without a tower."""
    return replace(config, layers=(*dict.fromkeys(config.layers), config.layers[-1]), vision=None)


_REMOTE = "AutoModelForCausalLM"  # the key of auto_map whose class can generate


@dataclass(frozen=True)
class Foreign:
    """A model that transformers' code, or code of the model's own folder, computes."""

    architecture: str  # of the class
    values: Mapping[str, Any]  # config.json
    code: Path | None = None  # the folder whose code it is; None: transformers'
    layout: Layout | None = None  # what a probe of it found
    coded_experts: bool = False  # the checkpoint has them quantised, one each

    def log_line(self, asked: str) -> str:
        """The line that says whose code computes the model, and why. `asked`: --model-impl."""
        whose = "transformers' code" if self.code is None else f"the code in {self.code}"
        why = "there is no family of our own" if asked == "auto" else f"--model-impl {asked}"
        return f"{self.architecture} is computed by {whose}, on vserve's cache and kernels ({why})"


def choose(
    raw: Mapping[str, Any], implementation: str = "auto", folder: Path | None = None, trusted: bool = False
) -> Family | EncoderFamily | Foreign:
    """By --model-impl and --trust-remote-code. Raises ModelError where neither can serve a config.json with `raw`."""
    names = architectures(raw)
    if (encoder := find_encoder(raw)) is not None:
        if implementation == "transformers":
            raise ModelError(
                f"--model-impl transformers: {(names or [encoder.name])[0]} is an encoder, which vserve computes "
                "itself: leave it out"
            )
        return encoder
    if implementation in ("vserve", "vllm"):
        return find_family(raw)
    if implementation == "auto":
        try:
            return find_family(raw)
        except ModelError as error:
            own = error
    else:
        if (family := own_family(raw)) is not None and not family.foreign:
            raise ModelError(
                f"--model-impl transformers: {family.architecture} keeps recurrent states, for which transformers' "
                "code has no cache here; vserve computes it itself: leave it out"
            )
        own = ModelError(
            f"architecture {names[0] if names else 'unnamed'} is not supported: transformers has no such decoder; "
            "leave --model-impl transformers out, or use another model"
        )
    code = raw.get("auto_map")
    remote = code.get(_REMOTE) if isinstance(code, Mapping) else None
    if remote and trusted and folder is not None:
        return Foreign(str(remote).rpartition(".")[2], raw, folder)
    if (line := refusal(names)) is not None:
        raise ModelError(line)
    known = _decoders()
    classes = {name.lower(): name for name in known.values()}  # PhiMoE is written in two ways
    for name in (found for given in names for found in (given, f"{given.removesuffix('Model')}ForCausalLM")):
        if name.lower() in classes:
            return Foreign(classes[name.lower()], raw)
    if (not names or generates_by_name(raw)) and (kind := model_type(raw)) in known:
        return Foreign(known[kind], raw)
    if remote:
        raise ModelError(
            f"architecture {names[0] if names else remote} is code of the model's own folder, which runs only where it "
            "is trusted: read it, then add --trust-remote-code"
        )
    raise own


@cache
def _decoders() -> dict[str, str]:
    """Model type → class of transformers' decoders, read of its source: to import it takes seconds."""
    package = find_spec("transformers")
    for folder in (package.submodule_search_locations or ()) if package else ():
        source = Path(folder, "models", "auto", "modeling_auto.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                (target,) = node.targets
                if isinstance(target, ast.Name) and target.id == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
                    return dict(ast.literal_eval(node.value.args[0]))
    return {}


@dataclass(frozen=True)
class Cut:
    """How one matrix is divided: a product's, or the stacked ones of experts."""

    rule: Literal["column", "row"]  # as LinearShape has it
    length: int  # of the rows, or columns, that are divided
    unit: int = 1  # of these that stay together: a head
    whole: bool = False  # column: each rank gets the results of all; row: each has all of the input
    packed: bool = False  # of experts: two halves, each of which is divided


@dataclass(frozen=True)
class Layout:
    """Paths are those of the model with its head ("model.layers.0.self_attn")."""

    attention: tuple[str, ...]  # the modules that call attention, in their order; one a layer of the config
    products: tuple[str, ...]  # nn.Linear modules that are called
    siblings: tuple[tuple[str, ...], ...]  # of these, those of one module that multiply the same input
    norms: Mapping[str, tuple[float, bool]]  # RMS norms → (eps, whether their weights are less one)
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # of products, and of parameters
    summed: tuple[str, ...] = ()  # experts: each rank has a summand of their results
    undivided: str = "it was not looked at"  # why it cannot be divided; "": it can

    def is_divided(self, attention: str) -> bool:
        """Whether each rank has some of its heads."""
        return any(cut.rule == "column" and not cut.whole for cut in self._cuts_of(attention))

    def fault(self, layers: Sequence[LayerSpec], size: int) -> str | None:
        """What cannot be divided over so many ranks, for people."""
        for path, layer in zip(self.attention, layers, strict=True):
            spec = layer.attention
            if not self.is_divided(path) or not isinstance(spec, AttentionSpec):
                continue
            heads, keys = spec.num_heads, spec.num_kv_heads
            whole_heads = all(cut.unit > 1 for cut in self._cuts_of(path) if cut.rule == "column")
            if heads % size or (keys % size and (size % keys or not whole_heads)):
                return f"{heads} attention heads over {keys} of keys and values"
        for path, cut in self.cuts.items():
            units = cut.length // cut.unit // (2 if cut.packed else 1)
            if units % size and (cut.unit == 1 or size % units):
                what = "rows" if cut.rule == "column" else "columns"
                return f"{units} heads of {path}" if cut.unit > 1 else f"{units} {what} of {path}"
        return None

    def _cuts_of(self, attention: str) -> list[Cut]:
        return [cut for path, cut in self.cuts.items() if path.rpartition(".")[0] == attention]
