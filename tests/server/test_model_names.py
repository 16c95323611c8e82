"""Names of models as people have them, and models that lie on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.options import model_path, shelves
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.model_names import hub_name, meant
from vserve.engine.options.shelves import shelved
from vserve.server.cli import main
from vserve.server.cli.download_line import Download, duration


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("copied", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B?local-app=vllm", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/x/y/tree/gptq-8bit", "https://huggingface.co/x/y/tree/gptq-8bit"),
        ("https://huggingface.co/x/y/blob/main/m.gguf", "https://huggingface.co/x/y/blob/main/m.gguf"),
        ("https://huggingface.co/datasets/squad", "https://huggingface.co/datasets/squad"),
        ("hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M", "unsloth/Qwen3-8B-GGUF:Q4_K_M"),
        ("huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("./huggingface.co/Qwen/x", "./huggingface.co/Qwen/x"),
    ],
)
def test_a_copied_address_is_the_model_that_it_shows(copied: str, name: str) -> None:
    assert hub_name(copied) == name
    if name[4] == "/":
        assert EngineConfig(copied).model == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"), ("MiniMax-M2", "MiniMaxAI/MiniMax-M2"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"), ("llama3.2", "meta-llama/Llama-3.2-3B-Instruct"),
        ("qwen3:8b", "Qwen/Qwen3-8B"), ("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("gemma3:4b-it-qat", "google/gemma-3-4b-it"), ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("deepseek-r1:7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), ("phi4", "microsoft/phi-4"),
        ("foo", ""), ("foo:bar", ""), ("qwen3:nonsense", ""), ("phi4:mini", ""), ("mixtral:8x22b", ""),
        ("gemma3:270m", "google/gemma-3-270m-it"),
    ],
)  # fmt: skip
def test_a_name_without_an_owner_is_told_which_is_meant(typed: str, name: str) -> None:
    assert meant(typed) == name
    with pytest.raises(ConfigError, match=f"did you mean {name}\\?" if name else "pass a folder, or a name of the hub"):
        model_path.find_model(typed)


@pytest.mark.parametrize("address", ["https://huggingface.co/x/y/tree/gptq-8bit", "hf.co/datasets/squad"])
def test_an_address_of_something_else_is_no_model(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a whole model: pass owner/model, a branch of it with"):
        model_path.find_model(address)


def test_old_models_of_the_hub_have_no_owner() -> None:
    for name in ("gpt2", "bert-base-uncased", "distilgpt2", "t5-small", "owner/model", "owner/model:Q4_K_M"):
        assert model_path.find_model(name) is None


def hub_model(cache: Path, name: str, files: dict[str, bytes], broken: bool = False) -> Path:
    """As the hub's library lays it down."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / "0123", folder / "blobs"
    for part in (snapshot, blobs, folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123")
    for index, (file, content) in enumerate(files.items()):
        (blobs / f"{index}").write_bytes(content)
        (snapshot / file).symlink_to(blobs / f"{index}")
    if broken:
        (blobs / "9.incomplete").write_bytes(b"12")
    return folder


def ollama_model(folder: Path, name: str, content: bytes) -> Path:
    model, tag = name.split(":")
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / model / tag
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00"},
              {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abcd"}]  # fmt: skip
    manifest.write_text(json.dumps({"layers": layers}))
    blob = folder / "blobs" / "sha256-abcd"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob


def test_models_of_three_programs_are_listed_and_served_by_their_names(home: Path, capsys) -> None:
    cache = home / ".cache" / "huggingface" / "hub"
    hub_model(cache, "org/one", {"config.json": b"{}", "model.safetensors": b"x" * 1500000})
    hub_model(cache, "org/half", {"config.json": b"{}"}, broken=True)
    hub_model(cache, "org/only-a-tokenizer", {"tokenizer.json": b"{}"})
    blob = ollama_model(home / ".ollama" / "models", "llama3.2:1b", b"GGUF")
    studio = home / ".lmstudio" / "models" / "org" / "name" / "name-Q4_K_M.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(b"GGUF")
    (studio.parent / "mmproj-F16.gguf").write_bytes(b"GGUF")
    found = {model.name: model for model in shelved()}
    assert set(found) == {"org/one", "org/half", "llama3.2:1b", str(studio)}
    assert found["org/one"].size == 1500002 and found["org/one"].is_whole and not found["org/half"].is_whole
    assert model_path.find_model("llama3.2:1b") == blob and model_path.is_gguf(blob)
    assert model_path.find_model(str(studio)) == studio
    assert main.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "USED", "WHERE"] and len(lines) == 5
    assert any(line.startswith("org/one ") and "1.5 MB" in line and line.endswith("hub") for line in lines)
    assert any(line.startswith("org/half ") and "`vserve pull` goes on" in line for line in lines)
    assert any(line.startswith("~/.lmstudio/models/org/name/name-Q4_K_M.gguf") for line in lines)
    assert main.main(["ls", "--json"]) == 0
    found_on = {json.loads(line)["shelf"] for line in capsys.readouterr().out.splitlines()}
    assert found_on == {"hub", "Ollama", "LM Studio"}


@pytest.mark.parametrize("name", ["../../x:1", "/etc/passwd:x", "a/../b:c"])
def test_a_name_does_not_lead_out_of_ollamas_folder(name: str) -> None:
    assert shelves.ollama_file(name) is None


def test_a_model_is_deleted_once_somebody_says_yes(home: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = home / "elsewhere"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    folder = hub_model(cache, "org/one", {"config.json": b"{}"})
    ollama_model(home / ".ollama" / "models", "llama3.2:1b", b"GGUF")
    assert main.main(["rm", "org/on"]) == 2
    assert "org/on is not on this machine; did you mean org/one?" in capsys.readouterr().err
    assert main.main(["rm", "llama3.2:1b"]) == 2
    assert "llama3.2:1b is Ollama's: remove it there" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert main.main(["rm", "org/one"]) == 2 and folder.exists()
    assert "add --yes" in capsys.readouterr().err
    assert main.main(["rm", "-y", "https://huggingface.co/org/one"]) == 0
    assert not folder.exists() and "deleted org/one" in capsys.readouterr().out


def test_a_line_says_bytes_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    download = Download()
    assert download.line(100_000_000, 16_100_000_000) == "downloading 0.1 of 16.1 GB"
    now[0] += 4
    assert download.line(500_000_000, 16_100_000_000) == "downloading 0.5 of 16.1 GB, 100.0 MB/s, 3 min left"
    now[0] += 60  # it has stood still: the speed of the last seconds counts
    assert download.line(600_000_000, 16_100_000_000) == "downloading 0.6 of 16.1 GB"
    assert [duration(seconds) for seconds in (0.2, 40, 600, 9000)] == ["1 s", "40 s", "10 min", "2.5 h"]
