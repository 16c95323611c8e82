"""Cohere's own client, pointed at a vserve: embeddings and ranks in the shape of its second API."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
TEXTS = ["What is 12 + 30?", "A cat sleeps.", "The answer is 42."]


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    import cohere

    return cohere.ClientV2(api_key="none", base_url=base_url.removesuffix("/v1"))


def test_rerank(client: Any) -> None:
    answer = client.rerank(model="demo", query="12 + 30", documents=TEXTS, top_n=2)
    first, second = answer.results
    assert first.relevance_score >= second.relevance_score and {first.index, second.index} < {0, 1, 2}
    every = client.rerank(model="demo", query="12 + 30", documents=TEXTS).results
    assert [result.index for result in every][:2] == [first.index, second.index] and len(every) == 3


def test_embed(client: Any) -> None:
    asked = {"model": "demo", "texts": TEXTS, "input_type": "search_document"}
    answer = client.embed(**asked, embedding_types=["float"])
    vectors = answer.embeddings.float_
    assert answer.texts == TEXTS and len(vectors) == 3
    assert all(sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-3) for vector in vectors)
    assert len({len(vector) for vector in vectors}) == 1 and answer.meta.billed_units.input_tokens > 3


def test_errors_are_its_own(client: Any) -> None:
    from cohere.core.api_error import ApiError

    with pytest.raises(ApiError) as error:
        client.rerank(model="other", query="q", documents=TEXTS)
    assert error.value.status_code == 404 and "does not exist" in str(error.value.body)
    with pytest.raises(ApiError) as error:
        client.rerank(model="demo", query="q", documents=[])
    assert error.value.status_code == 400
