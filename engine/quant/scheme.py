"""Which quantisation a model is served with: what its folder says, and --quantization; refusals come before torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ModelError, unreadable
from .format import FLOATS, Scheme
from .methods import ALIASES, AT_LOAD, FITS, NOT_AT_LOAD, READ, REFUSED, UNREAD
from .online import OnlineScheme

_NOTHING = ("", "none", "auto")  # of --quantization
# Files beside config.json, in the order they are looked for → the method they are of.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def read_quantization(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The folder's quantisation: `quantization_config` of `raw` (config.json), else of an older file of its own.

    None: it is not quantised. Otherwise `quant_method` is set. Raises ModelError for files that cannot be read.
    """
    texts = (raw.get(key) for key in ("text_config", "llm_config"))
    objects = (raw, *(values for values in texts if isinstance(values, Mapping)))
    for key in ("quantization_config", "compression_config", "quantization"):
        for values in objects:
            if values.get(key) is not None:
                config = _with_method(values[key], key)
                if config["quant_method"] == "modelopt" and not {"quant_algo", "quantization"} & config.keys():
                    return {**(_read(folder / "hf_quant_config.json") or {}), **config}
                return config
    for name, method in _FILES.items():
        if (found := _read(folder / name)) is not None:
            return {"quant_method": method, **found}
    return None


def make_scheme(config: Mapping[str, Any] | None, asked: str | None) -> Scheme | None:
    """How the modules of a checkpoint are stored, or are to be quantised at load; None: neither.

    `config`: of `read_quantization`; `asked`: --quantization. Raises ModelError, naming the remedy, for what is not
    read, and where `asked` is something else than the checkpoint.
    """
    name = _plain(asked or "")
    wanted = None if name in _NOTHING else name
    if not config:
        return None if wanted is None else _at_load(wanted, str(asked))
    config = _with_method(config, "quantization_config")
    method = _method(config)
    if method not in READ:
        label, nearest = REFUSED.get(method, (repr(config["quant_method"]), UNREAD))
        raise ModelError(
            f"the checkpoint is quantized with {label}, which vserve does not read; nearest: {nearest}. Serve the "
            "unquantized model with --quantization fp8"
        )
    kind = _kind(method, config)
    if wanted is not None and not any(m == method and part in kind.lower() for m, part in FITS.get(wanted, ())):
        raise ModelError(f"the checkpoint is {_described(method, config, kind)}: leave --quantization {asked} out")
    module, scheme, _ = READ[method]
    return getattr(import_module(f".{module}", __package__), scheme)(config)


def _at_load(wanted: str, asked: str) -> Scheme:
    """Of a checkpoint that is not quantised."""
    from .online import OnlineScheme

    if wanted in AT_LOAD:
        return OnlineScheme(*AT_LOAD[wanted], experts_alone=wanted == "experts_int8")
    if wanted == "gguf":
        raise ModelError(
            "--quantization gguf, but this is no GGUF file: leave it out, or pass the path of a .gguf file"
        )
    if wanted in NOT_AT_LOAD:
        raise ModelError(
            f"--quantization {asked}, but the checkpoint is not quantized, and vserve does not quantize so at load: "
            f"the nearest is --quantization {NOT_AT_LOAD[wanted]}"
        )
    kinds = "fp8, int8, int4 or bitsandbytes"
    if wanted in FITS:
        raise ModelError(
            f"--quantization {asked}, but the checkpoint is not quantized: leave it out, or quantize at load with "
            f"{kinds}"
        )
    label, nearest = REFUSED.get(wanted, (None, UNREAD))
    raise ModelError(
        f"--quantization {asked} is not served{f' ({label})' if label else ''}: use a checkpoint of {nearest}, or "
        f"quantize this one at load with {kinds}"
    )


def _method(config: Mapping[str, Any]) -> str:
    name = _plain(str(config["quant_method"]))
    return ALIASES.get(name, name)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _kind(method: str, config: Mapping[str, Any]) -> str:
    """What tells checkpoints of a method apart: ModelOpt's algorithm, the formats of compressed-tensors."""
    if method == "modelopt":
        inner = config.get("quantization")
        return str((inner if isinstance(inner, Mapping) else config).get("quant_algo") or "")
    if method == "compressed_tensors":
        groups = config.get("config_groups")
        formats = [config.get("format")]
        if isinstance(groups, Mapping):
            formats += [group.get("format") if isinstance(group, Mapping) else name for name, group in groups.items()]
        found = sorted({str(name) for name in formats if name and name != "mixed-precision"})
        return ", ".join(found)
    if method == "quark":
        whole = config.get("global_quant_config")
        weight = whole.get("weight") if isinstance(whole, Mapping) else None
        return str(weight.get("dtype") or "") if isinstance(weight, Mapping) else ""
    return ""


def _described(method: str, config: Mapping[str, Any], kind: str) -> str:
    """ "AWQ, 4 bit" """
    bits = config.get("bits") or config.get("w_bit")
    if method == "bitsandbytes":
        bits = 8 if config.get("load_in_8bit") or config.get("_load_in_8bit") else 4
    detail = kind or (f"{bits} bit" if bits else "")
    return (READ[method][2] if method in READ else method) + (f", {detail}" if detail else "")


def _with_method(values: Any, key: str) -> dict[str, Any]:
    """A configuration that says its method; where it does not, its keys do."""
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: {key} is {values!r:.60}, an object belongs there: correct the file")
    config = dict(values)
    if config.get("quant_method") is not None:
        return config
    signs = {
        "quant_algo": "modelopt",
        "config_groups": "compressed-tensors",
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "w_bit": "awq",
        "desc_act": "gptq",
        "group_size": "mlx",  # of which this and bits are all there is
    }
    inner = config.get("quantization")
    found = {*config, *(inner if isinstance(inner, Mapping) else ())}
    method = "compressed-tensors" if key == "compression_config" else None
    method = method or next((signs[sign] for sign in signs if sign in found), None)
    if method is None:
        raise ModelError(f"config.json: {key} has no quant_method: download the file again, or use another checkpoint")
    return {**config, "quant_method": method}


def _read(file: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file has all in itself
        return None
    except PermissionError:
        raise unreadable(file) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file} ({error}): download it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__} where an object belongs: download it again")
    return found


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
