"""Kernels compiled in parallel at a cold start, or before anybody waits for them, and the cache that keeps them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, ModelError
from ..files.model_file import read_config
from ..link.messages import Progress
from ..options.cgroup import num_cores
from ..options.config import EngineConfig
from ..options.model_path import find_model, is_gguf
from ..options.speculation import read_speculation

if TYPE_CHECKING:
    import torch

    from ..cache.kv_format import KVFormat
    from ..describe.model_config import ModelConfig
    from ..speculation.loading import Draft


def kernel_cache() -> Path:
    """TRITON_CACHE_DIR or TRITON_HOME where they are set; else kernels/ in VSERVE_CACHE, else in the user's cache."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    if home := os.environ.get("TRITON_HOME"):
        return Path(home) / ".triton" / "cache"
    if folder := os.environ.get("VSERVE_CACHE"):
        return Path(folder).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vserve" / "kernels"


def use_kernel_cache() -> Path:
    """Tells Triton, in this process and those that it starts; before Triton is used."""
    os.environ["TRITON_CACHE_DIR"] = str(folder := kernel_cache())
    return folder


@dataclass(frozen=True)
class CacheSize:
    kernels: int  # compiled for a card
    num_bytes: int

    @classmethod
    def of(cls, folder: Path) -> CacheSize:
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        return cls(sum(path.suffix == ".cubin" for path in files), sum(path.stat().st_size for path in files))


logger = logging.getLogger(__name__)

# Options that no kernel depends on.
UNRELATED = (
    "model", "seed", "load_format", "revision", "download_dir", "backlog_steps", "kv_events_config",
    "prefix_cache_seed", "cpu_threads", "data_parallel_size", "distributed_executor_backend", "nnodes", "node_rank",
    "master_addr", "master_port", "host_ip", "cluster_secret", "distributed_timeout_seconds",
    "ray_workers_use_nsight", "language_model_only", "mm_processor_kwargs",
    "mm_encoder_cache_tokens",
)  # fmt: skip

MAX_HELPERS = 8
SLOW_STARTS = 2  # helpers, the first: what warm_up_steps has them begin with takes longest to compile
HOST_BYTES = 3 << 30  # of free memory for each helper
HELPER_BYTES = 4 << 30  # of the card's memory for each helper, beside the weights that it makes up
ENGINE_BYTES = 2 << 30  # of the card's memory for the engine meanwhile, beside its weights
LONGEST_CONTEXT = 8192  # more does not change what is compiled


