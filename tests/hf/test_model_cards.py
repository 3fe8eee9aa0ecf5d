"""Model cards beside saved models and adapters."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import ModelCard
from tiny_models import tiny, tokens

from attention_priors.hf import attach, detach, push_adapter_to_hub, save_adapter
from attention_priors.models import (
    PriorDecoderConfig,
    PriorDecoderForCausalLM,
    PriorEncoderConfig,
    PriorEncoderForMaskedLM,
    PriorVisionConfig,
    PriorVisionForImageClassification,
)
from attention_priors.models.card import CARD, name_on_hub

IDS = tokens(2, 20)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
}


def decoder(**config: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    return PriorDecoderForCausalLM(PriorDecoderConfig(**(SIZES | config))).eval()


def card_of(folder: Path) -> str:
    return (folder / CARD).read_text()


def table(folder: Path) -> list[str]:
    return [line for line in card_of(folder).splitlines() if line.startswith("|")]


def loaded(folder: Path, **names: Path) -> Any:
    """Run the card's code and return its model."""
    code = card_of(folder).split("```python\n")[1].split("```")[0]
    for name, path in names.items():
        assert name in code
        code = code.replace(name, str(path))
    assert len([line for line in code.splitlines() if line]) <= 3
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["model"].eval()


@torch.no_grad()
def assert_same_outputs(one: Any, other: Any) -> None:
    torch.testing.assert_close(one(IDS).logits, other(IDS).logits)


def test_a_decoder_has_a_card(tmp_path: Path) -> None:
    model = decoder(
        layer_pattern=["near", "near", "far"],
        layer_kinds={
            "near": {"prior": {"name": "window", "size": 5}, "encoding": "rotary"},
            "far": {"prior": ["laplace", {"name": "key_sink", "train_length": 9}], "logit_scale": "ssmax"},
        },
    )
    model.save_pretrained(tmp_path)
    assert table(tmp_path) == [
        "| layers | prior | encoding | logit scale |",
        "|---|---|---|---|",
        "| 0 to 1 | `window(size=5)` | `rotary` | none |",
        "| 2 | `laplace` + `key_sink(train_length=9)` | none | `ssmax` |",
        "| 3 to 4 | `window(size=5)` | `rotary` | none |",
    ]
    data = {"library_name": "attention-priors", "tags": ["attention-priors"]}
    assert ModelCard.load(tmp_path / CARD).data.to_dict() == data
    assert "## Training" not in card_of(tmp_path)
    assert_same_outputs(loaded(tmp_path, THIS_MODEL=tmp_path), model)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (PriorEncoderForMaskedLM, PriorEncoderConfig(**SIZES, prior="laplace", share_prior=True)),
        (
            PriorVisionForImageClassification,
            PriorVisionConfig(
                **{name: size for name, size in SIZES.items() if name != "vocab_size"},
                image_size=8,
                patch_size=4,
                prior={"name": "axial", "rows": "laplace"},
                share_prior=True,
            ),
        ),
    ],
)
def test_other_models_have_a_card(kind: Any, config: Any, tmp_path: Path) -> None:
    kind(config).save_pretrained(tmp_path)
    assert table(tmp_path)[2].startswith("| 0 to 4 | `laplace" if config.prior == "laplace" else "| 0 to 4 | `axial(")
    assert "All layers share one prior." in card_of(tmp_path)
    assert type(loaded(tmp_path, THIS_MODEL=tmp_path)) is kind


def test_the_card_of_a_model_without_a_prior_says_so(tmp_path: Path) -> None:
    decoder().save_pretrained(tmp_path)
    assert table(tmp_path) == ["| layers | prior |", "|---|---|", "| 0 to 4 | none |"]


