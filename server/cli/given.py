"""What was given, and where: by flag, else in the environment, else in a file, else by a preset."""

from __future__ import annotations

import argparse
import os
import re

from ...engine.errors import ConfigError
from ...engine.options.config import flag
from ..options.given import META, Given, judge, value_of, with_files
from ..options.hint import did_you_mean
from ..options.http import ENVIRONMENT
from ..options.reading import options
from ..options.vllm import vllm_options

PREFIX = "VSERVE_"
HIDDEN = "(hidden)"
# Variables that are no options; typos are looked for among the others.
_OTHER_VARIABLES = ("CACHE", "FAULT", "ALLOW_FAULTS", "NO_PDL")
_VLLM_PREFIX = "VLLM_"
# vLLM's variables: what says the same here; "": it is read.
_VLLM_VARIABLES = {
    "VLLM_API_KEY": "", "VLLM_PP_LAYER_PARTITION": "", "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_CACHE_ROOT": "VSERVE_CACHE", "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "--cpu-threads", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-dir",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "--hf-overrides", "VLLM_HOST_IP": "--master-addr",
    "VLLM_LOGGING_CONFIG_PATH": "--log-level and --log-format", "VLLM_USE_MODELSCOPE": "a folder as the model",
}  # fmt: skip
# What Kubernetes and Docker's links tell of services whose names begin with vserve.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


def given_options(arguments: argparse.Namespace) -> dict[str, Given]:
    """By name of the option; nothing that has its default. Raises ConfigError, also for options of vLLM that ask for
    what is not here."""
    merged = _merged(arguments)
    judge(merged)
    return {name: one for name, one in merged.items() if name in options()}


def notices(arguments: argparse.Namespace) -> list[str]:
    """Lines for the log: what was set elsewhere than on the command line, where nobody sees it, and what changes
    nothing. Raises ConfigError."""
    merged = _merged(arguments)
    groups: dict[str, list[str]] = {}
    for name, one in merged.items():
        if one.source != "flag" and name in options():
            secret = options()[name][0].metadata["secret"]
            place = {"environment": "the environment", "file": one.where, "preset": f"--performance-mode {one.where}"}
            groups.setdefault(place[one.source], []).append(f"{name}={HIDDEN if secret else one.value}")
    lines = [f"set by {place}: {', '.join(settings)}" for place, settings in groups.items()]
    return lines + judge(merged)


def unknown_variables() -> list[str]:
    """A line for each VSERVE_… variable that sets nothing, and one for those of vLLM: who wrote them believes that
    they do something."""
    known = [name.upper() for name in (*options(), *META)] + list(_OTHER_VARIABLES)
    foreign = [name.upper() for name in vllm_options()]
    lines = []
    for variable in sorted(os.environ):
        name = variable.removeprefix(PREFIX)
        if name != variable and name not in {*known, *foreign} and not _SERVICE_LINK.fullmatch(name):
            hint = did_you_mean(name, known, PREFIX)
            lines.append(f"the variable {variable} sets nothing, no option has that name{hint}")
    return lines + _variables_of_vllm()


def _variables_of_vllm() -> list[str]:
    words = []
    for variable in sorted(os.environ):
        instead = _VLLM_VARIABLES.get(variable)
        name = variable.removeprefix(_VLLM_PREFIX)
        if name != variable and instead != "" and not _SERVICE_LINK.fullmatch(name):
            words.append(variable if instead is None else f"{variable} (use {instead})")
    return [f"these variables of vLLM change nothing: {', '.join(words)}"] if words else []


def _merged(arguments: argparse.Namespace) -> dict[str, Given]:
    """Options of vLLM too. Raises ConfigError."""
    flags = {
        name.partition("_")[2]: Given(value, "flag", flag(name.partition("_")[2]))
        for name, value in vars(arguments).items()
        if name.startswith(("opt_", "vllm_")) and value is not None
    }
    if arguments.model:
        if "model" in flags and flags["model"].value != arguments.model:
            raise ConfigError(
                f"two models are named, {arguments.model!r} and --model {flags['model'].value!r}: leave one out"
            )
        flags["model"] = Given(arguments.model, "flag", "MODEL")
    return with_files(_environment() | flags)


def _environment() -> dict[str, Given]:
    found = {}
    for name in (*options(), *META, *vllm_options()):
        variable = PREFIX + name.upper()
        text = os.environ.get(variable, "").strip()
        # Keys are read by those who compare them. tcp://… is what Kubernetes tells of a service called vserve.
        if text and name not in ENVIRONMENT and not text.startswith(("tcp://", "udp://")):
            found[name] = Given(value_of(name, text, variable), "environment", variable)
    return found
