"""Whether a model can be served here: its kind, its weights, and one request of the whole context."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ...engine.describe.model_source import choose, model_files, split_name
from ...engine.errors import ConfigError, ModelError
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import cache_folder, is_gguf
from . import machine
from .finding import FAIL, OK, WARN, Finding
from .machine import Torch, gib

HUB_TIMEOUT = 10.0  # seconds
_WEIGHTS = (".safetensors", ".bin")  # of which the first that there is is loaded


def model_finding(engine: EngineConfig, torch: Torch, on_card: bool) -> Finding:
    folder = Path(engine.model).expanduser()
    if not folder.is_dir() and not is_gguf(folder):
        cached = from_hub_cache(engine)
        if cached is None:
            return _on_hub(engine, torch, on_card)
        folder = cached
    try:
        return _fit(engine, torch, on_card, folder, str(folder))
    except ModelError as error:
        return _refused(error)


def of_config_alone(engine: EngineConfig) -> Finding | None:
    """Of a folder with a config.json and no weights, without torch; None: it is none."""
    from ...engine.describe.model_config import Foreign
    from ...engine.describe.model_config import choose as choose_family
    from ...engine.describe.reading import check_described
    from ...engine.files.model_file import PATTERNS, read_config

    folder = Path(engine.model).expanduser()
    if not (folder / "config.json").is_file():
        return None
    if any(path.match(pattern) for path in folder.iterdir() for pattern in ("*.safetensors", "*.gguf", *PATTERNS)):
        return None
    try:
        check_described(folder, engine)
        kind = choose_family(read_config(folder), engine.model_impl, folder, engine.trust_remote_code)
    except ModelError as error:
        return _refused(error)
    name = getattr(kind, "architecture", None) or getattr(kind, "name", "")
    whose = "transformers' code may compute it" if isinstance(kind, Foreign) else "it is known here"
    whose += ", its text alone" if getattr(kind, "nested", "") else ""
    return Finding(
        FAIL, "model", f"{folder}: {name}, {whose}. There are no weights: how they are stored, whether that can be "
        "read, and what fits beside them is known when they are here",
        "download the weights, or serve random ones with --load-format dummy",
    )  # fmt: skip


def _refused(error: ModelError) -> Finding:
    what, _, remedy = str(error).partition(": ")
    return Finding(FAIL, "model", what, remedy or "download it again")


def _fit(
    engine: EngineConfig, torch: Torch, on_card: bool, folder: Path, place: str, size: int | None = None
) -> Finding:
    """`folder` has the config.json; `size`: bytes of the weights, where they are not there too. Raises ModelError."""
    from torch import device

    from ...engine.cache.kv_format import KVSettings, planned_format
    from ...engine.cache.kv_layout import KVLayout
    from ...engine.cache.states import StateLayout
    from ...engine.describe.reading import read_model_config
    from ...engine.families.layer_spec import MoESpec
    from ...engine.files.checkpoint import checkpoint_bytes
    from ...engine.planning.memory import CPU_CACHE_BYTES
    from ...engine.planning.settings import choose_dtype, choose_max_model_len
    from ...engine.planning.state_slots import choose_state_dtype, state_dtype
    from ...engine.planning.step_sizes import default_limits
    from ...engine.planning.weight_size import orders_experts, smaller_weights, weight_size
    from ...engine.weights.loader import check_files, count_parameters

    config = read_model_config(folder, engine)
    note = None
    if size is None:
        note, size = check_files(folder, config, engine.load_format), checkpoint_bytes(folder)
    text = f"{place}: {config.architecture}, {gib(size)} of weights, context {config.max_model_len} tokens"
    try:
        length = choose_max_model_len(engine, config)
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding(FAIL, "model", what, remedy)
    dtype = choose_dtype(engine.dtype, config.dtype, device("cuda" if on_card else "cpu"))
    try:
        kept = KVSettings.of(engine, config, str(dtype).removeprefix("torch."))
        of_states = state_dtype(choose_state_dtype(engine, config))
    except ConfigError as error:
        what, _, remedy = str(error).rpartition(": ")
        return Finding(FAIL, "model", what, remedy)
    parameters = count_parameters(config)
    weights, item = weight_size(config, parameters, dtype, size, on_card), dtype.itemsize
    if config.quantization is not None:
        text += f", quantization {config.quantization.method}"
    mixture = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)), None)
    if mixture is not None:
        codes = config.quantization is not None and (not on_card or item == 2) and not orders_experts(config, on_card)
        text += f", {mixture.routing.num_experts} experts of which a token has {mixture.routing.top_k}"
        text += " (their codes are kept)" if codes else f" (in {str(dtype).removeprefix('torch.')})"
    if config.foreign is not None:
        text += ", computed by transformers' code" if config.foreign.code is None else ", computed by its folder's code"
    if on_card and torch.cards:
        room, where = int(torch.cards[0].total * engine.gpu_memory_utilization), "the card"
    else:
        room, where = machine.memory()[0], "memory"
    if weights > room:
        remedies = [*smaller_weights(config, parameters, dtype, size, room, on_card), "choose a smaller model"]
        return Finding(FAIL, "model", text, f"the weights take {gib(weights)}, and {where} has {gib(room)} for vserve: "
                       f"{', or '.join(remedies)}, or take a larger machine")  # fmt: skip
    if not config.causal:
        text += "; it reads texts whole, without a cache, and generates none"
        return Finding(OK if note is None else WARN, "model", text, note or "")
    left = room - weights
    if engine.kv_cache_memory_bytes is not None:
        left = min(left, engine.kv_cache_memory_bytes)
    elif not on_card:
        left = min(left, CPU_CACHE_BYTES)
    card = torch.cards[0].total if on_card and torch.cards else 0
    chunk = engine.max_num_batched_tokens or default_limits(card)[0]
    layout = KVLayout.of(config.kv_specs(), engine.block_size, length, planned_format(kept, config))
    if (states := StateLayout.of(config.state_specs(), 0, of_states)) is not None:
        slot = states.slot_bytes(item)
        left = max(0, left - 2 * slot)
        text += f"; a running request's recurrent state takes {gib(slot)}"
    block, blocks = layout.block_bytes(item), layout.request_blocks(length, chunk)
    most = max(engine.block_size, layout.longest_request(left // block, chunk, length))
    taken = gib(blocks * block)
    text += f"; a request of {length} tokens takes {taken} of cache, and {gib(left)} are there at most"
    if length <= most:
        return Finding(OK if note is None else WARN, "model", text, note or "")
    larger = "" if on_card or blocks * block > room - weights else (
        f", or add --kv-cache-memory-bytes {(blocks + 2) * block}"
    )  # fmt: skip
    if engine.max_model_len is None:
        return Finding(WARN, "model", text, f"the context will be cut to some {most} tokens{larger}")
    return Finding(FAIL, "model", text, f"lower --max-model-len to {most} or less{larger}")


def from_hub_cache(engine: EngineConfig) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        cache = cache_folder(engine.download_dir)
        return Path(snapshot_download(engine.model, revision=engine.revision, cache_dir=cache, local_files_only=True))
    except Exception:  # no such name, or not there: what there is to say is the same
        return None


def _on_hub(engine: EngineConfig, torch: Torch, on_card: bool) -> Finding:
    """Asks the hub (HF_ENDPOINT names another) for sizes and config.json, which is all that is downloaded."""
    name = engine.model
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return Finding(FAIL, "model", f"{name} does not exist", "pass the folder of a model, or its name on the hub")
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return Finding(FAIL, "model", f"{name} is not in the hub's cache, and HF_HUB_OFFLINE is set",
                       "download it first, or unset HF_HUB_OFFLINE")  # fmt: skip
    home = Path(engine.download_dir or os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(nearest).free
    token = "with a token" if os.environ.get("HF_TOKEN") or (home / "token").exists() else "without HF_TOKEN"
    text = f"{name} is not here; the server downloads it {token} to {home}, which has {gib(free)} free"
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        repository, wanted = split_name(name)
        listed = api.model_info(repository, revision=engine.revision, files_metadata=True, timeout=HUB_TIMEOUT)
        sizes = {file.rfilename: file.size or 0 for file in listed.siblings or ()}
        if wanted:
            size = sum(sizes[file] for file in choose(repository, model_files(sizes), wanted))
            return Finding(OK, "model", f"{text}: {gib(size)} of weights; what fits is known when they are here")
        found = ([size for file, size in sizes.items() if file.endswith(end)] for end in _WEIGHTS)
        size = sum(next(filter(None, found), []))
        with tempfile.TemporaryDirectory() as folder:  # the hub's cache would have a model without weights
            api.hf_hub_download(name, "config.json", revision=engine.revision, local_dir=folder)
            finding = _fit(engine, torch, on_card, Path(folder), text, size)
            if finding.status != FAIL:
                note = f"{finding.text}; whether the weights fit config.json is known when they are here"
                finding = replace(finding, text=note)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        reason = str(error).splitlines()[0]
        return Finding(FAIL, "model", f"the hub has no {name} for who asks {token}: {reason}",
                       "check the name and --revision; a model that is not public wants HF_TOKEN")  # fmt: skip
    except ModelError as error:
        return _refused(error)
    except Exception as error:  # of a network, of many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return Finding(WARN, "model", f"{text}; the hub does not answer ({reason})", f"hf download {name}")
    if finding.status == OK and size > free:
        return Finding(FAIL, "model", finding.text, f"the weights take {gib(size)}: make room, or name another place "
                       "with --download-dir")  # fmt: skip
    return finding
