"""Command lines that people bring from vLLM: each option is known here, does what it says there, or is answered."""

from __future__ import annotations

import argparse
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.options import kv_events_settings
from vserve.engine.options.config import EngineConfig, flag
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags
from vserve.server.cli.given import notices
from vserve.server.cli.parser import Parser
from vserve.server.offline.llm import LLM
from vserve.server.options.config import ServerConfig
from vserve.server.options.keywords import from_keywords
from vserve.server.options.reading import options
from vserve.server.options.vllm import vllm_options


@cache
def parser() -> Parser:
    return main.command_parser("serve", serve)


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args([main._dashes(word) for word in words])


def test_a_usual_command_line_is_served(monkeypatch: Any) -> None:
    for name in [name for name in os.environ if name.startswith("VSERVE_")]:
        monkeypatch.delenv(name)
    arguments = parse(
        "/m", "-tp", "1", "-pp", "1", "-dp", "1", "--code_revision", "x", "--dtype", "half", "--swap-space=4",
        "--max-model-len", "32K", "--disable-log-requests", "--quantization", "None", "--generation-config", "vllm",
        "--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip
    engine, server = read_flags(arguments)
    assert (engine.model, engine.dtype, engine.max_model_len) == ("/m", "float16", 32768)
    assert read_flags(parse("/m", "-q", "AWQ"))[0].quantization == "AWQ"
    assert not engine.enable_prefix_caching and server.tool_call_parser == "hermes"
    assert server.generation_config == "vserve"
    assert [line.split(":")[0] for line in notices(arguments)] == [
        "--code-revision changes nothing",
        "--swap-space changes nothing",
        "--disable-log-requests changes nothing",
    ]


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        ("-dp 4 --data-parallel-size-local 4", 4),
        ("-dpl 2 --data-parallel-backend mp", 2),
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb --data-parallel-start-rank 2 --data-parallel-address 10.0.0.1", 2),
        ("-dp 4 --data-parallel-rank 3", 1),
        ("-dp 4 --data-parallel-external-lb --data-parallel-rank 0 -dpl 1 --data-parallel-rpc-port 13345", 1),
    ],
)
def test_engines_of_several_servers(words: str, engines: int) -> None:
    arguments = parse("/m", *words.split())
    assert read_flags(arguments)[0].data_parallel_size == engines
    assert notices(arguments), "told of"


@pytest.mark.parametrize(
    ("words", "rank", "endpoint"),
    [
        ("-dp 4 --data-parallel-rank 3", 3, "tcp://127.0.0.1:5560"),
        ("-dp 4 --data-parallel-rank 0", 0, "tcp://127.0.0.1:5557"),
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb --data-parallel-start-rank 2", 2, "tcp://127.0.0.1:5559"),
        ("-dp 4", 0, "tcp://127.0.0.1:5557"),
    ],
)
@pytest.mark.parametrize("as_keys", [False, True], ids=["whole", "key by key"])
def test_kv_events_have_the_rank_of_the_server(words: str, rank: int, endpoint: str, as_keys: bool) -> None:
    pytest.importorskip("zmq")
    whole = ["--kv-events-config", '{"enable_kv_cache_events": true}']
    events = ["--kv-events-config.enable_kv_cache_events", "true"] if as_keys else whole
    found = kv_events_settings.settings(read_flags(parse("/m", *words.split(), *events))[0].kv_events_config)
    assert found is not None and (found["data_parallel_rank"], found["endpoint"]) == (rank, endpoint)


