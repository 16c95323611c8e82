"""Who computes a model: a family of vserve's own, or transformers' class of that name. Decided without torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..families.encoders import EncoderFamily, find_encoder
from ..families.family import Family
from ..families.raw_config import architectures, model_type
from ..families.refused import refusal
from ..families.registry import find_family

if TYPE_CHECKING:
    from .foreign_layout import Layout

_REMOTE = "AutoModelForCausalLM"  # the key of auto_map whose class can generate


@dataclass(frozen=True)
class Foreign:
    """A model that transformers' code, or code of the model's own folder, computes."""

    architecture: str  # of the class
    values: Mapping[str, Any]  # config.json
    code: Path | None = None  # the folder whose code it is; None: transformers'
    layout: Layout | None = None  # what a probe of it found

    def told(self, asked: str) -> str:
        """For the log: who computes it. `asked`: --model-impl."""
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
    for name in (found for given in names for found in (given, f"{given.removesuffix('Model')}ForCausalLM")):
        if name in known.values():
            return Foreign(name, raw)
    if not names and (kind := model_type(raw)) in known:
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