def test_a_model_with_attached_priors_has_a_card(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config._name_or_path = "someone/llama"
    attach(model, "generalized_gaussian", logit_scale="residual_ssmax", layers=[1], heads=[0, 2], drop_positions=True)
    model.save_pretrained(tmp_path)
    assert table(tmp_path) == [
        "| layers | prior | logit scale | own positions dropped |",
        "|---|---|---|---|",
        "| 1 | `generalized_gaussian` | `residual_ssmax` | yes |",
    ]
    assert "Only the heads 0, 2 of these layers have priors." in card_of(tmp_path)
    assert ModelCard.load(tmp_path / CARD).data.to_dict()["base_model"] == "someone/llama"
    assert_same_outputs(loaded(tmp_path, THIS_MODEL=tmp_path), model)


def test_a_model_without_attached_priors_has_no_card(tmp_path: Path) -> None:
    detach(attach(tiny("llama"), "laplace")).save_pretrained(tmp_path)
    assert not (tmp_path / CARD).exists()


def test_an_adapter_has_a_card(tmp_path: Path) -> None:
    model, adapter, base = tiny("gpt2"), tmp_path / "adapter", tmp_path / "base"
    model.save_pretrained(base)
    attach(model, "relative_buckets", share_prior=True)
    save_adapter(model, adapter)
    assert table(adapter) == ["| layers | prior |", "|---|---|", "| 0 to 1 | `relative_buckets` |"]
    assert "These layers share one prior." in card_of(adapter)
    assert_same_outputs(loaded(adapter, BASE_MODEL=base, THIS_ADAPTER=adapter), model)
    model.config._name_or_path = str(base)
    save_adapter(model, adapter)
    assert str(base) not in card_of(adapter), "a path of this machine"
    model.config._name_or_path = "someone/gpt2"
    save_adapter(model, adapter)
    assert 'from_pretrained("someone/gpt2")' in card_of(adapter)
    assert "Base model: `someone/gpt2`." in card_of(adapter)


def test_hub_names_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_on_hub("someone/gpt2") == "someone/gpt2"
    (tmp_path / "someone/gpt2").mkdir(parents=True)
    for name in ("someone/gpt2", "", "/someone/gpt2", "a/b/c"):
        assert name_on_hub(name) is None


@pytest.mark.parametrize("attached", [False, True])
def test_a_card_is_replaced_until_a_person_edits_it(attached: bool, tmp_path: Path) -> None:
    def save(prior: str) -> str:
        model = attach(tiny("llama"), prior) if attached else decoder(prior=prior)
        model.save_pretrained(tmp_path)
        return card_of(tmp_path)

    assert "`laplace`" in save("laplace")
    ours = save("kerple")
    assert "`kerple`" in ours
    assert "`laplace`" not in ours
    edited = ours.replace("## Load", "## How to load")
    for theirs in (edited, "My own card", "", ours + "One more line\n"):
        (tmp_path / CARD).write_text(theirs)
        assert save("laplace") == theirs


def test_other_processes_write_no_card(tmp_path: Path) -> None:
    decoder().save_pretrained(tmp_path, is_main_process=False)
    attach(tiny("llama"), "laplace").save_pretrained(tmp_path, False)
    assert not (tmp_path / CARD).exists()


@pytest.mark.parametrize("theirs", [None, "My own card"])
def test_an_upload_keeps_the_card_of_the_repository(theirs: str | None, tmp_path: Path) -> None:
    uploaded: dict[str, str] = {}

    class Api:
        def create_repo(self, repo_id: str, **options: Any) -> None:
            pass

        def file_exists(self, repo_id: str, name: str) -> bool:
            return theirs is not None

        def hf_hub_download(self, repo_id: str, name: str, local_dir: str) -> None:
            assert theirs is not None
            (Path(local_dir) / name).write_text(theirs)

        def upload_folder(self, *, folder_path: str, **options: Any) -> str:
            uploaded[CARD] = card_of(Path(folder_path))
            return "https://hub/commit"

    with mock.patch("attention_priors.hf.adapter.HfApi", Api):
        push_adapter_to_hub(attach(tiny("llama"), "laplace"), "me/priors")
    assert uploaded[CARD].startswith(theirs or "---\n")
