"""Requests that lose their cache are told of, at most once a second, with what would help."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vserve import LLM, SamplingParams
from vserve.engine.link.messages import EngineStats, StepOutputs
from vserve.engine.options.config import EngineConfig
from vserve.server.observe import preemptions
from vserve.server.observe.preemptions import Preemptions


def test_a_small_cache_is_told_of(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(
        str(tiny_model("llama")), device="cpu", engine_in_process=True, cpu_threads=1, max_model_len=128, block_size=8,
        num_gpu_blocks_override=20, enable_prefix_caching=False,
    ) as llm, caplog.at_level(logging.WARNING):  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate([[5 + i] * 20 for i in range(4)], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 60 for output in outputs)
        total = llm._counts.preemptions.total
    said = [record for record in caplog.records if record.name == preemptions.__name__]
    assert total > 0 and said
    text, fields = said[0].getMessage(), said[0].fields  # type: ignore[attr-defined]
    assert "mode RECOMPUTE" in text and "the KV cache of 20 blocks is full" in text
    assert (
        "Raise --kv-cache-memory-bytes (now " in text and f"total_cumulative_preemption_cnt={said[0].args[-1]}" in text
    )
    assert fields["preempted"] >= 1 and fields["total_cumulative_preemption_cnt"] <= total


def test_once_a_second(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(preemptions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    info = SimpleNamespace(
        settings={}, memory={"kv_cache": 7, "weights": 42}, device="NVIDIA H100", max_num_seqs=64,
        max_num_batched_tokens=512, more_cards=("tensor_parallel_size", 2, 8.0),
    )  # fmt: skip
    config = EngineConfig("m", gpu_memory_utilization=0.8)  # what was asked for: no other setting becomes of it
    client: Any = SimpleNamespace(info=info, config=config, stats_listeners=[], engines=[None])
    watch = Preemptions(client)
    (step,) = client.stats_listeners
    stats = EngineStats(num_running=9, num_blocks=30)
    for seconds, ids in ((0.0, [1]), (0.4, [2, 3]), (0.8, []), (1.1, []), (1.2, [4]), (5.0, [5])):
        now[0] = 100.0 + seconds
        step(StepOutputs([], stats, ids))
    counts = [record.fields["preempted"] for record in caplog.records]  # type: ignore[attr-defined]
    assert counts == [1, 2, 2] and watch.total == 5, "none is forgotten"
    assert (
        "Raise --gpu-memory-utilization (now 0.8) or --kv-cache-memory-bytes (now 7) or --tensor-parallel-size (now 1; "
        "with 2 the cache holds about 8.0 times as much), or lower --max-num-seqs (now "
        in (caplog.records[0].getMessage())
    )
    assert "64) to about 9, or --max-num-batched-tokens (now 512)" in caplog.records[0].getMessage()
    info.more_cards = ("pipeline_parallel_size", 3, 4.0)  # of a model that cannot be divided further
    now[0] = 9.0 + 100.0
    step(StepOutputs([], stats, [6]))
    assert "or --pipeline-parallel-size (now 1; with 3 the cache holds about 4.0 times as much), or lower" in (
        caplog.records[-1].getMessage()
    )
