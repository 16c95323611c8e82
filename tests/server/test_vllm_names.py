"""Every option of vLLM's 0.8 command line, by name: known as a flag, in a file and as a keyword of `LLM`."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags
from vserve.server.cli.given import notices
from vserve.server.cli.parser import Parser
from vserve.server.options.keywords import from_keywords
from vserve.server.options.reading import negated, options
from vserve.server.options.vllm import vllm_options

NAMES = """
    additional-config allowed-local-media-path block-size calculate-kv-scales code-revision
    collect-detailed-traces compilation-config config-format cpu-offload-gb device disable-async-output-proc
    disable-custom-all-reduce disable-log-stats disable-logprobs-during-spec-decoding
    disable-mm-preprocessor-cache disable-sliding-window distributed-executor-backend download-dir dtype
    enable-chunked-prefill enable-expert-parallel enable-lora enable-lora-bias enable-prefix-caching
    enable-prompt-adapter enable-reasoning enable-sleep-mode enforce-eager fully-sharded-loras generation-config
    gpu-memory-utilization guided-decoding-backend hf-config-path hf-overrides ignore-patterns kv-cache-dtype
    kv-transfer-config limit-mm-per-prompt load-format logits-processor-pattern long-lora-scaling-factors
    long-prefill-token-threshold lora-dtype lora-extra-vocab-size max-cpu-loras max-logprobs
    max-long-partial-prefills max-lora-rank max-loras max-model-len max-num-batched-tokens
    max-num-partial-prefills max-num-seqs max-parallel-loading-workers max-prompt-adapter-token
    max-prompt-adapters max-seq-len-to-capture mm-processor-kwargs model model-impl model-loader-extra-config
    multi-step-stream-outputs ngram-prompt-lookup-max ngram-prompt-lookup-min no-enable-prefix-caching
    no-use-tqdm-on-load num-gpu-blocks-override num-lookahead-slots num-scheduler-steps num-speculative-tokens
    otlp-traces-endpoint override-generation-config override-neuron-config override-pooler-config
    pipeline-parallel-size preemption-mode qlora-adapter-name-or-path quantization ray-workers-use-nsight
    reasoning-parser revision rope-scaling rope-theta scheduler-cls scheduler-delay-factor scheduling-policy seed
    served-model-name show-hidden-metrics-for-version skip-tokenizer-init spec-decoding-acceptance-method
    speculative-disable-by-batch-size speculative-disable-mqa-scorer speculative-draft-tensor-parallel-size
    speculative-max-model-len speculative-model speculative-model-quantization swap-space task
    tensor-parallel-size tokenizer tokenizer-mode tokenizer-pool-extra-config tokenizer-pool-size
    tokenizer-pool-type tokenizer-revision trust-remote-code typical-acceptance-sampler-posterior-alpha
    typical-acceptance-sampler-posterior-threshold use-tqdm-on-load use-v2-block-manager worker-cls
    worker-extension-cls
""".split()  # noqa: SIM905 (113 lines otherwise)
# What its present command line has beside them, of the same kind.
PRESENT = """
    allowed-media-domains attention-backend convert default-chat-template-kwargs disable-fastapi-docs enable-dbo
    enable-eplb enable-log-deltas enable-tokenizer-info-endpoint eplb-config exclude-tools-when-tool-choice-none
    interleave-mm-strings io-processor-plugin kv-offloading-backend language-model-only logits-processors logprobs-mode
    max-cudagraph-capture-size mm-encoder-tp-mode moe-backend pooler-config pt-load-map-location renderer-num-workers
    runner safetensors-load-strategy skip-mm-profiling structured-outputs-config
""".split()  # noqa: SIM905
# All others of version 0.33, but --help, and --config and --performance-mode, which have tests of their own.
NEWEST = """
    aggregate-engine-logging all2all-backend allow-credentials allow-deprecated-quantization allowed-headers
    allowed-methods allowed-origins anthropic-disabled-thinking-effort api-key api-server-count async-scheduling
    attention-config aux-output-config chat-template chat-template-content-format cohere-format
    cohere-is-reasoning-model cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-params
    cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address
    data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
    data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold
    dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
    decode-context-parallel-size default-mm-loras device-ids device-memory-utilization diffusion-config
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization disable-uvicorn-access-log
    distributed-timeout-seconds dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-sync-interval ec-manager-config ec-transfer-config elastic-ep-max-dp-size
    enable-auto-tool-choice enable-batch-sharded-sampling enable-cumem-allocator enable-elastic-ep
    enable-ep-weight-filter enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
    enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-outputs enable-log-requests
    enable-logging-iteration-details enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics
    enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers enable-return-routed-experts
    enable-scale-out enable-server-load-tracking enable-shm-tensor-arena enable-ssl-refresh
    enable-tower-connector-lora enable-trace-replay engram-config expert-placement-strategy
    fail-on-environ-validation fault-tolerance-config fingerprint-mode fingerprint-value gdn-prefill-backend
    grpc grpc-port h11-max-header-count h11-max-incomplete-event-size headless hf-token host ir-op-priority
    jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample kv-events-config
    kv-offloading-size kv-sharing-fast-prefill linear-backend log-config-file log-error-stack log-level
    logging-config long-prefill-token-threshold-adaptive lora-modules lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype
    mamba-ssu-algorithm master-addr master-port max-log-len max-lora-cls-labels max-num-active-seqs
    max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens media-io-kwargs middleware
    mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
    mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only mm-hasher-algorithm
    mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides monokernel nnodes node-rank numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group offload-params
    offload-prefetch-step optimization-level per-request-spec-decode-metrics port prefill-context-parallel-size
    prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit
    profiler-config quantization-config reasoning-config reasoning-effort-map reasoning-parser-plugin
    replayssm-buffer-len
    response-role return-sampling-mask return-tokens-as-token-ids root-path safetensors-prefetch-block-size
    safetensors-prefetch-num-threads scheduler-reserve-full-isl shutdown-timeout sleep-mode-backend
    sleep-mode-offload-cudagraph sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method
    spec-model spec-tokens specialize-active-lora speculative-config sse-keep-alive-interval ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile stream-interval swa-bounded-replay tokens-only
    tool-call-parser tool-parser-plugin tool-server tool-strict-level trust-request-chat-template
    trust-request-mm-kwargs ubatch-size uds use-fp64-gumbel use-replayssm uvicorn-log-level video-pruning-method
    video-pruning-rate watchdog-config watermark watermark-config weight-transfer-config
