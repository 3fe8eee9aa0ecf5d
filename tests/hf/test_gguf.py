"""GGUF files of ALiBi decoders, read back and computed as in llama.cpp's ``refact``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from attention_priors.hf import export_gguf
from attention_priors.lab.data import Document, train_tokenizer
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

gguf: Any = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "initializer_range": 0.3,
    "prior": "laplace",
}


def decoder(**changes: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    return PriorDecoderForCausalLM(PriorDecoderConfig(**SIZES | changes)).eval()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: torch.from_numpy(tensor.data.copy()).float() for tensor in reader.tensors}


def logits_of_refact(fields: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Compute llama.cpp's logits: its formulas, with the numbers of the file."""
    of = {name.removeprefix("refact."): value for name, value in fields.items()}
    heads, kv_heads, width = of["attention.head_count"], of["attention.head_count_kv"], of["attention.key_length"]
    power = 2 ** (heads.bit_length() - 1)
    steep, between = 2 ** (-8 / power), 2 ** (-4 / power)
    slopes = [steep ** (h + 1) if h < power else between ** (2 * (h - power) + 1) for h in range(heads)]
    apart = torch.arange(len(ids)).unsqueeze(-1) - torch.arange(len(ids))
    bias = -torch.tensor(slopes).view(-1, 1, 1) * apart.abs()
    bias = bias.masked_fill(apart < 0, float("-inf"))

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], tensors[name], of["attention.layer_norm_rms_epsilon"])

    hidden = tensors["token_embd.weight"][ids]
    for block in range(of["block_count"]):
        weight = {name: tensors[f"blk.{block}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        x = norm(hidden, f"blk.{block}.attn_norm.weight")
        query, key, value = (
            (x @ weight[f"attn_{name}"].T).unflatten(-1, (number, width)).transpose(0, 1)
            for name, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        key, value = (part.repeat_interleave(heads // kv_heads, 0) for part in (key, value))
        weights = (query @ key.mT / width**0.5 + bias).softmax(-1)
        hidden = hidden + (weights @ value).transpose(0, 1).flatten(1) @ weight["attn_output"].T
        x = norm(hidden, f"blk.{block}.ffn_norm.weight")
        gate, up, down = (tensors[f"blk.{block}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (silu(x @ gate.T) * (x @ up.T)) @ down.T
    last = tensors.get("output.weight", tensors["token_embd.weight"])
    return norm(hidden, "output_norm.weight") @ last.T


@pytest.mark.parametrize(
    "changes",
    [{}, {"share_prior": True, "tie_word_embeddings": False, "head_dim": 16}, {"dtype": torch.bfloat16}],
    ids=["tied", "shared, untied, wide heads", "bfloat16"],
)
@torch.no_grad()
def test_files_hold_the_model(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = dict(changes)
    model = decoder(**{name: value for name, value in changes.items() if name != "dtype"})
    model.to(changes.get("dtype", torch.float32))
    export_gguf(model, tmp_path / "model.gguf", context_length=99)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    fields, tensors = read(tmp_path / "model.gguf")
    assert (fields["general.architecture"], fields["refact.context_length"]) == ("refact", 99)
    assert (fields["tokenizer.ggml.model"], fields["refact.vocab_size"]) == ("none", 300)
    ids = torch.randint(300, (20,), generator=torch.Generator().manual_seed(0))
    found = logits_of_refact(fields, tensors, ids)
    torch.testing.assert_close(found, model.float()(ids.unsqueeze(0)).logits[0], rtol=1e-4, atol=1e-4)


def test_files_hold_the_tokenizer(tmp_path: Path) -> None:
    text = Path(__file__).read_text()
    tokenizer = train_tokenizer([Document("this", text)], vocab_size=300)
    export_gguf(decoder(), tmp_path / "model.gguf", tokenizer)
    fields, _ = read(tmp_path / "model.gguf")
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "refact")
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(list(range(300)))
    end = tokenizer.eos_token_id
    assert [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3] == [end]
    assert fields["tokenizer.ggml.eos_token_id"] == end
    # A merge joins two tokens.
    joined = [merge.replace(" ", "") for merge in fields["tokenizer.ggml.merges"]]
    assert len(joined) == 300 - 257
    assert set(joined) <= set(fields["tokenizer.ggml.tokens"])
    with pytest.raises(ValueError, match="tokenizer has 300 tokens, but the model has 400"):
        export_gguf(decoder(vocab_size=400), tmp_path / "other.gguf", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prior": "generalized_gaussian"}, "its prior is 'generalized_gaussian'"),
        ({"prior": None}, "its prior is None"),
        ({"prior": ["laplace", {"name": "window", "size": 4}]}, "its prior is "),
        ({"prior": {"name": "laplace", "slopes": [1.0] * 6}}, "its slopes are not ALiBi's"),
        ({"logit_scale": "ssmax", "encoding": "rotary"}, "it has encoding and logit_scale"),
        ({"layer_pattern": ["a", "b"], "layer_kinds": {"a": {}, "b": {"null_logit": "null_key"}}}, "it has null_logit"),
    ],
)
def test_models_that_llama_cpp_cannot_compute_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"layer [01] cannot be exported to GGUF: {reason}.* export_onnx supports"):
        export_gguf(decoder(**changes), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