def test_kv_events_of_a_fleet_are_checked() -> None:
    with pytest.raises(ConfigError, match="there is no 'port'"):
        read_flags(parse("/m", "-dp", "2", "--data-parallel-rank", "1", "--kv-events-config", '{"port": 1}'))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-dp 4 -dpl 2", "all on its own host. Start one on each host, with --data-parallel-size 2"),
        ("-dp 2 -dpl 4 --data-parallel-hybrid-lb", "--data-parallel-size-local is 4, and --data-parallel-size is 2: "),
        ("-dp 2 -dpl x", "--data-parallel-size-local is 'x': it must be an integer of at least 1"),
        ("-dp 2 -dpl 0", "--data-parallel-size-local is '0': it must be an integer of at least 1"),
        ("-dp 2 --data-parallel-rank 2", "--data-parallel-rank is 2, of 2 engines: say with --data-parallel-size how"),
        ("--data-parallel-rank 1", "--data-parallel-rank is 1, of 1 engine: "),
        ("-dp 2 --data-parallel-rank -1", "--data-parallel-rank is '-1': it must be an integer of at least 0"),
        ("-dp 4 --data-parallel-rank 1 -dpl 2", "--data-parallel-size-local is 2: a server that is one of several"),
        ("-dp 4 --data-parallel-external-lb", "say with --data-parallel-rank which of them this server is"),
        ("-dp 2 --data-parallel-backend ray", "start a server on each host, and `vserve router` before them"),
    ],
)
def test_fleets_that_are_none(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(parse("/m", *words.split()))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--decode-context-parallel-size", "2"], "--decode-context-parallel-size 2: a context stays on its cards"),
        (["-dcp", "8"], "--decode-context-parallel-size 8: "),
        (["--enable-prompt-adapter"], "--enable-prompt-adapter: prompt adapters are not served, only LoRA is"),
        (["--speculative-config", '{"method": "medusa"}'], "the answers are the same"),
        (["--spec-method", "eagle3"], "its model is None: it must be the folder"),
        (["--spec-decoding-acceptance-method", "typical_acceptance_sampler"], "drafts here never change an answer"),
        (
            ["--spec-tokens", "3", "--speculative-config.num_speculative_tokens", "4"],
            "--spec-tokens and --speculative-config.num_speculative_tokens are one option: leave one out",
        ),
        (["--guided-decoding-backend", "xgrammar:disable-any-whitespace"], "use --structured-outputs-config"),
        (["--guided-decoding-disable-any-whitespace"], "use --structured-outputs-config.disable_any_whitespace true"),
        (
            ["--access-log", "--disable-uvicorn-access-log"],
            "--disable-uvicorn-access-log and --access-log are one option",
        ),
        (
            ["--cudagraph-capture-sizes", "large"],
            "the sizes of CUDA graphs are ['large']: give numbers, such as 1 2 4 8",
        ),
        (["-pcp", "2"], "--prefill-context-parallel-size 2: a context stays on its cards: leave it out"),
        (["--watermark-config.key", "1"], "texts are not watermarked: leave it out"),
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

    assert read("decode-context-parallel-size: 1\nkv_cache_dtype: auto\nmax-model-len: 4k").max_model_len == 4000
    with pytest.raises(ConfigError, match="decode-context-parallel-size 2: a context stays on its cards"):
        read("decode-context-parallel-size: 2")
    path.write_text("model: /m\nswap-space: 4\ncode_revision: x\npreemption-mode: SWAP\n")
    arguments = parse("--config", str(path))
    assert read_flags(arguments)[0].model == "/m"
    assert [line.split(":")[:2] for line in notices(arguments)[1:]] == [
        [str(path), f" {name} changes nothing"] for name in ("swap-space", "code-revision", "preemption-mode")
    ]  # fmt: skip
    path.write_text("model: /m\ndecode-context-parallel-size: 2\n")
    assert read_flags(parse("--config", str(path), "--decode-context-parallel-size", "1"))[0].model == "/m", (
        "flags come first"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'],
        ["--structured-outputs-config.backend", "xgrammar", "--structured-outputs-config.disable_any_whitespace=true"],
        ["--structured_outputs_config.disable_any_whitespace", "true", "--structured-outputs-config.backend=xgrammar"],
    ],
)
def test_json_is_given_whole_or_key_by_key(words: list[str]) -> None:
    for arguments in (parse("/m", *words), parse(*words, "/m")):
        engine, server = read_flags(arguments)
        assert engine.model == "/m" and server.structured_outputs() == {"disable_any_whitespace": True}
        assert json.loads(str(server.structured_outputs_config))["backend"] == "xgrammar"


