"""Command lines that people bring from vLLM: each option is known here, does what it says there, or is answered."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.config import ConfigError, EngineConfig
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags
from vserve.server.cli.given import notices, options
from vserve.server.llm import LLM
from vserve.server.vllm_options import vllm_options


def parse(*words: str) -> argparse.Namespace:
    return main.command_parser("serve", serve).parse_args([main._dashes(word) for word in words])


def test_a_usual_command_line_is_served(monkeypatch: Any) -> None:
    for name in [name for name in os.environ if name.startswith("VSERVE_")]:
        monkeypatch.delenv(name)
    arguments = parse(
        "/m", "--tensor-parallel-size", "1", "-dp", "1", "--trust_remote_code", "--dtype", "half", "--swap-space=4",
        "--max-model-len", "32K", "--disable-log-requests", "--quantization", "None", "--generation-config", "vllm",
        "--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip
    engine, server = read_flags(arguments)
    assert (engine.model, engine.dtype, engine.max_model_len) == ("/m", "float16", 32768)
    assert not engine.enable_prefix_caching and server.tool_call_parser == "hermes"
    assert server.generation_config == "vserve"
    assert [line.split(":")[0] for line in notices(arguments)] == [
        "--trust-remote-code changes nothing",
        "--swap-space changes nothing",
        "--disable-log-requests changes nothing",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2: a model on several GPUs is not built yet"),
        (["-tp", "8"], "--tensor-parallel-size 8: "),
        (["--quantization", "awq"], "--quantization awq: quantized weights are not served yet: use the unquantized"),
        (["--enable-lora"], "--enable-lora: adapters are not served yet: merge it"),
        (["--speculative-config", '{"method": "ngram"}'], "the answers are the same"),
        (["--disable-uvicorn-access-log"], "--disable-uvicorn-access-log: use --no-access-log"),
    ],
)
def test_what_is_not_there_says_what_to_do(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(parse("/m", *words))
    assert message in str(caught.value)
    assert main.main(["serve", "/m", *words]) == 2
    assert capsys.readouterr().err == f"vserve: {caught.value}\n"


def test_a_file_of_options(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"

    def read(text: str) -> EngineConfig:
        path.write_text(f"model: /m\n{text}\n")
        return read_flags(parse("--config", str(path)))[0]

    assert read("tensor-parallel-size: 1\nkv_cache_dtype: auto\nmax-model-len: 4k").max_model_len == 4000
    with pytest.raises(ConfigError, match="tensor-parallel-size 2: a model on several GPUs is not built"):
        read("tensor-parallel-size: 2")
    with pytest.raises(ConfigError, match=r"trust_remote_code changes nothing: .*; leave it out"):
        read("trust_remote_code: true")


def test_offline() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: a model on several GPUs is not built yet"):
        LLM("/m", tensor_parallel_size=2, trust_remote_code=True)
    with pytest.raises(TypeError, match="LLM has no option 'max_model_length'"):
        LLM("/m", max_model_length=2, tensor_parallel_size=1, speculative_config=None)


def test_the_table() -> None:
    assert not set(vllm_options()) & set(options())
    for option in vllm_options().values():
        assert option.reason and option.reason[-1] != "." and "\n" not in option.reason
    assert "tensor-parallel" not in main.command_parser("serve", serve).format_help()


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("2M", 2 << 20), ("4GiB", 4 << 30)],
)
def test_large_numbers(text: str, number: int) -> None:
    assert read_flags(parse("/m", "--kv-cache-memory-bytes", text))[0].kv_cache_memory_bytes == number


@pytest.mark.parametrize("text", ["4GB", "1.0001k", "0x10", "1_000", "k", "", "auto"])
def test_no_numbers(text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("/m", "--kv-cache-memory-bytes", text)
    assert f"{text!r}: it must be an integer" in capsys.readouterr().err
