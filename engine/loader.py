"""From a model's folder to a model on its device: found, checked by its headers, then copied tensor by tensor."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .checkpoint import FLOATS, PICKLED, TensorInfo, and_more, one_line, read_headers
from .config import EngineConfig
from .layers.weights import Placement, WeightHolder
from .model_config import ModelConfig, ModelError
from .model_path import cache_folder, find_model
from .models.blocks import CausalLM
from .models.registry import build_model
from .pickled import PATTERNS, is_pickled, read_pickled

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_LOADER_THREADS = 4  # reading and copying overlap; more only fight over the disk
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_SKIP = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights in other formats


def resolve_model_path(
    name: str, revision: str | None = None, download_dir: str | None = None, load_format: str = "auto"
) -> Path:
    """A folder as it is; else a model of the Hugging Face hub, downloaded (or found in its cache, HF_HUB_OFFLINE=1).

    `download_dir`: where that cache is, None where the hub's library has it.
    """
    if (folder := find_model(name)) is not None:
        return folder
    if load_format not in PICKLED:
        folder = from_hub(name, revision, _HUB_FILES, download_dir)
        if load_format != "auto" or any(folder.glob("*.safetensors")):
            return folder
    return from_hub(name, revision, [*_HUB_FILES, *PATTERNS], download_dir)


def from_hub(name: str, revision: str | None, files: list[str], download_dir: str | None) -> Path:
    """Raises ModelError."""
    import huggingface_hub  # slow, and not needed for a folder

    try:
        cache = cache_folder(download_dir)
        path = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=_HUB_SKIP
        )
        return Path(path)
    except Exception as error:  # one line whatever went wrong: network, name, licence, disk
        wanted = f"{name} (revision {revision})" if revision else name
        raise ModelError(
            f"cannot get {wanted} from the hub ({type(error).__name__}: {one_line(error)}): check name, network and "
            "HF_TOKEN, or pass a folder"
        ) from error


def resolve_config_path(config: EngineConfig) -> Path:
    """The folder that --hf-config-path names, or what the hub has of it."""
    name = str(config.hf_config_path)
    folder = find_model(name)
    return folder if folder is not None else from_hub(name, None, ["config.json"], config.download_dir)


def load_model(
    model_path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    max_model_len: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """The model of `model_path` on `device`, its weights in `dtype`, frozen, ready for contexts up to `max_model_len`.

    load_format "dummy" needs no weights: N(0, 0.02), norms 1, seeded. Raises ModelError, before anything is allocated
    where the fault is in a file and before anything is copied where the checkpoint does not fit config.json.
    """
    place = Placement(dtype, torch.device(device))
    report = progress or (lambda done, total: None)
    headers = {} if load_format == "dummy" else read_headers(model_path, load_format)
    stored = sum(info.num_bytes for info in headers.values())
    if headers and config.num_parameters > 4 * stored:  # two parameters a byte is the densest that checkpoints are
        raise ModelError(
            f"config.json describes {config.num_parameters:,} parameters, the weights have {stored:,} bytes: they are "
            "not of one model, download both again"
        )
    bare = "embed_tokens.weight" in headers  # saved without its head, as embedding models are
    if bare and not config.tie_word_embeddings:
        logger.warning("the checkpoint has no output matrix: embeddings are fine, but generated text means nothing")
        config = dataclasses.replace(config, tie_word_embeddings=True)
    with torch.no_grad():
        model = build_model(config, place, max_model_len)
        if load_format == "dummy":
            _fill_with_noise(model, seed, report)
        else:
            _copy_weights(_match(model, headers, "model." if bare else ""), report)
        for holder in _holders(model):
            holder.finish()
    return model.requires_grad_(False).eval()


def _holders(model: CausalLM) -> list[WeightHolder]:
    """Each module with weights once, though several parts of a checkpoint may go to it."""
    return list({id(holder): holder for holder, _ in model.weight_map().values()}.values())


def _fill_with_noise(model: CausalLM, seed: int, progress: Progress) -> None:
    """Layer by layer on the device, always in the same order: a seed gives the same weights again."""
    generator = torch.Generator(model.place.device).manual_seed(seed)
    sizes: dict[int, int] = {}
    for holder, part in model.weight_map().values():
        num_elements = sum(prod(shape) for shape in holder.expected(part).values())
        sizes[id(holder)] = sizes.get(id(holder), 0) + num_elements * model.place.dtype.itemsize
    done, total = 0, sum(sizes.values())
    progress(0, total)
    for holder in _holders(model):
        holder.randomize(generator)
        done += sizes[id(holder)]
        progress(done, total)


@dataclass(frozen=True)
class _Copy:
    """One tensor of the checkpoint and where it goes."""

    name: str
    info: TensorInfo
    holder: WeightHolder
    part: str
    kind: str


def _match(model: CausalLM, headers: dict[str, TensorInfo], prefix: str) -> list[_Copy]:
    """Pair what the model expects with what the checkpoint has; what is missing, left over or misshapen is an error.

    `prefix`: what the checkpoint's names lack at their beginning.
    """
    copies: list[_Copy] = []
    missing: list[str] = []
    for path, (holder, part) in model.weight_map().items():
        for kind, shape in holder.expected(part).items():
            name = f"{path}.{kind}".removeprefix(prefix)
            info = headers.get(name)
            if info is None:
                missing.append(name)
                continue
            if info.shape != shape:
                raise ModelError(
                    f"{name} has shape {list(info.shape)} in {info.file.name}, config.json makes it {list(shape)}: the "
                    "weights and the config are not of one model, download both again"
                )
            if info.dtype not in FLOATS:
                raise ModelError(
                    f"{name} is stored as {info.dtype}: quantized weights are not supported yet, use the unquantized "
                    "checkpoint"
                )
            copies.append(_Copy(name, info, holder, part, kind))
    if missing:
        raise ModelError(
            f"the checkpoint lacks {missing[0]}{and_more(missing)}: the weights are incomplete or do not fit "
            "config.json, download both again"
        )
    taken = {copy.name for copy in copies}
    extra = [name for name in headers if name not in taken and not model.is_ignorable(name)]
    if extra:
        raise ModelError(
            f"the checkpoint has {extra[0]}{and_more(extra)}, which {model.config.architecture} has no place for: the "
            "weights do not fit config.json, download both again"
        )
    return copies


def _copy_weights(copies: list[_Copy], progress: Progress) -> None:
    """Copy from the memory-mapped files straight into the model's parameters, a few tensors at a time."""
    total = sum(copy.info.num_bytes for copy in copies)
    handles = threading.local()
    pickled = {file: read_pickled(file) for file in {copy.info.file for copy in copies} if is_pickled(file)}

    def copy_one(copy: _Copy) -> int:
        opened: dict[Any, Any] = handles.__dict__  # one mapping a thread and file
        file = copy.info.file
        try:
            if file in pickled:
                tensor = pickled[file][copy.name].contiguous()
            else:
                if file not in opened:
                    opened[file] = safe_open(file, framework="pt", device="cpu")
                tensor = opened[file].get_tensor(copy.name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {copy.name} from {file} ({one_line(error)}): download it again") from None
        with torch.no_grad():  # a thread's own setting
            copy.holder.load(copy.part, tensor, copy.kind)
        return copy.info.num_bytes

    done = 0
    progress(0, total)
    with ThreadPoolExecutor(_LOADER_THREADS, thread_name_prefix="load-weights") as pool:
        try:
            for future in as_completed([pool.submit(copy_one, copy) for copy in copies]):
                done += future.result()
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
