"""Adapters in PEFT's form for the tiny models, and the same merged by hand into transformers' model: the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vserve.tests.tiny_models import reference

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def modules_of(base: Path, names: Iterable[str]) -> list[str]:
    """Modules of a checkpoint whose last name is one of these."""
    weights = load_file(base / "model.safetensors")
    paths = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return [path for path in paths if path.rpartition(".")[2] in tuple(names)]


def write_adapter(
    folder: Path,
    base: Path,
    names: Iterable[str] = SEVEN,
    *,
    rank: int | Callable[[str], int] = 4,
    seed: int = 0,
    skip: Callable[[str], bool] = lambda module: False,
    whole: Iterable[str] = (),
    **config: Any,
) -> Path:
    """Of all modules with these last names. `rank`: of a module; `skip`: those that get none; `whole`: modules whose
    weight is saved as it is; `config`: keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    for module in modules_of(base, names):
        if skip(module):
            continue
        rows, columns = weights[f"{module}.weight"].shape
        r = rank(module) if callable(rank) else rank
        if module.endswith("embed_tokens"):
            tensors[f"{PREFIX}{module}.lora_embedding_A"] = random(r, rows)
            tensors[f"{PREFIX}{module}.lora_embedding_B"] = random(columns, r)
            tensors[f"{PREFIX}{module}.base_layer.weight"] = weights[f"{module}.weight"]  # as PEFT does
            continue
        tensors[f"{PREFIX}{module}.lora_A.weight"] = random(r, columns)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = random(rows, r)
        if config.get("use_dora"):
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = 1 + random(rows).abs()
    for module in modules_of(base, whole):
        tensors[f"{PREFIX}{module}.weight"] = random(*weights[f"{module}.weight"].shape)
    folder.mkdir(parents=True, exist_ok=True)
    # As transformers calls Nemotron's modules, but for their files.
    tensors = {name.replace(f"{PREFIX}backbone.", f"{PREFIX}model."): value for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    defaults = {
        "peft_type": "LORA", "r": rank if isinstance(rank, int) else 4, "lora_alpha": 8,
        "target_modules": sorted(names), "base_model_name_or_path": "base", "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))
    return folder


@torch.no_grad()
def merged(base: Path, folder: Path | None, scale: Callable[[str], float] = lambda module: 2.0) -> Any:
    """transformers' model in float32 with the adapter in its weights; `scale`: of B A, of a module."""
    model = reference(base, dtype=torch.float32)
    if folder is None:
        return model
    tensors = {
        name.removeprefix(PREFIX): value for name, value in load_file(folder / "adapter_model.safetensors").items()
    }
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".lora_")
        if kind == "A.weight":
            weight = model.get_submodule(module).weight
            weight += scale(module) * tensors[f"{module}.lora_B.weight"] @ value
            if (length := tensors.get(f"{module}.lora_magnitude_vector")) is not None:
                weight *= (length / weight.norm(dim=1))[:, None]
        elif kind == "embedding_A":
            table = model.get_submodule(module)
            if model.config.tie_word_embeddings:
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
            table.weight += scale(module) * (tensors[f"{module}.lora_embedding_B"] @ value).T
        elif not module and not name.endswith(".base_layer.weight"):
            model.get_parameter(name).copy_(value)
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def merged_checkpoint(base: Path, folder: Path, out: Path) -> Any:
    """The same done to the tensors of the checkpoint, which are named as the adapter's modules are."""
    shutil.copytree(base, out)
    weights = load_file(base / "model.safetensors")
    tensors = {
        name.removeprefix(PREFIX): value for name, value in load_file(folder / "adapter_model.safetensors").items()
    }
    config = json.loads((base / "config.json").read_text())
    if config["tie_word_embeddings"] and any("embed_tokens" in name for name in tensors):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".lora_")
        if kind == "A.weight":
            weight = weights[f"{module}.weight"] + 2.0 * tensors[f"{module}.lora_B.weight"] @ value
            if (length := tensors.get(f"{module}.lora_magnitude_vector")) is not None:
                weight = weight * (length / weight.norm(dim=1))[:, None]
            weights[f"{module}.weight"] = weight
        elif kind == "embedding_A":
            weights[f"{module}.weight"] = (
                weights[f"{module}.weight"] + 2.0 * (tensors[f"{module}.lora_embedding_B"] @ value).T
            )
        elif not module and not name.endswith(".base_layer.weight"):
            weights[name] = value
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


EXPERTS = ("gate_up_proj", "down_proj")


def experts_of(model: Any) -> list[str]:
    """Modules that hold all experts' matrices, as transformers 5 names them."""
    return [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj") and "experts" in name]


def write_experts_adapter(
    folder: Path, model: Any, names: Iterable[str] = EXPERTS, *, rank: int = 4, old: bool = False, **config: Any
) -> Path:
    """Of the experts' parameters of transformers' model, as PEFT's target_parameters writes it. `old`: as before 0.19,
    where the sides of a parameter [E, out, in] were taken for each other."""
    generator, tensors = torch.Generator().manual_seed(7), {}
    chosen = [name for name in EXPERTS if name in tuple(names)]
    transposed = getattr(model.get_submodule(experts_of(model)[0]), "is_transposed", False)
    for module in experts_of(model):
        for name, prefix in zip(reversed(chosen), (module, f"{module}.base_layer"), strict=False):
            num_experts, *sides = model.get_parameter(f"{module}.{name}").shape
            inputs, outputs = sides if transposed or old else reversed(sides)
            a, b = torch.randn(num_experts * rank, inputs, generator=generator), torch.randn(
                outputs, num_experts * rank, generator=generator)  # fmt: skip
            tensors[f"{PREFIX}{prefix}.lora_A.weight"] = a / inputs**0.5
            tensors[f"{PREFIX}{prefix}.lora_B.weight"] = b / (2 * rank**0.5)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    defaults = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [], "bias": "none",
        "target_parameters": [f"mlp.experts.{name}" for name in chosen], "base_model_name_or_path": "base",
        "peft_version": "0.18.1" if old else "0.19.0"}  # fmt: skip
    if "mlp.experts" not in experts_of(model)[0]:
        defaults["target_parameters"] = [f"experts.{name}" for name in chosen]
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))
    return folder


@torch.no_grad()
def merge_experts(model: Any, folder: Path, names: Iterable[str] = EXPERTS, *, old: bool = False) -> Any:
    """What PEFT's ParamWrapper.merge does to transformers' model."""
    tensors = load_file(folder / "adapter_model.safetensors")
    chosen = [name for name in EXPERTS if name in tuple(names)]
    for module in experts_of(model):
        keeps = old or getattr(model.get_submodule(module), "is_transposed", False)
        for name, prefix in zip(reversed(chosen), (module, f"{module}.base_layer"), strict=False):
            parameter = model.get_parameter(f"{module}.{name}")
            a, b = (tensors[f"{PREFIX}{prefix}.lora_{kind}.weight"] for kind in "AB")
            a, b = a.reshape(len(parameter), -1, a.shape[-1]), b.reshape(len(b), -1, len(parameter))
            parameter += 2.0 * torch.einsum("ore,eri->eio" if keeps else "ore,eri->eoi", b, a)
    return model
