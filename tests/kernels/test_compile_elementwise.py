"""The launchers' kernels, compiled for a Hopper GPU on a machine that needs none.

The interpreter accepts much that the compiler refuses (types that change in a loop, ranges that are no power of two).
So this file, run as a program of its own without the interpreter, calls the launchers on CPU tensors of real models'
sizes and compiles what they would have launched, down to machine code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def test_kernels_compile() -> None:
    from triton import knobs

    if not Path(knobs.nvidia.ptxas.path).exists():
        pytest.skip("no ptxas")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert len(done.stdout.splitlines()) >= 20, done.stdout


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands in for JITFunction.run: compiles with the signature and the specialisations that a launch would have."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    dtypes = {
        "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64", "bool": "i1"
    }  # fmt: skip
    for position, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[(position,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + dtypes[str(value.dtype).removeprefix("torch.")]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float), (parameter.name, value)
            signature[parameter.name] = "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    check_waiting(compiled.asm["ptx"], kernel.__name__, bool(values.get("PDL")))
    print(kernel.__name__, options, {kernel.arg_names[i]: value for (i,), value in constants.items()})


# (query heads, key heads, head size, rotated dimensions)
ROPE_SHAPES = ((32, 8, 128, 128), (14, 2, 64, 64), (32, 32, 80, 32), (9, 3, 96, 96))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def check_waiting(ptx: str, name: str, pdl: bool) -> None:
    """With programmatic dependent launch, a kernel waits for the one before; up to there it reads weights at most, and
    what is the whole step's."""
    body = ptx[ptx.index(".entry") :]
    if not pdl:
        assert "griddepcontrol" not in body
        return
    start, launched, rest = body.partition("griddepcontrol.launch_dependents")
    before, waits, after = rest.partition("griddepcontrol.wait")
    assert launched and waits, f"{name} has no griddepcontrol"
    assert "griddepcontrol" not in after
    assert not re.search(r"(ld|st)\.global", start), f"{name} reads or writes before it lets the next kernel start"
    assert not re.search(r"st\.global|\b(ret|exit);", start + before), f"{name} writes or exits before it has waited"
    early = (
        "_rms_norm_kernel", "_layer_norm_kernel", "_rope_write_kv_kernel", "_delta_decode_kernel",
        "_scan_decode_kernel", "_gated_conv_kernel",
    )  # fmt: skip
    assert name in early or "ld.global" not in before, f"{name} reads before it has waited"


