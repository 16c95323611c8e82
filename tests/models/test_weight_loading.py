"""The loader: what it copies, what it refuses and in which words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.describe.model_source import resolve_model_path
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.files.checkpoint import checkpoint_bytes, open_checkpoint, read_headers
from vserve.engine.layers.linear import Linear
from vserve.engine.models.blocks import CausalLM
from vserve.engine.quant.weights import PIECE, SMALL, copy_weight
from vserve.engine.weights.loader import count_parameters, load_model

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    return Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    source = tiny_model("qwen3", max_shard_size="60KB")
    assert len(list(source.glob("model-*.safetensors"))) > 3
    return Path(shutil.copytree(source, tmp_path / "model"))


def load(folder: Path, **changes: Any) -> CausalLM:
    values: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    return load_model(folder, read_folder(folder), **(values | changes))


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **keys: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


# ---- what is loaded ----
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_whole_and_frozen(sharded: Path, dtype: torch.dtype) -> None:
    seen: list[tuple[int, int]] = []
    model = load(sharded, dtype=dtype, progress=lambda done, total: seen.append((done, total)))
    tensors = {name: t for file in sharded.glob("*.safetensors") for name, t in load_file(file).items()}
    assert set(read_headers(sharded)) == set(tensors)
    for path, (holder, part) in model.weight_map().items():
        weight = holder.method.weight if isinstance(holder, Linear) else holder.weight
        if part and part != "out":
            weight = weight.narrow(0, holder.shape.offsets[part], holder.shape.spans[part][1])
        assert torch.equal(weight, tensors[f"{path}.weight"].to(dtype)), path
    assert not model.training
    for parameter in model.parameters():
        assert parameter.dtype is dtype and not parameter.requires_grad
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert checkpoint_bytes(sharded) == total
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen) and len(seen) == len(model.weight_map()) + 1


def test_dummy_weights_need_only_the_config(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    set_config(tmp_path, num_hidden_layers=3, hidden_size=128, layer_types=None)
    seen: list[tuple[int, int]] = []
    first, same, other = (
        load(tmp_path, load_format="dummy", seed=seed, progress=lambda *step: seen.append(step)) for seed in (1, 1, 2)
    )
    size = 4 * count_parameters(read_folder(tmp_path))
    assert seen[0] == (0, size) and seen[-1] == (size, size)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        if "norm" in name:
            assert (weight == 1).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1) and abs(weight.mean().item()) < 1e-3
            assert not torch.equal(weight, other.get_parameter(name)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_bytes", [SMALL + 2, PIECE - 2, PIECE, PIECE + 2, 5 * PIECE + 6])
def test_pieces_arrive_in_order(num_bytes: int) -> None:
    """Of several threads at once, into the middle of a parameter."""
    count = num_bytes // 2
    sources = [torch.randint(-30000, 30000, (3, count), dtype=torch.int16).view(torch.bfloat16) for _ in range(4)]
    targets = [torch.zeros(5, count, dtype=torch.bfloat16, device="cuda") for _ in sources]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for row in range(3):
            copy_weight(target.narrow(0, row + 1, 1), source.narrow(0, row, 1))

    with ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(copy, targets, sources))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[1:4].cpu().view(torch.int16), source.view(torch.int16))
        assert not target[[0, 4]].any(), "beside the target"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [300, 3001])
def test_columns_arrive_in_order(rows: int) -> None:
    """What a rank has of a matrix that is divided by columns: more than a piece, and more than one of them."""
    source = torch.randint(-30000, 30000, (rows, 2 * 3584 + 8), dtype=torch.int16).view(torch.bfloat16)
    target = torch.zeros(rows, 3584, dtype=torch.bfloat16, device="cuda")
    copy_weight(target, source.narrow(1, 3588, 3584))
    assert torch.equal(target.cpu().view(torch.int16), source.narrow(1, 3588, 3584).view(torch.int16))


def test_weights_are_converted_and_made_contiguous() -> None:
    target, source = torch.zeros(3, 4, dtype=torch.bfloat16), torch.randn(4, 6).t()[:3]
    copy_weight(target, source)
    assert torch.equal(target, source.to(torch.bfloat16))


def test_files_without_an_index(folder: Path) -> None:
    """One file of any name will do; Mistral's own second copy is passed over."""
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    assert len(load(folder).config.layers) == 2