""".split()  # noqa: SIM905
# Where "1" is no value of theirs.
VALUES = {
    "block-size": "16", "config-format": "hf", "device": "cpu", "distributed-executor-backend": "mp",
    "dtype": "bfloat16", "lora-dtype": "auto", "generation-config": "auto", "gpu-memory-utilization": "0.5",
    "guided-decoding-backend": "auto", "hf-overrides": "{}", "kv-cache-dtype": "auto", "load-format": "auto",
    "model": "/m", "model-impl": "auto", "override-generation-config": "{}", "preemption-mode": "recompute",
    "quantization": "none", "reasoning-parser": "auto", "scheduling-policy": "fcfs", "task": "generate",
    "tokenizer": ".", "tokenizer-mode": "slow", "worker-cls": "auto", "additional-config": "{}",
    "model-loader-extra-config": "{}", "override-neuron-config": "{}", "otlp-traces-endpoint": "http://localhost:4318",
    "convert": "auto", "runner": "auto", "pooler-config": "{}", "structured-outputs-config": "{}",
    "eplb-config": "{}", "log-level": "info", "mamba-ssm-cache-dtype": "float32",
}  # fmt: skip


def is_switch(name: str) -> bool:
    key = name.replace("-", "_")
    key = negated(key) or key
    return not vllm_options()[key].takes_value if key in vllm_options() else options()[key][1] is bool


@cache
def parser() -> Parser:
    return main.command_parser("serve", serve)


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args([main._dashes(word) for word in words])


def answered(ask: Any) -> None:
    """Taken, or refused in one line that says what to do instead."""
    try:
        ask()
    except ConfigError as error:
        what, colon, remedy = str(error).partition(": ")
        assert what and colon and remedy and "\n" not in remedy and "unknown" not in what


def test_the_list_is_whole() -> None:
    assert len(NAMES) == len(set(NAMES)) == 113


@pytest.mark.parametrize("name", NAMES + PRESENT + NEWEST)
def test_each_is_known_everywhere(name: str, tmp_path: Path) -> None:
    value = VALUES.get(name, "1")
    words = [f"--{name}"] if is_switch(name) else [f"--{name}", value]
    flags = parse(*words) if name == "model" else parse("/m", *words)
    answered(lambda: (read_flags(flags), notices(flags)))
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {'true' if is_switch(name) else value}\n")
    arguments = parse("--config", str(file)) if name == "model" else parse("/m", "--config", str(file))
    answered(lambda: (read_flags(arguments), notices(arguments)))
    key = name.replace("-", "_")
    keywords = {"model": "/m"} | {key: True if is_switch(name) else value}
    answered(lambda: from_keywords(keywords))


def test_a_switch_off_is_off_in_a_file_and_by_keyword(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    for text, on in (("no-enable-prefix-caching: true", False), ("no_enable_prefix_caching: false", True)):
        file.write_text(text)
        assert read_flags(parse("/m", "--config", str(file)))[0].enable_prefix_caching is on
    assert not from_keywords({"model": "/m", "no_enable_prefix_caching": True})[0].enable_prefix_caching
    with pytest.raises(ConfigError, match="are one option: leave one out"):
        from_keywords({"enable_prefix_caching": True, "no_enable_prefix_caching": True})
    file.write_text("no-port: 1")
    with pytest.raises(ConfigError, match="unknown option 'no-port'"):
        read_flags(parse("/m", "--config", str(file)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--speculative-disable-mqa-scorer"], "--speculative-disable-mqa-scorer changes nothing: drafts are verified"),
        (
            ["--logits-processor-pattern", "my.*"],
            "--logits-processor-pattern changes nothing: no code of others runs here, requests that",
        ),
        (["--enable-lora-bias"], "--enable-lora-bias changes nothing: adapters with a bias of their own are refused"),
        (["--max-prompt-adapters", "2"], "--max-prompt-adapters changes nothing: prompt adapters are not served, only"),
        (["--override-neuron-config", '{"a": 1}'], '--override-neuron-config {"a": 1}: models run on NVIDIA GPUs and'),
    ],
)
def test_what_was_unknown_says_what_it_does(words: list[str], line: str) -> None:
    try:
        (said,) = notices(parse("/m", *words))
    except ConfigError as error:
        said = str(error)
    assert said.startswith(line)
