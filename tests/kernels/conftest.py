"""Fixtures of the kernel tests. Without a GPU the Triton kernels run in Triton's interpreter, on CPU tensors."""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _interpret_loaded_kernels() -> None:
    """Turn the @triton.jit functions that are already loaded into interpreted ones.

    `@triton.jit` chooses between compiler and interpreter when it is applied. Tests of other rooms may have imported
    the kernels, and with them triton's own library of device functions, before this file was read.
    """
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, InterpretedFunction] = {}  # by id: hashing a JITFunction would parse its source
    names = [name for name in sys.modules if name.startswith(("triton.language", "vserve.kernels"))]
    for name in names:
        module = sys.modules[name]
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                if id(value) not in interpreted:
                    interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(module, attribute, interpreted[id(value)])
    # x.sum() is tl.sum as an attribute of the tensor class, where only a plain function becomes a method.
    for attribute, value in list(vars(triton.language.tensor).items()):
        if isinstance(value, JITFunction):
            function = interpreted.get(id(value)) or InterpretedFunction(value.fn)
            setattr(triton.language.tensor, attribute, lambda *args, _function=function, **kw: _function(*args, **kw))


def _spare_the_interpreter_idle_work() -> None:
    """Three things that are most of its time and of no effect.

    It looks through all of triton.language whenever a kernel calls a device function, for functions to replace that it
    has replaced at the launch. It computes whether integers overflow, and then asks nobody (`debug` is off). And it
    makes a table of all types whenever it looks up one.
    """
    from triton.runtime import interpreter

    replaced: set[int] = set()  # modules of the language, in this launch
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function: Any) -> Any:
        tl, core = interpreter.tl, interpreter.tl.core
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is core}
        if modules and modules <= replaced:
            return None  # a device function's: a launch is never within another one
        replaced.update(modules)
        return patch(function)

    def restore_and_forget(scope: Any) -> None:
        replaced.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_once, restore_and_forget
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name  # types of blocks cannot be hashed
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = find_once


def _run_assembly() -> None:
    """Inline assembly, too: of one output, for two neighbours at a time."""
    from importlib.util import module_from_spec, spec_from_file_location

    from triton.runtime import interpreter

    spec = spec_from_file_location("ptx", Path(__file__).with_name("ptx.py"))
    assert spec is not None and spec.loader is not None
    ptx = module_from_spec(spec)
    spec.loader.exec_module(ptx)

    class Results:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get_result(self, place: int) -> Any:
            return self.handle

    def create_inline_asm(builder: Any, asm: str, constraints: str, values: Any, types: Any, *_: Any) -> Results:
        assert constraints == "=r" + ",r" * len(values) and len(types) == 1
        scalar = types[0].scalar
        data = ptx.evaluate_pairs(asm, *(value.data for value in values)).view(interpreter._get_np_dtype(scalar))
        return Results(interpreter.TensorHandle(data, scalar))

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def _round_to_fp8() -> None:
    """As the hardware does it. The interpreter's own conversion loses the carry of a mantissa that is rounded up."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_rightly(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name == "fp32" and target.name == "fp8e4nv":
            rounded = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy().reshape(data.shape)
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_rightly


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1":
        if "triton" in sys.modules:
            _interpret_loaded_kernels()
        _spare_the_interpreter_idle_work()
        _run_assembly()
        _round_to_fp8()


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    spec = importlib.util.spec_from_file_location("pairs", here / "pairs.py")
    assert spec is not None and spec.loader is not None
    pairs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pairs)
    pairs.mark_the_rest(item for item in items if item.path.parent == here)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu": where the Triton launchers of the tests run."""
    if not torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET forbids the interpreter")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator with a fresh seed; pytest shows the printed seed when the test fails."""
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"TEST_SEED={seed} repeats this run")
    return torch.Generator().manual_seed(seed)


