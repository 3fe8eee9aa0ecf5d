"""Compile Triton's kernels for CUDA devices, without having one, and print the resources of each kernel as JSON.

Run as a program, without the interpreter: ``python triton_compile.py 90 64 bf16 plain slots`` (compute capability, head
dimension, dtype, kinds of problems).
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
    "rows": triton_kernels.rows_kernel,
    "query_grad": triton_kernels.query_grad_kernel,
    "key_grad": triton_kernels.key_grad_kernel,
}
NUMBERS = ("QUERY", "KEY", "VALUE", "OUT", "OUT_GRAD", "QUERY_GRAD", "KEY_GRAD", "VALUE_GRAD")
KEYS = ("KEY_HIGH", "KEY_LOW", "OWN_HIGH", "OWN_LOW", "BIAS_GRAD")
FLOATS = ("LSE", "NEAR_LSE", "LSE_GRAD", "CONSTANT", "REST", "TABLE", "ROW_SCALE", "SCALE_GRAD", *KEYS)
DOCUMENTS = ("QUERY_DOCUMENTS", "KEY_DOCUMENTS")
TYPES = {
    "fp32": FLOATS,
    "fp64": ("UNITS", "SHIFT", "FAR_LSE"),
    "i8": ("PADDING", "FAR", "IS_FAR"),
    "i64": (*DOCUMENTS, "TABLE_GRAD"),
}
MASKS = ("ROW_SCALE", "SCALE_GRAD", "REACH", "PADDING")
SLOTS = ("FIRST", "LAST", "COUNTS", "SLOTS")
POSITIONS = ("QUERY_POSITIONS", "KEY_POSITIONS", *DOCUMENTS)
LEFT_OUT = {
    "plain": (*MASKS, *SLOTS, *POSITIONS, *KEYS, "FAR"),
    "keys": (*MASKS, *SLOTS, *POSITIONS, "FAR"),
    "slots": (*POSITIONS, "FAR"),
    "positions": (*SLOTS, *KEYS, "FAR"),
    "far": ("IS_FAR", "KEY_LOW", "OWN_HIGH", "OWN_LOW", *SLOTS, *POSITIONS),
}
"""Pointers that are None, by kind of problem. ``plain`` has only the table; ``keys`` has key biases too; ``slots``
has no positions; ``positions`` has no slots; ``far`` (computed in float64) has neither.
"""


def variant(kernel: Any, size: backend.Blocks, head_dim: int, dtype: str, kind: str, capability: int) -> ASTSource:
    """Return a kernel's source as compiled for a kind of problem."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            width = backend._padded(head_dim)
            widths = {"D": head_dim, "DV": head_dim, "BLOCK_D": width, "BLOCK_DV": width}
            blocks = {"ROWS": size.rows, "KEYS": size.keys, "SLOT": backend.SLOT}
            own = size.keys if kernel is KERNELS["key_grad"] else size.rows
            regular = kind not in ("positions", "far")
            kinds = {
                "SCALES_PRIOR": "ROW_SCALE" not in LEFT_OUT[kind],
                "TILED": regular and backend.has_fragments(capability // 10, DTYPES[dtype], own, size.warps),
                "WARPS": size.warps,
            }
            signature[name], constants[(index,)] = "constexpr", (widths | blocks | kinds)[name]
        elif name in LEFT_OUT[kind]:
            signature[name], constants[(index,)] = "constexpr", None
        elif name.isupper():
            to = dtype if name in NUMBERS else next((to for to, names in TYPES.items() if name in names), "i32")
            if name == "LSE" and kernel in (KERNELS["forward"], KERNELS["rows"]):
                to = "fp64"
            if kind == "far":
                to = {"TABLE": "fp64", "KEY_HIGH": "fp64", "LSE": "fp64"}.get(name, to)
            signature[name], attributes[(index,)] = f"*{to}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "softmax_scale" else "i32"
            if re.fullmatch("(query|key|value|grad)_(batch|head|row)", name):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def usage(source: ASTSource, size: backend.Blocks, capability: int) -> dict[str, Any]:
    """Return registers per thread, bytes spilled to the stack, shared memory in bytes, and layouts of tiles."""
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
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "layouts": layouts(compiled.asm["ttgir"]),
    }


def layouts(code: str) -> list[str]:
    """Return the layouts of tiles whose numbers PTX takes all at once in a thread."""
    names = re.findall(r"elementwise_inline_asm .*packed_element = (?:[2-9]|\d\d+) .*, (#\w+)> loc", code)
    return [line.split(" = ", 1)[1] for line in code.splitlines() if line.split(" = ")[0] in names]


def main(capability: str, head_dim: str, dtype: str, *kinds: str) -> None:
    found = {}
    for name, kernel in KERNELS.items():
        for kind in kinds if name != "rows" else ["plain"]:
            of = torch.float32 if kind == "far" else DTYPES[dtype]
            configuration = backend.configuration(backend._padded(int(head_dim)), of, capability=int(capability) // 10)
            size = configuration._asdict().get(name, backend.PREPARED)
            source = variant(kernel, size, int(head_dim), dtype, kind, int(capability))
            found[f"{name} {kind}"] = usage(source, size, int(capability))
    print(json.dumps(found))


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    main(*sys.argv[1:])
