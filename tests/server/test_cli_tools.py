"""doctor, collect-env and completion: what they find, what they say, what they hide."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import vserve
from vserve.engine.describe.reading import read_folder
from vserve.engine.options.config import EngineConfig
from vserve.server.cli import collect_env, completion, doctor, machine, main, model_finding
from vserve.server.cli.bench.command import MEASUREMENTS
from vserve.server.cli.machine import Card, Torch
from vserve.server.options.config import ServerConfig

DEMO = Path(__file__).parents[2] / "configs" / "demo"
CARD = Card("H200", (9, 0), 140 << 30, 141 << 30)
ON_CARD = Torch("2.13.0", "13.0", ("sm_90",), (CARD,))
ON_CPU = Torch("2.13.0+cpu")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without faults; healthy(name, value) gives it one."""

    def make(name: str, value: Any) -> None:
        monkeypatch.setattr(machine, name, lambda *arguments: value)

    make("probe_torch", ON_CPU)
    make("nvidia_smi", None)
    make("memory", (32 << 30, 64 << 30))
    make("shared_memory", 64 << 20)
    make("open_files", (1024, 1 << 20))
    make("compiler", "/usr/bin/gcc")
    make("package_versions", {"triton": "3.7.1", "pillow": "13.0"})
    return make


def examine(model: Path | str = DEMO, port: int = 0, **options: Any) -> dict[str, doctor.Finding]:
    found = list(doctor.examine(EngineConfig(str(model), **options), ServerConfig(host="127.0.0.1", port=port)))
    assert all(finding.remedy for finding in found if finding.status == doctor.FAIL)
    return {finding.name: finding for finding in found}


def test_a_machine_without_faults(healthy: Any) -> None:
    found = examine()
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "the CPU serves" in found["driver"].text and "9 MiB of weights" in found["model"].text


def test_a_mixture_is_named_with_its_experts(healthy: Any, tiny_model: Any) -> None:
    folder = tiny_model("mixtral")
    assert ", 5 experts of which a token has 3 (in float32)" in examine(folder)["model"].text
    quantised = examine(folder, quantization="int8")["model"].text
    assert ", quantization int8, 5 experts of which a token has 3 (their codes are kept)" in quantised


@pytest.mark.parametrize(("ordered", "told"), [(True, "(in bfloat16)"), (False, "(their codes are kept)")])
def test_experts_whose_columns_have_an_order_are_no_codes_on_a_card(
    healthy: Any, tiny_models: Any, tmp_path: Path, ordered: bool, told: str
) -> None:
    folder = tiny_models.tiny_checkpoint(tmp_path / "model", "mixtral")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": ordered}
    (folder / "config.json").write_text(json.dumps(raw))
    healthy("probe_torch", ON_CARD)
    healthy("nvidia_smi", [{"driver_version": "580.1", "name": "H200"}])
    assert told in examine(folder, dtype="bfloat16")["model"].text


def test_a_card(healthy: Any) -> None:
    healthy("probe_torch", ON_CARD)
    healthy("nvidia_smi", [{"driver_version": "580.1", "name": "H200"}])
    found = examine()
    assert found["driver"].text == "NVIDIA 580.1, 1 card" and "compute 9.0" in found["card 0"].text
    healthy("compiler", None)
    assert "apt-get install gcc" in examine()["C compiler"].remedy
    healthy("package_versions", {"triton": "not installed", "pillow": "not installed"})
    assert examine()["triton"].status == "FAIL"
    assert examine()["pillow"].status == "warn" and "pictures are refused" in examine()["pillow"].text
    healthy("probe_torch", Torch("2.13.0", "13.0", (), (Card("T4", (7, 5), 1 << 30, 16 << 30),) * 2))
    found = examine()
    assert "--dtype float16" in found["card 0"].remedy and "--ipc=host" in found["shared memory"].remedy


def test_a_card_that_torch_cannot_use(healthy: Any) -> None:
    healthy("nvidia_smi", [{"driver_version": "470.1", "name": "A100"}])
    healthy("probe_torch", Torch("2.13.0", "13.0", error="RuntimeError: the driver is too old"))
    assert examine()["torch"].status == "warn" and "too old" in examine()["torch"].text
    assert examine(device="cuda")["torch"].status == "FAIL"
    healthy("probe_torch", ON_CPU)
    assert "install torch from PyPI" in examine()["torch"].remedy
    healthy("nvidia_smi", None)
    assert examine(device="cuda")["driver"].status == "FAIL"
    healthy("probe_torch", Torch(error="ImportError: libfoo.so"))
    assert examine()["torch"].status == "FAIL"


