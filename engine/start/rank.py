"""One rank, from a configuration to a runner that can step: the phases of start-up, in the order they happen."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from ...kernels.linear.cublaslt import accumulate_in_fp32
from ..adapters.adapter import Adapter
from ..adapters.store import find_adapter
from ..cache.kv_format import KVFormat, loaded_format
from ..describe.divide import check_divides
from ..describe.model_config import ModelConfig
from ..describe.model_source import resolve_model_path
from ..describe.reading import read_model_config
from ..describe.stages import check_stages, stage_layers
from ..errors import ConfigError
from ..link.messages import Progress
from ..models.model import Model
from ..options.config import EngineConfig, default_cpu_threads
from ..parallel.group import LOCAL, TIMEOUT, Group, gather
from ..parallel.join import join
from ..parallel.pipeline import WHOLE, Stage, form_ring
from ..parallel.rendezvous import Rendezvous
from ..planning.cpu_memory import check_rows
from ..planning.draft_size import draft_bytes
from ..planning.encoder_limits import plan_encoder
from ..planning.host_memory import available_bytes, machine_bytes
from ..planning.memory import WORST_SAMPLING, plan_memory, weight_bytes
from ..planning.settings import Fitted, Machine, Settings, resolve, step_limits
from ..planning.shortage import is_out_of_memory, out_of_memory
from ..planning.weight_size import check_weights
from ..quant.packed import has_kernels
from ..ranks.agreement import check_equal, union
from ..ranks.messages import Seat
from ..ranks.network import advice
from ..speculation.loading import find_draft, load_drafter
from ..speculation.model_drafter import ModelDrafter
from ..step.encoder_runner import EncoderRunner
from ..step.graphs import StepGraphs
from ..step.runner import ModelRunner
from ..weights.loader import load_model
from .described import describe, told
from .expert_info import describe_experts, told_of_experts
from .make_adapters import make_tables
from .warm_steps import GREEDY, adapter_prompts, adapter_steps, draft_steps, prompt_steps, warm_up_steps

logger = logging.getLogger(__name__)
ALONE = Seat()
GRAPHS_ACROSS_HOSTS = (2, 30, 4)  # NCCL's version


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
        self._config = config
        self._asked: Settings | None = None
        self._weights = self._drafts = 0  # bytes; of who drafts, known beforehand
        with self._phase("device"):
            machine = open_machine(config, seat.card)
        config = self._config = eager_across_hosts(config, seat, machine.device)
        patience = max(timedelta(seconds=config.distributed_timeout_seconds), TIMEOUT)
        with self._phase("config"):
            rendezvous = find_rendezvous(seat, patience)
            path = resolve_model_path(
                config.model, config.revision, config.download_dir, config.load_format, config.trust_remote_code
            )
            model_config = read_model_config(path, config)
            if (foreign := model_config.foreign) is not None:
                logger.info("%s", foreign.told(config.model_impl))
            self._asked = asked = resolve(config, model_config, machine)
            _warn(asked.notices)
            if limits := step_limits(config, asked):
                logger.info("%s", limits)
            draft = None
            if asked.speculation.by_model:
                draft = find_draft(
                    asked.speculation, path, model_config, config.download_dir, config.tensor_parallel_size,
                    config.enable_expert_parallel,
                )  # fmt: skip
                asked = asked.drafted_by(draft.settings.method)
                self._drafts = draft_bytes(
                    draft, model_config, asked.dtype, config.tensor_parallel_size, config.enable_expert_parallel,
                    machine.device.type == "cuda",
                )  # fmt: skip
            if note := getattr(model_config.quantization, "note", None):
                logger.warning("--quantization %s: %s", config.quantization, note)
            num_stages = config.pipeline_parallel_size
            check_stages(model_config, num_stages, config.stage_layers)
            check_divides(model_config, seat.size // num_stages, config.enable_expert_parallel)
            symmetric = not config.disable_custom_all_reduce
            wait_for_ranks(rendezvous, "files")
            self.world = meet(seat, machine.device, symmetric, num_stages, patience, rendezvous)
            check_equal(self.world, asked)
            layers = stage_layers(model_config, num_stages, config.stage_layers)
            one_host = seat.rendezvous.startswith(LOCAL)
            self.group, self.stage = form_ring(self.world, num_stages, machine.device, symmetric, layers, one_host)
            if num_stages > 1:
                logger.info("layers of the %d stages: %s", num_stages, ", ".join(str(len(part)) for part in layers))
        with self._phase("weights"):
            self.model = load(
                path, model_config, asked, self.group, lambda done, total: report(Progress("weights", done, total)),
                lambda *sizes: self._admit(model_config, *sizes), config.merge_lora, self.stage,
            )  # fmt: skip
            drafter = None if draft is None else load_drafter(draft, self.model, asked.max_model_len)
            self.quantization = describe(self.model)
            if self.quantization:
                logger.info("%s", told(self.quantization))
            self.experts = describe_experts(self.model)
            if self.experts:
                logger.info("%s", told_of_experts(self.experts))
            wait_for_ranks(rendezvous, "weights")
        with self._phase("compilation"):
            before_memory()
            gather(self.world, machine.device, [0])  # the others find in the cache what rank 0 has had compiled
        with self._phase("memory"):
            kv_format, told_of_cache = loaded_format(asked, self.model)
            if told_of_cache:
                logger.info("%s", told_of_cache)
            self.runner = make_runner(self.model, asked, kv_format, drafter)
            if not isinstance(self.runner, EncoderRunner):
                self.runner.adapters = make_tables(self.model, asked, config.download_dir)
            elif asked.max_loras:
                raise ConfigError("--enable-lora: encoders are served without adapters, leave it out")
            self.settings, graphs = take_memory(self.runner, config, asked, self.world)
        with self._phase("warm-up"):
            self.longest_step = warm_up(self.runner, self.settings, self.world)
        if graphs is not None:
            assert not isinstance(self.runner, EncoderRunner)
            with self._phase("graphs"):
                capture(self.runner, graphs, self.settings)
        self.runner.count_compilations()
        self.num_threads = None if machine.device.type == "cuda" else machine.cpu_threads

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
        self.seconds[name] = time.monotonic() - started

    def _admit(self, model_config: ModelConfig, parameters: int, stored: int) -> None:
        assert self._asked is not None
        self._weights = check_weights(
            self._config, model_config, self._asked.machine, self._asked.dtype, parameters, stored, self._drafts
        )

    def _explained(self, error: Exception, phase: str) -> str:
        place, free, total, limits = "the machine", available_bytes(), machine_bytes(), {}
        if (asked := self._asked) is not None:
            limits = {"max_model_len": asked.max_model_len, "max_num_seqs": asked.max_num_seqs}
            if asked.device.type == "cuda":
                place, (free, total) = asked.machine.name, torch.cuda.mem_get_info()
        return out_of_memory(
            error, phase, self._config, place=place, free=free, total=total, weights=self._weights,
            on_card=place != "the machine", **limits,
        )  # fmt: skip


def find_rendezvous(seat: Seat, patience: timedelta) -> Rendezvous | None:
    """Before the model's files are looked for: a network that leads nowhere is said before they are downloaded. Raises
    ConfigError."""
    if seat.size == 1:
        return None
    with finding(seat):
        return Rendezvous(seat.rank, seat.size, seat.rendezvous, patience, seat.listener)


def wait_for_ranks(rendezvous: Rendezvous | None, what: str) -> None:
    """Until all have these: how long hosts download or read may differ by more than a collective waits."""
    if rendezvous is not None:
        rendezvous.wait_for_all(what, lambda missing: logger.info(
            "waiting for the model's %s of rank %s of %d", what, ", ".join(map(str, missing)), rendezvous.size
        ))  # fmt: skip


def meet(
    seat: Seat, device: torch.device, symmetric: bool, num_stages: int, patience: timedelta,
    rendezvous: Rendezvous | None,
) -> Group:  # fmt: skip
    """The group of all ranks. `patience`: also of each collective, which may be a long prompt's. Raises ConfigError
    where those of other hosts are not found."""
    with finding(seat):
        return join(seat.rank, seat.size, seat.rendezvous, device, symmetric, num_stages, patience, rendezvous)


class RanksApartError(ConfigError, RuntimeError):
    """Ranks of several hosts do not find each other, because of their network. Or one of them is gone: whoever watches
    their processes waits for that news, as after any RuntimeError of a rank."""


@contextmanager
def finding(seat: Seat) -> Iterator[None]:
    """Raises RanksApartError."""
    try:
        yield
    except RuntimeError as error:
        if seat.rendezvous.startswith(LOCAL):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RanksApartError(f"rank {seat.rank} does not find the others ({lines[0]}): {advice()}") from error


def eager_across_hosts(config: EngineConfig, seat: Seat, device: torch.device) -> EngineConfig:
    """Without graphs where NCCL stops for ever in those that reach over a network (2.28.9 has)."""
    if seat.size == 1 or seat.rendezvous.startswith(LOCAL) or device.type != "cuda" or config.enforce_eager:
        return config
    if (found := torch.cuda.nccl.version()) >= GRAPHS_ACROSS_HOSTS:
        return config
    logger.warning(
        "steps are launched kernel by kernel: ranks are on several hosts, and CUDA graphs reach over a network with "
        "NCCL %s; it is %s", *(".".join(map(str, version)) for version in (GRAPHS_ACROSS_HOSTS, found)),
    )  # fmt: skip
    return dataclasses.replace(config, enforce_eager=True)


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
        check_rows(
            model, weight_bytes(model, drafter), max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len, max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
        )  # fmt: skip
    return ModelRunner(
        model, max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len,
        block_size=settings.block_size, device=settings.device, kv_format=kv_format,
        speculation=settings.speculation, model_drafter=drafter,
    )  # fmt: skip


def take_memory(
    runner: ModelRunner | EncoderRunner, config: EngineConfig, settings: Settings, world: Group
) -> tuple[Fitted, StepGraphs | None]:
    """Plans the memory, makes the rows as wide as the context that fits, and takes the cache."""
    if isinstance(runner, EncoderRunner):
        plan = plan_encoder(runner, config, settings)
        logger.info("memory:\n%s", plan.table())
        return settings.fit(plan), None
    graphs = None
    if settings.uses_graphs:
        graphs = runner.plan_graphs(
            settings.config.max_cudagraph_capture_size, settings.mixed_step, settings.large_mixed_tokens
        )
    shapes = graphs.shapes() if graphs else ()
    if graphs and runner.adapters is not None and runner.adapter_graphs is not None:
        shapes = [*shapes, *runner.adapter_graphs.shapes()]
    plan = plan_memory(runner, config, settings.dtype, settings.max_num_batched_tokens, shapes, world)
    fitted = settings.fit(plan)
    _warn(fitted.notices)
    if fitted.max_model_len != settings.max_model_len:
        runner.make_rows(fitted.max_model_len)
    runner.bind_cache(plan.num_blocks, settings.dtype)
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
