"""Where options come from, which of them wins, and what a wrong one is told."""

from __future__ import annotations

import argparse
import dataclasses
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.server.cli import flags, main, serve
from vserve.server.cli.flags import read_flags, sources
from vserve.server.cli.given import notices, unknown_variables
from vserve.server.cli.parser import Parser
from vserve.server.options.config import ServerConfig
from vserve.server.options.given import PRESETS, performance_modes
from vserve.server.options.keywords import from_keywords, in_keywords
from vserve.server.options.reading import options


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in [name for name in os.environ if name.startswith(("VSERVE_", "VLLM_"))]:
        monkeypatch.delenv(name, raising=False)


@cache
def parser() -> Parser:
    return main.command_parser("serve", serve)


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args([main._dashes(word) for word in words])


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
        (
            "gpu-memory-utilization: 7",
            "--gpu-memory-utilization is 7.0: it must be above 0 and at most 1; it is a share",
        ),
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


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs is 0: it must be at least 1"),
        ({"block_size": 512}, "--block-size is 512: it must be from 1 to 256"),
        ({"block_size": 24}, "--block-size is 24: it must be a power of two"),
        ({"max_mixed_tokens": -1}, "--max-mixed-tokens is -1: it must be 0 (no limit) or more"),
        ({"max_logprobs": -2}, "--max-logprobs is -2: it must be at least -1"),
        ({"gpu_memory_utilization": float("nan")}, "is nan: it must be above 0 and at most 1; it is a share"),
        ({"max_cudagraph_capture_size": 0}, "it must be at least 1; --enforce-eager turns graphs off"),
        ({"port": 65536}, "--port is 65536: it must be from 0 (any free one) to 65535"),
        ({"stall_timeout": 0.0}, "--stall-timeout is 0.0: it must be from 0.1 to 86400 seconds"),
        ({"request_timeout": 1e9}, "it must be from 0 (no limit) to 86400 seconds"),
        ({"hang_timeout": 3.0}, "--hang-timeout is 3.0: it must be 0 (never) or at least --stall-timeout (30.0)"),
        ({"hang_timeout": -1.0}, "--hang-timeout is -1.0: it must be from 0 (never) to 86400 seconds"),
        ({"root_path": "/a/"}, "--root-path is '/a/': it must start with / and not end with one"),
        ({"metrics_prefix": "1a"}, "--metrics-prefix is '1a': it must not start with a digit"),
        ({"metrics_prefix": "a-"}, "only letters, digits, _ and : may be in a metric's name"),
        ({"served_model_name": ("a", " ")}, "a name is empty, leave it out"),
        ({"api_key": ("sesame", "")}, "--api-key: a key is empty, leave it out"),
        ({"ssl_keyfile": "/no"}, "--ssl-keyfile is '/no': it is no file, give the path of one"),
        ({"allowed_origins": "*"}, "--allowed-origins is '*': it must be a JSON list of strings, such as"),
        ({"log_level": "loud"}, "--log-level is 'loud': choose one of debug, info, warning, error"),
    ],
    ids=str,
)
def test_options_out_of_bounds(option: dict[str, Any], problem: str) -> None:
    engine = {spec.name for spec in dataclasses.fields(EngineConfig)}
    with pytest.raises(ConfigError) as caught:
        (EngineConfig if set(option) <= engine else ServerConfig)(**option)
    assert problem in str(caught.value) and "sesame" not in str(caught.value)


