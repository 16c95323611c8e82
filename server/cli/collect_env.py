"""versions and hardware of this machine, to paste into a bug report"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from typing import Any

from ... import __version__
from . import machine
from .machine import gib

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "fastapi", "starlette",
    "pydantic", "uvicorn", "uvloop", "httptools", "sse-starlette", "msgspec", "prometheus_client",
)  # fmt: skip
_VARIABLES = ("VSERVE_", "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "TORCH_", "PYTORCH_", "HF_", "OMP_", "MKL_", "OTEL_")
_OTHER_VARIABLES = ("CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
LONGEST = 200  # characters of a value: some images carry a page of requirements in a variable
_SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET|HEADERS")


EXAMPLES = ("vserve collect-env", "vserve collect-env > report.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for title, facts in found.items():
        print(f"{title}:")
        for name, value in facts.items():
            text = str(value)
            print(f"  {name:<23} {text if len(text) <= LONGEST else text[:LONGEST] + ' … (--json has it all)'}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """What may go to a public place: secrets are hidden."""
    torch = machine.probe_torch()
    memory, shared = machine.memory(), machine.shared_memory()
    cards = machine.nvidia_smi() or []
    hardware = {
        "processor": machine.processor(),
        "cores": machine.num_cores(),
        "memory": f"{gib(memory[0])} of {gib(memory[1])} available",
        "/dev/shm": gib(shared) if shared is not None else "none",
        "open files": "soft {}, hard {}".format(*machine.open_files()),
    }
    for index, card in enumerate(cards):
        hardware[f"card {index}"] = (
            f"{card['name']}, driver {card['driver_version']}, {card['memory.free']} of {card['memory.total']} MiB free"
        )
    hardware.setdefault("card 0", "none")
    return {
        "vserve": {"version": __version__, "python": platform.python_version(), "system": machine.system()},
        "torch": {
            "version": torch.version,
            "CUDA": torch.cuda,
            "architectures": " ".join(torch.architectures),
            "cards": ", ".join(f"{card.name} ({'.'.join(map(str, card.capability))})" for card in torch.cards),
            "error": torch.error,
            "C compiler": machine.compiler(),
        },
        "hardware": hardware,
        "packages": machine.package_versions(PACKAGES),
        "environment": {name: value for name, value in sorted(environment().items())},
    }


def environment() -> dict[str, str]:
    return {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) or name in _OTHER_VARIABLES
    }
