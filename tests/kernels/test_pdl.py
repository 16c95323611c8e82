"""Which launches take part in programmatic dependent launch, and which may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.engine.layers import attention as layer
from vserve.kernels.attention import attention_beside, attention_prefill_hopper
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.launch import pdl

CPU = torch.device("cpu")
TAKES_PART = {"PDL": True, "launch_pdl": True}


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "pdl_available", lambda device: True)


def attend_beside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """attend_beside without a GPU → what it launched."""
    launched: list[str] = []
    stream = SimpleNamespace(record_event=lambda: launched.append("event"), wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(attention_beside, "num_processors", lambda device: 132)
    monkeypatch.setattr(attention_prefill_hopper, "num_processors", lambda device: 132)
    monkeypatch.setattr(attention_prefill_hopper, "descriptor", lambda *_: None)
    kernel = {(count,): lambda *_, **__: launched.append("prefill") for count in (44, 88)}
    monkeypatch.setattr(attention_prefill_hopper, "prefill_hopper_kernel", kernel)

    def decode(query: torch.Tensor, *_: Any, **__: Any) -> None:
        pdl.pdl_options(query)  # as the real one, in between
        launched.append("decode")

    monkeypatch.setattr(attention_beside, "decode_attention_triton", decode)
    query, keys, ints = torch.zeros(40, 8, 128), torch.zeros(2, 16, 2, 128), torch.zeros(40, dtype=torch.int32)
    cache = PagedCache(keys, keys, ints)
    decodes, prompts = UniformBatch(ints[:39], ints[:39]), RaggedBatch(ints[39:], ints[39:], ints[38:], 1)
    work: Any = SimpleNamespace(table=lambda *_: None)
    attention_beside.attend_beside(
        query, cache, decodes, prompts, Scoring(1.0), workspace=None, work=work, out=torch.zeros(40, 8, 128)
    )
    return launched


def test_none_takes_part_right_after_attend_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the last of three launches, while the other two may still run."""
    for _ in range(2):  # it begins with a plain launch itself
        assert attend_beside(monkeypatch) == ["prefill", "event", "decode", "event", "prefill"]
    with pytest.raises(RuntimeError, match="launch it plainly"):
        pdl.pdl_options(torch.zeros(1))
    assert pdl.pdl_options(torch.zeros(1)) == TAKES_PART, "one error, or every later step would fail"


def test_a_plain_launch_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_beside(monkeypatch)
    assert pdl.pdl_options(torch.zeros(1), rows=40) == {"PDL": False}
    assert pdl.pdl_options(torch.zeros(1)) == TAKES_PART


def test_the_engine_overlaps_more_rows_than_take_part() -> None:
    """So that the product or the norm behind attend_beside, which has a row a request, is a plain launch."""
    assert layer.MIN_DECODES > pdl.MAX_ROWS


def test_who_yields_launches_plainly_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write into the cache, where no norm of ours comes between two layers' attention."""
    attend_beside(monkeypatch)
    assert pdl.pdl_options(torch.zeros(1), yields=True) == {"PDL": False}
    assert pdl.pdl_options(torch.zeros(1), yields=True) == TAKES_PART
