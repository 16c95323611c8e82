"""How a model makes embeddings: what its folder says of it, in sentence-transformers' files, and --pooling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError
from ...engine.files.gguf_file import read_gguf
from ...engine.link.sampling_params import CLS, LAST, MEAN, POOLINGS
from ...engine.options.model_path import is_gguf
from .defaults import read_json

MODULES = "modules.json"
_KINDS = {
    "pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS,
    "lasttoken": LAST, "mean": MEAN, "cls": CLS,
}  # fmt: skip
_GGUF_KINDS = {1: MEAN, 2: CLS, 3: LAST}


@dataclass(frozen=True)
class PoolingDefaults:
    kind: str = LAST
    normalize: bool = True
    source: str = "default"
    problem: str | None = None  # why this server cannot make the model's embeddings
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name, what is put before texts
    default_prompt: str | None = None  # the name of the one that is put before all
    max_tokens: int | None = None  # of an input
    matryoshka: tuple[int, ...] = ()  # the dimensions that it was trained for; (): any
    dimensions: int | None = None  # of requests that say none; None: all
    activate: bool = True  # where a request says nothing, classes are probabilities; otherwise logits
    step_tag: int | None = None  # the token that ends a step, for models that rate steps of reasoning
    task: str | None = None  # of /pooling, where a request says none; None: what the model is for
    longest: int | None = None  # tokens of an input that is embedded in pieces; 0: any number, None: never

    @property
    def prefix(self) -> str:
        """What stands before each text, where nothing else is asked for."""
        return self.prompts.get(self.default_prompt or "", "")


def read_pooling(folder: Path, asked: str, normalized: bool | None = None, default: str = LAST) -> PoolingDefaults:
    """`asked`: --pooling; `normalized`: whether their length becomes 1, None where no option says.

    Where nobody says anything, it is of `default` and length 1.

    Raises ConfigError for files that are no JSON, or a way of pooling that does not exist.
    """
    if asked not in ("auto", *POOLINGS):
        raise ConfigError(f"--pooling is {asked!r}: choose one of auto, {', '.join(POOLINGS)}")
    if is_gguf(folder):
        return _of_gguf(folder, asked, normalized is not False)
    modules = _modules(folder / MODULES)
    types = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    normalize = not modules or "Normalize" in types
    if normalized is not None:
        normalize = normalized
    if asked != "auto":
        return PoolingDefaults(asked, normalize, "flag")
    known = ("Transformer", "Pooling", "Normalize", "Dense")
    unknown = [name for name in types if name not in known]
    if "Dense" in types and types.index("Dense") < 2:  # of every token
        unknown.append("Dense")
    if unknown:
        problem = f"{MODULES} has the module {unknown[0]!r}, which is not supported"
        return PoolingDefaults(default, normalize, MODULES, problem)
    if "Pooling" not in types:
        return PoolingDefaults(default, normalize)
    path = folder / str(modules[types.index("Pooling")].get("path") or "1_Pooling") / "config.json"
    config, name = read_json(path), f"{path.parent.name}/{path.name}"
    modes = [mode for mode, value in config.items() if mode.startswith("pooling_mode_") and value is True]
    if isinstance(mode := config.get("pooling_mode"), str):  # the newer form
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _KINDS:
        problem = f"{name} asks for pooling {' and '.join(modes) or 'of no kind'}, which is not supported"
        return PoolingDefaults(default, normalize, name, problem)
    if config.get("include_prompt") is False and _KINDS[modes[0]] == MEAN:
        problem = f"{name} leaves the tokens of prompts out of the mean (include_prompt), which is not supported"
        return PoolingDefaults(MEAN, normalize, name, problem)
    return PoolingDefaults(_KINDS[modes[0]], normalize, name)


def read_embedding_files(folder: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of PoolingDefaults that other files say: prompts, the longest input, dimensions. `described`: config.json.

    Raises ConfigError for what no model can mean.
    """
    if is_gguf(folder):
        return {}
    found: dict[str, Any] = {}
    name = "config_sentence_transformers.json"
    settings = read_json(folder / name)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{name}: prompts is {prompts!r:.60}, an object of names and texts belongs there: correct it")
    if default is not None and default not in prompts:
        raise ConfigError(f"{name}: default_prompt_name is {default!r:.60}, which prompts do not have: correct it")
    found |= {"prompts": prompts, "default_prompt": default}
    name = "sentence_bert_config.json"
    most = read_json(folder / name).get("max_seq_length")
    if most is not None and not _is_count(most):
        raise ConfigError(f"{name}: max_seq_length is {most!r:.60}, a whole number above 0 belongs there: correct it")
    sizes = described.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(map(_is_count, sizes)):
        raise ConfigError(f"config.json: matryoshka_dimensions is {sizes!r:.60}, a list of numbers belongs there")
    return found | {"max_tokens": most, "matryoshka": tuple(sizes)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of_gguf(path: Path, asked: str, normalize: bool) -> PoolingDefaults:
    """The file names the kind by its number in llama.cpp, and never the length."""
    if asked != "auto":
        return PoolingDefaults(asked, normalize, "flag")
    keys = read_gguf(path).metadata
    key = f"{keys.get('general.architecture')}.pooling_type"
    number = keys.get(key, 0)
    if number in _GGUF_KINDS:
        return PoolingDefaults(_GGUF_KINDS[number], normalize, key)
    problem = None if number == 0 else f"{key} is {number!r}, which is not supported"
    return PoolingDefaults(normalize=normalize, problem=problem)


def _modules(path: Path) -> list[dict[str, Any]]:
    """[] where the folder is not of sentence-transformers. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} of {str(path.parent)!r} is no JSON ({error}): repair or delete it") from None
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        raise ConfigError(f"{path.name} of {str(path.parent)!r} holds no list of modules: repair or delete it")
    return content
