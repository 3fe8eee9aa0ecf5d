"""Setup shared by all tests: one thread, random examples, order, garbage, autograd, Triton, one Chromium per file."""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tqdm import tqdm

from thoroughness import DEEP

TESTS = Path(__file__).parent

# Draw equal examples on every machine at any speed, also where the variable CI is set.
settings.load_profile("ci")

# Use one thread in each process, here and in processes started by tests. With two, several processes wait for each
# other's threads: on two cores, all tests took twice as long. Sums also depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Without a CUDA device, Triton's interpreter runs its kernels. It must be chosen before the first import of triton,
# which all tests of a process share.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    # The first backward pass of a process starts autograd's threads, one for each device, and a process with such
    # threads cannot be forked to compute. Once FakeTensorMode has run, PyTorch for CUDA counts a device that does not
    # exist, so the first backward pass must come before.
    torch.zeros((), requires_grad=True).backward()
else:
    # Import before any test sets that variable.
    importlib.import_module("attention_priors.attention.triton.kernels")


# Inductor compiles and runs a program for each vector unit that the processor reports, to see whether the compiler can
# use it. This check took five seconds in each process, so trust the processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Progress bars share one lock among this process and its forked copies. A copy that is killed while it holds the lock
# would stop all others for ever, so share none. The thread that watches bars takes a lock too, which a copy may inherit
# locked, so start none.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

# Imported modules stay. Collecting garbage among them would take a third of a second each time, for example at the end
# of each training.
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude existing objects from garbage collection, and collect others seldom: it took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End a worker of pytest-xdist, which has reported its tests. Python would free all its objects for eight seconds.

    Elsewhere, include all objects in garbage collection, because Triton complains about leftovers.
    """
    if hasattr(config, "workerinput"):
        os._exit(0)
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``deep``, except in a deep run. Skip tests marked ``cuda`` without a CUDA device.

    The files of this folder come first, because they take longest: at the end, another worker would wait for them.
    """
    items.sort(key=lambda item: item.path.parent != TESTS)
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    left_out = [] if DEEP else [item for item in items if item.get_closest_marker("deep")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture(scope="module", autouse=True)
def leftovers_excluded() -> Iterator[None]:
    """Exclude also what a file leaves, mostly imported modules: collecting it took a tenth of the time of trainings."""
    yield
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def compiled_anew() -> Iterator[None]:
    """Reset compiled code before each file, so that no file meets the limits of another."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def denormal_numbers() -> Iterator[None]:
    """Compute with denormal numbers after each file: the command line, run in this process, counts them as 0."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start the machine's Chromium without a window."""
    from playwright.sync_api import sync_playwright

    from browsing import CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
