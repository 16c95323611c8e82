"""Where options come from, which of them wins, and what a wrong one is told."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from vserve.engine.config import ConfigError, EngineConfig
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags, sources
from vserve.server.cli.given import PRESETS, notices, options, performance_modes
from vserve.server.cli.parser import Parser
from vserve.server.config import ServerConfig


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in [name for name in os.environ if name.startswith(("VSERVE_", "VLLM_"))]:
        monkeypatch.delenv(name, raising=False)


def parse(*words: str) -> argparse.Namespace:
    return main.command_parser("serve", serve).parse_args([main._dashes(word) for word in words])


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_come_before_the_environment_before_the_file_before_the_preset(
    config_file: Any, monkeypatch: Any
) -> None:
    file = config_file(
        "model: /m\nport: 1\nmax_num_seqs: 2\nmax-mixed-tokens: 3\nserved-model-name: [a, b]\nseed:\n"
        "enforce-eager: true\nperformance-mode: latency\nallowed-origins: [x]\n"
    )
    monkeypatch.setenv("VSERVE_MAX_NUM_SEQS", "20")
    monkeypatch.setenv("VSERVE_PORT", "10")
    arguments = parse("--config", file, "--port", "100")
    engine, server = read_flags(arguments)
    assert (server.port, engine.max_num_seqs, engine.max_mixed_tokens) == (100, 20, 3)
    assert engine.max_cudagraph_capture_size == 64 and engine.model == "/m" and engine.enforce_eager
    assert server.served_model_name == ("a", "b") and server.allowed_origins == '["x"]' and engine.seed == 0
    found = sources(arguments)
    assert found["port"] == "flag" and found["max_num_seqs"] == "environment" and found["max_mixed_tokens"] == "file"
    assert found["max_cudagraph_capture_size"] == "preset" and found["model"] == "file" and "seed" not in found
    lines = notices(arguments)
    assert "set by --performance-mode latency: max_cudagraph_capture_size=64" in lines
    assert "set by the environment: max_num_seqs=20" in lines


def test_what_the_log_says_hides_secrets(config_file: Any) -> None:
    (line,) = notices(parse("--config", config_file("api-key: sesame")))
    assert line.endswith("config.yaml: api_key=(hidden)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 3", r"unknown option 'max-modle-len'; did you mean max-model-len\?"),
        ("zzzzz: 3", "unknown option 'zzzzz'$"),
        ("port: eight", "port is 'eight': it must be an integer"),
        ("port: 80.5", "port is 80.5: it must be an integer"),
        ("port: true", "port is True: it must be an integer"),
        ("enforce-eager: maybe", "enforce-eager is 'maybe': it must be true or false"),
        ("gpu-memory-utilization: 7", "--gpu-memory-utilization is 7.0: it is a share"),
        ("max-model-len: 3\nmax_model_len: 4", "sets max_model_len twice"),
        ("- port", "must have lines such as"),
        ("port: [", "is no YAML"),
        ("performance-mode: fast", "performance-mode is 'fast': choose one of latency, throughput"),
        ("dtype: int4", "--dtype is 'int4': choose one of"),
    ],
)
def test_a_wrong_file(config_file: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_flags(parse("--config", config_file(text)))


def test_no_file() -> None:
    with pytest.raises(ConfigError, match=r"--config '/no/file' cannot be read \(No such file or directory\)"):
        read_flags(parse("--config", "/no/file"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("SEED", "x", "VSERVE_SEED is 'x': it must be an integer"), ("ENFORCE_EAGER", "2", "must be true or false")],
)
def test_a_wrong_variable(monkeypatch: Any, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(f"VSERVE_{name}", value)
    with pytest.raises(ConfigError, match=message):
        read_flags(parse())


def test_variables(monkeypatch: Any, config_file: Any) -> None:
    monkeypatch.setenv("VSERVE_PORT", "tcp://10.0.0.1:8000")  # Kubernetes' word on a service called vserve
    monkeypatch.setenv("VSERVE_SERVED_MODEL_NAME", "a, b")
    monkeypatch.setenv("VSERVE_ENABLE_PREFIX_CACHING", "off")
    monkeypatch.setenv("VSERVE_MAX_MODEL_LENGTH", "9")
    monkeypatch.setenv("VSERVE_CONFIG", config_file("seed: 5"))
    monkeypatch.setenv("VSERVE_PERFORMANCE_MODE", "throughput")
    engine, server = read_flags(parse("/m"))
    assert server.port == 8000 and server.served_model_name == ("a", "b") and not engine.enable_prefix_caching
    assert engine.seed == 5 and engine.gpu_memory_utilization == 0.95 and engine.model == "/m"
    assert "the variable VSERVE_MAX_MODEL_LENGTH is no option; did you mean VSERVE_MAX_MODEL_LEN?" in notices(parse())


def test_presets_are_engine_options_that_can_work() -> None:
    assert performance_modes() == ["latency", "throughput"]
    names = {spec.name for spec in dataclasses.fields(EngineConfig)}
    for mode in performance_modes():
        content = yaml.safe_load((PRESETS / f"{mode}.yaml").read_text())
        assert {name.replace("-", "_") for name in content} <= names
        engine, _ = read_flags(parse("--performance-mode", mode))
        assert engine != read_flags(parse())[0]


def test_every_option_is_a_flag_in_a_group_of_the_help(capsys: Any) -> None:
    text = main.command_parser("serve", serve).format_help()
    for name, (spec, _) in options().items():
        assert "--" + name.replace("_", "-") in text and f"\n{spec.metadata['group']}:\n" in text
    assert len(options()) == len(dataclasses.fields(EngineConfig)) + len(dataclasses.fields(ServerConfig))


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["--help=cache"], "--block-size", "--port"),
        (["--help=CACHE"], "--block-size", "--port"),
        (["--help", "max_model_len"], "--max-model-len", "--max-num-seqs"),
        (["-h", "mixed"], "--max-mixed-tokens", "--max-num-seqs"),
        (["serve", "--help=all"], "--max-mixed-tokens", "\x1b"),
        (["bench", "serve", "--help=request-rate"], "--request-rate", "--burstiness"),
    ],
)
def test_help_on_a_word(capsys: Any, words: list[str], shown: str, hidden: str) -> None:
    if words[0].startswith("-"):
        words = ["serve", *words]
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    out = capsys.readouterr().out
    assert ended.value.code == 0 and shown in out and hidden not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "3"], "unknown option --max-modle-len; did you mean --max-model-len?"),
        (["serve", "--zzzzzz"], "vserve serve: unknown option --zzzzzz (`vserve serve --help` lists"),
        (["serve", "--max-model", "3"], "unknown option --max-model; did you mean --max-model-len?"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--help=cahce"], "there is no group and no option 'cahce'; did you mean cache?"),
        (["serve", "--port", "x"], "argument --port: 'x': it must be an integer such as"),
        (["serve", "--request-timeout", "1m"], "argument --request-timeout: '1m': it must be a number such as"),
        (["bench", "serve", "--num-promts", "1"], "did you mean --num-prompts?"),
        (["chat", "--system-promt", "1"], "did you mean --system-prompt?"),
    ],
)
def test_unknown_flags(capsys: Any, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and message in err and err.endswith("--help` lists the options)\n")
    assert err.count("\n") == 1  # the last line is the cause


def test_a_model_that_is_not_there_is_said_before_anything_is_loaded(capsys: Any) -> None:
    assert main.main(["./not/there", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("vserve: model './not/there' does not exist: pass a folder")
    with pytest.raises(ConfigError, match="--tokenizer 'a/b/c' is no folder"):
        read_flags(parse("--tokenizer", "a/b/c"))


def test_ctrl_c_while_modules_are_imported(monkeypatch: Any, capsys: Any) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "load", interrupted)
    assert main.main(["serve"]) == 130
    assert capsys.readouterr().err == "vserve: stopped\n"


def test_unknown_commands(capsys: Any) -> None:
    assert main.main(["sevre"]) == 2
    assert "'sevre'; did you mean serve?" in capsys.readouterr().err


def test_the_overview_names_every_command(capsys: Any) -> None:
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in main.COMMANDS:
        assert f"\n  {name} " in out
        assert main.load(name).__doc__ and isinstance(main.command_parser(name, main.load(name)), Parser)
    assert len(out.splitlines()) <= 30 and "\x1b" not in out
