"""Where a model's files come from: a folder as it is, or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError, one_line
from ..files.checkpoint import PICKLED
from ..files.pickled import PATTERNS
from ..options.config import EngineConfig
from ..options.model_path import cache_folder, find_model
from .hub_gguf import hub_gguf, split_name

_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_CODE = "*.py"
_SKIP = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights in other formats


def resolve_model_path(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    with_code: bool = False,
) -> Path:
    """A folder as it is; else a model of the Hugging Face hub, downloaded (or found in its cache, HF_OFFLINE=1): a
    GGUF file where the name says which, or where the repository has nothing else.

    `download_dir`: where that cache is, None where the hub's library has it. `with_code`: its own code is wanted too.
    """
    if (folder := find_model(name)) is not None:
        return folder
    cache = cache_folder(download_dir)
    if split_name(name)[1]:
        file = hub_gguf(name, revision, cache)
        assert file is not None
        return file
    files = [*_FILES, _CODE] if with_code else _FILES
    if load_format == "dummy":
        return from_hub(name, revision, files, download_dir)
    if load_format not in PICKLED:
        folder = from_hub(name, revision, [*files, *_WEIGHTS], download_dir)
        if load_format != "auto" or any(folder.glob("*.safetensors")):
            return folder
    folder = from_hub(name, revision, [*files, *_WEIGHTS, *PATTERNS], download_dir)
    if load_format == "auto" and not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        return hub_gguf(name, revision, cache) or folder
    return folder


def from_hub(name: str, revision: str | None, files: list[str], download_dir: str | None) -> Path:
    """Raises ModelError."""
    import huggingface_hub  # slow, and not needed for a folder

    try:
        cache = cache_folder(download_dir)
        path = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=_SKIP
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