def test_tensors_nobody_needs_are_passed_over(folder: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(folder, add)
    load(folder)
    set_config(folder, tie_word_embeddings=True)
    copy = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": copy}))
    model = load(folder)  # a copy of the tied output matrix
    assert model.lm_head.method.weight is model.embedding.weight


@pytest.mark.parametrize("differs", ["each row", "one number"])
def test_an_output_matrix_that_differs_from_the_one_it_is_tied_to_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture, differs: str
) -> None:
    """Models whose two were trained apart are saved with both, and a configuration that ties them."""
    set_config(folder, tie_word_embeddings=True)

    def change(tensors: dict[str, Any]) -> None:
        if differs == "one number":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["lm_head.weight"][-2, -1] += 1

    rewrite(folder, change)
    stored = load_file(folder / "model.safetensors")
    model = load(folder)
    assert torch.equal(model.lm_head.method.weight, stored["lm_head.weight"])
    assert torch.equal(model.embedding.weight, stored["model.embed_tokens.weight"])
    assert "config.json ties lm_head.weight to model.embed_tokens.weight (tie_word_embeddings), but" in caplog.text


def test_names_without_the_models_beginning(folder: Path) -> None:
    """As transformers' base models have them; an output matrix says that text is generated all the same."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    whole = load(folder)
    rewrite(folder, rename)
    short = load(folder)
    assert short.config.generates and torch.equal(short.lm_head.method.weight, whole.lm_head.method.weight)


# ---- what is refused ----
def test_layers_that_draft_are_passed_over(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """DeepSeek-V3 has one behind its last: as many as config.json says, and no other."""
    folder = Path(shutil.copytree(tiny_model("deepseek_v3"), tmp_path / "model"))
    spare = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.mlp.gate.weight": torch.ones(8, 64)}
    rewrite(folder, lambda tensors: tensors.update(spare))
    load(folder)
    set_config(folder, num_nextn_predict_layers=0)
    assert refusal(folder).startswith("the checkpoint has model.layers.2.eh_proj.weight (and 1 more), which Deepseek")
    set_config(folder, num_nextn_predict_layers=1)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(64)}))
    assert refusal(folder).startswith("the checkpoint has model.layers.3.enorm.weight, which Deepseek")


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_dummy_weights_of_models_whose_attention_differs(family: str, tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model(family), load_format="dummy")
    weights = dict(model.named_parameters())
    assert all(weight.isfinite().all() for weight in weights.values())
    assert all(weight.any() for name, weight in weights.items() if "norm" not in name)


def test_missing_shard(sharded: Path) -> None:
    names = sorted(file.name for file in sharded.glob("model-*.safetensors"))
    (sharded / names[1]).unlink()
    assert refusal(sharded) == f"{sharded} lacks {names[1]}, named by {INDEX}: download the missing files again"
    (sharded / names[2]).unlink()
    assert f"lacks {names[1]} (and 1 more), named by {INDEX}" in refusal(sharded)


def test_shard_without_its_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    file = sharded / index[Q]
    save_file({name: t for name, t in load_file(file).items() if name != Q}, file)
    expected = f"{file.name} lacks {Q}, which {INDEX} promises (1 such tensors): download the checkpoint again"
    assert refusal(sharded) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}', '{"weight_map": [1]}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    message = refusal(sharded)
    assert message.startswith(f"{sharded / INDEX} is broken (") and message.endswith("): download it again")


def test_truncated_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert refusal(folder) == (
        f"{file} is truncated or corrupt ({len(whole) - 1} bytes, its header says {len(whole)}): download it again"
    )
    file.write_bytes(whole[:100])
    assert f"{file} is truncated (100 bytes, its header alone takes " in refusal(folder)
    file.write_bytes(whole[:5])
    assert refusal(folder) == f"{file} is no safetensors file (5 bytes, bad header): download it again"
    file.write_bytes(b"PK\x03\x04" + bytes(range(100, 200)))
    assert refusal(folder) == f"{file} is no safetensors file (104 bytes, bad header): download it again"
    file.write_bytes(whole[:9] + b"?" + whole[10:])
    assert f"{file} has a corrupt header (JSONDecodeError: " in refusal(folder)
    file.write_bytes(whole.replace(b'"shape":[300,64]', b'"shape":[300,65]'))
    assert f"{file} has a corrupt header (ValueError: " in refusal(folder)


def test_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    file = folder / "model.safetensors"
    assert refusal(folder) == f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q))
    assert refusal(folder) == (
        f"the checkpoint lacks {Q}, and has lm_head.weight, model.embed_tokens.weight, "
        "model.layers.0.input_layernorm.weight, …: the weights are incomplete or do not fit config.json, download both "
        "again"
    )


@pytest.mark.parametrize("more", ["_orig_mod.", "module.", "language_model."])
def test_names_that_have_more_at_their_beginning_are_said(folder: Path, more: str) -> None:
    """As torch.compile and others that wrap a model leave them."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[more + name] = tensors.pop(name)

    rewrite(folder, rename)
    message = refusal(folder)
    assert f"and has {more}model.embed_tokens.weight: its names begin with '{more}', save it without that" in message


