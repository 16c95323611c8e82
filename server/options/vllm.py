"""Options of vLLM that are none here: which may stay on a command line, and what to do instead of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ...engine.errors import ConfigError

ANY = "*"
_JSON = frozenset(("kv-transfer-config", "compilation-config", "override-neuron-config"))
OFF = "off"  # of a switch
HERE = "here"  # is read as options of ours (fleet.py, given.py); the reason says what follows
READ = "read"  # as a key of --speculative-config, which is the reason (speculation.py)
_ONE_HOST = "a server's engines are processes of its own host"
_SEVERAL = frozenset((
    "cudagraph-capture-sizes", "cuda-graph-sizes", "sleep-preserve-parameter-names", "kv-cache-dtype-skip-layers",
    "cpu-offload-params", "offload-params", "numa-bind-cpus", "numa-bind-nodes", "device-ids",
))  # fmt: skip
_SHORT = {
    "prefill-context-parallel-size": "pcp", "data-parallel-multi-port-external-lb": "dpm", "attention-config": "ac",
    "diffusion-config": "dc",
}  # fmt: skip
_ONE_OF_SEVERAL = "one engine runs here, and whoever is before the servers chooses"

# name, short name | takes a value, or is a switch | values that mean what vserve does anyway, or ANY | the reason
_ROWS = (
    # ---- several GPUs ----
    ("data-parallel-size-local", "dpl", True, HERE, "so many engines run here"),
    ("data-parallel-rank", "dpn", True, HERE, _ONE_OF_SEVERAL),
    ("data-parallel-external-lb", "dpe", False, HERE, _ONE_OF_SEVERAL),
    ("data-parallel-hybrid-lb", "dph", False, HERE, "this server chooses among the engines that run here"),
    ("data-parallel-start-rank", "dpr", True, ANY, "a server's engines are numbered from 0, but in KV events"),
    ("data-parallel-address", "dpa", True, ANY, _ONE_HOST),
    ("data-parallel-rpc-port", "dpp", True, ANY, _ONE_HOST),
    ("data-parallel-backend", "dpb", True, "mp", f"{_ONE_HOST}; start a server on each host, and `vserve router` "
     "before them"),
    ("decode-context-parallel-size", "dcp", True, "1", "a context stays on its cards: leave it out"),
    ("enable-dbo", "", False, OFF, "a step is not cut in two: leave it out"),
    # ---- the model ----
    ("code-revision", "", True, ANY, "a model's code is that of its own --revision"),
    ("config-format", "", True, "auto hf mistral", "models are read from config.json and safetensors: leave it out"),
    ("ignore-patterns", "", True, ANY, "only config, tokenizer and safetensors are downloaded"),
    ("max-parallel-loading-workers", "", True, ANY, "loading is parallel as it is"),
    ("use-tqdm-on-load", "", False, ANY, "the progress line is always shown"),
    ("cpu-offload-gb", "", True, "0", "weights stay on the GPU: choose a smaller model or a larger GPU"),
    ("safetensors-load-strategy", "", True, ANY, "files are read ahead as it is"),
    ("pt-load-map-location", "", True, ANY, "pickled tensors are read on the CPU, always"),
    ("enable-sleep-mode", "", False, OFF, "sleeping is not built: stop the server, it starts in seconds"),
    ("enable-prompt-embeds", "", False, OFF, "prompts are text or token ids"),
    # ---- adapters ----
    ("fully-sharded-loras", "", False, ANY, "every rank holds its share of the matrices as it is"),
    ("specialize-active-lora", "", False, ANY, "steps without adapters have graphs of their own as it is"),
    ("enable-lora-bias", "", False, ANY, "adapters with a bias of their own are refused, whatever it says"),
    ("lora-extra-vocab-size", "", True, ANY, "adapters that bring more tokens are refused: merge them with PEFT"),
    ("long-lora-scaling-factors", "", True, ANY, "an adapter's own configuration says its scale, and the model's how "
     "long contexts are"),
    # ---- speculative decoding ----
    ("spec-method", "", True, READ, "method"),
    ("spec-model", "", True, READ, "model"),
    ("spec-tokens", "", True, READ, "num_speculative_tokens"),
    ("speculative-mode", "", True, READ, "method"),
    ("speculative-model", "", True, READ, "model"),
    ("num-speculative-tokens", "", True, READ, "num_speculative_tokens"),
    ("ngram-prompt-lookup-max", "", True, READ, "prompt_lookup_max"),
    ("ngram-prompt-lookup-min", "", True, READ, "prompt_lookup_min"),
    ("speculative-model-quantization", "", True, READ, "quantization"),
    ("speculative-draft-tensor-parallel-size", "spec-draft-tp", True, READ, "draft_tensor_parallel_size"),
    ("speculative-max-model-len", "", True, READ, "max_model_len"),
    ("speculative-disable-by-batch-size", "", True, READ, "disable_by_batch_size"),
    ("spec-decoding-acceptance-method", "", True, READ, "rejection_sample_method"),
    ("speculative-disable-mqa-scorer", "", False, ANY, "drafts are verified in one step, always"),
    ("disable-logprobs-during-spec-decoding", "", False, ANY, "they are those of the tokens that are kept"),
    # ---- scheduling and memory ----
    ("swap-space", "", True, ANY, "a preempted request is computed again, which is faster than copying its cache"),
    ("preemption-mode", "", True, ANY, "a preempted request is computed again, always"),
    ("multi-step-stream-outputs", "", False, ANY, "every token is streamed at once, always"),
    ("num-lookahead-slots", "", True, ANY, "they follow from what is scheduled"),
    ("use-v2-block-manager", "", False, ANY, "there is one block manager"),
    ("scheduler-delay-factor", "", True, ANY, "prompts wait for nothing but room; --max-mixed-tokens says how much of "
     "them a step takes"),
    ("prefix-caching-hash-algo", "", True, ANY, "prefixes are told apart by SHA-256"),
    ("disable-hybrid-kv-cache-manager", "", False, ANY, "what is behind a layer's window is given back, always"),
    ("kv-offloading-size", "", True, "0", "the cache stays on the GPU: leave it out"),
    ("kv-offloading-backend", "", True, ANY, "the cache stays on the GPU"),
    ("kv-transfer-config", "", True, "", "prompts and answers are computed in one place: leave it out"),
    ("compilation-config", "cc", True, ANY, "nothing is compiled at start; --enforce-eager turns CUDA graphs off"),
    ("optimization-level", "O", True, ANY, "nothing is compiled at start; --performance-mode sets what suits a load"),
    ("cudagraph-capture-sizes", "", True, HERE, "graphs have sizes of their own, up to the largest of these"),
    ("cuda-graph-sizes", "", True, HERE, "graphs have sizes of their own, up to the largest of these"),
    ("max-seq-len-to-capture", "", True, ANY, "CUDA graphs serve every length"),
    ("attention-backend", "", True, ANY, "the attention kernels are vserve's own"),
    ("moe-backend", "", True, ANY, "the kernels of experts are vserve's own"),
    # ---- text ----
    ("guided-decoding-backend", "", True, "auto xgrammar guidance outlines lm-format-enforcer",
     "llguidance or xgrammar, whichever fits the grammar: leave it out; for its options use "
     "--structured-outputs-config"),
    ("guided-decoding-disable-fallback", "", False, ANY, "llguidance or xgrammar, whichever fits the grammar"),
    ("guided-decoding-disable-any-whitespace", "", False, OFF,
     "use --structured-outputs-config.disable_any_whitespace true"),
    ("guided-decoding-disable-additional-properties", "", False, OFF,
     "use --structured-outputs-config.disable_additional_properties true"),
    ("chat-template-content-format", "", True, ANY, "the chat template tells"),
    ("response-role", "", True, "assistant", "answers are the assistant's: leave it out"),
    ("logits-processor-pattern", "", True, ANY, "no code of others runs here, requests that name some in "
     "'logits_processors' are refused whatever it allows"),
    ("logprobs-mode", "", True, "raw_logprobs", "log-probabilities are the model's own, before penalties and "
     "temperature: leave it out"),
    ("exclude-tools-when-tool-choice-none", "", False, ANY, "chat templates get no tools then, always"),
    ("enable-tokenizer-info-endpoint", "", False, ANY, "/tokenizer_info always tells"),
    ("tool-server", "", True, "", "tools run at the client's: leave it out"),
    # ---- server ----
    ("disable-log-requests", "", False, ANY, "prompts are not logged unless --enable-log-requests asks for it"),
    ("enable-log-deltas", "", False, ANY, "--enable-log-outputs logs whole answers"),
    ("disable-fastapi-docs", "", False, OFF, "/docs says nothing of this server, and /openapi.json wants a key where "
     "there are keys: leave it out"),
    ("disable-uvicorn-access-log", "", False, HERE, "requests have no line in the log, as --no-access-log says"),
    ("sse-keep-alive-interval", "", True, HERE, "it is --sse-ping-interval"),
    ("uvicorn-log-level", "", True, ANY, "use --log-level for all that is logged"),
    ("log-config-file", "", True, "", "use --log-level and --log-format"),
    ("enable-prompt-tokens-details", "", False, ANY, "usage always has them"),
    ("enable-server-load-tracking", "", False, ANY, "/load always tells"),
    ("enable-request-id-headers", "", False, ANY, "answers always have an x-request-id"),
    ("enable-ssl-refresh", "", False, OFF, "files are not watched: POST /reload or SIGUSR2 reads them again"),
    ("h11-max-incomplete-event-size", "", True, "", "use --max-header-size and --max-request-line"),
    ("h11-max-header-count", "", True, "", "use --max-header-count"),
    ("show-hidden-metrics-for-version", "", True, ANY, "no metric is hidden"),
    ("collect-detailed-traces", "", True, ANY, "spans have all there is"),
    ("override-neuron-config", "", True, "{}", "models run on NVIDIA GPUs and CPUs: leave it out"),
)  # fmt: skip

# The same for names that share an answer: the reason | accepted | names: `=` takes a value, `={}` a JSON object.
_ALIKE = (
    ("pictures are prepared and encoded in one way, as the model's folder says", ANY,
     "skip-mm-profiling interleave-mm-strings mm-encoder-tp-mode= default-mm-loras={} disable-chunked-mm-input "
     "enable-mm-embeds media-io-kwargs={} "
     "mm-device-do-normalize mm-encoder-attn-backend= mm-encoder-attn-dtype= mm-encoder-fp8-scale-path= "
     "mm-encoder-fp8-scale-save-margin= mm-encoder-fp8-scale-save-path= mm-hasher-algorithm= mm-ipc-gpu-memory-gb= "
     "mm-processor-cache-type= mm-processor-device= mm-shm-cache-max-object-size-mb= mm-tensor-ipc= "
     "trust-request-mm-kwargs video-pruning-method= video-pruning-rate= enable-tower-connector-lora "
     "ec-manager-config={} enable-shm-tensor-arena"),
    ("there is no encoder of pictures that could run alone: leave it out", OFF, "mm-encoder-only"),
    ("prompts and pictures are computed in one place: leave it out", "", "ec-transfer-config={}"),
    ("prompt adapters are not served, only LoRA is: --enable-lora", OFF, "enable-prompt-adapter"),
    ("prompt adapters are not served, only LoRA is: --enable-lora", ANY,
     "max-prompt-adapters= max-prompt-adapter-token="),
    ("texts are tokenized on threads as it is", ANY, "tokenizer-pool-type= tokenizer-pool-extra-config={}"),
    ("vserve loads no code of others: leave it out", "",
     "tool-parser-plugin= reasoning-parser-plugin= logits-processors= io-processor-plugin= middleware= "
     "model-class-overrides={}"),
    ("the scheduler and the worker are vserve's own, and no others can be put in their place: leave it out; to change "
     "them see docs/house.md", "auto", "scheduler-cls= worker-cls= worker-extension-cls="),
    ("vserve loads no code of others: leave it out", "{}", "additional-config={}"),
    ("experts stay on the cards where they are: leave it out", OFF, "enable-eplb enable-elastic-ep"),
    ("experts stay on the cards where they are: leave it out", "{}", "eplb-config={}"),
    ("experts stay on the cards where they are", ANY,
     "expert-placement-strategy= elastic-ep-max-dp-size= enable-ep-weight-filter all2all-backend="),
    ("each engine of a server has a whole model, and waits for no other", ANY,
     "dp-sync-interval= disable-nccl-for-dp-synchronization"),
    ("one port answers for all engines of a server; for a port each, start a server each", OFF,
     "data-parallel-multi-port-external-lb"),
    ("one port answers for all engines of a server", ANY,
     "data-parallel-supervisor-port= dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s= "
     "dp-supervisor-probe-failure-threshold="),
    ("a context stays on its cards: leave it out", "1", "prefill-context-parallel-size="),
    ("a context stays on its cards", ANY,
     "cp-kv-cache-interleave-size= dcp-kv-cache-interleave-size= dcp-comm-backend= dcp-q-replicate"),
    ("a step is not cut in two: leave it out", "0", "ubatch-size="),
    ("a step is not cut in two", ANY, "dbo-decode-token-threshold= dbo-prefill-token-threshold="),
    ("only typical acceptance has it, which is refused by decision: it changes answers", ANY,
     "typical-acceptance-sampler-posterior-threshold= typical-acceptance-sampler-posterior-alpha="),
    ("the next step is planned while one runs, always", ANY,
     "num-scheduler-steps= async-scheduling disable-async-output-proc"),
    ("every token is streamed at once, always", ANY, "stream-interval="),
    ("safetensors are read ahead by threads as it is", ANY,
     "model-loader-extra-config={} safetensors-prefetch-block-size= safetensors-prefetch-num-threads="),
    ("the kernels are vserve's own, chosen by card and shape", ANY,
     "attention-config={} kernel-config={} linear-backend= sparse-indexer-topk-backend= gdn-prefill-backend= "
     "kda-decode-backend= kda-prefill-backend= ir-op-priority={} monokernel enable-flashinfer-autotune "
     "enable-flash-late-interaction disable-cascade-attn enable-hc-sp enable-batch-sharded-sampling "
     "kv-sharing-fast-prefill"),
    ("recurrent states lie in slots of their own beside the blocks", ANY,
     "mamba-backend= mamba-block-size= mamba-cache-dtype= mamba-cache-mode= mamba-cache-philox-rounds= "
     "mamba-ssu-algorithm= enable-mamba-cache-stochastic-rounding "
     "enable-mamba-shared-prefix-checkpoint replayssm-buffer-len= use-replayssm"),
    ("models that write by diffusion are not served: leave it out", "", "diffusion-config={}"),
    ("embeddings of n-grams are not served: leave it out", "", "engram-config={}"),
    ("weights stay on the GPU: choose a smaller model or a larger GPU", "auto 0", "offload-group-size="),
    ("weights stay on the GPU", ANY,
     "cpu-offload-params= offload-backend= offload-num-in-group= offload-params= offload-prefetch-step="),
    ("sleeping is not built: stop the server, it starts in seconds", ANY,
     "sleep-mode-backend= sleep-mode-offload-cudagraph sleep-preserve-parameter-names= enable-nccl-comm-suspend"),
    ("memory comes from torch's allocator", ANY, "enable-cumem-allocator"),
    ("weights are read from files: stop the server and start it with the new ones", "", "weight-transfer-config={}"),
    ("quantisation follows from the checkpoint, or from --quantization: leave it out", "{}", "quantization-config={}"),
    ("a method that is served is served", ANY, "allow-deprecated-quantization"),
    ("all layers are stored as --kv-cache-dtype says: leave it out", "", "kv-cache-dtype-skip-layers="),
    ("which prefixes are kept follows from blocks and windows", ANY,
     "prefix-match-unit= prefix-cache-retention-interval= swa-bounded-replay"),
    ("a request leaves the queue only where its whole prompt fits the free blocks, always", ANY,
     "scheduler-reserve-full-isl watermark="),
    ("texts are not watermarked: leave it out", "", "watermark-config={}"),
    ("use --max-num-seqs", "", "max-num-active-seqs="),
    ("use --max-num-batched-tokens", "", "max-num-scheduled-tokens="),
    ("--max-mixed-tokens says how much of prompts a step takes beside who is being answered", ANY,
     "prefill-schedule-interval= long-prefill-token-threshold-adaptive"),
    ("noise has 32 bits", ANY, "use-fp64-gumbel"),
    ("adapters of experts are read as they are written", ANY, "enable-mixed-moe-lora-format enable-moe-shared-loras"),
    ("an adapter that brings a head of classes is refused, whatever it says", ANY, "max-lora-cls-labels="),
    ("not built: leave it out", OFF,
     "enable-return-routed-experts enable-trace-replay return-sampling-mask tokens-only grpc"),
    ("not built: leave it out", "", "grpc-port="),
    ("not built: leave it out", "{}", "aux-output-config={}"),
    ("/tokenize, /v1/chat/completions/render and the like are always there", ANY, "enable-scale-out"),
    ("what is to be strict, requests say: \"strict\" of a tool", "auto", "tool-strict-level="),
    ("requests say it: \"reasoning_effort\", \"thinking\"", ANY, "anthropic-disabled-thinking-effort="),
    ("a budget of thinking needs no markers: the model's format says where reasoning begins and ends, and "
     "--reasoning-parser names another", ANY, "reasoning-config={}"),
    ("efforts reach the chat template as requests name them: leave it out", "{}", "reasoning-effort-map={}"),
    ("the chat template of the model's folder says the format", ANY, "cohere-format= cohere-is-reasoning-model"),
    ("metrics are at /metrics, all of them: docs/running/observe.md", ANY,
     "cudagraph-metrics kv-cache-metrics kv-cache-metrics-sample= enable-mfu-metrics aggregate-engine-logging "
     "enable-logging-iteration-details jit-monitor-mode= jit-monitor-verbose"),
    ("buckets are fixed, so that servers can be added up: leave it out", "{}", "custom-histogram-buckets={}"),
    ("answers do not carry it; /metrics and traces do: leave it out", "none", "per-request-spec-decode-metrics="),
    ("profile from outside, as with `nsys profile vserve …` or py-spy: leave it out", "{}", "profiler-config={}"),
    ("profile from outside, as with `nsys profile vserve …` or py-spy: leave it out", OFF,
     "enable-layerwise-nvtx-tracing"),
    ("use --log-level and --log-format", "{}", "logging-config={}"),
    ("the log has the stack of what was not foreseen, always", ANY, "log-error-stack"),
    ("an engine that hangs is ended and started again, always", ANY,
     "watchdog-config={} enable-fault-tolerance fault-tolerance-config={} cpu-distributed-timeout-seconds="),
    ("unknown variables VSERVE_… are told, always", ANY, "fail-on-environ-validation"),
    ("/docs needs no network", ANY, "enable-offline-docs"),
    ("answers have no system_fingerprint", ANY, "fingerprint-mode= fingerprint-value="),
    ("processes run where the system puts them; to bind them start vserve with numactl", ANY,
     "numa-bind numa-bind-cpus= numa-bind-nodes="),
    ("set CUDA_VISIBLE_DEVICES", "", "device-ids="),
    ("use --gpu-memory-utilization", "", "device-memory-utilization="),
)  # fmt: skip


@dataclass(frozen=True)
class VllmOption:
    name: str  # with hyphens
    short: str  # "" or another name, with one hyphen
    takes_value: bool
    accepted: str
    reason: str
    is_json: bool = False  # may be given key by key

    @property
    def takes_several(self) -> bool:
        return self.name in _SEVERAL

    def judge(self, given: Any, where: str) -> str | None:
        """A line for the log where it changes nothing, None where it says what vserve does anyway.

        `given`: the value, True or False for a switch. Raises ConfigError with what to do, naming `where`.
        """
        if self.accepted == READ:
            return f"{where} is read as --speculative-config.{self.reason}"
        if self.accepted == HERE:
            return f"{where} is read: {self.reason}" if given is not False else None
        if self.accepted == ANY:
            return f"{where} changes nothing: {self.reason}"
        if given is False or str(given).lower() in self.accepted.split():
            return None
        raise ConfigError(f"{where}{f' {given}' if self.takes_value else ''}: {self.reason}")


@cache
def vllm_options() -> dict[str, VllmOption]:
    """By name, with underscores."""
    found = [VllmOption(*row, is_json=row[0] in _JSON) for row in _ROWS]
    for reason, accepted, names in _ALIKE:
        for word in names.split():
            name, takes_value, kind = word.partition("=")
            found.append(VllmOption(name, _SHORT.get(name, ""), bool(takes_value), accepted, reason, kind == "{}"))
    return {option.name.replace("-", "_"): option for option in found}
