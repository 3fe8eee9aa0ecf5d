"""Compile Triton's kernels for CUDA devices, without having one, and print what each would use there, as JSON.

Run as a program, without the interpreter: ``python triton_compile.py 90 64 bf16 plain slots`` (compute capability,
head dimension, dtype, kinds of problems).
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

from attention_priors.attention.triton import backend
from attention_priors.attention.triton import kernels as triton_kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = {
    "forward": triton_kernels.forward_kernel,
    "query_grad": triton_kernels.query_grad_kernel,
    "key_grad": triton_kernels.key_grad_kernel,
    "table_grad": triton_kernels.table_grad_kernel,
}
NUMBERS = ("QUERY", "KEY", "VALUE", "OUT", "OUT_GRAD", "QUERY_GRAD", "KEY_GRAD", "VALUE_GRAD")
KEYS = ("KEY_HIGH", "KEY_LOW", "OWN_HIGH", "OWN_LOW", "BIAS_GRAD")
FLOATS = ("LSE", "LSE_GRAD", "CONSTANT", "REST", "TABLE", "ROW_SCALE", "SCALE_GRAD", "PARTS", *KEYS)
BYTES = ("PADDING", "KEPT")
MASKS = ("ROW_SCALE", "SCALE_GRAD", "REACH", "PADDING")
SLOTS = ("FIRST", "LAST", "COUNTS", "SLOTS", "KEPT")
POSITIONS = ("QUERY_POSITIONS", "KEY_POSITIONS", "QUERY_DOCUMENTS", "KEY_DOCUMENTS")
LEFT_OUT = {
    "plain": (*MASKS, *SLOTS, *POSITIONS, *KEYS),
    "keys": (*MASKS, *SLOTS, *POSITIONS),
    "slots": POSITIONS,
    "positions": (*SLOTS, *KEYS),
}
"""Which pointers are None: all but the table; all but table and biases of keys; those to positions; or those that tell
what slots see each other."""


def variant(kernel: Any, size: backend.Blocks, head_dim: int, dtype: str, kind: str) -> ASTSource:
    """A kernel as it is compiled for a kind of problem."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            width = backend._padded(head_dim)
            widths = {"D": head_dim, "DV": head_dim, "BLOCK_D": width, "BLOCK_DV": width}
            blocks = {"ROWS": size.rows, "KEYS": size.keys, "SLOT": backend.SLOT}
            signature[name], constants[(index,)] = "constexpr", (widths | blocks)[name]
        elif name in LEFT_OUT[kind]:
            signature[name], constants[(index,)] = "constexpr", None
        elif name.isupper():
            to = dtype if name in NUMBERS else "fp32" if name in FLOATS else "i8" if name in BYTES else "i32"
            signature[name], attributes[(index,)] = f"*{to}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "softmax_scale" else "i32"
            if re.fullmatch("(query|key|value|grad)_(batch|head|row)", name):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def usage(source: ASTSource, size: backend.Blocks, capability: int) -> dict[str, int]:
    """Registers per thread, bytes of them spilled to the stack, and shared memory in bytes."""
    compiled = triton.compile(
        source,
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


def main(capability: str, head_dim: str, dtype: str, *kinds: str) -> None:
    sizes = backend.configuration(backend._padded(int(head_dim)), DTYPES[dtype])._asdict()
    found = {}
    for name, kernel in KERNELS.items():
        for kind in kinds:
            # Without a common offset there are no diagonals.
            if (name, kind) != ("table_grad", "positions"):
                source = variant(kernel, sizes[name], int(head_dim), dtype, kind)
                found[f"{name} {kind}"] = usage(source, sizes[name], int(capability))
    print(json.dumps(found))


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    main(*sys.argv[1:])
