"""What all tests share: drawn examples that are the same every time, one Chromium a file, and Triton's interpreter."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples every time, however slow the machine is, here as where CI is set.
settings.load_profile("ci")

# Where there is no CUDA device, Triton's kernels are run by its interpreter. It must be chosen before anything imports
# triton, hence here: all tests of one process share that import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def compiled_anew() -> Iterator[None]:
    """What one file has compiled is forgotten before the next, so that none comes upon another's limits."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The machine's Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    from browsing import CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