# What scripts that compile for sm_90 without a GPU find done: their launchers get CPU tensors, and the launch itself is
# replaced by a warm-up. `kernels`: (name, what was compiled) of every variant. `resources(kernel)`: its registers.
# `around_wait(kernel)`: its PTX, and the parts of that before, at and after the wait for the kernel before it.
# `touches(ptx, *places)`: what reads or writes the memory of the parameters at these places, in a part from the start.
_FOR_HOPPER = """
import json, os, re, subprocess, sys, tempfile, traceback
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

kernels = {}

def warm_up_instead(self, grid):
    def launch(*args, **options):
        kernel = self.run(*args, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = self.fn.__name__, kernel
    return launch

def resources(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key.lower(): max(map(int, re.findall(key + r":(\\d+)", text))) for key in ("REG", "STACK", "LOCAL")}

def around_wait(kernel):
    body = kernel.asm["ptx"]
    body = body[body.index(".entry"):]
    return body, *body.partition("griddepcontrol.wait")

def touches(ptx, *places):
    derived, found = set(), []  # registers whose value comes from one of them
    for line in ptx.splitlines():
        operation, _, operands = re.sub(r"//.*|@!?%p\\d+|\\s+", " ", line).strip().partition(" ")
        registers = re.findall(r"%\\w+", operands)
        if "[" in operands and "ld.param" not in operation:
            address = re.findall(r"%\\w+", operands[operands.index("["):])
            found += [line.strip()] if derived & set(address) else []
        elif any(f"param_{place}]" in operands for place in places) or derived & set(registers[1:]):
            derived.add(registers[0])
    return found

driver.set_active(Hopper())
JITFunction.__getitem__ = warm_up_instead

for line in sys.stdin:
    script, sys.argv[1:], cache, output, errors = json.loads(line)
    if (child := os.fork()) == 0:
        os.environ["TRITON_CACHE_DIR"] = cache
        for descriptor, path in ((1, output), (2, errors)):
            with open(path, "w") as stream:
                os.dup2(stream.fileno(), descriptor)
        code = 1
        try:
            exec(script)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # nothing is taken down: that takes longer than most scripts
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def _compiler() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and Triton, which takes longer than many kernels; a script runs in a fork."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", _FOR_HOPPER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as compiler:
        yield compiler


@functools.cache
def _sources(folders: tuple[str, ...]) -> str:
    """A digest of what a script compiles and with what: the scripts import nothing else of this tree."""
    import triton

    digest = hashlib.sha256(f"{triton.__version__} {torch.__version__} {triton.knobs.nvidia.ptxas.version}".encode())
    for name in sorted(name for name in os.environ if name.startswith(("TRITON_", "VSERVE_")) and "CACHE" not in name):
        digest.update(f"{name}={os.environ[name]}\n".encode())
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".json"):
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture
def run_for_hopper(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """run_for_hopper(script, *arguments) → the JSON that the script prints of its `kernels`.

    It is kept in build/hopper/ and taken from there while nothing changes that could make it another one; not that of a
    script that writes files of its own.
    """
    ptxas = pytest.importorskip("triton.knobs").nvidia.ptxas
    if not os.path.exists(ptxas.path):
        pytest.skip("triton without ptxas")

    def run(script: str, *arguments: str) -> Any:
        folders = ("kernels", "configs/tiles", *(["engine"] if "vserve.engine" in script else []))
        asked_for = json.dumps([_sources(folders), _FOR_HOPPER, script, arguments])
        kept = ROOT / "build" / "hopper" / f"{hashlib.sha256(asked_for.encode()).hexdigest()}.json"
        if kept.exists():
            return json.loads(kept.read_text())
        compiler = request.getfixturevalue("_compiler")
        output, errors = tmp_path / "output", tmp_path / "errors"
        asked = script, arguments, str(tmp_path), str(output), str(errors)
        print(json.dumps(asked), file=compiler.stdin, flush=True)
        code = compiler.stdout.readline()
        assert code == "0\n", errors.read_text()[-3000:] if code else "the process that compiles is gone"
        text = output.read_text()
        result = json.loads(text)
        if not any(str(tmp_path) in argument for argument in arguments):
            kept.parent.mkdir(parents=True, exist_ok=True)
            written = kept.with_suffix(f".{os.getpid()}")
            written.write_text(text)
            written.replace(kept)
        return result

    return run


@pytest.fixture(autouse=True)
def _no_launch_before() -> None:
    """A test that ends with attend_beside says nothing about the first launch of the next one."""
    pdl = sys.modules.get("vserve.kernels.launch.pdl")
    if pdl is not None:
        pdl._overlapping.clear()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
