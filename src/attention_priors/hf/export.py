"""Export to ONNX and ``torch.export``, for programs without this package and transformers."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicIndexedLayer

from attention_priors._io import synchronise
from attention_priors.hf.attach import attached_priors
from attention_priors.models.decoder import PriorDecoderForCausalLM

Call = tuple[Tensor, Tensor, list[Tensor]]
"""Arguments of an exported program: ``input_ids``, ``attention_mask`` and the cache's tensors."""
MOST_IN_ONE_FILE = 1.5e9
"""Size of weights, in bytes, above which an ONNX graph keeps them in a separate file: the format's limit is 2 GiB."""


def export_program(model: PreTrainedModel, path: str | Path) -> None:
    """Export a model as a ``torch.export`` program, which PyTorch loads and runs without other packages.

    The program is one graph of three arguments:

    - ``input_ids`` ``(B, L)``. New tokens.
    - ``attention_mask`` ``(B, P + L)``. 1 for tokens and 0 for padding.
    - ``past``. A list of the cached keys and values of ``P`` tokens, ``(B, Hkv, P, D)``, layer by layer. A gated layer
      has its sums ``(B, P, H)`` after them.

    ``B``, ``L`` and ``P`` are dynamic, and ``P`` may be 0. Results are the logits ``(B, L, vocabulary)`` and the
    updated list.

    Attention is computed densely: memory grows with ``L · (P + L)``. ``tolerance`` has no effect.

    Args:
        model: a :class:`PriorDecoderForCausalLM`, or a model with attached priors, in evaluation mode.
        path: ``.pt2`` file. The file is written atomically.

    Raises:
        ValueError: the model cannot be exported, or the program's logits differ from the model's. The message says why.
    """
    path = _suffixed(path, ".pt2")
    program, _, _ = _trace(model)
    with _moved_to(path) as temporary:
        torch.export.save(program, temporary)


def export_onnx(model: PreTrainedModel, path: str | Path) -> None:
    """Export a model as an ONNX graph, for ONNX Runtime and other programs.

    Inputs, outputs and sizes are those of :func:`export_program`, with the usual names of decoders in ONNX. Inputs are
    ``input_ids``, ``attention_mask``, ``past_key_values.0.key``, ``past_key_values.0.value``, ...; outputs are
    ``logits``, ``present.0.key``, ... A gated layer's sums are ``past_key_values.0.gate``. Requires
    ``attention-priors[export]``.

    Args:
        model: as for :func:`export_program`.
        path: ``.onnx`` file. Weights above 1.5 GB go to a second file beside it, with the suffix ``.data``.

    Raises:
        ModuleNotFoundError: a package is missing. The message names the package.
        ValueError: the model cannot be exported, or ONNX Runtime cannot run it or computes other logits. The message
            says why.
    """
    path = _suffixed(path, ".onnx")
    for package in ("onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            message = f"export_onnx needs {package}: pip install 'attention-priors[export]'"
            raise ModuleNotFoundError(message, name=package)
    if getattr(model, "dtype", None) == torch.bfloat16:
        raise ValueError("ONNX export does not support bfloat16: call model.float() or model.half() first")
    program, step, calls = _trace(model)
    inputs = ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in step.names)]
    outputs = ["logits", *(f"present.{name}" for name in step.names)]
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    with _moved_to(path) as temporary:
        try:
            graph = torch.onnx.export(program, (), input_names=inputs, output_names=outputs, dynamo=True, verbose=False)
            assert graph is not None
            graph.save(temporary, external_data=size > MOST_IN_ONE_FILE)
            run = _onnx_runtime(temporary, inputs)
        except Exception as error:
            # Both packages have their own exceptions, which name the unsupported operator.
            raise ValueError(f"this {type(model).__name__} cannot be exported to ONNX: {error}") from error
        _compare(run, step, calls, "ONNX Runtime's logits")


def _onnx_runtime(path: Path, inputs: list[str]) -> Callable[..., Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> Tensor:
        given = zip(inputs, (input_ids, attention_mask, *past), strict=True)
        found: Any = session.run(["logits"], {name: tensor.numpy(force=True) for name, tensor in given})
        return torch.from_numpy(found[0])

    return run


def _suffixed(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise ValueError(f"path must end in {suffix}, got {str(path)!r}")
    return path


@contextmanager
def _moved_to(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside ``path``; at the end, move all files of that folder into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder, path.name)
        # Weights first: where the graph exists, the weights are complete.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
            synchronise(file)
            os.replace(file, path.with_name(file.name))


# ---- one graph


class _PastLayer(DynamicIndexedLayer):
    """Cached keys and values of one layer, and the running sums of its gates."""

    def __init__(self, keys: Tensor, values: Tensor, gates: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values, self.indexer_keys = keys, values, gates
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized, self.is_indexer_initialized = True, gates is not None

    def get_seq_length(self) -> int:
        # The size is symbolic and must not be compared with 0.
        assert self.keys is not None
        return self.keys.shape[-2]


def _tensors(layer: Any) -> dict[str, Tensor]:
    found = {"key": layer.keys, "value": layer.values, "gate": getattr(layer, "indexer_keys", None)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class _Step(nn.Module):
    """One decoding step, with the cache as a list of tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # PriorDecoderForCausalLM computes positions itself; generate() passes them to other models.
        own = isinstance(model, PriorDecoderForCausalLM)
        self.tells_positions = not own and "position_ids" in inspect.signature(model.forward).parameters
        # Layers with a sliding window keep all keys, because the mask hides keys outside the window.
        cache = DynamicCache(config=model.config) if own else DynamicCache()
        one = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=one, cache=cache, use_cache=True)
        self.layers = [list(_tensors(layer)) for layer in cache.layers]
        self.past = [tensor for layer in cache.layers for tensor in _tensors(layer).values()]

    @property
    def names(self) -> list[str]:
        """Names of the cache's tensors, in order."""
        return [f"{index}.{name}" for index, layer in enumerate(self.layers) for name in layer]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        remaining = iter(past)
        cache = Cache(layers=[_PastLayer(*(next(remaining) for _ in layer)) for layer in self.layers])
        length = input_ids.shape[1]
        # Indexing ties the mask's symbolic size to the number of keys.
        slots = torch.arange(past[0].shape[2] + length, device=input_ids.device)
        tokens, told = attention_mask[:, slots], {}
        if self.tells_positions:
            told = {"position_ids": (tokens.cumsum(-1) - 1).clamp(min=0)[:, -length:]}
        out = self.model(input_ids=input_ids, attention_mask=tokens, cache=cache, use_cache=True, **told)
        return out.logits, [tensor for layer in cache.layers for tensor in _tensors(layer).values()]


@torch.no_grad()
def _trace(model: PreTrainedModel) -> tuple[ExportedProgram, _Step, list[Call]]:
    """Return the program, the module that it was traced from, and the calls on which both were compared."""
    name = type(model).__name__
    if not isinstance(model, PriorDecoderForCausalLM) and not attached_priors(model):
        raise ValueError(f"model must be a PriorDecoderForCausalLM or have attached priors, got {name}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers model, got {name}: pass the wrapped model (for PEFT, merge it first)"
        )
    if model.training:
        raise ValueError(f"this {name} is in training mode; call model.eval() first")
    step = _Step(model).eval()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, 3), generator=draw).to(model.device)
    past = [torch.randn(2, *x.shape[1:-2], 2, x.shape[-1], generator=draw).to(x) for x in step.past]
    mask = torch.ones(2, 5, dtype=torch.int64, device=model.device)
    mask[0, 0] = 0
    batch, some = Dim("batch"), Dim("past")
    # The length of keys and gates is the second dimension from the end.
    shapes = {0: batch, 1: Dim("new")}, {0: batch, 1: Dim("all")}, [{0: batch, x.dim() - 2: some} for x in past]
    try:
        program = torch.export.export(step, (ids, mask, past), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        # The exception depends on the code that cannot be traced: UserError, RuntimeError, ValueError, ...
        raise ValueError(f"this {name} cannot be exported as one graph for all lengths: {error}") from error
    operators = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    foreign = sorted(str(target) for target in operators if target.namespace not in ("aten", "prims"))
    if foreign:
        raise ValueError(
            f"this {name} cannot be exported: operators {', '.join(foreign)} are not portable; for a mixture of "
            "experts call model.set_experts_implementation('batched_mm') first"
        )
    first = ids[:1, :1], mask[1:, :1], [x[:1].narrow(-2, 0, 0) for x in past]
    calls: list[Call] = [(ids, mask, past), first]
    module = program.module()
    _compare(lambda *call: module(*call)[0], step, calls, "the exported program's logits")
    return program, step, calls


@torch.no_grad()
def _compare(run: Callable[..., Tensor], step: _Step, calls: list[Call], what: str) -> None:
    for call in calls:
        expected, found = step(*call)[0], run(*call)
        off = float((found.to(expected) - expected).abs().max() / expected.abs().max())
        if not off <= (1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.05):
            sizes = f"{call[0].shape[1]} tokens after {call[2][0].shape[2]}"
            raise ValueError(f"{what} differ by {off:.1e} of the largest logit, for {sizes}; nothing was written")
