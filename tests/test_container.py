"""What the container files promise, held against the code; docker/prove.sh builds and runs the image itself."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
REACHES = ("*.md",)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
KUBERNETES = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of the Dockerfile, continued lines joined, comments left out."""
    text = "\n".join(li for li in (ROOT / "Dockerfile").read_text().splitlines() if not li.lstrip().startswith("#"))
    lines = [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(" ", 1)[0].upper(), line.split(" ", 1)[1]) for line in lines]


INSTRUCTIONS = instructions()
LAST_STAGE = INSTRUCTIONS[max(i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :]
FINAL = {name: rest for name, rest in LAST_STAGE if name not in ("RUN", "COPY")}


def test_stages_and_base():
    assert INSTRUCTIONS[0] == ("ARG", "BASE_IMAGE=debian:bookworm-slim")
    stages: list[str] = []
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            base, *alias = rest.split(" AS ")
            assert base == "${BASE_IMAGE}" or base in stages
            stages += alias
        if name == "COPY" and (found := re.match(r"--from=(\S+)", rest)):
            assert found[1] in stages
    # The base of the last stage is bare: nothing of a build stage is in it but what is copied.
    assert LAST_STAGE[0][1] == "${BASE_IMAGE}"


def test_what_a_reviewer_would_ask_for():
    for name, rest in INSTRUCTIONS:
        assert name != "ADD" and "sudo" not in rest
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
        if "install" in rest and "pip --python" in rest:
            assert "--no-cache-dir" in rest and ("--constraint constraints.txt" in rest or "--no-deps" in rest)
    installed = next(rest for name, rest in LAST_STAGE if name == "RUN").split("--no-install-recommends")[1]
    packages = installed.split("&&")[0].split()
    assert packages == ["ca-certificates", "gcc", "libc6-dev", "python3"]  # nothing else is needed at run time
    environment = dict(word.split("=", 1) for word in shlex.split(FINAL["ENV"]))
    # One volume for what is downloaded and what is compiled.
    for cache in ("HF_HOME", "VSERVE_CACHE"):
        assert environment[cache].startswith(f"{FINAL['VOLUME']}/") and environment[cache] in str(LAST_STAGE[1])
    assert "TRITON_CACHE_DIR" not in environment, "VSERVE_CACHE says where kernels lie"
    assert environment["PATH"].startswith("/opt/vserve/bin:")
    names = [name for name, _ in LAST_STAGE]
    assert FINAL["USER"] not in ("root", "0") and "RUN" not in names[names.index("USER") :]
    assert f"useradd --uid 10001 --create-home {FINAL['USER']}" in str(LAST_STAGE)
    assert FINAL["EXPOSE"] == "8000"


def test_the_entry_point_is_the_command_that_pyproject_installs():
    (entry,) = json.loads(FINAL["ENTRYPOINT"])
    module, function = PROJECT["project"]["scripts"][entry].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    # Arguments after the image's name are vserve's, as `MODEL` and as `--model MODEL`.
    from vserve.server.cli import main, serve
    from vserve.server.cli.flags import read_flags

    for words in (["/m", "--port", "1"], ["--model", "/m", "--port", "1"]):
        engine, server = read_flags(main.command_parser("serve", serve).parse_args(words))
        assert engine.model == "/m" and server.port == 1


def test_the_health_check_is_a_command_that_there_is() -> None:
    from vserve.server.cli import doctor, main

    entry, command, *words = json.loads(FINAL["HEALTHCHECK"].split("CMD ")[1])
    assert entry in PROJECT["project"]["scripts"] and command == "doctor"
    assert main.command_parser(command, doctor).parse_args(words).health
    interval = dict(re.findall(r"--(\w[\w-]*)=(\d+)", FINAL["HEALTHCHECK"]))
    from vserve.server.cli import health

    assert float(interval["timeout"]) > health.SECONDS


def test_labels_say_what_the_image_is() -> None:
    labels = dict(word.split("=", 1) for word in shlex.split(FINAL["LABEL"]))
    arguments = {rest.split("=")[0] for name, rest in LAST_STAGE if name == "ARG"}
    used = set(re.findall(r"\$\{(\w+)\}", FINAL["LABEL"]))
    assert used == arguments == {"VERSION", "REVISION", "CREATED", "SOURCE"}
    project = PROJECT["project"]
    told = {name.removeprefix("org.opencontainers.image."): text for name, text in labels.items()}
    assert (told["title"], told["description"]) == (project["name"], project["description"])
    assert told["licenses"] == project["license"] and told["version"] == "${VERSION}"


def test_every_docker_run_that_is_shown_gives_the_server_its_time() -> None:
    from vserve.server.options.config import ServerConfig

    shown = [path for path in ROOT.rglob("*.md") if ".venv" not in path.parts] + [
        ROOT / "Dockerfile",
        ROOT / "Makefile",
    ]
    commands = []
    for path in shown:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        commands += [line for line in text.splitlines() if re.search(r"docker run .*\bvserve\b(?!:/)", line)]
    others = ("warm", "doctor", "bench", "version")
    serving = [line for line in commands if not re.search(rf"vserve ({'|'.join(others)})", line)]
    assert serving
    page = " ".join((ROOT / "docs" / "running" / "containers.md").read_text(encoding="utf-8").split())
    (excused,) = re.findall(r"; ([^;]*) answer nobody and need none\.", page)
    for line in commands:
        if "--stop-timeout" not in line:
            assert re.search(r" vserve ([a-z]+)", line)[1] in re.findall(r"`(\w+)`", excused), line
    for line in serving:
        (seconds,) = re.findall(r"--stop-timeout (\d+)", line)
        assert float(seconds) >= ServerConfig.shutdown_timeout + 5, line


def test_probes_ask_for_routes_that_exist():
    from vserve.server.api import health

    routes = {route.path for route in health.router.routes}
    assert "/readyz" in routes
    for container in deployment()["containers"]:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in routes
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def deployment() -> Any:
    (found,) = (document for document in KUBERNETES if document["kind"] == "Deployment")
    return found["spec"]["template"]["spec"]


def test_grace_periods_are_longer_than_the_drain():
    from vserve.server.cli import main, serve
    from vserve.server.cli.flags import read_flags
    from vserve.server.options.config import ServerConfig

    pod = deployment()
    (container,) = pod["containers"]
    _, server = read_flags(main.command_parser("serve", serve).parse_args(container["args"]))
    pre_stop = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pre_stop + server.shutdown_timeout + 5
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > server.hang_timeout
    assert float(COMPOSE["vserve"]["stop_grace_period"].rstrip("s")) >= ServerConfig.shutdown_timeout + 5
    # A service of that name would set VSERVE_PORT.
    assert pod["enableServiceLinks"] is False and pod["securityContext"]["runAsUser"] == 10001


def test_compose_needs_no_card_unless_the_second_file_is_given() -> None:
    assert "deploy" not in COMPOSE["vserve"] and "runtime" not in COMPOSE["vserve"]
    gpu = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())["services"]
    assert set(gpu) <= set(COMPOSE)
    (device,) = gpu["vserve"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_pods_are_disrupted_one_by_one_and_scaled_by_a_metric_that_there_is() -> None:
    (found,) = (document for document in KUBERNETES if document["kind"] == "Deployment")
    (budget,) = (document for document in KUBERNETES if document["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["selector"] == found["spec"]["selector"] and budget["spec"]["maxUnavailable"] == 1
    scaling = (ROOT / "docker" / "kubernetes-scaling.yaml").read_text()
    scaler = yaml.safe_load(scaling)
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (found["kind"], found["metadata"]["name"])
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric == "vllm_num_requests_waiting" and f"name: {{ as: {metric} }}" in scaling
    from vserve.server.observe import exposition

    assert '"num_requests_waiting"' in Path(exposition.__file__).read_text()


def test_compose_mounts_what_is_there():
    for service in COMPOSE.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / "docker" / source).exists(), source
    for name in COMPOSE["vserve"]["environment"]:
        from vserve.server.cli.given import options

        assert name == "HF_TOKEN" or name.removeprefix("VSERVE_").lower() in options()
    provider = yaml.safe_load((ROOT / "docker/grafana/provisioning/dashboards/vserve.yaml").read_text())["providers"][0]
    mounts = dict(mount.split(":")[:2] for mount in COMPOSE["grafana"]["volumes"])
    assert provider["options"]["path"] in mounts.values()


def test_the_build_gets_all_of_the_package_and_nothing_else():
    patterns = (ROOT / ".dockerignore").read_text().split()
    assert patterns[0] == "*"  # whatever comes to lie here later stays out
    kept = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    rooms = {package.split(".")[1] for package in PROJECT["tool"]["setuptools"]["packages"] if "." in package}
    assert rooms <= kept and {"pyproject.toml", "constraints.txt", "__init__.py", PROJECT["project"]["readme"]} <= kept
    assert all((ROOT / name).exists() for name in kept)
    assert not any(fnmatch.fnmatch(".git", name) or name in (".venv", "tests") for name in kept)


def test_the_proof_is_a_script_that_bash_reads():
    script = ROOT / "docker" / "prove.sh"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script], timeout=240).returncode == 0
    assert not re.findall(r"https?://[\w.]*(?:debian|ubuntu)", script.read_text()), "the machine's apt knows a mirror"


def test_extras_of_the_image(tmp_path: Path, monkeypatch: Any) -> None:
    """What the build makes of EXTRAS is what pyproject.toml says; a refusal inside names the argument."""
    (build,) = (rest for name, rest in INSTRUCTIONS if "requirements.txt" in rest and name == "RUN")
    (command,) = re.findall(r'python3 -c "(import sys, tomllib.*?)" "\$EXTRAS"', build)
    listed = PROJECT["project"]["dependencies"]
    for extras, more in (("", []), ("otel,kv-events", ["opentelemetry-sdk", "pyzmq"]), ("ray", ["ray>=2.50,<3"])):
        words = ["python3", "-c", command, extras]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        assert done[: len(listed)] == listed and set(more) <= set(done) and (more or len(done) == len(listed))
    assert ("ARG", "EXTRAS=otel,kv-events") in INSTRUCTIONS
    from vserve.engine.options import extras as module

    assert module.how_to_install("otel") == "pip install 'vserve[otel]'"
    assert f"venv --without-pip {module.IMAGE} " in build
    monkeypatch.setattr(module.sys, "prefix", module.IMAGE)
    assert "--build-arg EXTRAS=otel" in module.how_to_install("otel")