class Precompile:
    def __init__(self, processes: list[subprocess.Popen[bytes]], marker: Path) -> None:
        self._processes = processes
        self._marker = marker

    @classmethod
    def start(cls, config: EngineConfig) -> Precompile | None:
        """None where it cannot help: no GPU, few cores, no process to be had, or kernels that were compiled before."""
        on_gpu = config.device != "cpu" and os.path.exists("/dev/nvidiactl")
        count = num_helpers(config.num_ranks)
        model = Path(config.model).expanduser()
        if not on_gpu or count < 2 or not (model.is_dir() or is_gguf(model)):
            return None
        marker = kernel_cache() / f"vserve-{fingerprint(config)}"
        if marker.exists():
            return None
        # Arguments can be read by all who are on this machine: no secret goes with them, and no kernel needs one.
        options = json.dumps(
            dataclasses.asdict(dataclasses.replace(config, prefix_cache_seed=None, cluster_secret=None))
        )
        command = [sys.executable, "-m", "vserve.engine.start.precompile", options, str(count)]
        quiet = subprocess.DEVNULL
        started = cls([], marker)
        try:
            for i in range(count):
                started._processes.append(
                    subprocess.Popen([*command, str(i), str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet)
                )
        except OSError as error:  # no memory, or no more processes: the engine can do without
            started.kill()
            logger.info("no helpers to compile kernels in parallel: %s", error)
            return None
        return started

    def wait(self, seconds: float = 60.0) -> None:
        """Returns when all are done, or killed after that long. What a helper did not get to, the engine compiles."""
        deadline = time.monotonic() + seconds
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]
        except subprocess.TimeoutExpired:
            self.kill()
            logger.warning("compiling kernels in parallel took more than %.0f s: going on without", seconds)
            return
        if any(codes):
            logger.info("compiling kernels in parallel: exit codes %s", codes)
            return
        with contextlib.suppress(OSError):  # a cache that cannot be written is only slower the next time
            self._marker.touch()

    def kill(self) -> None:
        """Nothing is left of those that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def num_helpers(num_engines: int = 1) -> int:
    """As many as half of the cores and the free memory carry, where so many engines start at once."""
    cores = num_cores()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_HELPERS, cores // 2 // num_engines, free // HOST_BYTES // num_engines)


def helpers_beside(
    config: EngineConfig, dtype: torch.dtype, model: ModelConfig, format: KVFormat, draft: Draft | None, card_bytes: int
) -> int:  # fmt: skip
    """How many the card of rank 0, which has the last stage, holds while the engine loads its weights onto it."""
    from ..describe.divide import stage_layers
    from ..describe.model_config import ModelConfig, few_layers
    from ..parallel.pipeline import Stage
    from ..planning.shape import kept_weights, shape_of
    from ..planning.weight_size import draft_bytes

    size, whole, stages = config.tensor_parallel_size, config.enable_expert_parallel, config.pipeline_parallel_size
    kept = kept_weights(model, dtype)
    last = Stage(stages - 1, stages, stage_layers(model, stages, config.stage_layers)[-1])
    weights = shape_of(model, kept, format, size=size, stage=last, expert_parallel=whole).num_bytes
    few = shape_of(few_layers(model), kept, format, size=size, expert_parallel=whole).num_bytes
    if draft is not None:
        weights += draft_bytes(draft, model, dtype, size, whole, on_card=True)
        if isinstance(draft.described, ModelConfig):
            draft = dataclasses.replace(draft, described=few_layers(draft.described))
        few += draft_bytes(draft, model, dtype, size, whole, on_card=True)
    return max(0, (card_bytes - ENGINE_BYTES - weights) // (HELPER_BYTES + few))


def fingerprint(config: EngineConfig) -> str:
    """Of all that decides which kernels are compiled, but for the card: on another one, the engine compiles them."""
    digest = hashlib.sha256()
    for name in ("torch", "triton"):
        digest.update(version(name).encode())
    root = Path(__file__).parents[2]
    sources = [path for room in ("kernels", "engine") for path in sorted((root / room).rglob("*.py"))]
    for source in [*sources, *sorted((root / "configs" / "tiles").glob("*.json"))]:
        digest.update(source.read_bytes())
    speculation = read_speculation(config.speculative_config)
    for model in (config.hf_config_path or config.model, speculation.model if speculation is not None else ""):
        with contextlib.suppress(ModelError):  # the engine will say what is wrong with it
            described = read_config(Path(model).expanduser()) if model else {}
            digest.update(json.dumps(described, sort_keys=True).encode())
    options = dataclasses.asdict(config)
    for name in UNRELATED:
        options.pop(name)
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def run_share(config: EngineConfig, count: int, index: int) -> None:
    """Runs every `count`-th step of the warm-up, from the `index`-th on."""
    from ...kernels.linear.linear_hopper import MOST_LOW_COLUMNS
    from ..adapters.layout import padded_rank
    from ..cache.kv_format import planned_format
    from ..describe.model_config import few_layers
    from ..describe.reading import read_model_config
    from ..parallel.group import SingleGroup
    from ..planning.settings import resolve
    from ..speculation.loading import find_draft, load_drafter
    from ..step.runner import ModelRunner
    from . import rank, warm_steps
    from .rank import make_tables
    from .warm_steps import GREEDY

    machine = rank.open_machine(dataclasses.replace(config, device="cuda"))
    folder = Path(config.model).expanduser()
    whole = read_model_config(folder, config)
    if whole.foreign is not None or not whole.causal:
        return  # transformers' code makes all of its layers, or none; what reads whole texts has few kernels of ours
    settings = resolve(config, whole, machine)
    # Scales are as in the whole model where its configuration says so; else the engine compiles these kernels.
    format = planned_format(settings, whole)
    speculation, draft = settings.speculation, None
    # What would have to be downloaded the engine gets alone, and compiles for.
    if speculation.by_model and (not speculation.model or find_model(speculation.model) is not None):
        draft = find_draft(
            speculation, folder, whole, config.download_dir, config.tensor_parallel_size, config.enable_expert_parallel
        )
    count = min(count, helpers_beside(config, settings.dtype, whole, format, draft, machine.card_bytes))
    if index >= count:
        return
    context = min(settings.max_model_len, max(LONGEST_CONTEXT, settings.max_num_batched_tokens))
    made_up = dataclasses.replace(config, load_format="dummy")
    settings = dataclasses.replace(settings, config=made_up, max_model_len=context)
    model = rank.load(folder, few_layers(whole), settings, SingleGroup(0, config.tensor_parallel_size))
    drafter = None if draft is None else load_drafter(draft, model, context, few=whole)
    runner = rank.make_runner(model, settings, format, drafter)
    assert isinstance(runner, ModelRunner)
    runner.bind_cache(1, settings.dtype)
    runner.bind_states(1)
    more = warm_steps.prompt_steps(runner, settings.max_num_batched_tokens)
    steps = warm_steps.warm_up_steps(settings.max_num_seqs, settings.max_num_batched_tokens, more)[index::count]
    # After its first step a helper meets what others compile in theirs as late as can be: they are ready with sampling
    # before they are with prefill attention.
    later = sorted(steps[1:], key=lambda step: (step[0] != step[1], step[2] != GREEDY))
    num_early = sum(seqs == tokens and kind == GREEDY for seqs, tokens, kind in later)
    for step in [*steps[:1], *later[:num_early]]:
        runner.dummy_step(*step)
    # No more slots than tell whether products add adapters' shares (linear_hopper.py): each helper has them all.
    slots = min(settings.max_loras, MOST_LOW_COLUMNS // padded_rank(config.max_lora_rank) + 1)
    runner.adapters = make_tables(model, dataclasses.replace(settings, max_loras=slots), config.download_dir)
    if runner.adapters is not None:
        more = warm_steps.adapter_prompts(runner)
        adapted = warm_steps.adapter_steps(settings.max_num_seqs, settings.max_num_batched_tokens, more)
        for num_seqs, num_tokens in adapted_share(adapted, count, index):
            runner.dummy_step(num_seqs, num_tokens, GREEDY, adapted=True)
    for step in later[num_early:]:
        runner.dummy_step(*step)
    for drafts in warm_steps.draft_steps(settings.draft_depths, settings.max_num_seqs)[index::count]:
        runner.dummy_step(*drafts)


def adapted_share(steps: list[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """Of steps with adapters: the last helper has the first of them, and those whose own first steps take longest have
    none if there are enough others."""
    sharing = count - SLOW_STARTS if count > 2 * SLOW_STARTS else count
    position = count - 1 - index
    return steps[position::sharing] if position < sharing else []


@dataclass(frozen=True)
class Warmed:
    device: str
    folder: Path  # the cache
    before: CacheSize
    after: CacheSize
    phases: dict[str, float]  # seconds
    seconds: float  # in all


def warm(config: EngineConfig, report: Callable[[Progress], None]) -> Warmed:
    """Compiles what a server with these options will run on this card; of the model only its config.json is read.

    Kernels are compiled for the card that torch sees, so there has to be one: which tiles and which variants a step
    takes is asked of it. Raises ConfigError.
    """
    started = time.monotonic()
    if config.device == "cpu":
        raise ConfigError("--device cpu: nothing is compiled for the CPU, so there is nothing to warm")
    folder = use_kernel_cache()
    report(Progress("imports"))
    import torch

    from ..describe.model_source import resolve_model_path
    from .engine import Engine

    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no card here, and kernels are compiled on the kind of card that will run them: run `vserve "
            "warm` there, with the folder or volume of the deployment's cache (VSERVE_CACHE)"
        )
    path = resolve_model_path(config.model, config.revision, config.download_dir, "dummy", config.trust_remote_code)
    config = dataclasses.replace(config, model=str(path), load_format="dummy")
    before = CacheSize.of(folder)
    helpers = Precompile.start(config)
    try:
        engine = Engine(config, report, helpers.wait if helpers is not None else lambda: None)
    finally:
        if helpers is not None:
            helpers.kill()
    info = engine.info
    seconds = time.monotonic() - started
    return Warmed(info.device, folder, before, CacheSize.of(folder), info.startup_seconds, seconds)


if __name__ == "__main__":
    from ..link.logs import die_with_parent

    options, count, index, parent = sys.argv[1:]
    die_with_parent(int(parent))
    run_share(EngineConfig(**json.loads(options)), int(count), int(index))
