"""One rank, from a configuration to a runner that can step: the phases of start-up, in the order they happen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from ...kernels.linear.cublaslt import accumulate_in_fp32
from ..adapters.adapter import Adapter
from ..adapters.layout import AdapterStore, SlotLayout, find_adapter
from ..adapters.tables import AdapterTables
from ..cache.kv_format import KVFormat, loaded_format
from ..describe.divide import check_divides, check_stages, stage_layers
from ..describe.model_config import ModelConfig
from ..describe.model_source import resolve_model_path
from ..describe.reading import check_before_download, read_model_config
from ..errors import ConfigError
from ..link.messages import Progress
from ..models.model import Model
from ..options.config import EngineConfig, default_cpu_threads
from ..parallel.group import LOCAL, TIMEOUT, Group, gather
from ..parallel.join import Rendezvous
from ..parallel.pipeline import WHOLE, Stage, form_ring
from ..planning.host_memory import MACHINE, available_bytes, is_out_of_memory, machine_bytes, out_of_memory
from ..planning.machine import Machine
from ..planning.memory import WORST_SAMPLING, check_rows, plan_encoder, plan_memory, weight_bytes
from ..planning.settings import Fitted, Settings, resolve, step_limits
from ..planning.weight_size import check_weights, draft_bytes
from ..quant.matrix import has_kernels
from ..ranks.agreement import check_equal, eager_across_hosts, find_rendezvous, meet, union, wait_for_ranks
from ..ranks.messages import Seat
from ..schedule.planner import FEW_DECODES
from ..speculation.loading import Draft, find_draft, load_drafter
from ..speculation.model_drafter import ModelDrafter
from ..step.encoder_runner import EncoderRunner
from ..step.graphs import StepGraphs
from ..step.runner import ModelRunner
from ..vision.processors import read_processor
from ..weights.loader import load_model, whole_of
from .described import describe, describe_experts, experts_log_line, log_line
from .warm_steps import GREEDY, adapter_prompts, adapter_steps, draft_steps, prompt_steps, warm_up_steps

logger = logging.getLogger(__name__)
ALONE = Seat()


class Rank:
    """A device with the model (or its share of it) and a runner, ready to step."""

    runner: ModelRunner | EncoderRunner
    settings: Fitted

    def __init__(
        self, config: EngineConfig, report: Callable[[Progress], None],
        before_memory: Callable[[], None] = lambda: None, seat: Seat = ALONE,
    ) -> None:  # fmt: skip
        """`before_memory` is called when the weights are there, before the card's memory is measured."""
        self.seconds: dict[str, float] = {}  # of each phase
        self._report = report
        self._seat = seat
        self._settings: Settings | None = None  # before memory is planned
        self._weights = self._drafts = 0  # bytes; of who drafts, known beforehand
        self._config = config
        with self._phase("device"):
            machine = open_machine(config, seat.card)
        self._config = config = eager_across_hosts(config, seat, machine.device)
        patience = max(timedelta(seconds=config.distributed_timeout_seconds), TIMEOUT)
        with self._phase("config"):
            rendezvous = find_rendezvous(seat, patience)
            check_before_download(config)
        with self._phase("download"):
            path = resolve_model_path(
                config.model, config.revision, config.download_dir, config.load_format, config.trust_remote_code,
                report=lambda done, total: report(Progress("download", done, total)),
            )  # fmt: skip
        with self._phase("config"):
            described = read_model_config(path, config)
            settings, draft = self._resolve(path, described, machine)
            wait_for_ranks(rendezvous, "files")
            self._meet(described, settings, patience, rendezvous)
        with self._phase("weights"):
            drafter = self._load(path, described, settings, draft)
            wait_for_ranks(rendezvous, "weights")
        with self._phase("compilation"):
            before_memory()
            gather(self.world, machine.device, [0])  # the others find in the cache what rank 0 has had compiled
        with self._phase("memory"):
            self.runner = self._make_runner(settings, drafter)
            self.settings, graphs = take_memory(self.runner, settings, self.world)
        with self._phase("warm-up"):
            self.longest_step = warm_up(self.runner, self.settings, self.world)
        if graphs is not None:
            assert not isinstance(self.runner, EncoderRunner)
            with self._phase("graphs"):
                capture(self.runner, graphs, self.settings)
        self.runner.count_compilations()
        self.num_threads = None if machine.device.type == "cuda" else machine.cpu_threads

    def _resolve(self, path: Path, described: ModelConfig, machine: Machine) -> tuple[Settings, Draft | None]:
        """The settings, and the checkpoint that drafts where one does. Raises ConfigError."""
        config, draft = self._config, None
        if (foreign := described.foreign) is not None:
            logger.info("%s", foreign.log_line(config.model_impl))
        for line in described.log_lines(config.language_model_only):
            logger.info("%s", line)
        self._settings = settings = resolve(config, described, machine, largest_picture(path, described, config))
        _warn(settings.notices)
        if limits := step_limits(config, settings):
            logger.info("%s", limits)
        size, whole_experts = config.tensor_parallel_size, config.enable_expert_parallel
        if settings.speculation.by_model:
            draft = find_draft(settings.speculation, path, described, config.download_dir, size, whole_experts)
            settings = settings.drafted_by(draft.settings.method)
            on_card = machine.device.type == "cuda"
            self._drafts = draft_bytes(draft, described, settings.dtype, size, whole_experts, on_card)
        if note := getattr(described.quantization, "note", None):
            logger.warning("--quantization %s: %s", config.quantization, note)
        check_stages(described, config.pipeline_parallel_size, config.stage_layers)
        check_divides(described, self._seat.size // config.pipeline_parallel_size, whole_experts)
        return settings, draft

    def _meet(
        self, described: ModelConfig, settings: Settings, patience: timedelta, rendezvous: Rendezvous | None
    ) -> None:
        """The group of all ranks, this rank's own, and its stage."""
        config, seat, device = self._config, self._seat, settings.device
        num_stages, symmetric = config.pipeline_parallel_size, not config.disable_custom_all_reduce
        self.world = meet(seat, device, symmetric, num_stages, patience, rendezvous)
        check_equal(self.world, settings)
        layers = stage_layers(described, num_stages, config.stage_layers)
        one_host = seat.rendezvous.startswith(LOCAL)
        self.group, self.stage = form_ring(self.world, num_stages, device, symmetric, layers, one_host)
        if num_stages > 1:
            logger.info("layers of the %d stages: %s", num_stages, ", ".join(str(len(part)) for part in layers))

    def _load(self, path: Path, described: ModelConfig, settings: Settings, draft: Draft | None) -> ModelDrafter | None:
        """The model, and what drafts beside it."""

        def admit(parameters: int, stored: int) -> None:
            self._weights = check_weights(
                self._config, described, settings.machine, settings.dtype, parameters, stored, self._drafts
            )

        def progress(done: int, total: int) -> None:
            self._report(Progress("weights", done, total))

        self.model = load(path, described, settings, self.group, progress, admit, self._config.merge_lora, self.stage)
        drafter = None if draft is None else load_drafter(draft, self.model, settings.max_model_len)
        self.quantization, self.experts = describe(self.model), describe_experts(self.model)
        if self.quantization:
            logger.info("%s", log_line(self.quantization))
        if self.experts:
            logger.info("%s", experts_log_line(self.experts))
        return drafter

    def _make_runner(self, settings: Settings, drafter: ModelDrafter | None) -> ModelRunner | EncoderRunner:
        kv_format, line = loaded_format(settings, self.model)
        if line:
            logger.info("%s", line)
        runner = make_runner(self.model, settings, kv_format, drafter)
        if not isinstance(runner, EncoderRunner):
            runner.adapters = make_tables(self.model, settings, self._config.download_dir)
        elif settings.max_loras:
            raise ConfigError("--enable-lora: encoders are served without adapters, leave it out")
        return runner

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Raises ConfigError where memory runs out."""
        started = time.monotonic()
        try:
            self._report(Progress(name))
            yield
        except Exception as error:
            if isinstance(error, ConfigError) or not is_out_of_memory(error):
                raise
            raise ConfigError(self._explained(error, name)) from error
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def _explained(self, error: Exception, phase: str) -> str:
        where, free, total, settings = MACHINE, available_bytes(), machine_bytes(), self._settings
        if settings is not None and settings.device.type == "cuda":
            where, (free, total) = settings.machine.name, torch.cuda.mem_get_info()
        return out_of_memory(
            error, phase, self._config, settings, where=where, free=free, total=total, weights=self._weights
        )


def open_machine(config: EngineConfig, card: int = 0) -> Machine:
    """Sets up torch for a rank's device, which is this card. Raises ConfigError when there is no such device."""
    device = _choose_device(config, card)
    if device.type == "cuda":
        accumulate_in_fp32()
        free, card = torch.cuda.mem_get_info()
        codes = has_kernels(device)
        return Machine(device, torch.cuda.get_device_name(), card, torch.get_num_threads(), free, codes)
    threads = config.cpu_threads or default_cpu_threads()
    torch.set_num_threads(threads)
    return Machine(device, "cpu", 0, threads)


def _choose_device(config: EngineConfig, card: int) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; check nvidia-smi and the driver, or use --device cpu")
    if name == "cpu":
        return torch.device("cpu")
    if config.world_size > 1:
        needed = card + 1 if config.distributed_executor_backend == "ray" else config.ranks_per_node
        if (found := torch.cuda.device_count()) < needed:
            raise ConfigError(
                f"{config.divided_by}: every rank needs a card of its own, and torch sees {found}: lower it, let more "
                "be seen (CUDA_VISIBLE_DEVICES), or take several hosts (--nnodes, --distributed-executor-backend ray)"
            )
        torch.cuda.set_device(card)
    return torch.device("cuda", torch.cuda.current_device())


def largest_picture(path: Path, described: ModelConfig, config: EngineConfig) -> tuple[int, int]:
    """Patches and tokens of the largest one that the model takes. Raises ConfigError, ModelError."""
    if described.vision is None:
        return 0, 0
    processor = read_processor(path, described.vision, config.processor_kwargs)
    return processor.max_patches, processor.max_tokens


def load(
    path: Path,
    model_config: ModelConfig,
    settings: Settings,
    group: Group,
    progress: Callable[[int, int], None] | None = None,
    admit: Callable[[int, int], None] | None = None,
    merge: str | None = None,
    stage: Stage = WHOLE,
) -> Model:
    """`merge`: folder of an adapter that becomes part of it."""
    return load_model(
        path, model_config, dtype=settings.dtype, device=settings.device, load_format=settings.config.load_format,
        max_model_len=settings.max_model_len, seed=settings.config.seed, progress=progress, admit=admit, group=group,
        whole_experts=settings.config.enable_expert_parallel, stage=stage,
        adapter=None if merge is None else Adapter.open(find_adapter(merge)), exact=settings.exact,
    )  # fmt: skip


def make_runner(
    model: Model, settings: Settings, kv_format: KVFormat, drafter: ModelDrafter | None = None
) -> ModelRunner | EncoderRunner:
    """Raises ConfigError where a machine's memory is too small for the rows. A card's is planned when they are made."""
    if not model.config.causal:
        return EncoderRunner(model, settings.max_model_len, settings.device)
    if kv_format.code == "float8_e4m3fn" and settings.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(settings.device)
        if (major, minor) < (8, 9):
            raise ConfigError(
                f"--kv-cache-dtype {settings.kv_cache_dtype} needs a GPU of compute capability 8.9, and "
                f"{settings.machine.name} has {major}.{minor}: use --kv-cache-dtype fp8_e5m2"
            )
    if settings.device.type == "cpu":
        check_rows(model, weight_bytes(model, drafter), settings)
    runner = ModelRunner(
        model, max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len,
        block_size=settings.block_size, device=settings.device, kv_format=kv_format,
        speculation=settings.speculation, model_drafter=drafter, state_dtype=settings.state_dtype,
    )  # fmt: skip
    if runner.seeing is not None:
        runner.seeing.reserve(settings.encoder_cache_tokens, settings.largest_picture)
    return runner


def take_memory(
    runner: ModelRunner | EncoderRunner, settings: Settings, world: Group
) -> tuple[Fitted, StepGraphs | None]:
    """Plans the memory, makes the rows as wide as the context that fits, and takes the cache."""
    config = settings.config
    if isinstance(runner, EncoderRunner):
        plan = plan_encoder(runner, config, settings)
        logger.info("memory:\n%s", plan.table())
        return settings.fit(plan), None
    graphs = None
    if settings.uses_graphs:
        graphs = runner.plan_graphs(config.max_cudagraph_capture_size, settings.mixed_step, settings.large_mixed_tokens)
    shapes = graphs.shapes() if graphs else ()
    if graphs and runner.adapters is not None and runner.adapter_graphs is not None:
        shapes = [*shapes, *runner.adapter_graphs.shapes()]
    plan = plan_memory(runner, config, settings.dtype, settings.max_num_batched_tokens, shapes, world)
    fitted = settings.fit(plan)
    _warn(fitted.notices)
    if fitted.max_model_len != settings.max_model_len:
        runner.make_rows(fitted.max_model_len)
    runner.bind_cache(plan.num_blocks, settings.dtype)
    if plan.states is not None:
        runner.bind_states(plan.states.count)
    logger.info("memory:\n%s", plan.table())
    return fitted, graphs


def warm_up(runner: ModelRunner | EncoderRunner, settings: Settings, world: Group) -> float:
    """Compiles every kernel variant a request can meet: decode and prefill, small and large, greedy and sampled. All
    ranks take the same steps, whatever each of them holds: stages wait for one another in each.
    → seconds that the largest step takes on a card; 0 where it has no such step."""
    if isinstance(runner, EncoderRunner):
        runner.warm_up()
        return 0.0
    if runner.device.type == "cpu":
        runner.dummy_step(1, 4, WORST_SAMPLING)
        return 0.0
    largest = settings.max_num_batched_tokens
    seconds = [float("inf")]  # of the largest ones: the first has waited for compilers
    prompts = union(world, runner.device, prompt_steps(runner, largest))
    for step in warm_up_steps(settings.max_num_seqs, largest, prompts):
        result = runner.dummy_step(*step)
        seconds += [result.device_seconds] if step[1] == largest else []
    for drafts in draft_steps(settings.draft_depths, settings.max_num_seqs):
        runner.dummy_step(*drafts)
    if runner.seeing is not None:
        runner.seeing.warm_up()
    if runner.adapters is not None:
        more = union(world, runner.device, adapter_prompts(runner))
        for num_seqs, num_tokens in adapter_steps(settings.max_num_seqs, largest, more):
            runner.dummy_step(num_seqs, num_tokens, GREEDY, adapted=True)
    return min(seconds)


def capture(runner: ModelRunner, graphs: StepGraphs, settings: Settings) -> None:
    runner.capture_graphs(graphs)
    # What steps allocate beside their graphs is kept from here on: allocating later would stop the GPU.
    runner.dummy_step(settings.max_num_seqs, settings.max_num_batched_tokens, WORST_SAMPLING)


def _warn(notices: tuple[str, ...]) -> None:
    for notice in notices:
        logger.warning(notice)


def make_tables(model: Model, settings: Settings, download_dir: str | None) -> AdapterTables | None:
    """None where no adapter is served. Raises ConfigError for target modules that the model does not have."""
    if not settings.max_loras:
        return None
    layout = SlotLayout(model, settings.config.max_lora_rank, settings.config.lora_target_modules, whole_of(model))
    device: torch.device = settings.device
    store = AdapterStore(layout, settings.lora_dtype, device.type == "cuda", download_dir)
    return AdapterTables(store, settings.max_loras, device, most_tokens(settings), settings.max_num_seqs)


def most_tokens(settings: Settings) -> int:
    """Of a step, padding included: graphs pad by less than there may be rows, or have room for a few decodes more."""
    return settings.max_num_batched_tokens + max(settings.max_num_seqs, FEW_DECODES)
