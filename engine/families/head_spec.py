"""What stands behind the pooled hidden state of a model, as its folder describes it: a classifier, a reward, or the
Dense modules of an embedding model. Read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelError
from ..options.config_checks import Purpose
from ..options.model_path import is_gguf
from .raw_config import architectures

SEQUENCE, TOKENS, REWARD, PROCESS = (
    "ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForProcessRewardModel",
)  # fmt: skip
SUFFIXES = (SEQUENCE, TOKENS, REWARD, PROCESS)
MODULES = "modules.json"
RERANKER_TOKENS = ("no", "yes")  # of Qwen3-Reranker, a CausalLM that is asked for one of the two
DIFFERENCE, ROWS = METHODS = ("from_2_way_softmax", "no_post_processing")  # of classifier_from_token, as vLLM has them
# What is read of config.json here.
KEYS = (
    "classifier_activation", "classifier_bias", "classifier_from_token", "classifier_pooling", "id2label",
    "is_original_qwen3_reranker", "matryoshka_dimensions", "method", "num_labels", "pooling", "problem_type",
    "sbert_ce_default_activation_function", "sentence_transformers",
)  # fmt: skip
_ACTIVATIONS = {
    "": "", "Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid", "SiLU": "silu",
}  # fmt: skip
MAX_LABELS = 1 << 20


@dataclass(frozen=True)
class ProjectionSpec:
    """act(x Wᵀ + b), from `columns` to `rows` numbers."""

    path: str  # of the module in the checkpoint
    columns: int
    rows: int
    bias: bool = False
    activation: str = ""  # tanh | relu | gelu | sigmoid | silu
    folder: Path | None = None  # that has its tensors; None: the checkpoint's
    norm: str = ""  # the path of a LayerNorm behind that
    norm_eps: float = 0.0
    norm_bias: bool = False


@dataclass(frozen=True)
class HeadSpec:
    task: Literal["classify", "reward", "embed"]
    layers: tuple[ProjectionSpec, ...]
    labels: tuple[str, ...] = ()
    activation: Literal["", "sigmoid", "softmax"] = ""  # logits → what a client gets unless it asks for them raw
    by_token: bool = False  # each token has classes of its own
    steps: bool = False  # the tokens that end a step of reasoning have
    # Rows of the output matrix that take the place of a classifier's; of two, their difference (second - first).
    token_ids: tuple[int, ...] = ()
    reranks: bool = False  # it is Qwen3-Reranker, or asks for the same two tokens
    # Which hidden state classes are made of, whatever a request says: the first ("cls"), all tokens' mean ("mean"), or
    # all, of whose logits the mean is taken ("late"). "": the request says it.
    pooled: Literal["", "cls", "mean", "late"] = ""

    @property
    def width(self) -> int:
        """Numbers that come out."""
        return len(self.labels) or self.layers[-1].rows


def base_name(architecture: str) -> str:
    """The architecture whose layers one with a head has."""
    for suffix in (*SUFFIXES, "ForMaskedLM", "Model"):
        if architecture.endswith(suffix):
            return f"{architecture.removesuffix(suffix)}ForCausalLM"
    return architecture


def read_head(folder: Path | None, raw: Mapping[str, Any], hidden: int, purpose: Purpose) -> HeadSpec | None:
    """None: the pooled hidden state is the embedding. `folder`: None where only config.json is looked at.

    Raises ModelError for what cannot be run.
    """
    name = (architectures(raw) or [""])[0]
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    if suffix is not None and purpose.runner == "generate":
        raise ModelError(f"--runner generate: {name} has no output matrix, it generates no text: leave it out")
    if purpose.convert != "embed":
        if raw.get("classifier_from_token") is not None or raw.get("is_original_qwen3_reranker"):
            return _of_tokens(folder, raw, hidden)
        if suffix in (REWARD, PROCESS):
            return _reward(hidden, suffix == PROCESS)
        if suffix is not None or purpose.classifies:
            if suffix is None and raw.get("model_type") == "qwen3" and raw.get("id2label") is None:
                return _of_tokens(folder, raw, hidden)  # of this family, that is what its reranker is
            return _classifier(raw, hidden, suffix == TOKENS)
    layers = () if folder is None or is_gguf(folder) else read_dense(folder, hidden)
    return HeadSpec("embed", layers) if layers else None


def _classifier(raw: Mapping[str, Any], hidden: int, by_token: bool) -> HeadSpec:
    labels = read_labels(raw)
    layers, pooled = _products(raw, hidden, len(labels), by_token)
    return HeadSpec("classify", layers, labels, _activation(raw, len(labels)), by_token, pooled=pooled)


# Of encoders: paths of the products before the classes, and of these.
_POOLERS = {"Bert": "bert", "NomicBert": "nomic_bert", "New": "new", "Gte": "gte"}
_DENSE = {"Roberta": "tanh", "XLMRoberta": "tanh", "Camembert": "tanh", "Electra": "gelu"}


def _products(
    raw: Mapping[str, Any], hidden: int, num_labels: int, by_token: bool
) -> tuple[tuple[ProjectionSpec, ...], Any]:
    """The products that make classes, and what they are made of (HeadSpec.pooled), as transformers has them."""
    name = (architectures(raw) or [""])[0]
    kind = base_name(name).removesuffix("ForCausalLM")

    def classes(path: str, bias: bool = True) -> ProjectionSpec:
        return ProjectionSpec(path, hidden, num_labels, bias)

    def dense(path: str, activation: str) -> ProjectionSpec:
        return ProjectionSpec(path, hidden, hidden, True, activation)

    if kind == "ModernBert":
        activation = str(raw.get("classifier_activation") or "gelu")
        if activation not in _ACTIVATIONS.values():
            known = ", ".join(name for name in _ACTIVATIONS.values() if name)
            raise ModelError(f"config.json: classifier_activation is {activation!r}, supported are {known}")
        head = ProjectionSpec(
            "head.dense", hidden, hidden, bool(raw.get("classifier_bias")), activation, norm="head.norm",
            norm_eps=float(raw.get("norm_eps") or 1e-5), norm_bias=bool(raw.get("norm_bias")),
        )  # fmt: skip
        return (head, classes("classifier")), "" if by_token else _classifier_pooling(raw, "cls", ("cls", "mean"))
    if by_token and kind in (*_POOLERS, *_DENSE, "EuroBert"):
        return (classes("classifier"),), ""
    if kind in _POOLERS:
        return (dense(f"{_POOLERS[kind]}.pooler.dense", "tanh"), classes("classifier")), "cls"
    if kind in _DENSE:
        return (dense("classifier.dense", _DENSE[kind]), classes("classifier.out_proj")), "cls"
    if kind == "EuroBert":
        pooled = _classifier_pooling(raw, "late", ("bos", "mean", "late"))
        return (dense("dense", "gelu"), classes("classifier")), "cls" if pooled == "bos" else pooled
    pooled = {"avg": "mean", "cls": "cls"}.get(str(raw.get("pooling")), "") if kind == "LlamaBidirectional" else ""
    return (classes("score", bias=by_token),), pooled


def _classifier_pooling(raw: Mapping[str, Any], default: str, known: tuple[str, ...]) -> str:
    found = raw.get("classifier_pooling") or default
    if found not in known:
        raise ModelError(f"config.json: classifier_pooling is {found!r}: choose one of {', '.join(known)}")
    return str(found)


def _reward(hidden: int, steps: bool) -> HeadSpec:
    """Of Qwen2.5-Math's reward models: two products; with `steps`, how likely each step is wrong and right."""
    labels = ("LABEL_0", "LABEL_1") if steps else ("LABEL_0",)
    layers = (
        ProjectionSpec("score.0", hidden, hidden, bias=True, activation="relu"),
        ProjectionSpec("score.2", hidden, len(labels), bias=True),
    )
    return HeadSpec("reward", layers, labels, "softmax" if steps else "", by_token=True, steps=steps)


