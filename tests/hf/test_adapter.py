"""Attached modules are saved and loaded, as an adapter and with the model."""

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tiny_models import FAMILIES, tiny, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from attention_priors import GeneralizedGaussian, Laplace, SSMax
from attention_priors.config import FORMAT
from attention_priors.hf import (
    attach,
    attached_priors,
    detach,
    load_adapter,
    load_attached,
    load_model,
    push_adapter_to_hub,
    save_adapter,
)
from attention_priors.hf.adapter import DESCRIPTION, WEIGHTS
from attention_priors.models.card import CARD
from attention_priors.priors import CATALOGUE
from processes import run_command

IDS = tokens(2, 20)
KINDS: dict[str, dict[str, Any]] = {
    "described": {"prior": {"name": "generalized_gaussian", "init": "spread", "learn": True}},
    "sum, scaled": {"prior": [{"name": "laplace", "learn": True}, {"name": "key_sink", "train_length": 9}]}
    | {"logit_scale": "residual_ssmax"},
    "sum with a bare name": {"prior": ["generalized_gaussian", {"name": "laplace", "learn": True}]},
    "made": {"prior": GeneralizedGaussian(4, init="spread", learn="beta"), "logit_scale": SSMax(4, init=0.4)},
    "some layers and heads": {"prior": {"name": "relative_buckets", "num_buckets": 8}, "layers": [1], "heads": [2, 0]},
    "shared": {"prior": "relative_buckets", "share_prior": True},
    "without positions": {"prior": "generalized_gaussian", "drop_positions": True},
    "layers of two kinds": {
        "layer_pattern": ["near", "far"],
        "layer_kinds": {
            "near": {"prior": {"name": "window", "size": 5}, "logit_scale": "residual_ssmax"},
            "far": {"prior": {"name": "generalized_gaussian", "learn": True}},
        },
    },
}


def changed(family: str, kind: str) -> Any:
    """Return a model whose attached modules have learned."""
    model = attach(tiny(family), **KINDS[kind])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for part in attached_priors(model).values():
            for parameter in part.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def attached_tensors(model: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "attached_prior" in name}


def learns(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_survive_saving(family: str, kind: str, tmp_path: Path) -> None:
    model = changed(family, kind)
    save_adapter(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {DESCRIPTION, WEIGHTS, CARD}
    loaded = load_adapter(tiny(family), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert learns(loaded) == learns(model)
    assert loaded.config.to_dict() == model.config.to_dict()
    assert attached_tensors(loaded).keys() == attached_tensors(model).keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_models_survive_saving_with_attached_modules(
    family: str, shard: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = changed(family, "sum, scaled")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert ("model.safetensors" in {path.name for path in tmp_path.iterdir()}) == (shard == "5GB")
    loaded = load_attached(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))
    assert learns(loaded) == learns(model)
    detach(loaded)
    assert torch.equal(logits(loaded), logits(detach(model)))


def test_models_load_from_a_subfolder(tmp_path: Path) -> None:
    model = changed("llama", "described")
    model.save_pretrained(tmp_path / "inner")
    assert torch.equal(logits(load_attached(tmp_path, subfolder="inner")), logits(model))
    with pytest.raises(ValueError, match="does not support output_loading_info"):
        load_attached(tmp_path / "inner", output_loading_info=True)


@pytest.mark.parametrize("kind", KINDS)
def test_all_model_kinds_survive_saving(kind: str, tmp_path: Path) -> None:
    model = changed("llama", kind)
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert attached_tensors(loaded).keys() == attached_tensors(model).keys()


def test_half_precision_models_keep_float32_priors(tmp_path: Path) -> None:
    model = changed("llama", "sum, scaled").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.bfloat16}, {"dtype": torch.float32}):
        loaded = load_attached(tmp_path, **options)
        found = attached_tensors(loaded)
        for name, tensor in attached_tensors(model).items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], tensor)
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(load_adapter(tiny("llama").to(torch.bfloat16), tmp_path / "adapter")), logits(model))


def test_from_pretrained_alone_loads_the_plain_model(tmp_path: Path) -> None:
    """``from_pretrained`` alone leaves the priors out."""
    model = changed("llama", "described")
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not attached_priors(plain)
    assert torch.equal(logits(plain), logits(detach(model)))
    # The saved config describes the attached modules, so they can be attached again.
    with pytest.raises(ValueError, match="nothing to attach"):
        attach(plain)


