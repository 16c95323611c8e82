"""The chart for several hosts, rendered by as much of Helm's template language as it uses: helm is not needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vserve.engine.options.config import EngineConfig
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags
from vserve.server.options.config import ServerConfig

CHART = Path(__file__).parents[1] / "docker" / "chart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
PARTS = re.compile(r"[ \t]*\n?[ \t]*\{\{-\s*(.*?)\s*\}\}|\{\{\s*(.*?)\s*\}\}", re.DOTALL)


def render(name: str, **values: Any) -> Any:
    """A template's only document."""
    scope = {"$": {"Values": VALUES | values, "Release": {"Name": "big"}}}
    text, rest = _until_end((CHART / "templates" / name).read_text(), scope)
    assert rest is None
    return yaml.safe_load(text)


def _until_end(text: str, scope: dict[str, Any], live: bool = True) -> tuple[str, str | None]:
    """→ (what it makes up to the `end` that closes it, what stands behind that)"""
    made = ""
    while (found := PARTS.search(text)) is not None:
        made += text[: found.start()]
        word, _, given = (found[1] or found[2]).partition(" ")
        text = text[found.end() :]
        if word == "end":
            return made, text
        if word == "range":
            variable, _, items = given.partition(" := ")
            rest: str | None = ""
            for item in _value(items, scope):
                part, rest = _until_end(text, scope | {variable: item})
                made += part
            else:
                _, rest = _until_end(text, scope | {variable: ""})
            assert rest is not None
            text = rest
        elif word == "if":
            part, after = _until_end(text, scope)
            assert after is not None
            made, text = made + (part if _value(given, scope) else ""), after
        else:
            made += str(_value(found[1] or found[2], scope))
    return made + text, None


def _value(expression: str, scope: dict[str, Any]) -> Any:
    expression, _, filter = expression.partition(" | ")
    if filter:
        assert filter == "toJson"
        return json.dumps(_value(expression, scope))
    word, *operands = re.findall(r'"[^"]*"|\S+', expression)
    if word == "list":
        return [_value(operand, scope) for operand in operands]
    if word == "eq":
        return _value(operands[0], scope) == _value(operands[1], scope)
    if word.startswith('"'):
        return json.loads(word)
    name, *keys = word.split(".")
    found = scope[name or "$"]
    for key in keys:
        found = found[key]
    return found


def options(template: Any, index: int) -> tuple[EngineConfig, ServerConfig]:
    """What the pod's command line says, on the host with this index."""
    (container,) = template["spec"]["containers"]
    told = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "big-0.big.default"}
    words = [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in container["args"]]
    return read_flags(main.command_parser("serve", serve).parse_args(words))


def test_hosts_differ_in_nothing_but_who_they_are() -> None:
    found = render("leaderworkerset.yaml", args=["--max-model-len", "32K"])["spec"]["leaderWorkerTemplate"]
    leader, server = options(found["leaderTemplate"], 0)
    worker, headless = options(found["workerTemplate"], 1)
    assert (server.headless, headless.headless) == (False, True)
    assert (leader.node_rank, worker.node_rank, leader.nnodes, leader.max_model_len) == (0, 1, found["size"], 32768)
    assert leader.master_addr == "big-0.big.default" and leader.master_port == VALUES["masterPort"]
    assert leader.world_size == VALUES["nodes"] * VALUES["cardsPerNode"]
    for role in ("leader", "worker"):
        pod = found[f"{role}Template"]["spec"]
        (container,) = pod["containers"]
        names = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in container["env"]}
        assert names["VSERVE_CLUSTER_SECRET"] == {"name": "vserve", "key": "cluster-secret"}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == VALUES["cardsPerNode"]
        assert ("readinessProbe" in container) == (role == "leader"), "a headless node answers nobody"
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["terminationGracePeriodSeconds"] >= 5 + server.shutdown_timeout + serve.LAST_WORDS - 5


def test_network_cards_are_asked_for_where_they_are_named() -> None:
    def limits(**values: Any) -> Any:
        found = render("leaderworkerset.yaml", **values)["spec"]["leaderWorkerTemplate"]
        return found["workerTemplate"]["spec"]["containers"][0]["resources"]["limits"]

    assert set(limits()) == {"nvidia.com/gpu", "memory"}
    assert limits(rdma="rdma/hca", rdmaCount=8)["rdma/hca"] == 8


def test_the_service_reaches_those_that_answer() -> None:
    service, groups = render("service.yaml"), render("leaderworkerset.yaml")
    leader = groups["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    ports = {port["name"] for port in leader["spec"]["containers"][0]["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    assert service["metadata"]["name"] != groups["metadata"]["name"], "LeaderWorkerSet makes a service of its own name"


def test_every_value_is_used() -> None:
    used = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert not [name for name in VALUES if f".Values.{name} " not in used]


def test_the_chart_is_of_this_version() -> None:
    from vserve import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__ and VALUES["image"].endswith(f":{__version__}")


@pytest.mark.parametrize("path", sorted((CHART / "templates").iterdir()), ids=lambda path: path.name)
def test_templates_use_what_is_rendered_here(path: Path) -> None:
    words = {(one or other).split()[0] for one, other in PARTS.findall(path.read_text())}
    assert {word for word in words if word[0] not in "$."} <= {"range", "if", "end"}