def test_limits(healthy: Any) -> None:
    healthy("open_files", (256, 256))
    healthy("memory", (1 << 20, 4 << 30))
    found = examine()
    assert "nofile" in found["open files"].remedy and found["memory"].status == "warn"
    assert found["model"].status == "FAIL" and "has 1 MiB for vserve" in found["model"].remedy


def test_a_port_in_use(healthy: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = examine(port=taken.getsockname()[1])["port"]
    assert found.status == "FAIL" and "--port" in found.remedy


def test_files_are_held_against_the_configuration(healthy: Any, tiny_model: Any, tmp_path: Path) -> None:
    """By their headers, as when it is loaded: what would be refused then is no model that is ready to serve."""
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    claim = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": claim}))
    found = examine(folder)["model"]
    assert found.status == "warn" and found.text.startswith(f"{folder}: LlamaForCausalLM, ")
    assert found.remedy.startswith("config.json says that the checkpoint is quantized (awq), and its files hold plain")
    (folder / "config.json").write_text(json.dumps(raw | {"intermediate_size": 72}))
    found = examine(folder)["model"]
    assert found.status == "FAIL" and found.remedy.startswith(
        "the weights and the config are not of one model, download both"
    )
    assert "has shape [96, 64] in model.safetensors, config.json makes it [72, 64]" in found.text


def test_models(healthy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert examine("/no/such/folder")["model"].status == "FAIL"
    monkeypatch.setattr(model_finding, "from_hub_cache", lambda engine: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = examine("Qwen/Qwen3-0.6B")["model"]
    assert found.status == "warn" and str(tmp_path) in found.text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert examine("Qwen/Qwen3-0.6B")["model"].status == "FAIL"
    folder = tmp_path / "model"
    folder.mkdir()
    assert "config.json" in examine(folder)["model"].text
    config = json.loads((DEMO / "config.json").read_text())
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert examine(folder)["model"].status == "FAIL"
    shutil.copy(DEMO / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    assert "NoSuchModel" in examine(folder)["model"].text and examine(folder)["model"].status == "FAIL"


def test_who_computes_a_model(healthy: Any) -> None:
    own, foreign = examine()["model"], examine(model_impl="transformers")["model"]
    assert own.status == foreign.status == "ok" and "computed" not in own.text
    assert foreign.text.replace(", computed by transformers' code", "") == own.text


def test_whether_a_context_fits(healthy: Any, tmp_path: Path) -> None:
    """The demo model's cache takes 2 x layers x KV heads x head x 4 bytes a token on the CPU."""
    config = json.loads((DEMO / "config.json").read_text())
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10_000_000}))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4
    found = examine(tmp_path, max_model_len=1000)["model"]
    assert found.status == "ok" and f"takes {machine.gib(1000 * token)} of cache" in found.text
    longer = (3 << 29) // token  # 1.5 GiB
    found = examine(tmp_path, max_model_len=longer)["model"]
    most = int(re.search(r"lower --max-model-len to (\d+) or less", found.remedy)[1])  # type: ignore[index]
    assert found.status == "FAIL" and (1 << 30) - 64 * token < most * token <= 1 << 30
    assert examine(tmp_path, max_model_len=most)["model"].status == "ok"
    assert examine(tmp_path, max_model_len=most + 32)["model"].status == "FAIL"
    asked = int(re.search(r"--kv-cache-memory-bytes (\d+)", found.remedy)[1])  # type: ignore[index]
    assert examine(tmp_path, max_model_len=longer, kv_cache_memory_bytes=asked)["model"].status == "ok"
    assert examine(tmp_path)["model"].status == "warn"  # it is served, with less
    found = examine(tmp_path, max_model_len=10_000_001)["model"]
    assert (
        found.status == "FAIL" and "is beyond the 10000000 tokens" in found.text and "10000000 or less" in found.remedy
    )
    healthy("probe_torch", Torch("2.13.0", "13.0", ("sm_90",), (Card("small", (9, 0), 1 << 30, 1 << 30),)))
    found = examine(tmp_path, max_model_len=2 * longer)["model"]
    assert found.status == "FAIL" and "--kv-cache-memory-bytes" not in found.remedy


def test_windows_take_less_of_the_cache(healthy: Any, tiny_model: Any) -> None:
    """Doctor says what the engine will find: see test_memory.py."""
    windows = {"use_sliding_window": True, "sliding_window": 20,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}  # fmt: skip
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 400_000, "max_num_batched_tokens": 32}
    assert examine(tiny_model("qwen3", num_hidden_layers=6, **windows), **options)["model"].status == "ok"
    found = examine(tiny_model("qwen3", num_hidden_layers=6), **options)["model"]
    assert found.status == "FAIL" and "lower --max-model-len to 240 or less" in found.remedy