def test_keys_of_keys() -> None:
    arguments = parse(
        "/m", "--compilation-config.level", "3", "-cc.pass_config.fuse=true", "--kv-transfer-config.a.b", "x y"
    )
    assert json.loads(arguments.vllm_compilation_config) == {"level": 3, "pass_config": {"fuse": True}}
    assert json.loads(arguments.vllm_kv_transfer_config) == {"a": {"b": "x y"}}
    arguments = parse("--override-generation-config.temperature", "0.5", "--", "/m")
    engine, server = read_flags(arguments)
    assert engine.model == "/m" and server.overrides() == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compilation-config.level", "3", "--compilation-config", "{}"], "is given whole, and in parts"),
        (["--compilation-config.level", "3", "-cc.level=4"], "level is given twice: leave one out"),
        (["--compilation-config.level", "3", "-cc.level.x=4"], "level has a value, and parts too"),
        (["--compilation-config.level", "--port", "1"], "--compilation-config.level: a value is missing"),
        (["--compilation-config.", "1"], "a name is missing after the dot"),
        (["--port.x", "1"], "unknown option --port.x; did you mean --port?"),
    ],
)
def test_keys_that_make_no_sense(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("/m", *words)
    assert message in capsys.readouterr().err


def test_json_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"

    def read(text: str) -> ServerConfig:
        path.write_text(f"model: /m\n{text}\n")
        return read_flags(parse("--config", str(path)))[1]

    nested = "structured-outputs-config:\n  backend: xgrammar\n  disable_any_whitespace: true"
    dotted = "structured-outputs-config.backend: xgrammar\nstructured-outputs-config.disable_any_whitespace: true"
    for text in (nested, dotted, nested.replace("-", "_")):
        assert read(text).structured_outputs() == {"disable_any_whitespace": True}
    assert read("override-generation-config: {temperature: 0.5}\noverride-generation-config.top_k: 3").overrides() == {
        "temperature": 0.5, "top_k": 3
    }  # fmt: skip
    for text in ("hf-overrides: x\nhf-overrides.a: 1", "hf-overrides: {a: 1}\nhf-overrides.a: 1"):
        with pytest.raises(ConfigError, match="twice"):
            read(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"any_whitespace": false}', "has 'any_whitespace': it may set disable_any_whitespace, "),
        ('{"backend": "grammars"}', "has backend 'grammars': choose one of auto, xgrammar, guidance, "),
        ('{"disable_any_whitespace": "yes"}', "has disable_any_whitespace 'yes': it must be true or false"),
        ('{"reasoning_parser": "qwen3"}', "has reasoning_parser 'qwen3': use --reasoning-parser"),
        ('{"enable_in_reasoning": true}', "has enable_in_reasoning True: a grammar begins where the reasoning ends"),
        ("[]", "is no JSON object: give one such as"),
        ("{", "is no JSON"),
    ],
)
def test_structured_outputs_that_are_not_built(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--structured-outputs-config {message}"):
        read_flags(parse("/m", "--structured-outputs-config", config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pooler-config.pooling_type", "MAX"], "has pooling_type 'MAX': choose one of LAST, MEAN, CLS"),
        (
            ["--pooler-config.logit_bias", "8"],
            "has 'logit_bias': it may set pooling_type, seq_pooling_type, tok_pooling",
        ),
        (["--pooler-config.dimensions", "0"], "has dimensions 0: it must be an integer of at least 1"),
        (["--pooler-config.tok_pooling_type", "MEAN"], "has tok_pooling_type 'MEAN': choose one of ALL, STEP"),
        (
            ["--pooler-config.use_activation=false", "--pooler-config.normalize=true"],
            "has normalize True, and False too: leave one out",
        ),
        (["--pooler-config.normalize", "2"], "has normalize 2: it must be true or false"),
        (["--pooler-config.task", "plugin"], "has task 'plugin': choose one of embed, classify, token_embed"),
        (["--pooler-config", "[]"], "is no JSON object: give one such as"),
        (
            ["--pooler-config.pooling_type=MEAN", "--pooling", "cls"],
            "--pooling is 'cls', and --pooler-config has 'mean'",
        ),
        (["--pooler-config", "{}", "--override-pooler-config", "{}"], "are one option: leave one out"),
        (["--download-dir", __file__], "it is a file, give a folder"),
    ],
)
def test_pooler_and_download_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(parse("/m", *words))
    assert message in str(caught.value)
    assert read_flags(parse("/m", "--pooler-config.pooling_type", "MEAN"))[1].pooler() == ("mean", None)


def test_what_a_pooler_config_sets() -> None:
    def pooled(**config: Any) -> dict[str, Any]:
        return ServerConfig(pooler_config=json.dumps(config)).pooled()

    assert pooled() == {"longest": None}
    assert pooled(task="token_embed") == {"task": "token_embed", "longest": None}
    assert read_flags(parse("/m", "--pooler-config.task", "embed"))[1].pooled()["task"] == "embed"
    assert pooled(tok_pooling_type="ALL", dimensions=8) == {"dimensions": 8, "longest": None}
    for name in ("use_activation", "activation", "softmax"):
        assert pooled(**{name: False}) == {"activate": False, "longest": None}
    assert ServerConfig(pooler_config='{"use_activation": false}').pooler() == ("auto", False)


def test_who_computes_a_model(capsys: Any) -> None:
    assert read_flags(parse("/m"))[0].model_impl == "auto" and not read_flags(parse("/m"))[0].trust_remote_code
    engine = read_flags(parse("/m", "--model-impl", "transformers", "--trust_remote_code"))[0]
    assert (engine.model_impl, engine.trust_remote_code) == ("transformers", True)
    assert read_flags(parse("/m", "--model_impl=vllm"))[0].model_impl == "vllm"
    with pytest.raises(SystemExit):
        parse("/m", "--model-impl", "terratorch")
    assert "--model-impl: 'terratorch': models of terratorch are not served: choose auto" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is 'terratorch': models of terratorch are not served: choose auto"):
        LLM("/m", model_impl="terratorch")


def test_values_as_people_spell_them(monkeypatch: Any) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    engine, server = read_flags(parse(
        "/m", "--dtype", "fp16", "--load-format", "fastsafetensors", "--tokenizer-mode", "mistral", "--config-format",
        "mistral", "--log-level", "warn", "--cudagraph-capture-sizes", "1", "2", "24", "8", "--hf-token", "secret",
        "--disable-uvicorn-access-log", "--performance-mode", "balanced", "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
    ))  # fmt: skip
    assert (engine.dtype, engine.load_format, engine.max_cudagraph_capture_size) == ("float16", "auto", 24)
    assert (server.tokenizer_mode, server.log_level, server.access_log) == ("auto", "warning", False)
    assert server.template_kwargs() == {"enable_thinking": False} and "secret" not in repr(server)
    assert os.environ["HF_TOKEN"] == "secret"
    assert read_flags(parse("/m", "--dtype", "bf16"))[0].dtype == "bfloat16"
    latency = read_flags(parse("/m", "--performance-mode", "latency"))[0]
    assert read_flags(parse("/m", "--performance-mode", "interactivity"))[0] == latency


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--device tpu", "choose auto, cuda or cpu"),
        ("--load-format tensorizer", "give a folder with safetensors files"),
        ("--load-format sharded_state", "give the folder that they were made of"),
        ("--tokenizer-mode custom", "use a folder with a tokenizer.json"),
        ("--kv-cache-dtype nvfp4", "choose fp8, or leave it out"),
        ("--kv-cache-dtype turboquant_k8v4", "choose fp8, or leave it out"),
        ("--runner draft", "--speculative-config|speculative_config"),
        ("--task draft", "--speculative-config|speculative_config"),
    ],
)
def test_values_that_are_nothing_here_say_what_to_do(words: str, remedy: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("/m", *words.split())
    assert re.search(remedy, said := capsys.readouterr().err) and "invalid choice" not in said
    name, value = words.split()
    with pytest.raises(ConfigError, match=remedy):
        from_keywords({"model": "/m", name[2:].replace("-", "_"): value})


def test_no_value_is_an_invalid_choice(capsys: Any) -> None:
    """Whatever it is: what there is to choose from stands there."""
    named = [spec for spec, _ in options().values() if spec.metadata["choices"]]
    assert len(named) > 10
    for spec in named:
        with pytest.raises(SystemExit):
            parse("/m", flag(spec.name), "nonsense")
        said = capsys.readouterr().err
        assert "'nonsense'" in said and "choose " in said and "invalid choice" not in said, said


def test_variables_of_template_by_default() -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs has 'messages', which requests have a field"):
        ServerConfig(default_chat_template_kwargs='{"messages": []}').check_text()
    with pytest.raises(ConfigError, match="is no JSON object: give one such as"):
        ServerConfig(default_chat_template_kwargs="[]").check_text()


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["-sc", '{"method": "ngram"}'], {"method": "ngram"}),
        (["--speculative-config.method=ngram", "--spec-tokens=3"], {"method": "ngram", "num_speculative_tokens": "3"}),
        (["--spec-method=ngram", "--spec-tokens", "3"], {"method": "ngram", "num_speculative_tokens": "3"}),
        (
            ["--speculative-model", "[ngram]", "--num-speculative-tokens", "5", "--ngram-prompt-lookup-max", "4"],
            {"model": "[ngram]", "num_speculative_tokens": "5", "prompt_lookup_max": "4", "prompt_lookup_min": 1},
        ),
        (["--speculative-mode", "[ngram]"], {"method": "[ngram]"}),
        (["--spec-method", "ngram", "--ngram-prompt-lookup-min", "0"], {"method": "ngram"}),
        (
            ["--spec-method", "ngram", "--speculative-disable-by-batch-size", "5",
             "--speculative-draft-tensor-parallel-size", "1"],
            {"method": "ngram", "disable_by_batch_size": "5", "draft_tensor_parallel_size": "1"},
        ),
        # Without who drafts, as it was with vLLM: nobody does.
        (["--speculative-draft-tensor-parallel-size", "1"],
         {"draft_tensor_parallel_size": "1", "num_speculative_tokens": 0}),
        (["--spec-model", "/d", "--speculative-model-quantization", "None"], {"model": "/d"}),
    ],
)  # fmt: skip
def test_names_of_parts_of_the_speculative_config(words: list[str], keys: dict[str, Any]) -> None:
    engine, _ = read_flags(arguments := parse("/m", *words))
    assert json.loads(engine.speculative_config or "") == keys
    lines = [line for line in notices(arguments) if "is read as --speculative-config." in line]
    assert len(lines) == sum(word.startswith("--") and "config" not in word for word in words)


