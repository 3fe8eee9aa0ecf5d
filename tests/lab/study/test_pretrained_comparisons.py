"""Comparisons whose schemes start from a checkpoint of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_cases import RECIPE, carry_out, of_kind, write_texts
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from attention_priors import GeneralizedGaussian
from attention_priors.hf import attached_priors, load_model
from attention_priors.lab.data import load_corpus
from attention_priors.lab.data.tokenizer import load_tokenizer
from attention_priors.lab.results import read_rows
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study import Recipe
from attention_priors.lab.study.compare import load_study
from attention_priors.lab.study.runs import run_folder

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 200}
PRIOR = {"name": "generalized_gaussian", "init": "neighbours", "keep_sign": True}
SCHEMES: dict[str, Any] = {
    "as it is": {"training": {"steps": 0}},
    "YaRN, untrained": {"rope_parameters": YARN, "training": {"steps": 0}},
    "YaRN": {"rope_parameters": YARN},
    "prior in layer 1": {
        "attach": {"prior": PRIOR, "logit_scale": "residual_ssmax", "layers": [1], "drop_positions": True}
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a small Llama with random weights and its tokenizer; return the folders of a text and of the model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    texts = write_texts(folder / "texts")
    tokenizer = load_tokenizer(300, load_corpus(texts), folder / "cache")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 200}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2, num_attention_heads=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return texts, folder / "model"


def recipe(checkpoint: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    texts, model = checkpoint
    content = {key: value for key, value in RECIPE.items() if key not in ("model", "tokenizer")}
    content |= {"corpus": {"source": str(texts)}, "pretrained": str(model), "schemes": SCHEMES}
    content["training"] = RECIPE["training"] | {"steps": 3, "precision": "bfloat16"}
    content["evaluation"] = RECIPE["evaluation"] | {"dtype": "bfloat16"}
    return content | changes


@pytest.fixture(scope="module")
def finished(checkpoint: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    carry_out(Recipe.model_validate(recipe(checkpoint)), output)
    return output


def trained(output: Path, scheme: str) -> Any:
    return load_model(run_folder(output, scheme, 3) / "model")


def test_untrained_schemes_keep_the_weights(checkpoint: tuple[Path, Path], finished: Path) -> None:
    before: dict[str, Any] = AutoModelForCausalLM.from_pretrained(checkpoint[1]).state_dict()
    for scheme in ("as it is", "YaRN, untrained"):
        after = trained(finished, scheme).state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(trained(finished, "YaRN").lm_head.weight, before["lm_head.weight"])


def test_rotary_settings_and_priors_are_saved_with_the_model(finished: Path) -> None:
    for scheme in ("YaRN, untrained", "YaRN"):
        config = trained(finished, scheme).config
        assert config.rope_parameters["factor"] == 2.0
        assert config.max_position_embeddings == 400
    assert trained(finished, "as it is").config.rope_parameters["rope_type"] == "default"
    priors = attached_priors(trained(finished, "prior in layer 1"))
    assert [*priors] == [1]
    prior = priors[1].prior
    assert isinstance(prior, GeneralizedGaussian)
    assert not torch.equal(prior.theta_beta, GeneralizedGaussian(4, "neighbours", keep_sign=True).theta_beta)


def test_rows_describe_the_changes(finished: Path) -> None:
    rows = read_rows(finished)
    described = {row["scheme"]: row["description"] for row in of_kind(rows, "scheme")}
    assert described["as it is"] == "training(steps=0)"
    assert described["YaRN"].startswith("rope_parameters(rope_type='yarn', factor=2.0")
    assert described["prior in layer 1"] == (
        "generalized_gaussian(init='neighbours', keep_sign=True) · residual_ssmax · "
        "attach(layers=[1], drop_positions=True)"
    )
    assert {row["layer"] for row in of_kind(rows, "prior")} == {1}
    # As in the checkpoint's config. YaRN doubles the length in the config of its own models.
    assert {row["pretrained_length"] for row in of_kind(rows, "scheme")} == {200}
    steps = {row["scheme"]: row["steps"] for row in of_kind(rows, "run")}
    assert steps == {"as it is": 0, "YaRN, untrained": 0, "YaRN": 3, "prior in layer 1": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": RECIPE["model"]}, "set exactly one of model and pretrained; got model and pretrained"),
        ({"schemes": {"a": {"prior": "laplace"}}}, "schemes.a: prior cannot be set, because pretrained is set"),
        ({"schemes": {"a": {"evaluation": {"tolerance": 0.1}}}}, "tolerance and sink_mass need new decoders"),
    ],
)
def test_impossible_recipes_are_refused(checkpoint: tuple[Path, Path], changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(recipe(checkpoint, **changes))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarm"}}, "unknown rope_type 'yarm'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: .*factor"),
        ({"attach": {"prior": "laplace", "layers": [7]}}, "layers contains 7"),
        ({"attach": {"prior": "lapalce"}}, "schemes.a: .*lapalce"),
    ],
)
def test_impossible_models_are_refused_before_any_work(
    checkpoint: tuple[Path, Path], tmp_path: Path, scheme: Any, message: str
) -> None:
    made = Recipe.model_validate(recipe(checkpoint, schemes={"a": scheme}))
    with pytest.raises(RecipeError, match=message):
        load_study(made, tmp_path).check()


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"attach": {"prior": "laplace"}}, "schemes.a: attach cannot be set, because pretrained is not set"),
        ({"training": {"steps": 0}}, "0 steps need pretrained"),
    ],
)
def test_new_decoders_have_no_checkpoint_to_change(scheme: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(RECIPE | {"schemes": {"a": scheme}})