def test_every_number_has_bounds() -> None:
    free = [name for name, (spec, kind) in options().items() if kind in (int, float) and not spec.metadata["bounds"]]
    assert free == ["seed"]
    for name, (spec, _) in options().items():
        assert (
            spec.metadata["bounds"] is None or spec.default is None or not spec.metadata["bounds"].problem(spec.default)
        ), name


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("max_model_len", "2k", 2000),
        ("kv_cache_memory_bytes", "4GiB", 4 << 30),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("dtype", "half", "float16"),
        ("dtype", "Float", "float32"),
        ("load_format", "DUMMY", "dummy"),
        ("generation_config", "vllm", "vserve"),
        ("pooling", "MEAN", "mean"),
        ("served_model_name", "a", ("a",)),
        ("override_generation_config", '{"top_k": 3}', '{"top_k": 3}'),
        ("seed", "-3", -3),
    ],
)
def test_what_one_accepts_all_accept(
    name: str, given: str, expected: Any, config_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(configs: Any) -> Any:
        engine, server = configs[:2]
        return getattr(engine if hasattr(engine, name) else server, name)

    flag = f"--{name.replace('_', '-')}"
    assert found(read_flags(parse("/m", flag, given))) == expected
    assert found(read_flags(parse("/m", "--config", config_file(f"{name}: {given!r}")))) == expected
    assert found(from_keywords({"model": "/m", name: given})) == expected
    monkeypatch.setenv(f"VSERVE_{name.upper()}", given)
    assert found(read_flags(parse("/m"))) == expected


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("max_model_len", "2x", "'2x': it must be an integer such as 4096 or 4K"),
        ("gpu_memory_utilization", "most", "'most': it must be a number such as 0.9"),
        ("max_model_len", "0", "it must be at least 1"),
        ("log_level", "loud", "choose"),
        ("decode_context_parallel_size", "2", "a context stays on its cards"),
    ],
)
def test_what_one_refuses_all_refuse(
    name: str, given: str, problem: str, config_file: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises((ConfigError, SystemExit)) as caught:
        read_flags(parse("/m", flag, given))
    assert problem in str(caught.value) + capsys.readouterr().err
    with pytest.raises(ConfigError, match=problem):
        read_flags(parse("/m", "--config", config_file(f"{name}: {given!r}")))
    with pytest.raises(ConfigError, match=problem):
        from_keywords({"model": "/m", name: given})
    monkeypatch.setenv(f"VSERVE_{name.upper()}", given)
    with pytest.raises(ConfigError, match=problem):
        read_flags(parse("/m"))


def test_keywords() -> None:
    import torch

    engine, server, lines = from_keywords(
        {"model": "/m", "dtype": torch.float16, "max_num_seqs": None, "port": 9, "swap_space": 4, "pooling": "mean",
         "disable_log_stats": True, "override_generation_config": {"top_k": 3}, "hf_overrides": None}
    )  # fmt: skip
    assert (engine.dtype, engine.max_num_seqs, server.pooling) == ("float16", None, "mean")
    assert server.overrides() == {"top_k": 3}
    assert [line.split(":")[0] for line in lines] == [
        "swap_space changes nothing", "port changes nothing", "disable_log_stats changes nothing"
    ]  # fmt: skip
    with pytest.raises(TypeError, match="no option 'max_model_length'; did you mean max_model_len"):
        from_keywords({"max_model_length": 3})
    with pytest.raises(ConfigError, match=r"max_num_seqs is 2\.5: it must be an integer"):
        from_keywords({"max_num_seqs": 2.5})


def test_keywords_take_files_and_presets(config_file: Any) -> None:
    file = config_file("max-num-seqs: 3\nmax-model-len: 4k\nport: 9\nswap-space: 4\nperformance-mode: latency\n")
    engine, _, lines = from_keywords({"model": "/m", "config": file, "max_num_seqs": 5})
    assert (engine.max_num_seqs, engine.max_model_len, engine.max_mixed_tokens) == (5, 4000, 256)
    assert len(lines) == 2 and f"{file}: swap-space changes nothing" in lines[0] and "port changes" in lines[1]
    with pytest.raises(ConfigError, match="performance_mode is 'fast': choose one of latency, throughput"):
        from_keywords({"model": "/m", "performance_mode": "fast"})


def test_messages_for_keywords() -> None:
    said = in_keywords("--max-model-len 9 does not fit; raise --gpu-memory-utilization, or --no-such-thing a--b")
    assert said == "max_model_len 9 does not fit; raise gpu_memory_utilization, or --no-such-thing a--b"


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
    monkeypatch.setenv("VSERVE_CONFIG", config_file("seed: 5"))
    monkeypatch.setenv("VSERVE_PERFORMANCE_MODE", "throughput")
    engine, server = read_flags(parse("/m"))
    assert server.port == 8000 and server.served_model_name == ("a", "b") and not engine.enable_prefix_caching
    assert engine.seed == 5 and engine.gpu_memory_utilization == 0.95 and engine.model == "/m"
    assert unknown_variables() == []


def test_variables_that_set_nothing(monkeypatch: Any) -> None:
    for name in ("VSERVE_MAX_MODEL_LENGTH", "VSERVE_WHATEVER", "VSERVE_API_KEY", "VSERVE_FAULT"):
        monkeypatch.setenv(name, "9")
    # What Kubernetes says of services called vserve and vserve-two.
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "TWO_PORT"):
        monkeypatch.setenv(f"VSERVE_{name}", "10.0.0.1")
    assert unknown_variables() == [
        "the variable VSERVE_MAX_MODEL_LENGTH sets nothing, no option has that name; did you mean "
        "VSERVE_MAX_MODEL_LEN?",
        "the variable VSERVE_WHATEVER sets nothing, no option has that name",
    ]
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_API_KEY", "read")
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.1")  # of a service called vllm
    assert unknown_variables()[2:] == [
        "these variables of vLLM change nothing: VLLM_LOGGING_LEVEL (use --log-level), VLLM_USE_V1"
    ]