def test_no_speculative_model() -> None:
    assert read_flags(parse("/m", "--speculative-model", "None"))[0].speculative_config is None
    with pytest.raises(ConfigError, match=r"speculative-config is '\{': it is no JSON"):
        from_keywords({"model": "/m", "speculative_config": "{", "num_speculative_tokens": 3})


def test_values_of_python() -> None:
    """Paths, and numbers of NumPy's."""
    given = {"model": Path("/m"), "speculative_model": Path("/d"), "num_speculative_tokens": np.int64(3)}
    engine, _, _ = from_keywords(given)
    assert engine.model == "/m" and json.loads(engine.speculative_config or "") == {
        "model": "/d",
        "num_speculative_tokens": 3,
    }
    engine, _, _ = from_keywords(
        {"model": "/m", "speculative_config": {"model": Path("/d"), "max_model_len": np.int64(9)}}
    )
    assert json.loads(engine.speculative_config or "") == {"model": "/d", "max_model_len": 9}
    with pytest.raises(ConfigError, match=r"object at .* in it is no JSON"):
        from_keywords({"model": "/m", "speculative_config": {"model": object()}})


def test_offline() -> None:
    with pytest.raises(ConfigError, match="decode_context_parallel_size 2: a context stays on its cards"):
        LLM("/m", decode_context_parallel_size=2, code_revision="x")
    with pytest.raises(TypeError, match="LLM has no option 'max_model_length'"):
        LLM("/m", max_model_length=2, decode_context_parallel_size=1, speculative_config=None)
    with pytest.raises(ConfigError, match="its method is 'suffix': drafts by suffix decoding are not served yet"):
        LLM("/m", speculative_config={"method": "suffix", "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="its num_speculative_tokens is 99: it must be an integer from 0 to 15"):
        LLM("/m", speculative_model="small/model", num_speculative_tokens=99)


def test_the_table() -> None:
    assert not set(vllm_options()) & set(options())
    for option in vllm_options().values():
        assert option.reason and option.reason[-1] != "." and "\n" not in option.reason
    assert "decode-context-parallel" not in parser().format_help()


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
