"""Models exported to torch.export and ONNX: one graph for all lengths, with a cache, and equal tokens."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny, tokens
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.hf import attach, export, export_onnx, export_program
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from thoroughness import every_other_deep

STEPS = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
NEIGHBOURS = {"name": "generalized_gaussian", "init": "neighbours", "keep_sign": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "BAM": {"prior": NEIGHBOURS},
    "BAM+SSMax": {"prior": NEIGHBOURS, "logit_scale": {"name": "ssmax", "init": 0.2}},
    "RoPE": {"encoding": "rotary"},
    "ALiBi": {"prior": "laplace"},
    "NoPE+SSMax": {"logit_scale": {"name": "ssmax", "init": 0.2}},
}
LAYERS_THAT_DIFFER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_pattern": ["local", "global"],
    "layer_kinds": {
        "local": {"prior": {"name": "window", "size": 3}, "encoding": "rotary", "null_logit": "null_key"},
        "global": {"prior": ["spectral", {"name": "key_sink", "train_length": 16}], "key_bias": "forget_gate"},
    },
    "tolerance": 0.1,
}

Step = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


def decoder(**parts: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    model = PriorDecoderForCausalLM(PriorDecoderConfig(**SIZES | parts)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("prior.", "logit_scale.", "null_logit.", "key_bias.")):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def attached(family: str, **changes: Any) -> PreTrainedModel:
    sink = {"name": "key_sink", "train_length": 16, "init": {"bump": 1.0}}
    return attach(tiny(family, **changes), ["laplace", sink], logit_scale="ssmax")


def read_program(path: Path) -> tuple[Step, list[Tensor]]:
    """Return the program, and an empty cache for one text."""
    program = torch.export.load(path)
    example: Any = program.example_inputs
    return program.module(), [x[:1].narrow(-2, 0, 0) for x in example[0][2]]


def read_onnx(path: Path) -> tuple[Step, list[Tensor]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    names = [each.name for each in inputs]

    def step(*call: Any) -> tuple[Tensor, list[Tensor]]:
        given = zip(names, (call[0], call[1], *call[2]), strict=True)
        found: Any = session.run(None, {name: tensor.numpy() for name, tensor in given})
        logits, *present = map(torch.from_numpy, found)
        return logits, present

    sizes = ([1, *(size if isinstance(size, int) else 0 for size in each.shape[1:])] for each in inputs[2:])
    return step, [torch.zeros(each) for each in sizes]


@torch.no_grad()
def greedy(step: Step, past: list[Tensor], prompt: Tensor, mask: Tensor, number: int = STEPS) -> Tensor:
    """Read a prompt in two chunks, and continue it token by token."""
    past = [each.expand(len(prompt), *each.shape[1:]) for each in past]
    cut, found = prompt.shape[1] // 2, []
    if cut:
        _, past = step(prompt[:, :cut], mask[:, :cut], past)
    new = prompt[:, cut:]
    for _ in range(number):
        logits, past = step(new, mask, past)
        new = logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(new)], -1)
        found.append(new)
    return torch.cat(found, -1)


def generated(model: Any, prompt: Tensor, mask: Tensor, number: int = STEPS) -> Tensor:
    options = {"max_new_tokens": number, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=mask, **options)[:, prompt.shape[1] :]


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each model once, because a trace takes as long as all else."""
    monkeypatch.setattr(export, "_trace", lru_cache(export._trace))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("name", every_other_deep([*SCHEMES, "attached Llama"], ["attached Llama"]))
def test_reloaded_programs_and_onnx_runtime_generate_equal_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    beside = set[str]()
    if name in SCHEMES:
        model: Any = decoder(**SCHEMES[name])
    else:
        model, beside = attached("llama", num_hidden_layers=1), {"model.onnx.data"}
        monkeypatch.setattr(export, "MOST_IN_ONE_FILE", 0)
    export_program(model, tmp_path / "model.pt2")
    export_onnx(model, tmp_path / "model.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.pt2"} | beside
    prompt, mask = tokens(2, 7), torch.tensor([[1] * 7, [0] * 2 + [1] * 5])
    expected = generated(model, prompt, mask)
    assert min(len(set(row)) for row in expected.tolist()) > 3
    for read, file in ((read_program, "model.pt2"), (read_onnx, "model.onnx")):
        found = greedy(*read(tmp_path / file), prompt, mask)
        assert torch.equal(found, expected), file


@pytest.mark.parametrize(
    "make",
    [
        lambda: decoder(**LAYERS_THAT_DIFFER),
        pytest.param(lambda: attached("mistral", num_hidden_layers=1), marks=pytest.mark.deep),
        pytest.param(lambda: attached("gpt2"), marks=pytest.mark.deep),
    ],
    ids=["layers that differ", "attached, sliding windows", "attached, learned positions"],
)
def test_exported_models_accept_batches_padding_and_single_tokens(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make()
    export_program(model, tmp_path / "model.pt2")
    step, past = read_program(tmp_path / "model.pt2")
    padded = torch.tensor([[0] * 3 + [1] * 5, [1] * 8, [0] + [1] * 7])
    for mask in (padded, torch.ones(1, 1, dtype=torch.int64), torch.ones(4, 2, dtype=torch.int64)):
        prompt = tokens(*mask.shape)
        # A chunk may end inside the padding: a row may begin in the second chunk.
        assert torch.equal(greedy(step, past, prompt, mask, 12), generated(model, prompt, mask, 12))


# ---- errors


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(ValueError, match=r"model must be .* have attached priors, got LlamaForCausalLM"):
        export_program(tiny("llama"), path)
    with pytest.raises(ValueError, match=r"is in training mode; call model.eval\(\)"):
        export_program(decoder().train(), path)
    with pytest.raises(ValueError, match=r"path must end in .onnx, got '.*model.pt2'"):
        export_onnx(decoder(), path)
    with pytest.raises(ValueError, match=r"call model.float\(\)"):
        export_onnx(decoder().bfloat16(), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"grouped_mm.* call model.set_experts_implementation\('batched_mm'\)"):
        export_program(attached("gpt_oss", num_hidden_layers=1), path)
    assert not list(tmp_path.iterdir())


def test_data_dependent_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = decoder()
    mlp: Any = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) if bool(x.sum() > 0) else x
    with pytest.raises(ValueError, match=r"cannot be exported as one graph for all lengths: .*data-dependent"):
        export_program(model, tmp_path / "model.pt2")
    # The graph stores numbers that the model changes.
    numbers = iter(range(9))
    mlp.forward = lambda x: inner(x) * next(numbers)
    with pytest.raises(ValueError, match=r"logits differ by .* nothing was written"):
        export_program(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_dense_masks_are_refused_in_export() -> None:
    model, mask = attached("llama", num_hidden_layers=1), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"LlamaAttention got .* \(1, 1, 5, 5\), which does not say where"):
        torch.export.export(model, (), {"input_ids": tokens(1, 5), "attention_mask": mask, "use_cache": False})


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=r"export_onnx needs onnxruntime: pip install .*\[export\]"):
        export_onnx(decoder(), tmp_path / "model.onnx")
