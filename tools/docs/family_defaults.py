"""configs/families.json holds the defaults of transformers' config classes: this script writes it anew.

Of every family of engine/families/ that transformers has a class for, and of the keys that some family reads.
"""

from __future__ import annotations

import ast
import json
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vserve.engine.families.registry import BOTH_WAYS, FAMILIES

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "configs" / "families.json"
# Keys that are read in one way for all families, without these defaults.
ELSEWHERE = {
    "architectures", "classifier_pooling", "dtype", "id2label", "pad_token_id", "problem_type", "rope_parameters",
    "use_bidirectional_attention",
}  # fmt: skip


def keys_read() -> set[str]:
    """Every string in the code that reads config.json: more than the keys, and all of these."""
    paths = [*(ROOT / "engine" / "families").glob("*.py"), *(ROOT / "engine" / "describe").glob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)} - ELSEWHERE


def defaults(config: type, keys: set[str]) -> dict[str, Any]:
    values = {one.name: one.default if one.default is not MISSING else None for one in fields(config)}
    theta = getattr(config, "default_theta", 10_000.0)  # an object by kind of layer in Gemma 3
    if (theta := theta["global"] if isinstance(theta, dict) else theta) != 10_000.0:
        values["rope_theta"] = theta
    # JSON has no word for a limit that is none.
    found = {key: None if isinstance(value, tuple) and inf in value else value for key, value in values.items()}
    return {key: value for key, value in sorted(found.items()) if key in keys}


def table() -> str:
    keys, rows = keys_read(), {}
    for family in (*FAMILIES, *BOTH_WAYS):
        if not family.like:
            config = CONFIG_MAPPING[family.model_type]
            config = config.sub_configs[family.nested] if family.nested else config
            rows[family.model_type] = json.dumps(defaults(config, keys))
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {row}" for name, row in sorted(rows.items())) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(table())