def test_presets_are_engine_options_that_can_work() -> None:
    assert performance_modes() == ["latency", "throughput"]
    names = {spec.name for spec in dataclasses.fields(EngineConfig)}
    for mode in performance_modes():
        content = yaml.safe_load((PRESETS / f"{mode}.yaml").read_text())
        assert {name.replace("-", "_") for name in content} <= names
        engine, _ = read_flags(parse("--performance-mode", mode))
        assert engine != read_flags(parse())[0]


def test_every_option_is_a_flag_in_a_group_of_the_help(capsys: Any) -> None:
    text = parser().format_help()
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
        (["bench", "serve", "--url", "http://h"], "unknown option --url; did you mean --base-url?"),
        (["chat", "--base-url", "http://h"], "unknown option --base-url; did you mean --url?"),
        (
            ["bench", "startup", "--num-iters", "1"],
            "vserve bench startup: unknown option --num-iters; did you mean --num-iters-",
        ),
        (["-p", "9000"], "unknown option -p; did you mean --port?"),
        (["-m", "/m"], "unknown option -m; did you mean --model?"),
        (["serve", "/m", "-c", "512"], "unknown option -c; did you mean --max-model-len?"),
        (["/m", "--ctx-size=512"], "unknown option --ctx-size; did you mean --max-model-len?"),
        (["--model-path", "/m"], "unknown option --model-path; did you mean --model?"),
        (["/m", "-t", "4"], "unknown option -t; did you mean --cpu-threads?"),
        (["/m", "-e"], "unknown option -e (`"),
        (["/m", "-a", "x"], "unknown option -a; did you mean --served-model-name?"),
        (["/m", "-d", "cpu"], "unknown option -d; did you mean --device?"),
        (["/m", "--gpus", "2"], "unknown option --gpus; did you mean --tensor-parallel-size?"),
        (["/m", "--max-batch-size", "2"], "unknown option --max-batch-size; did you mean --max-num-seqs?"),
        (["/m", "--max-total-tokens", "9"], "unknown option --max-total-tokens; did you mean --max-model-len?"),
        (["/m", "-tp2"], "unknown option -tp2 (`"),
        (["/m", "--tensor-parallel-sise", "2"], "unknown option --tensor-parallel-sise; did you mean --tensor-para"),
        (["/m", "--swap-spaces", "2"], "unknown option --swap-spaces; did you mean --swap-space?"),
        (["/m", "--enable-prefix-caching=maybe"], "--enable-prefix-caching: 'maybe': it must be true or false"),
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


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--enforce-eager"], True), (["--enforce-eager", "True"], True), (["--enforce-eager=false"], False),
        (["--enforce-eager", "False"], False), (["--no-enforce-eager"], False), (["--no-enforce-eager=false"], True),
        (["--enforce_eager=1"], True), ([], False),
    ],
)  # fmt: skip
def test_a_switch_may_have_a_value(words: list[str], value: bool) -> None:
    for arguments in (parse("/m", *words), parse(*words, "/m")):
        engine, _ = read_flags(arguments)
        assert (engine.model, engine.enforce_eager) == ("/m", value)