@pytest.mark.deep
def test_a_new_process_generates_equal_tokens(tmp_path: Path) -> None:
    model = changed("llama", "sum, scaled")
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options)
    code = (
        "import json, sys\n"
        "import torch\n"
        "from attention_priors.hf import load_attached\n"
        "model = load_attached(sys.argv[1])\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        f"print(json.dumps(model.generate(ids, **{options!r}).tolist()))\n"
    )
    found = run_command([sys.executable, "-c", code, tmp_path, json.dumps(IDS.tolist())])
    assert json.loads(found.stdout.splitlines()[-1]) == expected.tolist()


def test_adapters_can_be_pushed_to_the_hub(tmp_path: Path) -> None:
    model = changed("llama", "described")
    seen: dict[str, Any] = {}

    class Api:
        def __init__(self, **options: Any) -> None:
            seen["options"] = options

        def create_repo(self, repo_id: str, **options: Any) -> None:
            seen["repo"] = repo_id, options

        def file_exists(self, repo_id: str, name: str) -> bool:
            return False

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
            assert repo_id == seen["repo"][0]
            for path in Path(folder_path).iterdir():
                (tmp_path / path.name).write_bytes(path.read_bytes())
            return "https://hub/commit"

    with mock.patch("attention_priors.hf.adapter.HfApi", Api):
        assert push_adapter_to_hub(model, "me/priors", private=True, token="t") == "https://hub/commit"
    assert seen == {"options": {"token": "t"}, "repo": ("me/priors", {"private": True, "exist_ok": True})}
    with mock.patch("attention_priors.hf.adapter.snapshot_download", return_value=str(tmp_path)) as download:
        loaded = load_adapter(tiny("llama"), "me/priors", revision="main")
    assert download.call_args.kwargs == {"allow_patterns": [DESCRIPTION, WEIGHTS], "revision": "main"}
    assert torch.equal(logits(loaded), logits(model))


# ---- errors


