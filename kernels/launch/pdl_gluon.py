"""What pdl.py asks of a kernel, in Gluon: gdc_launch_dependents and gdc_wait are Triton's alone."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    _control("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def wait():
    _control("griddepcontrol.wait; // $0")


@gluon.jit
def _control(instruction: gl.constexpr):
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
