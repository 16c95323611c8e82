"""Options of vLLM that are none here: which may stay on a command line, and what to do instead of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ...engine.errors import ConfigError

ANY = "*"
_JSON = frozenset((
    "model-loader-extra-config", "limit-mm-per-prompt", "mm-processor-kwargs",
    "kv-transfer-config", "compilation-config", "default-chat-template-kwargs",
    "default-mm-loras", "eplb-config", "tokenizer-pool-extra-config", "additional-config", "override-neuron-config",
))  # fmt: skip
OFF = "off"  # of a switch
HERE = "here"  # says how many engines are this server's (fleet.py); the reason says what follows
READ = "read"  # as a key of --speculative-config, which is the reason (speculation.py)
_ONE_HOST = "a server's engines are processes of its own host"
_ONE_OF_SEVERAL = "one engine runs here, and whoever is before the servers chooses"
_PROMPT_ADAPTERS = "prompt adapters are not served, only LoRA is: --enable-lora"
_IMAGES = "models here read text only"
_PLUGIN = "vserve loads no code of others: leave it out"
_EXPERTS = "experts stay on the cards where they are: leave it out"
_TOKENIZER_POOL = "texts are tokenized on threads as it is"
_TYPICAL = "only typical acceptance has it, which changes answers and is refused"

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
    ("enable-eplb", "", False, OFF, _EXPERTS),
    ("eplb-config", "", True, "{}", _EXPERTS),
    ("enable-dbo", "", False, OFF, "a step is not cut in two: leave it out"),
    # ---- the model ----
    ("code-revision", "", True, ANY, "a model's code is that of its own --revision"),
    ("config-format", "", True, "auto hf", "models are read from config.json and safetensors: leave it out"),
    ("ignore-patterns", "", True, ANY, "only config, tokenizer and safetensors are downloaded"),
    ("model-loader-extra-config", "", True, "{}", "safetensors need no settings: leave it out"),
    ("max-parallel-loading-workers", "", True, ANY, "loading is parallel as it is"),
    ("use-tqdm-on-load", "", False, ANY, "the progress line is always shown"),
    ("cpu-offload-gb", "", True, "0", "weights stay on the GPU: choose a smaller model or a larger GPU"),
    ("safetensors-load-strategy", "", True, ANY, "files are read ahead as it is"),
    ("pt-load-map-location", "", True, ANY, "pickled tensors are read on the CPU, always"),
    ("enable-sleep-mode", "", False, OFF, "sleeping is not built: stop the server, it starts in seconds"),
    ("enable-prompt-embeds", "", False, OFF, "prompts are text or token ids"),
    ("language-model-only", "", False, ANY, _IMAGES),
    ("skip-mm-profiling", "", False, ANY, _IMAGES),
    ("interleave-mm-strings", "", False, ANY, _IMAGES),
    ("mm-encoder-tp-mode", "", True, ANY, _IMAGES),
    ("allowed-media-domains", "", True, ANY, _IMAGES),
    ("limit-mm-per-prompt", "", True, ANY, _IMAGES),
    ("mm-processor-kwargs", "", True, ANY, _IMAGES),
    ("mm-processor-cache-gb", "", True, ANY, _IMAGES),
    ("disable-mm-preprocessor-cache", "", False, ANY, _IMAGES),
    ("allowed-local-media-path", "", True, ANY, _IMAGES),
    # ---- adapters ----
    ("fully-sharded-loras", "", False, ANY, "every rank holds its share of the matrices as it is"),
    ("specialize-active-lora", "", False, ANY, "steps without adapters have graphs of their own as it is"),
    ("default-mm-loras", "", True, "{}", _IMAGES),
    ("enable-prompt-adapter", "", False, OFF, _PROMPT_ADAPTERS),
    ("max-prompt-adapters", "", True, ANY, _PROMPT_ADAPTERS),
    ("max-prompt-adapter-token", "", True, ANY, _PROMPT_ADAPTERS),
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
    ("typical-acceptance-sampler-posterior-threshold", "", True, ANY, _TYPICAL),
    ("typical-acceptance-sampler-posterior-alpha", "", True, ANY, _TYPICAL),
    ("disable-logprobs-during-spec-decoding", "", False, ANY, "they are those of the tokens that are kept"),
    # ---- scheduling and memory ----
    ("swap-space", "", True, ANY, "a preempted request is computed again, which is faster than copying its cache"),
    ("preemption-mode", "", True, ANY, "a preempted request is computed again, always"),
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
    ("disable-hybrid-kv-cache-manager", "", False, ANY, "what is behind a layer's window is given back, always"),
    ("kv-offloading-size", "", True, "0", "the cache stays on the GPU: leave it out"),
    ("kv-offloading-backend", "", True, ANY, "the cache stays on the GPU"),
    ("kv-transfer-config", "", True, "", "prompts and answers are computed in one place: leave it out"),
    ("compilation-config", "cc", True, ANY, "nothing is compiled at start; --enforce-eager turns CUDA graphs off"),
    ("optimization-level", "O", True, ANY, "nothing is compiled at start; --performance-mode sets what suits a load"),
    ("cudagraph-capture-sizes", "", True, "", "use --max-cudagraph-capture-size"),
    ("cuda-graph-sizes", "", True, "", "use --max-cudagraph-capture-size"),
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
    ("default-chat-template-kwargs", "", True, "{}", "requests say it: \"chat_template_kwargs\""),
    ("response-role", "", True, "assistant", "answers are the assistant's: leave it out"),
    ("tokenizer-pool-type", "", True, ANY, _TOKENIZER_POOL),
    ("tokenizer-pool-extra-config", "", True, ANY, _TOKENIZER_POOL),
    ("tool-parser-plugin", "", True, "", _PLUGIN),
    ("reasoning-parser-plugin", "", True, "", _PLUGIN),
    ("logits-processor-pattern", "", True, ANY, "no code of others runs here, requests that name some in "
     "'logits_processors' are refused whatever it allows"),
    ("logits-processors", "", True, "", _PLUGIN),
    ("io-processor-plugin", "", True, "", _PLUGIN),
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
    ("disable-uvicorn-access-log", "", False, OFF, "use --no-access-log"),
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
    options = (VllmOption(*row) for row in _ROWS)
    return {option.name.replace("-", "_"): option for option in options}