def test_models_without_attached_modules_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="no attached priors"):
        save_adapter(model, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no attached priors"):
        push_adapter_to_hub(model, "me/priors")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'attached_priors'"):
        load_attached(tmp_path)
    with pytest.raises(FileNotFoundError, match=DESCRIPTION):
        load_adapter(model, tmp_path)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    save_adapter(changed("llama", "described"), tmp_path)
    for other in (
        tiny("llama", num_hidden_layers=1),
        tiny("llama", num_hidden_layers=3),
        tiny("llama", num_attention_heads=2),
    ):
        with pytest.raises(
            ValueError, match=r"for a base model with 2 layers; this LlamaForCausalLM has|has shape|num_heads"
        ):
            load_adapter(other, tmp_path)
        assert not attached_priors(other), "half attached"
        assert logits(other).shape == (2, 20, 64)


def test_adapters_of_another_model_type_are_refused(tmp_path: Path) -> None:
    save_adapter(changed("llama", "described"), tmp_path)
    other = tiny("gpt2")
    with pytest.raises(ValueError, match=r"a base model of type 'llama' \(LlamaForCausalLM\), not 'gpt2' \(GPT2LMHead"):
        load_adapter(other, tmp_path)
    assert not attached_priors(other), "half attached"
    assert len(attached_priors(load_adapter(tiny("llama").model, tmp_path))) == 2, "the model without its head"


MISSING = {"adapter": lambda name: load_adapter(tiny("llama"), name), "model": load_attached}


@pytest.mark.parametrize("what", MISSING)
@pytest.mark.parametrize("missing", ["./nowhere", "/nowhere", "a/b/c", "nowhere/"])
def test_missing_local_paths_cause_no_download(what: str, missing: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{what} '{missing}' does not exist as a folder"):
        MISSING[what](missing)


@pytest.mark.parametrize("what", MISSING)
def test_files_in_place_of_folders_are_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"must be a folder .*, got a file"):
        MISSING[what](tmp_path / "model.safetensors")


@pytest.mark.parametrize("error", [HFValidationError("Repo id must"), LocalEntryNotFoundError("not cached")])
def test_failed_downloads_are_explained(error: Exception) -> None:
    with (
        mock.patch("attention_priors.hf.adapter.snapshot_download", side_effect=error),
        pytest.raises(OSError, match="adapter 'nowhere' does not exist as a folder and cannot be downloaded"),
    ):
        load_adapter(tiny("llama"), "nowhere")


@pytest.mark.parametrize(("load", "inside"), [(load_attached, ""), (load_attached, "inner"), (load_model, "")])
@pytest.mark.parametrize(
    ("file", "kept", "complaint"),
    [
        ("model.safetensors", 0.5, "model.safetensors is not a valid safetensors file"),
        ("model.safetensors", 0, "model.safetensors is not a valid safetensors file"),
        ("model.safetensors.index.json", 0.5, "model.safetensors.index.json is not valid JSON"),
        ("config.json", 0.5, "config.json"),
        ("config.json", None, "config.json"),
    ],
)
def test_damaged_models_are_refused(
    load: Any, inside: str, file: str, kept: float | None, complaint: str, tmp_path: Path
) -> None:
    folder = tmp_path / inside
    changed("llama", "described").save_pretrained(folder, max_shard_size="20KB" if "index" in file else "1GB")
    path = folder / file
    whole = path.read_bytes()
    path.unlink() if kept is None else path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises((ValueError, OSError), match=complaint):
        load(tmp_path, **({"subfolder": inside} if inside else {}))


def test_damaged_configs_are_refused(tmp_path: Path) -> None:
    changed("llama", "described").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(content | {"attached_priors": {"format": FORMAT, "prior": "laplace"}})
    )
    with pytest.raises(ValueError, match=f"the config of {tmp_path}: the description of attached priors must hold"):
        load_attached(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "another format",
        "missing tensor",
        "no description",
        "half a description",
        "a list",
        "null",
        "empty",
    ],
)
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    save_adapter(changed("llama", "described"), tmp_path)
    weights, description = tmp_path / WEIGHTS, json.loads((tmp_path / DESCRIPTION).read_text())
    match = {
        "truncated": "not a valid safetensors file",
        "another format": "format 99",
        "missing tensor": "does not match the attached priors",
        "no description": DESCRIPTION,
        "half a description": f"{DESCRIPTION} is not valid JSON",
        "a list": f"{DESCRIPTION} has format None",
        "null": f"{DESCRIPTION} has format None",
        "empty": f"{DESCRIPTION}: the description of attached priors must hold",
    }[damage]
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif damage == "another format":
        (tmp_path / DESCRIPTION).write_text(json.dumps(description | {"format": 99}))
    elif damage == "missing tensor":
        save_adapter(attach(tiny("llama"), logit_scale="ssmax"), tmp_path / "other")
        weights.write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    elif damage in ("half a description", "a list", "null", "empty"):
        whole = json.dumps(description)
        texts = {
            "half a description": whole[: len(whole) // 2],
            "a list": "[]",
            "null": "null",
            "empty": json.dumps({"format": FORMAT}),
        }
        (tmp_path / DESCRIPTION).write_text(texts[damage])
    else:
        (tmp_path / DESCRIPTION).unlink()
    model = tiny("llama")
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        load_adapter(model, tmp_path)
    assert not attached_priors(model), "half attached"


class Steep(Laplace):
    """Prior outside the catalogue."""

    name = "steep"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, slopes=[2.0] * num_heads)


@pytest.mark.parametrize("heads", [None, [0, 3]])
@pytest.mark.parametrize("summed", [False, True])
def test_a_prior_outside_the_catalogue_is_not_saved(
    heads: list[int] | None, summed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 4 if heads is None else 2
    prior = Steep(number) + GeneralizedGaussian(number) if summed else Steep(number)
    match = r"cannot save the prior Steep: .*there is no 'steep'\. .*register it with attention_priors\.register_prior"
    with pytest.warns(UserWarning, match=match):
        model: Any = attach(tiny("llama"), prior, heads=heads)
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match=match):
            found.save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match=match):
            save_adapter(found, tmp_path / "adapter")
        with pytest.raises(ValueError, match=match):
            push_adapter_to_hub(found, "me/priors")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(CATALOGUE.registered, "steep", Steep)
    model.save_pretrained(tmp_path / "model")
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(load_attached(tmp_path / "model")), logits(model))
    assert torch.equal(logits(load_adapter(tiny("llama"), tmp_path / "adapter")), logits(model))
    monkeypatch.delitem(CATALOGUE.registered, "steep")
    detach(model).save_pretrained(tmp_path / "plain")
