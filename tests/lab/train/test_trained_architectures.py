"""``train`` on models of transformers: architectures, weights, attached priors."""

import pytest
import torch
from training_cases import LLAMA, saved_architecture
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from attention_priors.hf import attach, attached_priors, load_model
from attention_priors.lab.train import extend, run_recipe


def test_hugging_face_architectures_and_weights_are_trained(make_recipe, finished, tmp_path):
    data = {"shards": str(finished / "data")}
    name = saved_architecture(LlamaConfig(**LLAMA), tmp_path)
    first = run_recipe(make_recipe(model={"config": name}, data=data, tokenizer=None), tmp_path / "one")
    assert first["prior_parameters"] == 0
    assert first["history"][-1]["loss"] < first["history"][0]["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    recipe = make_recipe(model={"pretrained": str(tmp_path / "one" / "model")}, data=data, tokenizer=None)
    further = run_recipe(recipe, tmp_path / "two")
    assert further["history"][0]["loss"] < first["history"][3]["loss"]


def test_attached_priors_are_trained_and_saved_with_the_model(make_recipe, finished, tmp_path):
    data = {"shards": str(finished / "data")}
    name = saved_architecture(LlamaConfig(**LLAMA), tmp_path)
    attached = {"prior": {"name": "generalized_gaussian", "init": "spread"}, "logit_scale": "residual_ssmax"}
    model = {"config": name, "attach": attached | {"drop_positions": True}}
    first = run_recipe(make_recipe(model=model, data=data, tokenizer=None), tmp_path / "one")
    assert first["prior_parameters"] == 2 * 2 * 3  # per layer and head: beta, alpha and s
    loaded = load_model(tmp_path / "one" / "model")
    made = attach(AutoModelForCausalLM.from_config(loaded.config), **attached)
    for index, part in attached_priors(loaded).items():
        before = attached_priors(made)[index].state_dict()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in part.state_dict().items())
    longer = extend(tmp_path / "one", tmp_path / "longer", length="2x", steps=2, test_tokens=200)
    assert set(longer["loss"]["before"]) == set(longer["loss"]["after"])
    assert len(attached_priors(load_model(tmp_path / "longer" / "model"))) == 2


def test_frozen_models_stay_frozen_in_extensions(make_recipe, finished, tmp_path):
    data = {"shards": str(finished / "data")}
    name = saved_architecture(LlamaConfig(**LLAMA), tmp_path)
    model = {"config": name, "attach": {"prior": "generalized_gaussian", "freeze_model": True}}
    run_recipe(make_recipe(model=model, data=data, tokenizer=None), tmp_path / "one")
    for before, after in (("one", "two"), ("two", "three")):
        extend(tmp_path / before, tmp_path / after, length="2x", steps=2, learning_rate=0.1, test_tokens=200)
        old, new = (load_model(tmp_path / folder / "model").state_dict() for folder in (before, after))
        changed = {name for name, tensor in old.items() if not torch.equal(tensor, new[name])}
        assert changed
        assert all("attached_prior" in name for name in changed)


def test_frozen_models_need_trainable_attached_parts(make_recipe, finished, tmp_path):
    data = {"shards": str(finished / "data")}
    model = {"pretrained": str(finished / "model"), "train_only": "attached"}
    with pytest.raises(ValueError, match=r"model\.train_only: no trainable prior or logit scale is attached"):
        run_recipe(make_recipe(model=model, data=data, tokenizer=None), tmp_path / "one")


def test_too_short_position_tables_are_refused(make_recipe, finished, tmp_path):
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=20)
    recipe = make_recipe(
        model={"config": saved_architecture(config, tmp_path)},
        data={"shards": str(finished / "data")},
        tokenizer=None,
    )
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel has a table of 20 positions and cannot read rows of 24 tokens"
    ):
        run_recipe(recipe, tmp_path / "run")


@pytest.mark.parametrize(("scaling", "stated"), [("default", 24), ("dynamic", 20)])
def test_configs_state_the_training_length(make_recipe, finished, tmp_path, scaling, stated):
    """If rotary positions depend on the number, it stays."""
    rotary = {"rope_type": scaling, "rope_theta": 10000.0} | ({} if scaling == "default" else {"factor": 2.0})
    config = LlamaConfig(**LLAMA, max_position_embeddings=20, rope_parameters=rotary)
    model = {"config": saved_architecture(config, tmp_path), "attach": {"prior": "generalized_gaussian"}}
    data = {"shards": str(finished / "data")}
    run_recipe(make_recipe(model=model, data=data, tokenizer=None, training={"steps": 2}), tmp_path / "one")
    assert load_model(tmp_path / "one" / "model").config.max_position_embeddings == stated
    if scaling == "default":
        extend(tmp_path / "one", tmp_path / "two", length="2x", steps=2, test_tokens=100)
        assert load_model(tmp_path / "two" / "model").config.max_position_embeddings == 48
