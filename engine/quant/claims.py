"""Whether a checkpoint's configuration and its files agree that it is quantised; no torch.

Files decide which matrices are. So one whose configuration claims what no file has is a plain model with a word too
many (somebody dequantised it, or merged an adapter, and kept config.json): it is served as it is, with a warning, for
it takes more memory than its name promises. The other way round nothing can be served: codes alone mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ModelError
from .format import FLOATS, Scheme
from .online import OnlineScheme

BLOCKS = "_blocks"  # experts of gpt-oss
# Ends of names that only quantised tensors have → what writes them.
_SIGNS = {
    "qweight": "GPTQ or AWQ", "weight_packed": "compressed-tensors", "W_q": "HQQ", "weight.absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}  # fmt: skip


def check_claims(scheme: Scheme | None, paths: Iterable[str], dtypes: Mapping[str, str]) -> str | None:
    """`paths`: of the model's modules; `dtypes`: of the checkpoint's tensors that the model may need, by their names.

    → a line that says that plain numbers are served. Raises ModelError for codes that no configuration explains.
    """
    found = next((name for name, dtype in dtypes.items() if _is_code(name, dtype)), None)
    if scheme is None or isinstance(scheme, OnlineScheme):
        if found is not None and not found.endswith(BLOCKS):  # those say it themselves
            kind = next((kind for end, kind in _SIGNS.items() if found.endswith("." + end)), None)
            raise ModelError(
                f"{found} is quantized ({f'by {kind}' if kind else f'stored as {dtypes[found]}'}), and config.json has "
                "no quantization_config that says what it means: take the config.json that came with these weights"
            )
        return None
    if found is not None or scheme.method == "gguf":  # of which one file says both
        return None
    if not any(scheme.format(path, None) is not None for path in paths):
        return None  # the cache alone is quantised
    return (
        f"config.json says that the checkpoint is quantized ({scheme.method}), and its files hold plain numbers alone: "
        "it is served as they are; to quantize it at load, take quantization_config out and pass --quantization"
    )


def _is_code(name: str, dtype: str) -> bool:
    end = name.rpartition(".")[2]
    return end in _SIGNS or name.endswith(("weight.absmax", BLOCKS)) or (end == "weight" and dtype not in FLOATS)
