"""What all tests share: drawn examples that are the same every time, one Chromium a file, and Triton's interpreter."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from thoroughness import DEEP

# The same examples every time, however slow the machine is, here as where CI is set.
settings.load_profile("ci")

# Where there is no CUDA device, Triton's kernels are run by its interpreter. It must be chosen before anything imports
# triton, hence here: all tests of one process share that import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    # Imported before any test sets that variable.
    importlib.import_module("attention_priors.attention.triton.kernels")


# What is imported stays: collecting garbage among it takes a third of a second each time, as at the end of a training.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what is there."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter take apart what is there: Triton complains of what is left."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``deep``, except in a deep run."""
    left_out = [] if DEEP else [item for item in items if item.get_closest_marker("deep")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


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
