"""Classes, rewards and scores are transformers' in fp32, whatever the engine does on the way, packed beside others."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.families.head_spec import read_head, read_labels
from vserve.engine.link.sampling_params import ALL, LAST, MEAN, Pooling, SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.config_checks import Purpose
from vserve.server.client.engine_client import EngineClient, EngineDeadError

TOLERANCE = 1e-5  # of logits of size 1
LABELS = {0: "no", 1: "maybe", 2: "yes"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 24, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 12, "max_model_len": 112, "max_num_batched_tokens": 32},
}


def asked(kind: str = LAST, head: bool = True, **options: Any) -> SamplingParams:
    pooling = Pooling(kind, normalize=False, head=head, **options)
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = list(range(10, 60))
    return [shared[: n // 2] + [rng.randrange(5, 290) for _ in range(n - n // 2)] for n in (1, 2, 16, 31, 33, 100)]


def values(answer: Any) -> np.ndarray:
    assert answer.embedding is not None, answer.error
    return np.frombuffer(answer.embedding, "<f4")


def close(found: np.ndarray, wanted: torch.Tensor) -> bool:
    """Relative to the size of what is there: weights of the tiny models make logits of 10 and more."""
    scale = max(1.0, float(wanted.abs().max()))
    return found.shape == tuple(wanted.shape) and bool(np.abs(found - wanted.numpy()).max() < TOLERANCE * scale)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe"])
def classifier(request: pytest.FixtureRequest, tiny_model: Any, engine: Any) -> tuple[Any, Any]:
    """(an engine, transformers' classifier)"""
    from transformers import AutoModelForSequenceClassification as Classifier

    folder = tiny_model(request.param, kind=Classifier, id2label=LABELS, label2id={v: k for k, v in LABELS.items()})
    return type(engine)(folder), Classifier.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_classes(classifier: tuple[Any, Any], way: str) -> None:
    """Beside hidden states of the same prompts, and classes of every token; twice, then with a warm cache."""
    engine, oracle = classifier
    wave = [(p, s) for p in prompts() for s in (asked(), asked(MEAN, head=False), asked(ALL), asked(ALL, head=False))]
    waves, _ = engine.run(wave, wave, **WAYS[way])
    for answers in waves:
        for j, prompt in enumerate(prompts()):
            with torch.inference_mode():
                ids = torch.tensor([prompt])
                logits, states = oracle(ids).logits[0], oracle.model(ids).last_hidden_state[0]
                each = oracle.score(states)
            classes, mean, tokens, hidden = (values(answer) for answer in answers[4 * j : 4 * j + 4])
            assert close(classes, logits) and close(mean, states.mean(0)), (j, len(prompt))
            assert close(tokens.reshape(-1, 3), each) and close(hidden.reshape(-1, 64), states), (j, len(prompt))


# ---- heads that transformers has no class for ----
def with_tensors(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> dict[str, torch.Tensor]:
    """Puts tensors into a checkpoint in place of its output matrix, and keys into its config.json."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("lm_head")}
    save_file(kept | tensors, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(described))
    return tensors


@pytest.fixture
def copy(tiny_model: Any, tmp_path: Path) -> Any:
    import shutil

    def make(family: str, **overrides: Any) -> Path:
        shutil.copytree(tiny_model(family, **overrides), tmp_path / family)
        return tmp_path / family

    return make


def last_states(folder: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return found


@pytest.mark.parametrize(
    ("architecture", "num_labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)]
)
def test_rewards(architecture: str, num_labels: int, copy: Any, engine: Any) -> None:
    torch.manual_seed(3)
    shapes = {"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (num_labels, 64),
              "score.2.bias": (num_labels,)}  # fmt: skip
    folder = copy("qwen2")
    head = with_tensors(
        folder, {n: 0.2 * torch.randn(*shape) for n, shape in shapes.items()}, architectures=[architecture]
    )
    prompt = prompts()[4]
    (answers,), _ = type(engine)(folder).run([(prompt, asked()), (prompt, asked(ALL))], max_num_batched_tokens=16)
    inner = functional.linear(last_states(folder, prompt), head["score.0.weight"], head["score.0.bias"]).relu()
    wanted = functional.linear(inner, head["score.2.weight"], head["score.2.bias"])
    assert close(values(answers[0]), wanted[-1]) and close(values(answers[1]).reshape(-1, num_labels), wanted)


def info(folder: Path, **options: Any) -> Any:
    async def main() -> Any:
        client = EngineClient(EngineConfig(str(folder), device="cpu", cpu_threads=1, engine_in_process=True, **options))
        await client.start()
        await client.close()
        return client.info

    return asyncio.run(main())


@pytest.mark.parametrize("tied", [True, False])
def test_two_tokens_of_a_generator_make_a_score(tied: bool, tiny_model: Any, engine: Any) -> None:
    """As the authors of Qwen3-Reranker compute it: what is left of two logits after a softmax over both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model("qwen3", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    no, yes = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["n", "y"])
    prompt, ours = prompts()[3], type(engine)(folder)
    options = {"hf_overrides": json.dumps({
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True})}  # fmt: skip
    (answers,), _ = ours.run([(prompt, asked())], **options)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    (score,) = values(answers[0])
    assert close(np.array([score]), (logits[yes] - logits[no])[None])
    likely = logits[[no, yes]].softmax(0)[1]
    assert abs(1 / (1 + np.exp(-score)) - float(likely)) < TOLERANCE
    rows = {"hf_overrides": json.dumps({"classifier_from_token": ["n", "y", "e"], "method": "no_post_processing"})}
    (answers,), _ = ours.run([(prompt, asked())], **rows)
    assert close(values(answers[0])[:2], logits[[no, yes]])
    said = info(folder, **options)
    assert (said.tasks, said.labels, said.activation, said.reranks) == (("classify",), ("LABEL_0",), "sigmoid", True)


def test_what_the_engine_says_it_does(classifier: tuple[Any, Any], tiny_model: Any) -> None:
    engine, _ = classifier
    said = info(engine.folder)
    assert (said.tasks, said.labels, said.activation) == (("classify",), ("no", "maybe", "yes"), "softmax")
    assert info(engine.folder, task="embed").tasks == ("embed",)
    assert info(tiny_model("qwen2")).tasks == ("generate", "embed")
    assert info(tiny_model("qwen2"), runner="pooling").tasks == ("embed",)
    with pytest.raises(EngineDeadError, match="generates no text: leave it out"):
        info(engine.folder, runner="generate")


def test_options_that_contradict_each_other() -> None:
    for options, words in (
        ({"task": "transcription"}, "models here read text only, no audio"),
        ({"task": "score", "runner": "pooling"}, "an older name of --runner and --convert: leave it out"),
        ({"runner": "generate", "convert": "embed"}, "generates no text: leave out --runner generate"),
        ({"task": "translate"}, "choose one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig("m", **options)


LLAMA = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}


def test_labels_and_what_becomes_of_logits() -> None:
    assert read_labels({}) == ("LABEL_0", "LABEL_1") and read_labels({"num_labels": 1}) == ("LABEL_0",)
    assert read_labels({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")

    def activation(**raw: Any) -> str:
        head = read_head(None, LLAMA | raw, 64, Purpose())
        assert head is not None
        return head.activation

    assert [activation(num_labels=n) for n in (1, 2)] == ["sigmoid", "softmax"]
    assert activation(num_labels=1, problem_type="regression") == ""
    assert activation(problem_type="multi_label_classification") == "sigmoid"
    assert activation(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity") == ""
    assert activation(sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"}) == "sigmoid"
    assert read_head(None, LLAMA, 64, Purpose("pooling", "embed")) is None


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"id2label": {}}, "id2label is {}, an object of numbers and labels belongs there"),
    "a list": ({"id2label": ["a"]}, "an object of numbers and labels"),
    "a gap": ({"id2label": {"0": "a", "2": "b"}}, "id2label has the keys 0, 2: they count from 0 on"),
    "no number": ({"id2label": {"a": "b"}}, "they count from 0 on"),
    "how many": ({"num_labels": 0}, "num_labels is 0, a whole number above 0"),
    "problem": ({"problem_type": "x"}, "problem_type is 'x': choose one of regression"),
    "activation": ({"sbert_ce_default_activation_function": "my.Odd"}, "the activation of its scores is 'my.Odd'"),
    "method": ({"classifier_from_token": ["a"], "method": "x"}, "method is 'x': choose one of from_2_way_softmax"),
    "one of two": ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "has 1 tokens"),
    "no tokens": ({"classifier_from_token": "yes"}, "a list of tokens belongs there"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_configs_are_refused_in_one_line(name: str) -> None:
    raw, words = BROKEN[name]
    with pytest.raises(ModelError) as refusal:
        read_head(None, LLAMA | raw, 64, Purpose())
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_checkpoints_that_do_not_fit_are_refused(copy: Any) -> None:
    folder = copy("llama")
    described = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    with_tensors(folder, {}, **described)
    with pytest.raises(EngineDeadError, match=r"lacks score\.weight: it has no head that classifies; leave out --task"):
        info(folder)
    with_tensors(folder, {"score.weight": torch.zeros(3, 64)})
    with pytest.raises(EngineDeadError, match=r"score\.weight has shape \[3, 64\].*makes it \[2, 64\]"):
        info(folder)
    with pytest.raises(EngineDeadError, match="'<none>' is no token of"):
        info(folder, hf_overrides=json.dumps({"classifier_from_token": ["a", "<none>"]}))


# ---- the Dense modules of embedding models ----
def with_dense(folder: Path, *sizes: int, activation: str = "activation.Tanh", bias: bool = True) -> list[Any]:
    """Adds sentence-transformers' files for Dense modules of these sizes; → their weights and biases."""
    types = ["Transformer", "Pooling", *("Dense" for _ in sizes), "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{t}" if i else "", "type": f"sentence_transformers.models.{t}"}
        for i, t in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    layers, before = [], 64
    for i, size in enumerate(sizes, 2):
        inner = folder / f"{i}_Dense"
        inner.mkdir(exist_ok=True)
        tensors = {"linear.weight": 0.2 * torch.randn(size, before)} | (
            {"linear.bias": torch.randn(size)} if bias else {}
        )
        save_file(tensors, inner / "model.safetensors")
        described = {"in_features": before, "out_features": size, "bias": bias,
                     "activation_function": f"torch.nn.modules.{activation}"}  # fmt: skip
        (inner / "config.json").write_text(json.dumps(described))
        layers.append((tensors["linear.weight"], tensors.get("linear.bias")))
        before = size
    return layers


def test_dense_modules(copy: Any, engine: Any) -> None:
    """Two, as EmbeddingGemma has them: behind the mean, before the length becomes 1."""
    torch.manual_seed(5)
    folder = copy("qwen3")
    layers = with_dense(folder, 96, 40)
    asked_for = [(p, SamplingParams(max_tokens=1, pooling=Pooling(MEAN, head=True))) for p in prompts()]
    generation = (prompts()[3], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    (answers,), _ = type(engine)(folder).run([*asked_for, generation], max_num_batched_tokens=16)
    for prompt, answer in zip(prompts(), answers[:-1], strict=True):
        vector = last_states(folder, prompt).mean(0)
        for weight, bias in layers:
            vector = functional.linear(vector, weight, bias).tanh()
        assert close(values(answer), vector / vector.norm())
    assert len(answers[-1].tokens) == 5, "it generates as well"
    said = info(folder)
    assert (said.hidden_size, said.tasks) == (40, ("generate", "embed"))


def test_broken_dense_modules_are_refused(copy: Any) -> None:
    folder = copy("qwen3")
    with_dense(folder, 8, activation="activation.Softsign")
    with pytest.raises(EngineDeadError, match="activation_function is 'Softsign', supported are Identity, Tanh"):
        info(folder)
    with_dense(folder, 8, bias=False, activation="linear.Identity")
    assert info(folder).hidden_size == 8
    described = json.loads((folder / "2_Dense" / "config.json").read_text())
    (folder / "2_Dense" / "config.json").write_text(json.dumps(described | {"out_features": 9}))
    with pytest.raises(
        EngineDeadError, match=r"F32 \[8, 64\] as linear.weight, its config.json makes it floats \[9, 64"
    ):
        info(folder)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(described | {"in_features": 9}))
    with pytest.raises(EngineDeadError, match="9 → 8 features, before it come 64"):
        info(folder)


# ---- what the options make of a model that generates ----
def test_task_score_of_qwen3_is_its_reranker(copy: Any) -> None:
    folder = copy("qwen3")
    with pytest.raises(EngineDeadError, match=r"classifier_from_token: '(no|yes)' is no token of"):
        info(folder, task="score")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] |= {"no": tokenizer["model"]["vocab"][names[50]], "yes": 60}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = info(folder, task="score")
    assert (said.tasks, said.labels, said.reranks) == (("classify",), ("LABEL_0",), True)


def test_convert_classify_reads_score_weight(copy: Any, engine: Any) -> None:
    folder = copy("llama")
    torch.manual_seed(2)
    head = with_tensors(folder, {"score.weight": torch.randn(1, 64)}, num_labels=1)
    prompt = prompts()[3]
    (answers,), _ = type(engine)(folder).run([(prompt, asked())], convert="classify")
    assert close(values(answers[0]), head["score.weight"] @ last_states(folder, prompt)[-1])
    assert info(folder, runner="pooling", convert="embed").tasks == ("embed",)
