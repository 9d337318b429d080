"""Compile a bound launch for a GPU that need not be there, and read what came out."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1",
    torch.float8_e4m3fn: "*u8",  # kernels see e4m3 memory as bytes
}  # fmt: skip
# Compute capability -> the architecture Triton compiles for.
ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


@dataclass(frozen=True)
class Compiled:
    """PTX, machine code and what it needs of an SM: bytes of shared, stack and local memory, registers a thread."""

    ptx: str
    sass: str
    registers: int
    shared: int
    stack: int
    local: int

    def instructions(self, pattern):
        """Machine instructions, without their operands, that match the regular expression from their start."""
        return re.findall(rf"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?({pattern}[\w.]*)", self.sass, re.MULTILINE)


def compile_launch(launch, tensors, capability, aligned=True, **constants) -> Compiled:
    """Compile `launch` for its tensors; only their dtypes matter, so that meta tensors do.

    aligned: whether the pointers are multiples of 16 bytes. constants: constexprs to replace.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, (*tensors, *launch.args))):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = constants.pop(parameter.name, value)
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            if aligned and not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            assert parameter.do_not_specialize, f"{parameter.name} would recompile the kernel for each value"
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    assert not constants, f"the kernel has no constexpr {', '.join(constants)}"
    compiled = compile(
        ASTSource(launch.kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = _tool("cuobjdump", "-res-usage", cubin.name), _tool("nvdisasm", "-c", cubin.name)
    assert f".target {ARCHITECTURES[capability]}" in compiled.asm["ptx"]
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    # SHARED counts what the system keeps for itself too.
    return Compiled(
        compiled.asm["ptx"], sass, used["REG"], compiled.metadata.shared, used["STACK"], used["LOCAL"]
    )


def _tool(name, *arguments):
    """Output of a CUDA tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout
