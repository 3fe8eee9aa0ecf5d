"""attend() in programs of torch.export and ONNX: any length, PyTorch's own operators, without this package."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attention_priors import GeneralizedGaussian, Kerple, KeySink, Laplace, NullKey, Prior, Spectral, SSMax, attend
from attention_priors.attention.plan import Backend
from attention_priors.attention.problem import Options

HEADS = 4


class Attention(nn.Module):
    """Module that a user would export."""

    def __init__(self, prior: Prior, backend: Backend = "auto") -> None:
        super().__init__()
        self.prior = prior
        self.backend: Backend = backend
        self.logit_scale, self.null_key = SSMax(HEADS, 0.7), NullKey(HEADS, init=0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        options: Options = {"logit_scale": self.logit_scale, "null_logit": self.null_key, "key_padding_mask": padding}
        return attend(query, key, value, self.prior, backend=self.backend, **options)


def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(keys)
    query = torch.randn(batch, HEADS, queries, 8, generator=draw)
    key, value = torch.randn(2, batch, 2, keys, 8, generator=draw)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, : keys // 3] = True
    return query, key, value, padding


def goat() -> Prior:
    sink = KeySink(HEADS, train_length=16, init="recency")
    with torch.no_grad():
        sink.gain.fill_(0.5)
    return Spectral(HEADS, init="recency") + sink


def exported(module: Attention) -> ExportedProgram:
    batch, queries, keys = Dim("batch"), Dim("queries"), Dim("keys")
    like = {0: batch, 2: keys}
    with torch.no_grad():
        shapes = ({0: batch, 2: queries}, like, like, {0: batch, 1: keys})
        return torch.export.export(module, inputs(2, 5, 9), dynamic_shapes=shapes)


def test_a_saved_program_runs_in_a_process_without_this_package(tmp_path: Path) -> None:
    module = Attention(goat())
    program = exported(module)
    torch.export.save(program, tmp_path / "attention.pt2")
    # Queries are not only the last keys, and may be a single query. The traced sizes were different.
    cases = [inputs(*sizes) for sizes in ((1, 1, 1), (3, 1, 40), (2, 7, 7))]
    torch.save(cases, tmp_path / "cases.pt")
    script = (
        "import sys, torch\n"
        "run = torch.export.load('attention.pt2').module()\n"
        "torch.save([run(*case) for case in torch.load('cases.pt')], 'found.pt')\n"
        "assert not any(name.startswith(('attention_priors', 'transformers')) for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for case, found in zip(cases, torch.load(tmp_path / "found.pt"), strict=True):
        torch.testing.assert_close(found, module(*case), rtol=1e-5, atol=1e-5)


def test_onnx_runtime_matches_pytorch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = Attention(goat() + Kerple(HEADS) + GeneralizedGaussian(HEADS, init="spread"))
    names = ["query", "key", "value", "padding"]
    graph = torch.onnx.export(exported(module), (), input_names=names, output_names=["out"], verbose=False)
    assert graph is not None
    graph.save(tmp_path / "attention.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "attention.onnx", providers=["CPUExecutionProvider"])
    for sizes in ((1, 1, 1), (3, 1, 40), (2, 7, 7)):
        case = inputs(*sizes)
        (found,) = session.run(None, dict(zip(names, (tensor.numpy() for tensor in case), strict=True)))
        torch.testing.assert_close(torch.from_numpy(found), module(*case).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["toeplitz", "flex", "triton"])
def test_backends_with_custom_operators_refuse_export(backend: Backend) -> None:
    with pytest.raises(ValueError, match=rf"backend='{backend}' cannot .* exported program .* leave backend out"):
        exported(Attention(Laplace(HEADS), backend))
