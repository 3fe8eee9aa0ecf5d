"""The model under test: loading, and identity."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_folders
import peft
import pytest
import torch
import transformers as hf
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from attention_priors.hf import attach, attached_priors, save_adapter
from attention_priors.lab.inspect.load import load_inspected
from attention_priors.lab.machine import device_named
from attention_priors.lab.tasks import Subject
from attention_priors.lab.tasks.subject import model_fingerprint
from attention_priors.models.encoder import PriorEncoderConfig, PriorEncoderForMaskedLM
from attention_priors.models.vision import PriorVisionConfig, PriorVisionForImageClassification


@pytest.mark.parametrize("kind", model_folders.KINDS)
def test_fingerprints_do_not_depend_on_the_folder(kind: str, folders: dict[str, Path], tmp_path: Path):
    found = Subject.load(folders[kind])
    shutil.copytree(folders[kind], tmp_path / "elsewhere")
    assert Subject.load(tmp_path / "elsewhere").identity() == found.identity()
    assert not found.model.training
    assert (len(attached_priors(found.model)) == 2) == (kind == "attached")


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_fingerprints_change_with_any_weight(kind: str, folders: dict[str, Path]):
    model = Subject.load(folders[kind]).model
    seen = {model_fingerprint(model)}
    parameters = dict(model.named_parameters())
    assert any("prior" in name for name in parameters)
    for parameter in parameters.values():
        with torch.no_grad():
            value = parameter.flatten()[-1].clone()
            parameter.view(-1)[-1] = value + 1e-3
            seen.add(model_fingerprint(model))
            parameter.view(-1)[-1] = value
    assert len(seen) == 1 + len(parameters)
    assert model_fingerprint(model) in seen


def test_models_without_chunked_reading_are_refused(tmp_path: Path):
    """The first GPT of transformers has no cache."""
    config = hf.OpenAIGPTConfig(vocab_size=model_folders.VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    folder = model_folders.save(hf.OpenAIGPTLMHeadModel(config), model_folders.tokenizer(), tmp_path / "gpt")
    with pytest.raises(ValueError, match="expected a causal language model with a KV cache"):
        Subject.load(folder)


_ATTENTION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16
}  # fmt: skip
_OF_TEXT: dict[str, Any] = _ATTENTION | {"vocab_size": model_folders.VOCABULARY}
_T5: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
_ViT = hf.ViTConfig(**_ATTENTION, image_size=8, patch_size=4)
NOT_CAUSAL = {
    "BERT with a head": (lambda: hf.BertForMaskedLM(hf.BertConfig(**_OF_TEXT)), r"an encoder \(bert\)"),
    "BERT": (lambda: hf.BertModel(hf.BertConfig(**_OF_TEXT)), r"an encoder \(bert\)"),
    "our encoder": (
        lambda: PriorEncoderForMaskedLM(PriorEncoderConfig(**_OF_TEXT)),
        r"an encoder \(prior_encoder\); attention-priors inspect supports this model",
    ),
    "T5": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, vocab_size=model_folders.VOCABULARY)),
        r"an encoder-decoder \(t5\); attention-priors inspect supports T5",
    ),
    "ViT": (lambda: hf.ViTForImageClassification(_ViT), r"another kind of model \(vit\)"),
    "our classifier": (
        lambda: PriorVisionForImageClassification(PriorVisionConfig(**_ATTENTION, image_size=8, patch_size=4)),
        r"an image classifier \(prior_vision\); the report of its comparison shows its priors",
    ),
}


@pytest.mark.parametrize(("make", "complaint"), NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_other_kinds_of_models_are_named(make: Callable[[], Any], complaint: str, tmp_path: Path):
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"must be a causal language model, .*; got {complaint}"):
        Subject.load(tmp_path)


# ---- adapters


@pytest.fixture
def base(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "base"))


def _low_rank(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("kind", ["priors", "peft", "both", "priors and a tokenizer"])
def test_adapters_load_with_their_base_model(kind: str, base: Path, tmp_path: Path):
    folder, whole = tmp_path / "adapter", hf.AutoModelForCausalLM.from_pretrained(base)
    plain = _logits(whole)
    if kind != "peft":
        attach(whole, {"name": "laplace"})
        save_adapter(whole, folder)
    if kind in ("peft", "both"):
        torch.manual_seed(0)
        whole = _low_rank(whole)
        whole.save_pretrained(str(folder))
    if "tokenizer" in kind:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        (base / "tokenizer.json").unlink()
        (base / "tokenizer_config.json").unlink()
    subject = Subject.load(folder)
    assert not torch.allclose(_logits(whole), plain, atol=1e-3)
    torch.testing.assert_close(_logits(subject.model), _logits(whole), atol=1e-4, rtol=1e-4)
    assert subject.tokenizer.encode("12") == load_inspected(folder).tokenizer.encode("12")  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(_logits(load_inspected(folder).model), _logits(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base_name", [None, "nowhere/at all/base"])
@pytest.mark.parametrize("load", [Subject.load, load_inspected])
def test_missing_base_models_are_named_with_the_cure(
    load: Callable[[str], Any], base_name: str | None, base: Path, tmp_path: Path
):
    _low_rank(hf.AutoModelForCausalLM.from_pretrained(base)).save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base_name}))
    missing = (
        "names no base model"
        if base_name is None
        else f"base model of the adapter .* cannot be loaded: .*{base_name}' does not exist"
    )
    with pytest.raises((ValueError, OSError), match=missing) as refusal:
        load(str(tmp_path / "adapter"))
    assert "adapter'" in str(refusal.value)
    assert "save both together: model.save_pretrained(OTHER)" in str(refusal.value)


def test_adapters_that_cannot_be_merged_are_named(base: Path, tmp_path: Path):
    config = peft.PromptTuningConfig(task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=2)
    adapted = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"cannot merge the adapter .*adapter' of type .*PROMPT_TUNING into"):
        Subject.load(tmp_path / "adapter")


def test_models_with_non_finite_logits_are_refused(tmp_path: Path):
    model = model_folders.model("llama")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    folder = model_folders.save(model, model_folders.tokenizer(), tmp_path / "nan")
    with pytest.raises(ValueError, match="they differ by nan of their standard deviation"):
        Subject.load(folder)


def test_fingerprints_change_with_the_config(folders: dict[str, Path]):
    model: Any = Subject.load(folders["llama"]).model
    before = model_fingerprint(model)
    model.config.rms_norm_eps *= 2
    assert model_fingerprint(model) != before


def test_identities_change_with_precision_tokenizer_and_end_token(folders: dict[str, Path]):
    subject = Subject.load(folders["llama"])
    before = subject.identity()
    assert before["dtype"] == "float32"
    half = Subject.load(folders["llama"], dtype="bfloat16").identity()
    assert half["dtype"] == "bfloat16"
    assert half["model"] != before["model"]
    assert half["tokenizer"] == before["tokenizer"]
    generation: Any = subject.model.generation_config
    generation.eos_token_id = [0, 5]
    assert subject.ends() == {0, 5}
    assert subject.identity() == before | {"end": [0, 5]}
    other = Subject(subject.name, subject.model, AutoTokenizer.from_pretrained(folders["llama"]))
    backend: Any = other.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_tokens(["irrelevant text"])
    assert other.identity()["tokenizer"] != before["tokenizer"]


def test_a_tokenizers_saved_length_limit_does_not_change_the_identity(folders: dict[str, Path]):
    subject = Subject.load(folders["llama"])
    backend: Any = subject.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.enable_truncation(max_length=7)
    first = subject.identity()
    assert subject.identity() == first


def test_texts_begin_with_the_tokenizers_start_tokens(folders: dict[str, Path]):
    subject = Subject.load(folders["llama"])
    assert subject.beginning().tolist() == []
    before = subject.identity()
    backend: Any = subject.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokens = [("<|endoftext|>", 0)]
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=tokens)
    assert subject.beginning().tolist() == [0]
    assert subject.beginning().dtype == torch.int64
    assert subject.identity()["begin"] == [0] != before["begin"]


@pytest.mark.parametrize("device", ["mps", "meta", "gpu", "cuda:99", ""])
def test_missing_devices_are_refused(device: str, folders: dict[str, Path]):
    with pytest.raises(ValueError, match="device"):
        Subject.load(folders["gpt2"], device=device)


def test_models_with_missing_weights_are_refused(folders: dict[str, Path], tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(folders["llama"], folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        OSError, match=r"broken is not a complete LlamaForCausalLM: no weights for model.layers.1.mlp.up_proj.weight"
    ):
        Subject.load(folder)


def test_tokenizers_larger_than_the_model_are_refused(folders: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "unlike"
    shutil.copytree(folders["llama"], folder)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens(["pass key"])
    words.save_pretrained(folder)
    with pytest.raises(ValueError, match="has 400 tokens, but its tokenizer has 401"):
        Subject.load(folder)


def test_models_without_a_tokenizer_are_refused(folders: dict[str, Path], tmp_path: Path):
    for kind in ("gpt2", "llama"):  # for one of them, transformers creates an empty tokenizer
        folder = tmp_path / kind
        shutil.copytree(folders[kind], folder, ignore=shutil.ignore_patterns("tokenizer*", "special*", "vocab*"))
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 400
        with pytest.raises(OSError, match=r"^tokenizer .* cannot be loaded"):
            Subject.load(folder)


@pytest.mark.parametrize(("there", "name"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_used_if_present(there: bool, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(there))
    assert device_named(None).type == name
    assert device_named("cpu").type == "cpu"
