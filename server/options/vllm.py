"""Options of vLLM that are none here: which may stay on a command line, and what to do instead of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ...engine.config import ConfigError

ANY = "*"
_JSON = frozenset((
    "model-loader-extra-config", "limit-mm-per-prompt", "mm-processor-kwargs", "speculative-config",
    "kv-transfer-config", "kv-events-config", "compilation-config", "default-chat-template-kwargs",
    "tokenizer-pool-extra-config", "additional-config", "override-neuron-config",
))  # fmt: skip
OFF = "off"  # of a switch
_ADAPTERS = "adapters are not served yet: merge it into its base model, and pass the folder of the result"
_DRAFTS = "speculative decoding is not built yet: leave it out, the answers are the same"
_IMAGES = "models here read text only"
_PLUGIN = "vserve loads no code of others: leave it out"
_TOKENIZER_POOL = "texts are tokenized on threads as it is"
_NO_DRAFTS = "there is no speculative decoding yet, the answers are the same"
_NO_ADAPTERS = "there are no adapters yet"

# name, short name | takes a value, or is a switch | values that mean what vserve does anyway, or ANY | the reason
_ROWS = (
    # ---- several GPUs ----
    ("tensor-parallel-size", "tp", True, "1", "a model on several GPUs is not built yet: leave it out, and serve "
     "a model that one GPU holds"),
    ("pipeline-parallel-size", "pp", True, "1", "a model on several GPUs is not built yet: leave it out"),
    ("decode-context-parallel-size", "dcp", True, "1", "a model on several GPUs is not built yet: leave it out"),
    ("enable-expert-parallel", "ep", False, OFF, "mixtures of experts are not served yet"),
    ("distributed-executor-backend", "", True, "mp uni", "one GPU needs no other: leave it out"),
    ("disable-custom-all-reduce", "", False, ANY, "there is one GPU"),
    ("ray-workers-use-nsight", "", False, OFF, "there are no Ray workers: run `nsys profile vserve …`"),
    ("api-server-count", "asc", True, "1", "one API process serves one engine: leave it out"),
    ("headless", "", False, OFF, "several nodes are not built yet"),
    ("nnodes", "", True, "1", "several nodes are not built yet"),
    # ---- the model ----
    ("kv-cache-dtype", "", True, "auto", "the cache has the model's type: leave it out; for more room lower "
     "--max-model-len or raise --gpu-memory-utilization"),
    ("calculate-kv-scales", "", False, ANY, "the cache is not quantized"),
    ("code-revision", "", True, ANY, "a model's code is that of its own --revision"),
    ("tokenizer-mode", "", True, "auto hf", "tokenizers are read from tokenizer.json: leave it out"),
    ("config-format", "", True, "auto hf", "models are read from config.json and safetensors: leave it out"),
    ("ignore-patterns", "", True, ANY, "only config, tokenizer and safetensors are downloaded"),
    ("model-loader-extra-config", "", True, "{}", "safetensors need no settings: leave it out"),
    ("max-parallel-loading-workers", "", True, ANY, "loading is parallel as it is"),
    ("use-tqdm-on-load", "", False, ANY, "the progress line is always shown"),
    ("cpu-offload-gb", "", True, "0", "weights stay on the GPU: choose a smaller model or a larger GPU"),
    ("enable-sleep-mode", "", False, OFF, "sleeping is not built: stop the server, it starts in seconds"),
    ("enable-prompt-embeds", "", False, OFF, "prompts are text or token ids"),
    ("limit-mm-per-prompt", "", True, ANY, _IMAGES),
    ("mm-processor-kwargs", "", True, ANY, _IMAGES),
    ("mm-processor-cache-gb", "", True, ANY, _IMAGES),
    ("disable-mm-preprocessor-cache", "", False, ANY, _IMAGES),
    ("allowed-local-media-path", "", True, ANY, _IMAGES),
    # ---- adapters ----
    ("enable-lora", "", False, OFF, _ADAPTERS),
    ("lora-modules", "", True, "", _ADAPTERS),
    ("max-loras", "", True, ANY, _ADAPTERS),
    ("max-lora-rank", "", True, ANY, _ADAPTERS),
    ("max-cpu-loras", "", True, ANY, _ADAPTERS),
    ("lora-dtype", "", True, ANY, _ADAPTERS),
    ("fully-sharded-loras", "", False, ANY, _ADAPTERS),
    ("enable-prompt-adapter", "", False, OFF, _ADAPTERS),
    ("max-prompt-adapters", "", True, ANY, _NO_ADAPTERS),
    ("max-prompt-adapter-token", "", True, ANY, _NO_ADAPTERS),
    ("enable-lora-bias", "", False, ANY, _NO_ADAPTERS),
    ("lora-extra-vocab-size", "", True, ANY, _NO_ADAPTERS),
    ("long-lora-scaling-factors", "", True, ANY, _NO_ADAPTERS),
    ("qlora-adapter-name-or-path", "", True, "", _ADAPTERS),
    # ---- speculative decoding ----
    ("speculative-config", "", True, "", _DRAFTS),
    ("speculative-model", "", True, "", _DRAFTS),
    ("num-speculative-tokens", "", True, "0", _DRAFTS),
    ("ngram-prompt-lookup-max", "", True, "0", _DRAFTS),
    ("ngram-prompt-lookup-min", "", True, "0", _DRAFTS),
    ("speculative-model-quantization", "", True, ANY, _NO_DRAFTS),
    ("speculative-draft-tensor-parallel-size", "", True, ANY, _NO_DRAFTS),
    ("speculative-max-model-len", "", True, ANY, _NO_DRAFTS),
    ("speculative-disable-by-batch-size", "", True, ANY, _NO_DRAFTS),
    ("speculative-disable-mqa-scorer", "", False, ANY, _NO_DRAFTS),
    ("spec-decoding-acceptance-method", "", True, ANY, _NO_DRAFTS),
    ("typical-acceptance-sampler-posterior-threshold", "", True, ANY, _NO_DRAFTS),
    ("typical-acceptance-sampler-posterior-alpha", "", True, ANY, _NO_DRAFTS),
    ("disable-logprobs-during-spec-decoding", "", False, ANY, _NO_DRAFTS),
    # ---- scheduling and memory ----
    ("swap-space", "", True, ANY, "a preempted request is computed again, which is faster than copying its cache"),
    ("preemption-mode", "", True, "recompute", "a preempted request is computed again, always"),
    ("num-scheduler-steps", "", True, ANY, "the next step is planned while one runs, always"),
    ("multi-step-stream-outputs", "", False, ANY, "every token is streamed at once, always"),
    ("num-lookahead-slots", "", True, ANY, "they follow from what is scheduled"),
    ("async-scheduling", "", False, ANY, "the next step is planned while one runs, always"),
    ("disable-async-output-proc", "", False, ANY, "the next step is planned while one runs, always"),
    ("use-v2-block-manager", "", False, ANY, "there is one block manager"),
    ("scheduler-delay-factor", "", True, ANY, "prompts wait for nothing but room; --max-mixed-tokens says how much of "
     "them a step takes"),
    ("stream-interval", "", True, "1", "every token is streamed at once: leave it out"),
    ("prefix-caching-hash-algo", "", True, ANY, "prefixes are told apart by SHA-256"),
    ("disable-hybrid-kv-cache-manager", "", False, ANY, "there is one kind of cache"),
    ("kv-offloading-size", "", True, "0", "the cache stays on the GPU: leave it out"),
    ("kv-transfer-config", "", True, "", "prompts and answers are computed in one place: leave it out"),
    ("kv-events-config", "", True, "", "the cache publishes no events: leave it out"),
    ("compilation-config", "cc", True, ANY, "nothing is compiled at start; --enforce-eager turns CUDA graphs off"),
    ("optimization-level", "O", True, ANY, "nothing is compiled at start; --performance-mode sets what suits a load"),
    ("cudagraph-capture-sizes", "", True, "", "use --max-cudagraph-capture-size"),
    ("cuda-graph-sizes", "", True, "", "use --max-cudagraph-capture-size"),
    ("max-seq-len-to-capture", "", True, ANY, "CUDA graphs serve every length"),
    ("attention-backend", "", True, ANY, "the attention kernels are vserve's own"),
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
    ("default-chat-template-kwargs", "", True, "{}", "requests say it: \"chat_template_kwargs\""),
    ("response-role", "", True, "assistant", "answers are the assistant's: leave it out"),
    ("tokenizer-pool-type", "", True, ANY, _TOKENIZER_POOL),
    ("tokenizer-pool-extra-config", "", True, ANY, _TOKENIZER_POOL),
    ("tool-parser-plugin", "", True, "", _PLUGIN),
    ("reasoning-parser-plugin", "", True, "", _PLUGIN),
    ("logits-processor-pattern", "", True, ANY, "no code of requests runs here, their logits_processors are refused "
     "whatever it allows"),
    ("logits-processors", "", True, "", _PLUGIN),
    ("tool-server", "", True, "", "tools run at the client's: leave it out"),
    # ---- server ----
    ("disable-log-requests", "", False, ANY, "prompts are not logged unless --enable-log-requests asks for it"),
    ("disable-uvicorn-access-log", "", False, OFF, "use --no-access-log"),
    ("uvicorn-log-level", "", True, ANY, "use --log-level for all that is logged"),
    ("log-config-file", "", True, "", "use --log-level and --log-format"),
    ("enable-prompt-tokens-details", "", False, ANY, "usage always has them"),
    ("enable-server-load-tracking", "", False, ANY, "/load always tells"),
    ("enable-request-id-headers", "", False, ANY, "answers always have an x-request-id"),
    ("enable-ssl-refresh", "", False, OFF, "start the server again when the certificate changes"),
    ("h11-max-incomplete-event-size", "", True, "", "use --max-header-size and --max-request-line"),
    ("h11-max-header-count", "", True, "", "use --max-header-count"),
    ("show-hidden-metrics-for-version", "", True, ANY, "no metric is hidden"),
    ("collect-detailed-traces", "", True, ANY, "spans have all there is"),
    ("middleware", "", True, "", _PLUGIN),
    ("scheduler-cls", "", True, "", _PLUGIN),
    ("worker-cls", "", True, "auto", _PLUGIN),
    ("worker-extension-cls", "", True, "", _PLUGIN),
    ("additional-config", "", True, "{}", _PLUGIN),
    ("override-neuron-config", "", True, "{}", "models run on NVIDIA GPUs and CPUs: leave it out"),
)  # fmt: skip


@dataclass(frozen=True)
class VllmOption:
    name: str  # with hyphens
    short: str  # "" or another name, with one hyphen
    takes_value: bool
    accepted: str
    reason: str

    @property
    def is_json(self) -> bool:
        return self.name in _JSON

    def judge(self, given: Any, where: str) -> str | None:
        """A line for the log where it changes nothing, None where it says what vserve does anyway.

        `given`: the value, True or False for a switch. Raises ConfigError with what to do, naming `where`.
        """
        if self.accepted == ANY:
            return f"{where} changes nothing: {self.reason}"
        if given is False or str(given).lower() in self.accepted.split():
            return None
        raise ConfigError(f"{where}{f' {given}' if self.takes_value else ''}: {self.reason}")


@cache
def vllm_options() -> dict[str, VllmOption]:
    """By name, with underscores."""
    options = (VllmOption(*row) for row in _ROWS)
    return {option.name.replace("-", "_"): option for option in options}