def test_short_options_of_vllm() -> None:
    arguments = parse("/m", "-tp", "1", "-pp=1", "-dp", "1", "-q", "none", "-O3", "-cc.level=3", "-asc", "1")
    assert read_flags(arguments)[0].model == "/m" and arguments.vllm_optimization_level == "3"
    assert read_flags(parse("/m", "-ep", "False"))[0].model == "/m"
    divided = read_flags(parse("/m", "-tp", "2", "-ep"))[0]
    assert divided.tensor_parallel_size == 2 and divided.enable_expert_parallel
    cut = read_flags(parse("/m", "-pp", "3", "--pipeline-layer-partition", "12,10,10"))[0]
    assert cut.pipeline_parallel_size == 3 and cut.stage_layers == (12, 10, 10)


@pytest.mark.parametrize("option", ["--served-model-name", "--api-key", "--admin-api-key"])
@pytest.mark.parametrize("model", ["folder", "file", "owner/model", "./mistyped", "/no/such/folder", "elsewhere.GGUF"])
@pytest.mark.parametrize("before", [["sesame"], []])
def test_a_list_that_has_swallowed_the_model(
    option: str, model: str, before: list[str], tmp_path: Path, config_file: Any
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    if model in ("folder", "file"):
        model = str(tmp_path / model)
    with pytest.raises(ConfigError) as caught:
        read_flags(parse(option, *before, model))
    assert str(caught.value).startswith(f"{option} took ") and f"`vserve MODEL {option} …`" in str(caught.value)
    assert "sesame" not in str(caught.value) and (model in str(caught.value)) == ("key" not in option)
    for words in (["/m", option, *before, model], ["--model", "/m", option, *before, model], [f"{option}=a", model]):
        assert read_flags(parse(*words))[0].model in ("/m", model)
    file = config_file("model: /m")
    assert read_flags(parse("--config", file, option, *before, model))[0].model == "/m"
    assert read_flags(parse(option, "foo"))[0].model == str(flags.DEMO), "a name, for the demo model"


def test_unknown_commands(capsys: Any) -> None:
    assert main.main(["sevre"]) == 2
    assert "'sevre'; did you mean serve?" in capsys.readouterr().err


def test_the_overview_names_every_command(capsys: Any) -> None:
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in main.COMMANDS:
        assert f"\n  {name} " in out
        assert main.load(name).__doc__ and isinstance(main.command_parser(name, main.load(name)), Parser)
    assert len(out.splitlines()) <= 40 and "\x1b" not in out


def test_a_name_that_is_no_text_is_refused_in_one_line() -> None:
    """Folders may have any bytes for a name; a command line has what is no UTF-8 as surrogates."""
    name = os.fsdecode(b"/m\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        read_flags(parse(name))
    assert str(caught.value) == (
        "--model is '/m\\udcff\\udcfe': it is no UTF-8: rename the file or folder, or give another text"
    )
    str(caught.value).encode()
    with pytest.raises(ConfigError, match="no UTF-8"):
        from_keywords({"model": name})
