"""Over HTTP, pictures give transformers' tokens and log-probabilities (fp32, CPU); other processes decode them."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from vserve.engine.link.media import MediaItem
from vserve.engine.vision.processors import read_processor
from vserve.server.media.decode import item_of

from ..engine.test_pictures import END, START, expected, read_folder

PAD = 299
MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
TOKENS = 6
LENGTH = 1200


def with_pictures(folder: Path, source: Path) -> Path:
    """The model in `source` with a template that shows pictures, and their tokens special ones: those that there are
    get no other names, as the vocabulary is full."""
    shutil.copytree(source, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    names = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    begin, pad, end = (names[id] for id in (START, PAD, END))
    for id in (START, PAD, END):
        tokenizer["added_tokens"].append(
            {"id": id, "content": names[id], "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        )
    path.write_text(json.dumps(tokenizer))
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}" + json.dumps(begin + pad + end, ensure_ascii=False).join(("{{ ", " }}"))
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )  # fmt: skip
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    bounds = {"shortest_edge": 1024, "longest_edge": 1 << 20}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": bounds}))
    return folder


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(request.param, max_position_embeddings=LENGTH)
    return with_pictures(tmp_path_factory.mktemp("pictures") / "model", model)


@pytest.fixture(scope="module")
def url(folder: Path, live_server: Callable[..., Any]) -> Iterator[str]:
    with live_server(folder, max_model_len=LENGTH) as url:
        yield url


def file_of(width: int, height: int, form: str, seed: int = 0) -> bytes:
    """A picture that looks like one: colours that change from place to place."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    found = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(found, form)
    return found.getvalue()


def seen(folder: Path, *files: bytes) -> list[MediaItem]:
    vision = read_folder(folder).vision
    assert vision is not None
    processor = read_processor(folder, vision)
    return [item_of(file, processor) for file in files]


def placed(ids: list[int], items: list[MediaItem]) -> list[MediaItem]:
    found, at = [], 0
    for item in items:
        at = ids.index(PAD, at)
        found.append(msgspec.structs.replace(item, start=at))
        at += item.length
    return found


def ask(url: str, *parts: str | bytes, **more: Any) -> Any:
    content = [
        {"type": "text", "text": part} if isinstance(part, str)
        else {"type": "image_url",
              "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"}}
        for part in parts
    ]  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 1, "return_token_ids": True, **more,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text[:300]
    return answer.json()


def check(folder: Path, answer: Any, *files: bytes) -> None:
    ids, (choice,) = answer["prompt_token_ids"], answer["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == TOKENS and answer["usage"]["prompt_tokens"] == len(ids)
    items = placed(ids, seen(folder, *files))
    assert ids.count(PAD) == sum(item.length for item in items)
    wanted = expected(str(folder), [*ids, *tokens], items)[len(ids) - 1 : -1]
    for row, token, at in zip(wanted, tokens, choice["logprobs"]["content"], strict=True):
        assert row[token] > row.max() - MARGIN
        assert at["logprob"] == pytest.approx(row[token].item(), abs=MARGIN)


def test_a_megapixel(folder: Path, url: str) -> None:
    """The second time it is found, in the server as in the engine."""
    file = file_of(1024, 1024, "JPEG")
    answers = [ask(url, "What is this?", file) for _ in range(2)]
    assert answers[0]["usage"]["prompt_tokens"] > 1024
    assert answers[1]["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]
    check(folder, answers[0], file)
    page = httpx.get(f"{url}/metrics").text
    assert re.search(r"^vllm:mm_cache_hits_total{.*} 1\.0$", page, re.MULTILINE)


def test_several_pictures_of_several_shapes(folder: Path, url: str) -> None:
    files = file_of(96, 64, "PNG", 1), file_of(700, 100, "WEBP", 2), file_of(33, 320, "GIF", 3)
    check(folder, ask(url, files[0], "and", files[1], files[2], "?"), *files)
    check(folder, ask(url, "No picture at all."))


def test_other_pixels_in_the_same_place_are_seen(folder: Path, url: str) -> None:
    """The prompts have the same tokens: only the pictures tell them apart."""
    one, other = file_of(128, 128, "PNG", 4), file_of(128, 128, "PNG", 5)
    answers = [ask(url, "Look: ", file) for file in (one, other)]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    for answer, file in zip(answers, (one, other), strict=True):
        check(folder, answer, file)


def test_a_crash_is_one_pictures_matter(url: str) -> None:
    """A file that is none, and then one that is."""
    body = {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]}]}  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 400 and "its 5 bytes are no PNG" in answer.text
    assert ask(url, file_of(64, 64, "PNG"))["choices"]


def test_offline(folder: Path, tmp_path: Path) -> None:
    """The same answers from `LLM`, however a picture is given."""
    from vserve import LLM, SamplingParams

    file = file_of(96, 64, "PNG", 1)
    (tmp_path / "a.png").write_bytes(file)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    options = {"device": "cpu", "cpu_threads": 1, "engine_in_process": True, "max_model_len": 128}
    with LLM(str(folder), **options, allowed_local_media_path=str(tmp_path), limit_mm_per_prompt="image=2") as llm:
        image = Image.open(io.BytesIO(file))
        part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
        text = {"type": "text", "text": "See"}
        chats = [
            [{"role": "user", "content": [text, one]}] for one in (part, {"type": "image_pil", "image_pil": image})
        ]
        answers = llm.chat(chats, params, use_tqdm=False)
        prompt = [*llm.model.tokenizer.encode("See", False), START, PAD, END]
        for picture in (image, np.asarray(image), file, tmp_path / "a.png", [image]):
            answers += llm.generate(
                {"prompt_token_ids": prompt, "multi_modal_data": {"image": picture}}, params, use_tqdm=False
            )
        assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
        ids, tokens = answers[0].prompt_token_ids, answers[0].outputs[0].token_ids
        rows = expected(str(folder), [*ids, *tokens], placed(ids, seen(folder, file)))[len(ids) - 1 : -1]
        for row, token in zip(rows, tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        for given, words in (
            ({"image": [image] * 3}, "has 3 pictures; at most 2"), ({"image": image, "video": 1}, "'video'"),
            ({"image": 7}, "is no picture"), ({"image": b"none"}, "no PNG"), ({"image": [image] * 2}, "1 places for 2"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                llm.generate({"prompt_token_ids": prompt, "multi_modal_data": given}, params, use_tqdm=False)
