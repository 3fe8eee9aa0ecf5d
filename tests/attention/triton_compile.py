"""Compile Triton's kernels for CUDA devices, without having one, and print what each would use there, as JSON.

Run as a program, without the interpreter: ``python triton_compile.py 90 64`` (compute capability, head dimension).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_priors.attention import triton_backend, triton_kernels

DTYPE = torch.bfloat16
KERNELS = {
    "forward": triton_kernels.forward_kernel,
    "query_grad": triton_kernels.query_grad_kernel,
    "key_grad": triton_kernels.key_grad_kernel,
    "table_grad": triton_kernels.table_grad_kernel,
}
NUMBERS = ("QUERY", "KEY", "VALUE", "OUT", "OUT_GRAD", "QUERY_GRAD", "KEY_GRAD", "VALUE_GRAD")
FLOATS = ("LSE", "LSE_GRAD", "CONSTANT", "REST", "TABLE", "ROW_SCALE", "SCALE_GRAD", "PARTS")
BYTES = ("PADDING", "KEPT")
OPTIONAL = ("ROW_SCALE", "SCALE_GRAD", "REACH", "FIRST", "LAST", "COUNTS", "SLOTS", "KEPT", "PADDING")
POSITIONS = ("QUERY_POSITIONS", "KEY_POSITIONS", "QUERY_DOCUMENTS", "KEY_DOCUMENTS")


def variant(kernel: Any, size: triton_backend.Blocks, head_dim: int, masked: bool) -> ASTSource:
    """A kernel for a table alone, or (``masked``) with scales, a window, documents, padding and lists."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            width = triton_backend._padded(head_dim)
            widths = {"D": head_dim, "DV": head_dim, "BLOCK_D": width, "BLOCK_DV": width}
            blocks = {"ROWS": size.rows, "KEYS": size.keys, "SLOT": triton_backend.SLOT}
            signature[name], constants[(index,)] = "constexpr", (widths | blocks)[name]
        elif name in POSITIONS or (name in OPTIONAL and not masked):
            signature[name], constants[(index,)] = "constexpr", None
        elif name.isupper():
            kind = "bf16" if name in NUMBERS else "fp32" if name in FLOATS else "i8" if name in BYTES else "i32"
            signature[name], attributes[(index,)] = f"*{kind}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "softmax_scale" else "i32"
            if re.fullmatch("(query|key|value|grad)_(batch|head|row)", name):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def usage(kernel: Any, size: triton_backend.Blocks, head_dim: int, masked: bool, capability: int) -> dict[str, int]:
    """Registers per thread, bytes of them spilled to the stack, and shared memory in bytes."""
    compiled = triton.compile(
        variant(kernel, size, head_dim, masked),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": size.warps, "num_stages": size.stages, "enable_fp_fusion": True},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        shown = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout + shown.stderr)
    assert found is not None, shown
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared}


def main(capability: int, head_dim: int) -> None:
    sizes = triton_backend.configuration(triton_backend._padded(head_dim), DTYPE)._asdict()
    print(
        json.dumps(
            {
                f"{name} {'masked' if masked else 'plain'}": usage(kernel, sizes[name], head_dim, masked, capability)
                for name, kernel in KERNELS.items()
                for masked in (False, True)
            }
        )
    )


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    main(*map(int, sys.argv[1:]))