def _of_tokens(folder: Path | None, raw: Mapping[str, Any], hidden: int) -> HeadSpec:
    tokens = raw.get("classifier_from_token")
    tokens = list(RERANKER_TOKENS) if tokens is None else tokens
    method = raw.get("method") or (DIFFERENCE if len(tokens) == 2 else ROWS)
    if method not in METHODS:
        raise ModelError(f"config.json: method is {method!r}: choose one of {', '.join(METHODS)}")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"config.json: classifier_from_token is {tokens!r}, a list of tokens belongs there")
    if method == DIFFERENCE and len(tokens) != 2:
        raise ModelError(f"config.json: classifier_from_token has {len(tokens)} tokens, {DIFFERENCE} takes two")
    num_labels = 1 if method == DIFFERENCE else len(tokens)
    labels = tuple(f"LABEL_{i}" for i in range(num_labels))
    ids = () if folder is None else _token_ids(folder, tokens)
    reranks = bool(raw.get("is_original_qwen3_reranker")) or tokens == list(RERANKER_TOKENS)
    layer = ProjectionSpec("lm_head", hidden, num_labels)
    return HeadSpec("classify", (layer,), labels, _activation(raw, num_labels), token_ids=ids, reranks=reranks)


def _token_ids(folder: Path, tokens: list[str]) -> tuple[int, ...]:
    file = folder / "tokenizer.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        known = dict(content["model"]["vocab"])
        known |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        missing = [token for token in tokens if not isinstance(known.get(token), int)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"classifier_from_token needs the ids of {', '.join(tokens)}, and {file} cannot be read "
            f"({type(error).__name__}): download it again"
        ) from None
    if missing:
        raise ModelError(f"classifier_from_token: {missing[0]!r} is no token of {file}: name one that is")
    return tuple(known[token] for token in tokens)


