"""/metrics against a real engine under pressure: what the engine did and what requests report is the same."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx
import pytest


def scrape(url: str) -> dict[str, float]:
    """Sums over labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in httpx.get(f"{url}/metrics", timeout=240).text.splitlines():
        if not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            found[name.split("{")[0]] += float(number)
    return found


@pytest.mark.slow
def test_preemptions_reconcile(live_server: Any, tiny_model: Any) -> None:
    """A cache for two of eight prompts, which come at once: every preemption is one of an answer that finished."""
    with live_server(tiny_model("llama"), num_gpu_blocks_override=8, max_num_seqs=8, max_model_len=96) as url:
        prompts = [[5 + i] * 20 for i in range(8)]
        body = {"prompt": prompts, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=240).json()["usage"]
        found = scrape(url)
    assert usage["completion_tokens"] == 8 * 60
    assert found["vllm:num_preemptions_total"] > 0
    assert found["vllm:request_num_preemptions_sum"] == found["vllm:num_preemptions_total"]
    assert found["vllm:request_num_preemptions_count"] == 8
    assert found["vllm:generation_tokens_total"] == 480 == found["vllm:request_generation_tokens_sum"]
    assert found["vllm:prompt_tokens_total"] == 160 == found["vllm:prompt_tokens_by_source_total"]
    computed = found["vllm:prompt_tokens_total"] - found["vllm:prompt_tokens_cached_total"]
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == computed
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_blocks_free"] == found["vllm:kv_blocks"] and found["vllm:kv_cache_usage_perc"] == 0
    # what was computed twice is in the steps, and in nobody's tokens
    assert found["vllm:iteration_tokens_total_sum"] > 480 + 160
    assert found["vllm:engine_steps_total"] == found["vllm:iteration_tokens_total_count"]


@pytest.mark.slow
def test_steps_have_the_tokens_of_prompts_and_answers(live_server: Any, tiny_model: Any) -> None:
    with live_server(tiny_model("llama"), max_num_batched_tokens=16) as url:
        body = {"prompt": [[5 + i] * (20 + i) for i in range(3)], "max_tokens": 7, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 1}, timeout=240).status_code == 200
        found = scrape(url)
    computed = found["vllm:prompt_tokens_total"] - found["vllm:prompt_tokens_cached_total"]
    assert found["vllm:iteration_tokens_total_sum"] == computed + found["vllm:generation_tokens_total"]
    assert found["vllm:generation_tokens_total"] == 3 * 7 + 3


@pytest.mark.slow
def test_corrupted_requests_are_counted(live_server: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vserve.engine.step.executor import ThreadExecutor

    real, broken = ThreadExecutor.result, True

    async def result(self: Any) -> Any:
        import msgspec

        result = await real(self)
        return msgspec.structs.replace(result, errors={0: "NaN"}) if broken and result.token_ids else result

    monkeypatch.setattr(ThreadExecutor, "result", result)
    with live_server(tiny_model("llama")) as url:
        body = {"prompt": [5, 6, 7], "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 500
        broken = False
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 200
        found = scrape(url)
    assert found["vllm:corrupted_requests_total"] == 1
