"""AutoRound: the layouts of GPTQ and AWQ, and each layer's own bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .awq import Awq, AwqScheme
from .gptq import Gptq, GptqScheme
from .settings import Headers, entries, expression, layout, names

# Plain auto_round, of asymmetric matrices, stores zeros as they are. All other files of GPTQ's layout store zero - 1.
VERSIONS = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_gptq": "gptq", "gptq": "gptq"}
VERSIONS["auto_round"] = "gptq_v2"
AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq")
PLAIN_BITS = 16  # from here on a layer is not quantised


class _Layer(GptqScheme):
    """5 to 7 bits are streams like the others."""

    widths = range(2, 9)


class AutoRoundScheme:
    """quant_method auto-round (intel/auto-round)."""

    method = "auto-round"

    def __init__(self, config: Mapping[str, Any]) -> None:
        packing = layout(config, "packing_format", among=(*VERSIONS, *AWQ), default="auto_round:auto_gptq")
        self.packing = packing
        self.base = self._scheme(config)
        self.blocks = names({"names": _as_list(config.get("block_name_to_quantize"))}, "names")
        self.kept = [expression(name, "modules_to_not_convert") for name in names(config, "modules_to_not_convert")]
        self.layers: dict[str, GptqScheme | AwqScheme | None] = {}
        self.patterns: list[tuple[re.Pattern[str], GptqScheme | AwqScheme | None]] = []
        for name, entry in entries(config, "extra_config").items():
            bits = entry.get("bits")
            plain = isinstance(bits, int) and bits >= PLAIN_BITS
            own = None if plain else self._scheme({**config, **entry})
            self.layers[name] = own
            if re.fullmatch(r"[\w.-]+", name) is None:
                self.patterns.append((expression(name, "extra_config"), own))

    def format(self, path: str, stored: Headers | None) -> Gptq | Awq | None:
        scheme, named = self._own(path)
        if stored is not None:
            return (scheme or self.base).format(path, stored)
        if scheme is None or any(pattern.search(path) for pattern in self.kept):
            return None
        if named:
            return scheme.base
        if self.blocks and not any(path == block or path.startswith(block + ".") for block in self.blocks):
            return None
        return scheme.format(path, None)

    def _own(self, path: str) -> tuple[GptqScheme | AwqScheme | None, bool]:
        """What the path is stored as, and whether the configuration names it."""
        if path in self.layers:
            return self.layers[path], True
        for pattern, scheme in self.patterns:
            if pattern.search(path):
                return scheme, True
        return self.base, False

    def _scheme(self, config: Mapping[str, Any]) -> GptqScheme | AwqScheme:
        settings = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
        if self.packing in AWQ:
            return AwqScheme({**settings, "zero_point": not settings.get("sym", True)})
        return _Layer({**settings, "checkpoint_format": VERSIONS[self.packing]})


def _as_list(blocks: Any) -> Any:
    """ "model.layers", "model.layers,model.vision", or lists of blocks."""
    return [name.strip() for name in blocks.split(",")] if isinstance(blocks, str) else blocks
