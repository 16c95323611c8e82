"""Every option of the engine, declared, defaulted and validated in one place. Flags and /server_info derive from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from . import config_checks as checks
from .cgroup import num_cores
from .config_checks import Purpose, read_purpose
from .model_names import hub_name
from .option import FITTING as FITTING
from .option import PORT, POSITIVE, UNLIMITED, Bounds, check_options, json_object, option
from .option import flag as flag


@dataclass(frozen=True)
class EngineConfig:
    """What the user asked for; `resolve` fills in None and "auto" once model and device are known, see settings.py."""

    model: str = option("", "folder of a Hugging Face model, or its name on the hub", group="model")
    revision: str | None = option(None, "branch, tag or commit of a model taken from the hub", group="model")
    download_dir: str | None = option(
        None, "folder for what is taken from the hub (default: the hub's own cache, HF_HOME)", group="model",
        problem=checks.no_file,
    )  # fmt: skip
    model_impl: str = option(
        "auto",
        "who computes the model: vserve's own families, or transformers' code on vserve's cache and kernels; auto: the "
        "former where there is one; vllm means vserve",
        choices=("auto", "vserve", "transformers", "vllm"),
        group="model",
    )
    trust_remote_code: bool = option(
        False, "run the code of the model's folder where it has some, and vserve no family of its own; it may do all "
        "that you may", group="model",
    )  # fmt: skip
    runner: str = option(
        "auto", "generate: text, and embeddings beside it; pooling: embeddings, classes or scores, and no text; auto: "
        "what the model can",
        choices=("auto", "generate", "pooling"), group="model",
    )  # fmt: skip
    convert: str = option(
        "auto", "what a model that could do else is made to do: embed, classify (its head, or the two tokens of a "
        "reranker) or reward; auto, none: as its architecture says",
        choices=("auto", "none", "embed", "classify", "reward"), group="model",
    )  # fmt: skip
    task: str = option(
        "auto", "an older name of both: generate, embed, classify, score or reward",
        choices=("auto", "generate", "embed", "embedding", "classify", "score", "reward", "transcription"),
        group="model",
    )  # fmt: skip
    dtype: str = option(
        "auto",
        "of weights and activations; auto: the checkpoint's on a GPU, float32 on the CPU",
        choices=("auto", "bfloat16", "float16", "float32"),
        group="model",
    )
    load_format: str = option(
        "auto",
        "auto: safetensors, or what torch pickled where there are none; pt: the latter (*.bin, *.pt), tensors only; "
        "npcache: as pt; dummy: random weights from config.json alone (benchmarks)",
        choices=("auto", "safetensors", "pt", "npcache", "dummy"),
        group="model",
    )
    quantization: str | None = option(
        None,
        "what a 16-bit checkpoint becomes as it is loaded: fp8, int8, int4 or bitsandbytes; a quantized one says "
        "itself what it is",
        group="model",
        short="q",
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens; auto or -1: the model's, or what fits the memory (the default)",
        group="model",
        bounds=Bounds(1, note="auto or -1 take what fits"),
    )
    hf_config_path: str | None = option(
        None, "folder or hub name whose config.json is read instead of the model's", group="model", problem=checks.model
    )
    hf_overrides: str | None = option(
        None, "JSON object with values that come before those of config.json, such as '{\"rope_theta\": 1000000}'",
        group="model", problem=json_object, is_json=True,
    )  # fmt: skip
    rope_theta: float | None = option(
        None, "base of the rotary embedding, instead of config.json's", group="model", bounds=Bounds(above=0)
    )
    rope_scaling: str | None = option(
        None, "JSON object that stretches the rotary embedding, instead of config.json's, such as "
        '\'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}\'',
        group="model", problem=checks.rope_scaling, is_json=True,
    )  # fmt: skip
    disable_sliding_window: bool = option(
        False, "every layer sees the whole context, which is then no longer than the model's window", group="model"
    )
    language_model_only: bool = option(
        False, "of a model of pictures serve the text alone: what looks at pictures is not loaded", group="model"
    )
    mm_processor_kwargs: str | None = option(
        None, "JSON object with settings that come before those of the model's preprocessor_config.json, such as "
        "'{\"max_pixels\": 1048576}'", group="model", problem=json_object, is_json=True,
    )  # fmt: skip
    mm_encoder_cache_tokens: int | None = option(
        None, "tokens of pictures whose features stay in memory, so that a picture is looked at once; a request needs "
        "those of its largest picture (default: 16384, or those of the largest picture that the model takes)",
        group="model", bounds=POSITIVE,
    )  # fmt: skip
    seed: int = option(0, "seeds dummy weights and requests that bring no seed of their own", group="model")
    device: str = option("auto", "where the model runs", choices=("auto", "cuda", "cpu"))
    cpu_threads: int | None = option(
        None, "threads of the engine when it runs on the CPU (default: cores - 1)", bounds=POSITIVE
    )
    block_size: int = option(
        16, "tokens in a block of the KV cache", group="cache", bounds=Bounds(1, 256), problem=checks.power_of_two
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the card's memory that vserve may use, 0 to 1",
        group="cache",
        bounds=Bounds(above=0, at_most=1, note="it is a share"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "of keys and values in the cache; fp8 (fp8_e4m3): half the memory of 16 bits; fp8_per_token_head: the same, "
        "with a scale for each token and head; auto: the activations' type, or what the checkpoint says",
        choices=(
            "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head",
        ),
        group="cache",
    )  # fmt: skip
    calculate_kv_scales: bool = option(
        False,
        "for a cache of 8 bits: a scale for each token and head, instead of the checkpoint's or 1.0",
        group="cache",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache in bytes (default: what is left on a GPU, 1 GiB on the CPU)",
        group="cache",
        bounds=POSITIVE,
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        "of the recurrent states of models that have such; float16: half the memory of float32, rounded at each token; "
        "auto: what the checkpoint asks for",
        choices=("auto", "float32", "float16", "bfloat16"),
        group="cache",
    )
    state_cache_fraction: float = option(
        0.25,
        "share of the cache's memory, beside the states of running requests, that keeps snapshots of recurrent states, "
        "by which later requests find a prefix; the blocks have the rest",
        group="cache",
        bounds=Bounds(0, 0.9, note="it is a share"),
    )
    num_gpu_blocks_override: int | None = option(
        None, "number of blocks of the KV cache, whatever fits", group="cache", bounds=POSITIVE
    )
    enable_prefix_caching: bool = option(True, "reuse the cache blocks of equal prefixes", group="cache")
    prefix_cache_seed: str | None = option(
        None, "text that the keys of cached prefixes are made from: engines with the same one name equal blocks alike; "
        "keep it secret, who knows it can compute keys (default: random)",
        group="cache", secret=True, problem=checks.no_text,
    )  # fmt: skip
    kv_events_config: str | None = option(
        None, "what of the prefix cache is told to routers, as JSON: {\"enable_kv_cache_events\": true, \"endpoint\": "
        "\"tcp://*:5557\"} publishes vLLM's events over ZeroMQ, to whoever reaches that port; without an endpoint to "
        "this host alone", group="cache", is_json=True, problem=checks.kv_events,
    )  # fmt: skip
    enable_lora: bool = option(
        False, "serve adapters (LoRA) beside the model: each request names one, or none", group="adapters"
    )
    merge_lora: str | None = option(
        None, "folder of one adapter that is merged into the model as it is loaded: served alone, at no cost a token",
        group="adapters", problem=checks.no_file,
    )  # fmt: skip
    qlora_adapter_name_or_path: str | None = option(None, "an older name of merge_lora", group="adapters")
    max_loras: int | None = option(
        None, "adapters that the requests of a step may have; each takes a slot of device memory (default: 4, and no "
        "more than max_cpu_loras)", group="adapters", bounds=Bounds(1, 1024),
    )  # fmt: skip
    max_lora_rank: int = option(
        16, "largest rank of an adapter; slots have room for it", group="adapters", bounds=Bounds(1, 512)
    )
    max_cpu_loras: int | None = option(
        None, "adapters kept in host memory, ready for a slot; others are read again when they are asked for (default: "
        "twice max_loras)", group="adapters", bounds=POSITIVE,
    )  # fmt: skip
    lora_dtype: str = option(
        "auto", "of adapters in memory; auto: the model's", choices=("auto", "bfloat16", "float16", "float32"),
        group="adapters",
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] = option(
        (), "last names of the modules that adapters may change, such as q_proj, and experts for all matrices of a "
        "mixture's; fewer make slots smaller (default: all that can, but experts)", group="adapters",
    )  # fmt: skip
    data_parallel_size: int = option(
        1, "engines with the same model, each on a card (or a share of the cores) of its own, behind one address",
        group="parallel", bounds=Bounds(1, 64), short="dp",
    )  # fmt: skip
    tensor_parallel_size: int = option(
        1, "cards (on the CPU: processes) that share one model, each with a part of every layer: an engine has so many "
        "ranks", group="parallel", bounds=Bounds(1, 64), short="tp",
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        1, "stages that the layers of one model are dealt out to, each on a card (on the CPU: a process) of its own, "
        "or on as many as tensor_parallel_size says", group="parallel", bounds=Bounds(1, 64), short="pp",
    )  # fmt: skip
    pipeline_layer_partition: str | None = option(
        None, "layers of each stage, such as 12,10,10 (default: so that stages take about as much memory and time as "
        "each other; vLLM's VLLM_PP_LAYER_PARTITION)", group="parallel", problem=checks.partition,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, "ranks hold whole experts of a mixture, not a slice of each", group="parallel", short="ep"
    )
    disable_custom_all_reduce: bool = option(
        False, "ranks sum through NCCL alone, not in memory that their cards share", group="parallel"
    )
    distributed_executor_backend: str | None = option(
        None, "what starts ranks: mp, processes of this host and of the other nodes; ray, a Ray cluster; uni, there is "
        "one rank, in the engine; external_launcher, torchrun, of programs that use LLM (default: mp, or uni)",
        group="parallel", choices=("mp", "uni", "ray", "external_launcher"),
    )  # fmt: skip
    nnodes: int = option(
        1, "hosts that share the ranks of one engine; start the same command on each", group="parallel",
        bounds=Bounds(1, 64), short="n",
    )  # fmt: skip
    node_rank: int = option(
        0, "which of the nnodes this host is; 0 answers HTTP, the others are started with --headless",
        group="parallel", bounds=Bounds(0, 63), short="r",
    )  # fmt: skip
    master_addr: str = option(
        "127.0.0.1", "address of node 0, where the others dial in", group="parallel", problem=checks.no_text
    )
    master_port: int = option(29501, "port of node 0, where the others dial in", group="parallel", bounds=PORT)
    host_ip: str | None = option(
        None, "own address of this host among the nodes; its interface is the one that NCCL and gloo use (default: "
        "what reaches node 0)", group="parallel", problem=checks.no_text,
    )  # fmt: skip
    cluster_secret: str | None = option(
        None, "random text that nodes must share to be let in, 16 characters or more; needed where node 0 can be "
        "reached from other hosts, best as VSERVE_CLUSTER_SECRET",
        group="parallel", secret=True, problem=checks.no_text,
    )  # fmt: skip
    distributed_timeout_seconds: int = option(
        600, "seconds to wait for other nodes, a Ray cluster or another rank", group="parallel",
        bounds=Bounds(1, 86_400, unit="seconds"),
    )  # fmt: skip
    ray_workers_use_nsight: bool = option(
        False, "each Ray worker runs under `nsys profile`, which writes to Ray's folder of logs", group="parallel"
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens computed in one step, decodes or not (default: 8192 on a card of 70 GB, 2048 on less, of mixtures of "
        "experts 4096, 512 on the CPU, of them max_mixed_tokens beside decodes)",
        group="scheduler",
        bounds=POSITIVE,
    )
    max_mixed_tokens: int | None = option(
        None,
        "tokens computed in a step that also decodes, 0: as in any other (default: 1024 on a GPU, of weights that "
        "stay codes, without drafts, 2032, of mixtures of experts 4096, 0 on the CPU and where max_num_batched_tokens "
        "is given)",
        group="scheduler",
        bounds=UNLIMITED,
    )
    backlog_steps: int | None = option(
        None,
        "steps in which a long queue of prompts should be worked off; fewer make larger steps: faster, but others wait "
        "longer for their next token (default: 32, 16 where that of max_mixed_tokens is above 1024, 1 offline)",
        group="scheduler",
        bounds=POSITIVE,
    )
    max_num_seqs: int | None = option(
        None,
        "requests running at once (default: 1024 on a card of 70 GB, 256 on less, 16 on the CPU)",
        group="scheduler",
        bounds=POSITIVE,
    )
    enable_chunked_prefill: bool = option(True, "split long prompts over several steps", group="scheduler")
    max_num_partial_prefills: int | None = option(
        None, "prompts that are computed in pieces at once; they share each step evenly (default: as many as a step "
        "holds, each as much as is left)", group="scheduler", bounds=POSITIVE,
    )  # fmt: skip
    max_long_partial_prefills: int | None = option(
        None, "of them, those longer than long_prefill_token_threshold: shorter prompts pass those that wait for it",
        group="scheduler", bounds=POSITIVE,
    )  # fmt: skip
    long_prefill_token_threshold: int = option(
        0, "most tokens that a step computes of one prompt, so that others are in it too; 0: no limit, or 4 % of the "
        "context where max_long_partial_prefills needs one", group="scheduler", bounds=UNLIMITED,
    )  # fmt: skip
    speculative_config: str | None = option(
        None, "JSON object that turns drafts on, such as '{\"method\": \"ngram\", \"num_speculative_tokens\": 7}': "
        "answers stay the same, and come faster where they repeat what stood before, or \"model\": who drafts",
        group="scheduler", problem=checks.speculation, is_json=True, short="sc",
    )  # fmt: skip
    scheduling_policy: str = option(
        "fcfs",
        "who runs first: by arrival, or by the request's priority",
        choices=("fcfs", "priority"),
        group="scheduler",
    )
    enforce_eager: bool = option(False, "never use CUDA graphs")
    max_cudagraph_capture_size: int = option(
        512, "largest decode batch that gets a CUDA graph", bounds=Bounds(1, note="--enforce-eager turns graphs off")
    )
    max_logprobs: int = option(
        20, "most log-probabilities a request may ask for at a position; -1: of the whole vocabulary", bounds=Bounds(-1)
    )
    engine_in_process: bool = option(False, "run the engine loop inside the API process (tests, very small models)")

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", hub_name(self.model))
        if self.max_model_len == FITTING:
            object.__setattr__(self, "max_model_len", None)
        check_options(self)
        checks.check_batch(self)
        checks.check_partial_prefills(self)
        _ = self.purpose  # --task, --runner and --convert may contradict each other
        checks.check_events(self)
        checks.check_adapters(self)
        checks.check_stages(self)
        checks.check_nodes(self)
        if self.engine_in_process and self.data_parallel_size > 1:
            raise ConfigError(
                f"--engine-in-process has room for one engine, and --data-parallel-size is {self.data_parallel_size}: "
                "leave one of them out"
            )

    @property
    def world_size(self) -> int:
        """Ranks of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Those of an engine that are on one host; with Ray, at most."""
        return self.world_size // self.nnodes

    @property
    def processor_kwargs(self) -> dict[str, Any]:
        """--mm-processor-kwargs, read."""
        found: dict[str, Any] = json.loads(self.mm_processor_kwargs or "{}")
        return found

    @property
    def purpose(self) -> Purpose:
        """What --task, --runner and --convert say. Raises ConfigError where they contradict each other."""
        return read_purpose(self.task, self.runner, self.convert)

    @property
    def adapter_slots(self) -> int:
        """--max-loras; where nobody says it, 4, and no more than the host is to keep."""
        return self.max_loras or min(4, self.max_cpu_loras or 4)

    @property
    def fits_cache(self) -> bool:
        """Its size is what the memory leaves."""
        return self.kv_cache_memory_bytes is None and self.num_gpu_blocks_override is None

    @property
    def num_ranks(self) -> int:
        """Of all engines, on one host."""
        return self.data_parallel_size * self.ranks_per_node

    @property
    def divided_by(self) -> str:
        """The options that make several ranks of an engine, for people."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return " ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """How many layers each stage has; empty: nobody has said so."""
        return tuple(map(int, (self.pipeline_layer_partition or "").replace(",", " ").split()))


def default_cpu_threads() -> int:
    """One core is left to the API process."""
    return max(1, num_cores() - 1)