def read_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """In the order of their numbers; two where nothing is said, as transformers has it. Raises ModelError."""
    named, count = raw.get("id2label"), raw.get("num_labels")
    if named is None:
        count = 2 if count is None else count
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
            raise ModelError(f"config.json: num_labels is {count!r}, a whole number above 0 belongs there")
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, dict) or not named:
        raise ModelError(f"config.json: id2label is {named!r:.80}, an object of numbers and labels belongs there")
    try:
        labels = {int(number): str(label) for number, label in named.items()}
    except ValueError:
        labels = {}
    if sorted(labels) != list(range(len(named))):
        raise ModelError(f"config.json: id2label has the keys {', '.join(map(str, named))[:80]}: they count from 0 on")
    return tuple(labels[number] for number in range(len(labels)))


def _activation(raw: Mapping[str, Any], num_labels: int) -> Any:
    """What sentence-transformers' files say of a cross-encoder, then transformers' problem_type, then the number."""
    described = raw.get("sentence_transformers")
    name = described.get("activation_fn") if isinstance(described, dict) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if kind not in ("Identity", "Sigmoid", "Softmax"):
            raise ModelError(f"config.json: the activation of its scores is {name!r}: Identity or Sigmoid is run")
        return "" if kind == "Identity" else kind.lower()
    problems = {"regression": "", "multi_label_classification": "sigmoid", "single_label_classification": "softmax"}
    if (problem := raw.get("problem_type")) is not None and problem not in problems:
        raise ModelError(f"config.json: problem_type is {problem!r}: choose one of {', '.join(problems)}")
    if problem in ("regression", "multi_label_classification"):
        return problems[problem]
    return "sigmoid" if num_labels == 1 else "softmax"


def read_dense(folder: Path, hidden: int) -> tuple[ProjectionSpec, ...]:
    """The Dense modules behind a pooled embedding, as sentence-transformers writes them: () where there are none, or
    where other modules are between them. Raises ModelError for broken files."""
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        types = [str(module["type"]).rpartition(".")[2] for module in modules]
        names = [str(module.get("path") or "") for module in modules]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()  # the server's reader says what is wrong with it
    middle = types[2:-1] if types[-1:] == ["Normalize"] else types[2:]
    if types[:2] != ["Transformer", "Pooling"] or not middle or set(middle) != {"Dense"}:
        return ()
    layers: list[ProjectionSpec] = []
    for name in names[2 : 2 + len(middle)]:
        layers.append(_dense(folder / name, layers[-1].rows if layers else hidden))
    return tuple(layers)


def _dense(folder: Path, columns: int) -> ProjectionSpec:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        given, rows = int(config["in_features"]), int(config["out_features"])
        activation = str(config.get("activation_function") or "").rpartition(".")[2]
        source = config.get("module_input_name") or "sentence_embedding"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is broken ({type(error).__name__}): download it again") from None
    if given != columns or rows < 1:
        raise ModelError(f"{file}: {given} → {rows} features, before it come {columns}: download the folder again")
    if activation not in _ACTIVATIONS:
        known = ", ".join(name for name in _ACTIVATIONS if name)
        raise ModelError(f"{file}: activation_function is {activation!r}, supported are {known}")
    if source != "sentence_embedding":
        raise ModelError(f"{file}: module_input_name is {source!r}, supported is sentence_embedding")
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder, and modules.json names it: download the model again")
    return ProjectionSpec("linear", columns, rows, config.get("bias") is not False, _ACTIVATIONS[activation], folder)
