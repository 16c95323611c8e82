"""From a configuration to an engine that can step: the phases of start-up, in the order they happen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..kernels.linear_hopper import even_rows
from .config import (
    BACKLOG_STEPS,
    ConfigError,
    EngineConfig,
    SchedulerConfig,
    default_cpu_threads,
    large_mixed_tokens,
    resolve_limits,
    resolve_max_mixed_tokens,
)
from .graphs import MIXED_DECODE_ROWS
from .loader import load_model, resolve_model_path
from .memory import WORST_SAMPLING, plan_memory
from .messages import EngineInfo, Progress
from .model_config import ModelConfig
from .request import SamplingParams
from .runner import ModelRunner

logger = logging.getLogger(__name__)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Worker:
    """One rank: device, model and runner, ready to step."""

    def __init__(
        self, config: EngineConfig, report: Callable[[Progress], None], before_memory: Callable[[], None] = lambda: None
    ) -> None:
        """`before_memory` is called when the weights are there, before the card's memory is measured."""
        self._seconds: dict[str, float] = {}
        self._report = report
        with self._phase("device"):
            device = _choose_device(config.device)
            self.num_threads = None
            card = 0
            if device.type == "cuda":
                torch.backends.cuda.matmul.allow_tf32 = False
                _, card = torch.cuda.mem_get_info()
            else:
                self.num_threads = config.cpu_threads or default_cpu_threads()
                torch.set_num_threads(self.num_threads)
            tokens, seqs, notice = resolve_limits(config, device.type, card)
            if notice:
                logger.warning(notice)
            mixed = resolve_max_mixed_tokens(config, device.type, tokens)
            large = large_mixed_tokens(mixed, tokens, partial(even_rows, device))
        with self._phase("config"):
            path = resolve_model_path(config.model, config.revision)
            model_config = ModelConfig.from_folder(path)
            dtype = choose_dtype(config.dtype, model_config.dtype, device)
            max_model_len = choose_max_model_len(config, model_config)
        with self._phase("weights"):
            model = load_model(
                path, model_config, dtype=dtype, device=device, load_format=config.load_format,
                max_model_len=max_model_len, seed=config.seed,
                progress=lambda done, total: report(Progress("weights", done, total)),
            )  # fmt: skip
        with self._phase("compilation"):
            before_memory()
        with self._phase("memory"):
            runner = ModelRunner(
                model, max_num_seqs=seqs, max_model_len=max_model_len, block_size=config.block_size, device=device
            )
            graphs = None
            if device.type == "cuda" and not config.enforce_eager:
                graphs = runner.plan_graphs(config.max_cudagraph_capture_size, mixed, large)
            plan = plan_memory(runner, config, dtype, tokens, graphs.shapes() if graphs else ())
            for cut in plan.notices:
                logger.warning(cut)
            if plan.max_model_len != max_model_len:
                runner.make_rows(plan.max_model_len)
            runner.bind_cache(plan.num_blocks, dtype)
            logger.info("memory:\n%s", plan.table(config.block_size))
        with self._phase("warm-up"):
            self._warm_up(runner, tokens)
        if graphs is not None:
            with self._phase("graphs"):
                runner.capture_graphs(graphs)
                # What steps allocate beside their graphs is kept from here on: allocating later would stop the GPU.
                runner.dummy_step(runner.max_num_seqs, tokens, WORST_SAMPLING)
        runner.count_compilations()
        if not config.enable_chunked_prefill and tokens < plan.max_model_len:
            logger.warning(
                "chunked prefill is off: prompts are limited to max_num_batched_tokens=%d; raise it to %d to use the "
                "whole context", tokens, plan.max_model_len,
            )  # fmt: skip
        self.runner = runner
        self.scheduler_config = SchedulerConfig(
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            max_mixed_tokens=mixed,
            large_mixed_tokens=large,
            backlog_steps=config.backlog_steps or BACKLOG_STEPS,
            block_size=config.block_size,
            num_blocks=plan.num_blocks,
            num_groups=runner.num_groups,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling_policy,
            depth=2 if device.type == "cuda" else 1,
        )
        self.info = EngineInfo(
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            hidden_size=model_config.hidden_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            block_size=config.block_size,
            num_blocks=plan.num_blocks - 1,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            max_logprobs=config.max_logprobs,
            dtype=str(dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            memory={
                "weights": plan.weights,
                "activations": plan.activations,
                "graphs": plan.graphs,
                "other": plan.other,
                "kv_cache": plan.cache,
            },
            startup_seconds=self._seconds,
            settings={
                "max_mixed_tokens": mixed,
                "backlog_steps": self.scheduler_config.backlog_steps,
                "cpu_threads": torch.get_num_threads(),
                "kv_cache_memory_bytes": plan.cache,
                "num_gpu_blocks_override": plan.num_blocks - 1,
            },
            fitted=tuple(
                name
                for name, is_fitted in (
                    ("max_model_len", plan.max_model_len < max_model_len),
                    ("max_num_seqs", notice is not None and seqs == tokens and config.max_num_seqs is None),
                    ("max_num_batched_tokens", notice is not None and config.max_num_batched_tokens is None),
                )
                if is_fitted
            ),
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._report(Progress(name))
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started

    def _warm_up(self, runner: ModelRunner, max_num_batched_tokens: int) -> None:
        """Compiles every kernel variant a request can meet: decode and prefill, small and large, greedy and sampled."""
        if runner.device.type == "cpu":
            runner.dummy_step(1, 4, WORST_SAMPLING)
            return
        for step in warm_up_steps(runner.max_num_seqs, max_num_batched_tokens):
            runner.dummy_step(*step)


def warm_up_steps(max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int, SamplingParams]]:
    """Arguments of dummy_step (requests, tokens, sampling) that together meet every variant of every kernel."""
    # decodes beside a prompt, as many as the graphs of such steps have
    beside = [(rows + 1, rows + 2, GREEDY) for rows in MIXED_DECODE_ROWS if rows < max_num_seqs]
    # With precompile.py, each of the first steps has a process of its own. The kernels that take longest to compile
    # (prefill attention, the same beside decodes, sampling) are therefore met in one of these each; other steps that
    # need them come when they are ready.
    steps = [(1, max_num_batched_tokens, GREEDY), beside[-1], (64, 64, WORST_SAMPLING)]
    # The splits of decode attention and the tile of a product depend on how many decode.
    decodes = [(num_seqs, num_seqs) for num_seqs in (max_num_seqs, 128, 64, 1, 2, 96, 4, 8, 16, 17, 32)]
    prompts = [(4, 2048), (1, 16), (1, 17), (2, 256), *((num, max_num_batched_tokens) for num in (1, max_num_seqs))]
    others = [(*size, kind) for sizes in (decodes, prompts) for kind in (GREEDY, WORST_SAMPLING) for size in sizes]
    steps += [step for step in others + beside if step not in steps]
    return [step for step in steps if step[1] <= max_num_batched_tokens]


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; check nvidia-smi and the driver, or use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    # A checkpoint in float32 is served in bfloat16 on a GPU: half the memory, and its tensor cores.
    return torch.bfloat16 if checkpoint is torch.float32 else checkpoint


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the {model.max_model_len} tokens that the model's "
            f"config.json allows; set it to {model.max_model_len} or less"
        )
    return config.max_model_len
