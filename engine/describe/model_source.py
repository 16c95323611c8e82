"""A model's files: a folder, what the Hugging Face hub has, or one GGUF file of a repository (`owner/model:Q4_K_M`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ..errors import ModelError, one_line
from ..files.model_file import PATTERNS, PICKLED
from ..options.config import EngineConfig
from ..options.model_path import cache_folder, find_model
from .download import Report, from_hub

_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_CODE = "*.py"


def resolve_model_path(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    with_code: bool = False,
    report: Report | None = None,
) -> Path:
    """A folder as it is; else a model of the Hugging Face hub, downloaded (or found in its cache, HF_OFFLINE=1): a
    GGUF file where the name says which, or where the repository has nothing else.

    `download_dir`: where that cache is, None where the hub's library has it. `with_code`: its own code is wanted too.
    `report`: is told how far a download is.
    """
    if (folder := find_model(name)) is not None:
        return folder
    cache = cache_folder(download_dir)
    if split_name(name)[1]:
        file = hub_gguf(name, revision, cache, report)
        assert file is not None
        return file
    files = [*_FILES, _CODE] if with_code else _FILES
    if load_format == "dummy":
        return from_hub(name, revision, files, download_dir)
    if load_format not in PICKLED:
        folder = from_hub(name, revision, [*files, *_WEIGHTS], download_dir, report)
        if load_format != "auto" or any(folder.glob("*.safetensors")):
            return folder
    folder = from_hub(name, revision, [*files, *_WEIGHTS, *PATTERNS], download_dir, report)
    if load_format == "auto" and not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        return hub_gguf(name, revision, cache, report) or folder
    return folder


def resolve_config_path(config: EngineConfig) -> Path:
    """The folder that --hf-config-path names, or what the hub has of it."""
    name = str(config.hf_config_path)
    folder = find_model(name)
    return folder if folder is not None else from_hub(name, None, ["config.json"], config.download_dir)


USUAL = "Q4_K_M"  # taken where several are there and none is named
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
SHOWN = 8  # names in an error


def split_name(name: str) -> tuple[str, str]:
    """(repository, what is named behind the colon; "": nothing)."""
    repository, _, wanted = name.partition(":")
    return repository, wanted


def hub_gguf(name: str, revision: str | None, cache: str | None, report: Report | None = None) -> Path | None:
    """The file, downloaded or found in the cache, the first part of one that is split; None where the repository has
    no GGUF files and none was named. Raises ModelError."""
    repository, wanted = split_name(name)
    try:
        there = _listed(repository, revision, cache)
    except Exception as error:  # network, name, licence
        raise ModelError(
            f"cannot get {name} from the hub ({type(error).__name__}: {one_line(error)}): check name, network and "
            "HF_TOKEN, or pass a file"
        ) from error
    if not there and not wanted:
        return None
    files = choose(repository, there, wanted)
    return from_hub(repository, revision, [_literal(file) for file in files], cache, report) / files[0]


def choose(repository: str, files: list[str], wanted: str) -> list[str]:
    """One model of a repository's GGUF files, in all its parts. Raises ModelError where the choice is not clear."""
    models: dict[str, list[str]] = {}  # name without the number of the part → parts
    for file in sorted(files):
        models.setdefault(_PART.sub("", file.removesuffix(".gguf")), []).append(file)
    if wanted:
        fitting = [name for name in models if _has(name, wanted)]
    else:
        fitting = [name for name in models if _has(name, USUAL)] or list(models)
    if len(fitting) == 1:
        return models[fitting[0]]
    if fitting:
        raise ModelError(
            f"{repository} has {len(fitting)} GGUF models{wanted and f' for {wanted}'}: {_shown(fitting)}; name one by "
            f"what only it has, such as {repository}:{PurePosixPath(fitting[0]).name}"
        )
    others = f"it has {_shown(list(models))}" if models else "it has no GGUF files"
    raise ModelError(f"{repository} has no GGUF file for {wanted}: {others}")


def _has(name: str, wanted: str) -> bool:
    """Whether `wanted` is a word of the name, or all of it: Q4_K is none of model-Q4_K_M."""
    last = PurePosixPath(name).name
    return last == wanted or re.search(rf"(^|[-._]){re.escape(wanted)}([-.]|$)", last, re.IGNORECASE) is not None


def _listed(repository: str, revision: str | None, cache: str | None) -> list[str]:
    """The repository's; offline, those of the cache."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        folder = Path(  # by a pattern of nothing: asked for all, a snapshot without all files is refused
            snapshot_download(
                repository, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns=["/"]
            )
        )
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    else:
        found = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(repository, revision=revision)
        names = [file.rfilename for file in found.siblings or ()]
    return model_files(names)


def model_files(names: Iterable[str]) -> list[str]:
    """The GGUF files that hold a model, not the encoder of images beside it."""
    return [name for name in names if name.endswith(".gguf") and not PurePosixPath(name).name.startswith("mmproj")]


def _literal(file: str) -> str:
    """As a pattern of fnmatch."""
    return re.sub(r"([*?\[])", r"[\1]", file)


def _shown(names: list[str]) -> str:
    short = [PurePosixPath(name).name for name in names]
    return ", ".join(short[:SHOWN]) + (f" and {len(short) - SHOWN} more" if len(short) > SHOWN else "")