def test_names_that_lack_their_beginning_are_said(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q.removeprefix("model."): tensors.pop(Q)}))
    assert f"and has {Q.removeprefix('model.')}: its names lack 'model.' at their beginning" in refusal(folder)


def test_a_link_to_nothing(folder: Path) -> None:
    """What the hub's cache has once its blobs were deleted."""
    file = folder / "model.safetensors"
    file.rename(folder / "first.safetensors")
    (folder / "second.safetensors").symlink_to("blobs/none")
    assert refusal(folder) == (
        f"{folder / 'second.safetensors'} is a link to blobs/none, which is not there: download the model again"
    )
    (folder / "first.safetensors").unlink()
    (folder / "second.safetensors").unlink()
    (folder / "pytorch_model.bin").symlink_to("blobs/none")
    assert "pytorch_model.bin is a link to blobs/none, which is not there" in refusal(folder)


def test_missing_output_matrix_of_an_untied_model(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "the checkpoint lacks lm_head.weight, and has model." in refusal(folder)


def test_unexpected_shape_names_both(folder: Path) -> None:
    set_config(folder, head_dim=32)
    assert refusal(folder) == (
        f"{Q} has shape [64, 64] in model.safetensors, config.json makes it [128, 64]: the weights and the config are "
        "not of one model, download both again"
    )


def test_extra_tensors(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1, layer_types=None)
    message = refusal(folder)
    assert message.startswith("the checkpoint has model.layers.1.")
    assert message.endswith(
        " (and 10 more), which Qwen3ForCausalLM has no place for: the weights do not fit config.json, download both "
        "again"
    )


def test_quantized_tensors(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].to(torch.float8_e4m3fn)}))
    assert refusal(folder) == (
        f"{Q} is quantized (stored as F8_E4M3), and config.json has no quantization_config that says what it means: "
        "take the config.json that came with these weights"
    )


