"""Where there is no CUDA device, the tests run Triton's kernels by its interpreter.

It must be chosen before anything imports triton, hence here: all tests of one process share that import.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
