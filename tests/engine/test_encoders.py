"""Vectors, classes and scores of models that read both ways are transformers' in fp32, packed beside others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from vserve.engine.describe.reading import check_model
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.families.head_spec import HeadSpec
from vserve.engine.layers.packed import Packed
from vserve.engine.link.sampling_params import ALL, CLS, LAST, MEAN, Pooling, SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.config_checks import Purpose
from vserve.engine.planning.memory import plan_encoder
from vserve.engine.step.encoder_runner import EncoderRunner
from vserve.server.client.engine_client import EngineDeadError

TOLERANCE = 1e-5  # of numbers of size 1
KINDS = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "nomic_bert", "gte", "modernbert", "eurobert",
    "gemma3_text",
)  # fmt: skip
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def models(load_module: Any) -> Any:
    return load_module(Path(__file__).parents[1] / "encoder_models.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, models: Any) -> Checkpoint:
    def make(kind: str = "bert", **options: Any) -> Path:
        folder: Path = models.encoder_checkpoint(tmp_path_factory.mktemp(kind), kind, **options)
        return folder

    return make


def asked(kind: str = MEAN, head: bool = False, second: int = 0, normalize: bool = False) -> SamplingParams:
    pooling = Pooling(kind, normalize=normalize, head=head, second=second)
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[2, *(rng.randrange(5, 200) for _ in range(n)), 3] for n in (0, 1, 9, 9, 30, 62, 17, 30, 9)]


def close(answer: Any, wanted: torch.Tensor) -> bool:
    assert answer.embedding is not None, answer.error
    found = np.frombuffer(answer.embedding, "<f4").reshape(wanted.shape)
    return bool(np.abs(found - wanted.numpy()).max() < TOLERANCE * max(1.0, float(wanted.abs().max())))


def oracle(folder: Path, auto: str = "AutoModel") -> Any:
    import transformers

    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_vectors(kind: str, checkpoint: Checkpoint, engine: Any) -> None:
    """Every way of pooling, of all texts at once and of few at a time."""
    folder = checkpoint(kind)
    model = oracle(folder)
    wave = [(prompt, asked(way)) for prompt in prompts() for way in (MEAN, CLS, LAST, ALL)]
    for options in ({}, {"max_num_batched_tokens": 64, "max_num_seqs": 3}):
        (answers,), _ = type(engine)(folder).run(wave, **options)
        for j, prompt in enumerate(prompts()):
            with torch.inference_mode():
                states = model(torch.tensor([prompt])).last_hidden_state[0]
            for answer, wanted in zip(
                answers[4 * j : 4 * j + 4], (states.mean(0), states[0], states[-1], states), strict=True
            ):
                assert close(answer, wanted), (kind, j, options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS if kind != "gemma3_text"]
    + [("modernbert", {"classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True})]
    + [("eurobert", {"classifier_pooling": way}) for way in ("bos", "mean")],
)
def test_classes(kind: str, options: dict[str, Any], checkpoint: Checkpoint, engine: Any) -> None:
    """Of pairs too, whose second text has a type of its own where the model knows two."""
    from transformers import AutoModelForSequenceClassification as Classifier

    labels = {0: "no", 1: "maybe", 2: "yes"}
    folder = checkpoint(kind, auto=Classifier, id2label=labels, **options)
    model = oracle(folder, "AutoModelForSequenceClassification")
    seconds = [len(prompt) // 2 for prompt in prompts()]
    wave = [(prompt, asked(LAST, True, n)) for prompt, n in zip(prompts(), seconds, strict=True)]
    (answers,), _ = type(engine)(folder).run(wave)
    knows = getattr(model.config, "type_vocab_size", 0) > 1
    for prompt, second, answer in zip(prompts(), seconds, answers, strict=True):
        types = {"token_type_ids": torch.tensor([[int(i >= second) for i in range(len(prompt))]])} if knows else {}
        with torch.inference_mode():
            assert close(answer, model(torch.tensor([prompt]), **types).logits[0]), (kind, len(prompt))


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "eurobert"])
def test_classes_of_tokens(kind: str, checkpoint: Checkpoint, engine: Any) -> None:
    from transformers import AutoModelForTokenClassification as Classifier

    folder = checkpoint(kind, auto=Classifier, id2label={0: "O", 1: "PER", 2: "LOC"})
    model = oracle(folder, "AutoModelForTokenClassification")
    (answers,), _ = type(engine)(folder).run([(prompt, asked(ALL, True)) for prompt in prompts()])
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            assert close(answer, model(torch.tensor([prompt])).logits[0])


def test_decoders_read_both_ways(tiny_model: Any, tmp_path: Path, engine: Any) -> None:
    """Llama as retrieval models have it, of which transformers has no class: its layers under a mask of nothing."""
    import shutil

    folder = shutil.copytree(tiny_model("llama"), tmp_path / "llama")
    described = json.loads((folder / "config.json").read_text())
    described |= {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}
    (folder / "config.json").write_text(json.dumps(described))
    model = oracle(tiny_model("llama"))
    (answers,), _ = type(engine)(folder).run([(prompt, asked()) for prompt in prompts()])
    for prompt, answer in zip(prompts(), answers, strict=True):
        mask = torch.zeros(1, 1, len(prompt), len(prompt))
        with torch.inference_mode():
            assert close(answer, model(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0].mean(0))


def test_dense_modules(checkpoint: Checkpoint, engine: Any) -> None:
    """EmbeddingGemma's way: two products behind the mean, without biases."""
    folder = checkpoint("gemma3_text")
    sizes, weights = [(64, 96), (96, 32)], []
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Dense", "Dense")]
    listed = [{"type": f"sentence_transformers.models.{name}", "path": path} for path, name in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    for (columns, rows), (path, _) in zip(sizes, modules[2:], strict=True):
        (folder / path).mkdir()
        described = {"in_features": columns, "out_features": rows, "bias": False,
                     "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
        (folder / path / "config.json").write_text(json.dumps(described))
        weights.append(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 8)
        save_file({"linear.weight": weights[-1]}, folder / path / "model.safetensors")
    model = oracle(folder)
    (answers,), _ = type(engine)(folder).run([(prompt, asked(MEAN, True, normalize=True)) for prompt in prompts()])
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        wanted = weights[1] @ (weights[0] @ mean)
        assert close(answer, wanted / wanted.norm())


def test_ntk_of_gte(checkpoint: Checkpoint, tmp_path: Path, engine: Any) -> None:
    """Its own files' way to stretch, against frequencies written down here."""
    folder = checkpoint("gte", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    described = json.loads((folder / "config.json").read_text())
    described |= {"architectures": ["NewModel"], "model_type": "new", "rope_theta": 20000.0,
                  "rope_scaling": {"type": "ntk", "factor": 8.0}}  # fmt: skip
    del described["rope_parameters"]
    model = oracle(folder)
    (folder / "config.json").write_text(json.dumps(described))
    base = (8.0 * 20000.0) ** (torch.arange(0, 16, 2) / 16)
    model.rotary_emb.inv_freq = 1 / base / 8.0 ** (2 / 16)
    (answers,), _ = type(engine)(folder).run([(prompt, asked()) for prompt in prompts()])
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            assert close(answer, model(torch.tensor([prompt])).last_hidden_state[0].mean(0))


def test_names_of_nomics_own_files(checkpoint: Checkpoint, engine: Any) -> None:
    folder = checkpoint("nomic_bert")
    model = oracle(folder)
    described = json.loads((folder / "config.json").read_text())
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
             "n_layer": "num_hidden_layers", "layer_norm_epsilon": "layer_norm_eps"}  # fmt: skip
    described |= {theirs: described.pop(ours) for theirs, ours in names.items()}
    described |= {"rotary_emb_base": described.pop("rope_parameters")["rope_theta"], "activation_function": "swiglu"}
    described |= {"n_positions": 128, "max_trained_positions": described.pop("max_position_embeddings")}
    del described["hidden_act"]
    (folder / "config.json").write_text(json.dumps(described))
    (answers,), _ = type(engine)(folder).run([(prompt, asked()) for prompt in prompts()])
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            assert close(answer, model(torch.tensor([prompt])).last_hidden_state[0].mean(0))


class Large(TorchDispatchMode):
    """Counts tensors of a size or more that are made, in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.made = size, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.size:
                self.made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_tokens_states_are_there_once_in_fp32(dtype: torch.dtype) -> None:
    """Of hidden states of every token, a step's result is the only copy; a head reads another."""
    lengths, hidden = [300, 1, 211], 64
    states = torch.randn(sum(lengths), hidden).to(dtype)
    runner, batch = EncoderRunner.__new__(EncoderRunner), Packed(lengths, torch.tensor([0, 300, 301, 512]))
    runner.head = None
    for poolings in ([Pooling(ALL)] * 3, [Pooling(ALL), Pooling(CLS), Pooling(ALL)]):
        with Large(300 * hidden * 4) as large:
            pooled = runner._pool(states, batch, poolings)
        assert [storage for storage in large.made if storage != states.untyped_storage().data_ptr()] == [
            pooled.vectors.untyped_storage().data_ptr()
        ]
        assert pooled.vectors.dtype == torch.float32 and torch.equal(pooled.vectors[: 300 * hidden],
                                                                     states[:300].float().flatten())  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "largest"),
    [
        (None, Pooling(ALL, normalize=False)),
        (HeadSpec("embed", ()), Pooling(ALL, normalize=False)),
        (HeadSpec("classify", (), ("a", "b"), by_token=True), Pooling(ALL, head=True)),
        (HeadSpec("classify", (), ("a", "b"), pooled="late"), Pooling(MEAN, head=True)),
    ],
)
def test_memory_is_planned_for_the_largest_results(
    spec: HeadSpec | None, largest: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = EncoderRunner.__new__(EncoderRunner)
    runner.head, runner.device, runner.layout = spec and SimpleNamespace(spec=spec), SimpleNamespace(type="cuda"), None
    runner.model, steps = SimpleNamespace(parameters=list), []
    runner.dummy_step = lambda *step: steps.append(step)
    for name in ("max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    settings: Any = SimpleNamespace(max_model_len=512, max_num_seqs=64, max_num_batched_tokens=4096)
    plan_encoder(runner, EngineConfig("model"), settings)
    assert steps == [(8, 4096), (8, 4096, largest), (64, 4096), (64, 4096, largest)]


def test_who_asks_for_text_fails_alone(checkpoint: Checkpoint, engine: Any) -> None:
    """The server refuses it before; a request that came through would not take others with it for long."""
    folder, prompt = checkpoint(), prompts()[2]
    waves = [(prompt, SamplingParams(max_tokens=4))], [(prompt, asked())]
    (first, second), _ = type(engine)(folder).run(*waves)
    assert "generates no text" in str(first[0].error)
    assert second[0].embedding is not None


def test_steps_that_are_too_short(checkpoint: Checkpoint, engine: Any) -> None:
    """A step holds the longest text: texts are as long as it, or the options contradict each other."""
    folder = checkpoint()
    with pytest.raises(EngineDeadError, match="--max-num-batched-tokens is 32: this model reads a text in one step"):
        type(engine)(folder).run([(prompts()[0], asked())], max_num_batched_tokens=32, max_model_len=64)
    (answers,), stats = type(engine)(folder).run([(p, asked()) for p in prompts()[:4]], max_num_batched_tokens=32)
    assert all(answer.embedding for answer in answers)
    assert stats.num_steps >= 1


@pytest.mark.parametrize(
    ("kind", "change", "line"),
    [
        ("bert", {"hidden_act": "quick"}, "hidden_act is 'quick', supported are gelu"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"num_attention_heads": 5}, "hidden_size 64 is no multiple of num_attention_heads 5"),
        ("bert", {"is_decoder": True}, "is_decoder is True, supported is False"),
        ("roberta", {"pad_token_id": 66}, "pad_token_id is 66"),
        ("electra", {"embedding_size": 32}, "embedding_size is 32, supported is hidden_size"),
        ("nomic_bert", {"num_experts": 8}, "num_experts is 8, supported is 0"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("modernbert", {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "max"},
         "classifier_pooling is 'max': choose one of cls, mean"),
        ("eurobert", {"architectures": ["LlamaModel"], "is_causal": False, "attention_bias": True}, ""),
    ],
)  # fmt: skip
def test_broken_configs(kind: str, change: dict[str, Any], line: str, models: Any, checkpoint: Checkpoint) -> None:
    """Without torch, in one line."""
    folder = checkpoint(kind)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if not line:
        check_model(folder)
        return
    with pytest.raises(ModelError) as refusal:
        check_model(folder)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def test_refusals(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    with pytest.raises(ModelError, match="--runner generate: BertModel reads texts both ways, it generates none"):
        check_model(folder, purpose=Purpose("generate"))
    with pytest.raises(ModelError, match="--model-impl transformers: BertModel is an encoder"):
        check_model(folder, implementation="transformers")
    with pytest.raises(ConfigError, match="--convert classify makes a model that generates no text"):
        EngineConfig(str(folder), runner="generate", convert="classify")


def test_a_checkpoint_of_another_model(checkpoint: Checkpoint, engine: Any) -> None:
    folder = checkpoint()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(EngineDeadError, match=r"the checkpoint lacks encoder\.layer\.2"):
        type(engine)(folder).run([(prompts()[0], asked())])


def test_packed_attention_in_windows() -> None:
    """Against products written down, for lengths on both sides of the window, with shared key heads."""
    torch.manual_seed(0)
    lengths, window = [1, 4, 4, 9], 3
    query, key, value = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    found = Packed(lengths, torch.tensor([0, 1, 5, 9, 18])).attend(query, key, value, 0.5, window)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        keys, values = (x[part].repeat_interleave(2, dim=1) for x in (key, value))
        scores = 0.5 * torch.einsum("qhd,khd->hqk", query[part], keys)
        far = (torch.arange(length)[:, None] - torch.arange(length)).abs() >= window
        weights = scores.masked_fill(far, -torch.inf).softmax(-1)
        assert torch.allclose(found[part], torch.einsum("hqk,khd->qhd", weights, values), atol=1e-6)