def to_pickled(folder: Path, *names: str, **options: Any) -> None:
    """The weights in pickled files of these names, in place of safetensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for index, name in enumerate(names):
        part = dict(list(tensors.items())[index :: len(names)])
        torch.save(part, folder / name, **options)
    if len(names) > 1:
        weight_map = {tensor: names[index % len(names)] for index, tensor in enumerate(tensors)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache"])
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["pytorch_model.bin"], {}),
        (["pytorch_model-1.bin", "pytorch_model-2.bin"], {}),
        (["model.pt"], {}),
        (["pytorch_model.bin"], {"_use_new_zipfile_serialization": False}),
    ],
    ids=["one", "two", "pt", "before torch 1.6"],
)
def test_pickled_weights_are_the_same_weights(
    folder: Path, names: list[str], options: dict[str, Any], load_format: str
) -> None:
    expected = dict(load(folder).state_dict())
    num_bytes = checkpoint_bytes(folder)
    to_pickled(folder, *names, **options)
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    loaded = load(folder, load_format=load_format).state_dict()
    assert loaded.keys() == expected.keys() and checkpoint_bytes(folder) == num_bytes
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_pickled_weights_that_cannot_be_read(folder: Path) -> None:
    to_pickled(folder, "pytorch_model.bin")
    file, whole = folder / "pytorch_model.bin", (folder / "pytorch_model.bin").read_bytes()
    torch.save({Q: torch.zeros(1), "evil": Bomb(folder / "mark")}, file)
    assert refusal(folder) == (
        f"{file} is broken, or holds more than tensors, which could run code: download it again, or convert it to "
        "safetensors"
    )
    assert not (folder / "mark").exists()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"{file} is truncated or corrupt (" in refusal(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is a Git LFS pointer" in refusal(folder)
    torch.save([1], file)
    assert "holds no tensors by name" in refusal(folder)
    torch.save({Q: torch.zeros(3)}, file)
    assert refusal(folder).startswith("config.json describes ")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {Q: "a.bin", "x": "b.bin"}}))
    assert refusal(folder) == (
        f"{folder} lacks a.bin (and 1 more), named by pytorch_model.bin.index.json: download the missing files again"
    )


def test_folders_without_safetensors(folder: Path) -> None:
    config = read_folder(folder)
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == (
        f"{folder} has no *.safetensors: download the weights, or pass --load-format dummy for random ones"
    )
    assert refusal(folder, load_format="npcache") == (
        f"{folder} has no *.bin, no *.pt, no *.pth: leave --load-format npcache out"
    )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert refusal(folder, load_format="safetensors") == (
        f"{folder} has no *.safetensors but pytorch_model.bin: pass --load-format pt, or leave it out"
    )
    for file in folder.iterdir():
        file.unlink()
    values: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    with pytest.raises(ModelError, match=r"model is empty: download the model into it$"):
        load_model(folder, config, **values)
    folder.rmdir()
    with pytest.raises(ModelError, match=r"model is no folder: pass the folder of a Hugging Face model$"):
        load_model(folder, config, **values)


def test_a_file_that_rots_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever safetensors finds that the header check did not."""
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 4000)
    monkeypatch.setattr("vserve.engine.weights.loader.open_checkpoint", lambda path, load_format: checkpoint)
    message = refusal(folder)
    assert message.startswith("cannot read ") and message.endswith(": download it again")


def test_weights_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> Any:  # root may read every file
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ModelError, match=r"model.safetensors may not be read by the user with the id \d+"):
        read_headers(folder)


# ---- names ----
def test_model_names(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_path(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/model") == folder
    (folder / "model.gguf").touch()
    assert resolve_model_path(str(folder / "model.gguf")) == folder / "model.gguf"
    for name, message in (
        (
            str(folder / "config.json"),
            "config.json is a file: pass the folder of a Hugging Face model with safetensors",
        ),
        (str(tmp_path / "gone"), "gone' does not exist: pass a folder, or a name of the hub such as Qwen/Qwen3-0.6B"),
        ("./gone", "model './gone' does not exist: pass a folder"),
        ("a/b/c", "model 'a/b/c' does not exist: pass a folder"),
        ("", "no model was named: pass a folder, or a name of the hub"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_model_path(name)
        assert message in str(caught.value)


def test_hub_names_are_downloaded_or_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[Any, dict[str, Any]]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "pytorch_model.bin").touch()
    assert resolve_model_path("Qwen/Qwen3-0.6B", "v1") == tmp_path
    assert ["*.bin" in kwargs["allow_patterns"] for _, kwargs in asked] == [False, True], "there are no others"
    asked.clear()
    (tmp_path / "model.safetensors").touch()
    assert resolve_model_path("Qwen/Qwen3-0.6B", "v1") == tmp_path
    ((args, kwargs),) = asked
    assert args == ("Qwen/Qwen3-0.6B",) and kwargs["revision"] == "v1"
    assert "*.safetensors" in kwargs["allow_patterns"] and not any("bin" in p for p in kwargs["allow_patterns"])

    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        resolve_model_path("Qwen/Qwen3-0.6B", "v1")
    assert str(caught.value) == (
        "cannot get Qwen/Qwen3-0.6B (revision v1) from the hub (OSError: no route to host): check name, network and "
        "HF_TOKEN, or pass a folder"
    )


def test_offline_hub_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot get some/model from the hub \(LocalEntryNotFoundError: "):
        resolve_model_path("some/model")
