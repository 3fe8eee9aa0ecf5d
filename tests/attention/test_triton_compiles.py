"""Triton's kernels compile for CUDA devices, on a machine without one."""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import run_command

PROGRAM = Path(__file__).with_name("triton_compile.py")
SHARED_MEMORY = {"80": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024}
"""Shared memory in bytes of the smallest devices of a generation: for the first, compute capability 8.6 and 8.9."""


def tools() -> Path | None:
    spec = find_spec("triton")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return folder if folder is not None and (folder / "ptxas").exists() and (folder / "cuobjdump").exists() else None


@pytest.mark.slow
@pytest.mark.skipif(tools() is None, reason="triton with NVIDIA's ptxas and cuobjdump is not installed")
@pytest.mark.parametrize(
    ("capability", "head_dim", "kind"),
    [
        pytest.param("80", "80", "positions", marks=pytest.mark.deep),
        pytest.param("90", "64", "slots", marks=pytest.mark.deep),
        pytest.param("90", "128", "plain", marks=pytest.mark.deep),
        ("90", "64", "keys"),
        pytest.param("100", "64", "far", marks=pytest.mark.deep),
    ],
)
def test_kernels_compile(capability: str, head_dim: str, kind: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), capability, head_dim, "bf16", kind]
    done = run_command(command, environment=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, usage in found.items():
        assert usage["shared"] <= SHARED_MEMORY[capability], f"{name}: {usage}"
        # The layout that fragments.py expects.
        tiled = capability != "100" and kind not in ("positions", "far") and not name.startswith("rows")
        assert bool(usage["layouts"]) == tiled, name
        for layout in usage["layouts"]:
            assert re.search(r"nvidia_mma<.versionMajor = [23], .*warpsPerCTA = \[\d, 1\]", layout), f"{name}: {layout}"
        # This many bytes per thread stay in the first cache. On an H200, the fastest blocks spill 552 bytes.
        assert usage["stack"] <= 600, f"{name}: {usage}"