def test_a_cache_of_8_bits_takes_less(healthy: Any, tiny_model: Any) -> None:
    """Numbers of 4 bytes become codes of one; scales come on top where each token and head has its own."""
    length = 1 << 17
    folder = tiny_model("llama", max_position_embeddings=length)

    def taken(**options: Any) -> str:
        found = examine(folder, max_model_len=length, **options)["model"]
        assert found.status == "ok", found
        return str(re.search(r"takes (\S+ \S+) of cache", found.text)[1])  # type: ignore[index]

    specs = [layer.attention.kv for layer in read_folder(folder).layers]
    codes = length * sum(spec.token_elements for spec in specs)
    scales = length * sum(2 * 4 * spec.num_kv_heads for spec in specs)
    assert taken() == machine.gib(4 * codes)
    assert taken(kv_cache_dtype="fp8") == machine.gib(codes)
    assert taken(kv_cache_dtype="fp8", calculate_kv_scales=True) == machine.gib(codes + scales) != machine.gib(codes)
    found = examine(tiny_model("deepseek_v3"), kv_cache_dtype="fp8")["model"]
    assert found.status == "FAIL" and "latent attention" in found.text and found.remedy == "leave the option out"


def test_a_recurrent_state_takes_some_too(healthy: Any, tiny_model: Any) -> None:
    found = examine(tiny_model("qwen3_5_text"))["model"]
    assert found.status == "ok" and "a running request's recurrent state takes " in found.text
    found = examine(tiny_model("llama"), mamba_ssm_cache_dtype="float16")["model"]
    assert found.status == "FAIL" and "keeps no recurrent state" in found.text and found.remedy == "leave it out"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo model as `org/tiny` on a hub of this machine, and the paths that were asked for."""
    asked: list[str] = []
    config = (DEMO / "config.json").read_bytes()
    files = [{"rfilename": "config.json", "size": len(config)}, {"rfilename": "model.safetensors", "size": 7 << 30},
             {"rfilename": "pytorch_model.bin", "size": 9 << 30}]  # fmt: skip

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            status, body = 404, b"{}"
            if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
                status, body = 200, json.dumps({"id": "org/tiny", "sha": "0" * 40, "siblings": files}).encode()
            elif path == "/org/tiny/resolve/main/config.json":
                status, body = 200, config
            self.send_response(status)
            if status == 404:
                self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", '"1"')
            self.send_header("x-repo-commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(model_finding, "from_hub_cache", lambda engine: None)
    yield asked
    server.shutdown()
    server.server_close()


def test_a_model_on_the_hub_is_judged_before_its_weights_are_downloaded(hub: list[str], healthy: Any) -> None:
    found = examine("org/tiny", max_model_len=64)["model"]
    assert (
        found.status == "ok"
        and "7.0 GiB of weights" in found.text
        and "is not here; the server downloads it" in found.text
    )
    assert any("config.json" in path for path in hub) and not any("safetensors" in path for path in hub)
    longer = examine("org/tiny", max_model_len=10**6)["model"]
    assert longer.status == "FAIL" and "--max-model-len 1000000 is beyond" in longer.text
    missing = examine("org/nothing")["model"]
    assert missing.status == "FAIL" and "HF_TOKEN" in missing.remedy


def test_this_machine(capsys: Any) -> None:
    """Nothing is replaced here: whatever this machine is, the lines are there, and the exit code follows them."""
    code = main.main(["doctor", "--host", "127.0.0.1", "--port", "0", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python") and any(line.startswith("ok    model") for line in lines)
    assert code == (1 if any(line.startswith("FAIL") for line in lines) else 0)


def test_environment_report(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("VSERVE_API_KEY", "sesame")
    monkeypatch.setenv("VSERVE_PORT", "8123")
    assert main.main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["environment"]["HF_TOKEN"] == "(hidden)" and "sesame" not in text
    assert found["environment"]["VSERVE_PORT"] == "8123"
    assert found["packages"]["torch"].startswith("2.") and found["torch"]["version"] == found["packages"]["torch"]
    monkeypatch.setattr(machine, "probe_torch", lambda: ON_CARD)
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", "compute," * 100)
    collect_env.run(collect_env.argparse.Namespace(json=False))
    text = capsys.readouterr().out
    assert "H200 (9.0)" in text
    assert "NVIDIA_DRIVER_CAPABILITIES compute,compute" in text and max(map(len, text.splitlines())) < 260


def complete_in_bash(script: str, *words: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n"
         f"$(complete -p vserve | sed 's/.*-F \\([^ ]*\\).*/\\1/') vserve\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_completion(capsys: Any) -> None:
    scripts = {}
    for shell in completion.SHELLS:
        assert main.main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
    bash = scripts["bash"]
    assert complete_in_bash(bash, "vserve", "comp") == ["complete", "completion"]
    assert complete_in_bash(bash, "vserve", "serve", "--max-num-q") == [
        "--max-num-queued-reqs", "--max-num-queued-tokens",
    ]  # fmt: skip
    assert complete_in_bash(bash, "vserve", "serve", "--dtype", "b") == ["bfloat16"]
    assert complete_in_bash(bash, "vserve", "bench", "serve", "--num-p") != []
    for script in scripts.values():
        assert "run-batch" in script and "gpu-memory-utilization" in script
    for shell, script in scripts.items():
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=script, text=True, timeout=240).returncode == 0


@pytest.mark.parametrize("name", [*main.COMMANDS, ""])
def test_help_ends_with_examples_that_work(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = main.command_parser(name, main.load(name)).format_help() if name else main.overview()
    *_, examples = text.partition("examples:\n")
    commands = examples.strip().splitlines()
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(re.split(" [<>] ", command)[0])
        assert words.pop(0) == "vserve"
        called = words.pop(0) if words[0] in main.COMMANDS else "serve"
        assert called == name or not name or name == "serve"
        main.command_parser(called, main.load(called)).parse_args(words)  # exits where it is wrong


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_help_of_a_measurement_ends_with_examples_too(name: str, capsys: Any) -> None:
    parser = main.command_parser("bench", main.load("bench"))
    with pytest.raises(SystemExit):
        parser.parse_args([name, "--help"])
    commands = capsys.readouterr().out.partition("examples:\n")[2].strip().splitlines()
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["vserve", "bench", name]
        parser.parse_args(words[2:])


def test_help_shows_what_switches_are(monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = main.command_parser("serve", main.load("serve")).format_help()
    for switch, default in (("strict-params", "off"), ("access-log", "on"), ("enable-prefix-caching", "on")):
        (line,) = [line for line in text.replace("\n" + " " * 24, " ").splitlines() if f"--no-{switch}" in line[:90]]
        assert line.endswith(f"(default: {default})"), line


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_the_version(word: str, capsys: Any) -> None:
    assert main.main([word]) == 0 and capsys.readouterr().out == f"vserve {vserve.__version__}\n"


PICTURES = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (PICTURES, "Qwen3VLForConditionalGeneration, it is known here, its text alone. There are no weights: how they"),
        ({"architectures": ["Starcoder2ForCausalLM"]}, "Starcoder2ForCausalLM, transformers' code may compute it. The"),
        ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}, "it is known here. There are no weights"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not served"),
        (PICTURES | {"quantization_config": {"quant_method": "vptq"}}, "the checkpoint is quantized with VPTQ"),
    ],
)
def test_a_config_alone_is_judged_without_torch(tmp_path: Path, raw: dict[str, Any], told: str) -> None:
    """Within two seconds, that is: torch alone takes longer. It promises nothing of files that are not there."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    code = (
        "import sys; from vserve.server.cli.main import main; code = main(['doctor', sys.argv[1]]); "
        "print(code, [name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told in done.stdout and "FAIL" in done.stdout
    assert "ready to serve" not in done.stdout and done.stdout.endswith("\n1 []\n")
