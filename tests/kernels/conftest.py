"""Fixtures of the kernel tests. Without a GPU the Triton kernels run in Triton's interpreter, on CPU tensors."""

import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch


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


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and "triton" in sys.modules:
        _interpret_loaded_kernels()


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu": where the Triton launchers of the tests run."""
    if not torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET forbids the interpreter")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator with a fresh seed; pytest shows the printed seed when the test fails."""
    seed = int(os.environ.get("VSERVE_TEST_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"VSERVE_TEST_SEED={seed} repeats this run")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