def launch_dependent_kernels() -> None:
    """What a decode step is made of, but for the products and attention (test_attention.py)."""
    from vserve.kernels.attention import rope_kv
    from vserve.kernels.norm import activation, layer_norm, norm
    from vserve.kernels.sampling import argmax
    from vserve.kernels.state import delta_decode, gated_conv, gated_norm, group_norm, scan_decode
    from vserve.kernels.state.step import StateStep

    for size in (896, 4096, 16384):
        norm.add_rms_norm_triton(bf16(3, size), bf16(3, size), bf16(size), 1e-6)
    norm.rms_norm_triton(bf16(3, 4096), bf16(4096), 1e-6)
    norm.rms_norm_triton(bf16(3, 6144).view(3, 48, 128)[:, :32], bf16(128), 1e-6)
    norm.rms_norm_triton(torch.zeros(3, 2880), torch.zeros(2880), 1e-6)
    norm.add_rms_norm_triton(bf16(3, 4096), bf16(3, 4096), torch.zeros(4096), 1e-6, 0.22)

    layer_norm.add_layer_norm_triton(bf16(3, 8192), bf16(3, 8192), bf16(8192), None, 1e-5)
    layer_norm.layer_norm_triton(bf16(3, 4096), bf16(4096), bf16(4096), 1e-5)
    layer_norm.layer_norm_triton(bf16(3, 6144).view(3, 48, 128)[:, :32], bf16(32, 128), None, 1e-5)

    activation.silu_mul_triton(bf16(3, 28672))
    activation.gelu_tanh_mul_triton(bf16(3, 28672))

    for num_heads, num_key_heads, size, rot_dim in ROPE_SHAPES:
        query = bf16(3, num_heads, size)
        key, value = bf16(3, num_key_heads, size), bf16(3, num_key_heads, size)
        cache = bf16(4, 16, num_key_heads, size)
        arguments = query, key, value, i32(3), torch.zeros(64, rot_dim), cache, cache, i32(3)
        rope_kv.rope_write_kv_triton(*arguments)
        rope_kv.rope_write_kv_triton(*arguments, bf16(size), bf16(size), 1e-6)

    gated_norm.gated_rms_norm_triton(bf16(3, 32, 128), bf16(3, 12288)[:, 8192:], bf16(128), 1e-6)
    step = StateStep(i32(3), i32(3), i32(3), i32(3), i32(3), i32(3), i32(4), 3)
    delta_decode.delta_decode(
        bf16(3, 12352)[:, :8192], bf16(3, 12352)[:, 12288:], bf16(8192, 4), torch.zeros(32), torch.zeros(32),
        bf16(4, 8, 8256), torch.zeros(4, 32, 128, 128), step, 16, bf16(3, 32, 128),
    )  # fmt: skip

    for heads, rows, groups in ((128, 128, 1), (96, 256, 8)):
        channels = heads * 64 + 2 * groups * rows
        both, ring = bf16(3, heads * 65 + channels), bf16(4, 8, channels + heads)
        raw, dt = both[:, heads * 64 : heads * 64 + channels], both[:, heads * 64 + channels :]
        vectors = [torch.zeros(heads)] * 3
        weights = scan_decode.ScanWeights(bf16(channels, 4), bf16(channels), *vectors)
        state, out = torch.zeros(4, heads, rows, 64), bf16(3, heads, 64)
        scan_decode.scan_decode(raw, dt, weights, ring, state, step, groups, out)
        group_norm.gated_group_norm_triton(out.view(3, -1), both[:, : heads * 64], bf16(heads * 64), groups, 1e-6)
    gated_conv.gated_conv_triton(bf16(3, 6144), bf16(2048, 3), None, bf16(4, 4, 2048), step)

    for vocabulary in (512, 50257, 128256):
        argmax.argmax_triton(torch.zeros(2, vocabulary))


def launch_other_kernels() -> None:
    from vserve.kernels.attention import history
    from vserve.kernels.rows import batch_inputs
    from vserve.kernels.sampling import masks, ngram, penalties, sampling, verify

    block_table = i32(5, 256)
    tokens = history.History(i32(100, 16), block_table, i32(5, 16), i32(5, 12)[:, 10], 4096)
    batch_inputs.scatter_rows_triton(tokens.pages, i32(2), i32(2), i32(3), i32(9))
    batch_inputs.build_inputs_triton(tokens, i32(5), i32(4), i32(5), i32(9), i32(9), i32(4))
    batch_inputs.build_slots_triton(block_table, i32(4), i32(5), i32(9), i32(9), 16)
    batch_inputs.commit_tokens_triton(tokens, i32(5), i32(4), i32(5), i32(4), i32(4))
    verify.verify_drafts_triton(tokens, i32(5), i32(5), i32(4), i32(5), i32(16), i32(4), i32(2, 4), 3)
    rates = torch.zeros(3, dtype=torch.int64)
    verify.impose_acceptance_triton(tokens, i32(5), i32(5, 12)[:, 8], i32(4), i32(5), i32(16), i32(4), rates, 3)

    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for vocabulary in (512, 50257, 128256):
        logits = torch.zeros(2, vocabulary)
        sampling.sample_triton(logits, one, i32(2), one, one, zero, zero)
    counts = i32(64, vocabulary)
    history.read_tokens_triton(tokens, i32(4), i32(4), i32(9), i32(9))
    ngram.propose_ngrams_triton(tokens, i32(5), i32(4), i32(4), i32(5), i32(4), 2, 4, 3)
    masks.apply_bad_words_triton(logits, tokens, i32(2), i32(2), i32(2), i32(3), i32(4), i32(9))
    penalties.apply_penalties_triton(logits, tokens, i32(2), i32(2), i32(2), one, one, one, i32(2), counts)
    penalties.apply_logit_bias_triton(logits, i32(2), i32(3), i32(600, 2))


def main() -> None:
    from triton.runtime.jit import JITFunction

    from vserve.kernels.launch import pdl

    run: Callable[..., None] = compile_launch
    JITFunction.run = run
    launch_other_kernels()
    launch_dependent_kernels()
    pdl.pdl_available = lambda device: True  # type: ignore[assignment]
    launch_dependent_kernels()


if __name__ == "__main__":
    main()
