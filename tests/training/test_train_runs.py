"""``train`` and ``extend``: what they write, how they go on, and which models they take."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from typer.testing import CliRunner

from attention_priors.cli import app
from attention_priors.data.shards import ShardError
from attention_priors.files import read_json
from attention_priors.hub import attach, attached_priors, load_model
from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.strict_yaml import RecipeError
from attention_priors.training import Observer, TrainRecipe, extend, run_recipe
from attention_priors.training.packed import check_documents_apart, packed_inputs


class _StopError(Exception):
    pass


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def _furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def finished(recipe_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "tiny"
    run_recipe(TrainRecipe.model_validate(recipe_of(validation={"every": 5, "tokens": 200})), output)
    return output


def test_everything_is_written_beside_the_model(finished: Path):
    names = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert names == {"recipe.json", "identity.json", "machine.json", "data", "checkpoints", "model", "training.json"}
    training = read_json(finished / "training.json")
    assert training["steps"] == 12
    assert training["tokens"] == 12 * 96
    assert training["prior_parameters"] == 3 * 2 * 2
    assert training["logit_scale_parameters"] == 2 * 2
    assert [entry["step"] for entry in training["history"]] == list(range(1, 13))
    assert [entry["step"] for entry in training["validation"]] == [5, 10, 12]
    assert training["history"][-1]["loss"] < training["history"][0]["loss"]
    assert {"torch", "transformers", "python"} <= set(read_json(finished / "machine.json")["versions"])
    assert not (finished / "model" / "training_args.bin").exists()
    assert isinstance(load_model(finished / "model"), PriorDecoderForCausalLM)


@pytest.mark.parametrize(
    "running",
    [{"rows_at_a_time": 4}, {"rows_at_a_time": 1}, {"workers": 1, "activation_checkpointing": True}],
    ids=["at once", "one by one", "with a worker and activations recomputed"],
)
def test_how_it_runs_does_not_change_what_comes_out(finished, make_recipe, tmp_path, running):
    run_recipe(make_recipe(running=running), tmp_path)
    assert _furthest(_weights(tmp_path), _weights(finished)) < 1e-5


def test_the_validation_loss_does_not_depend_on_the_batches(finished, make_recipe, tmp_path):
    run_recipe(make_recipe(validation={"every": 5, "tokens": 200}, running={"rows_at_a_time": 4}), tmp_path)
    one, other = (read_json(output / "training.json")["validation"] for output in (finished, tmp_path))
    assert [entry["loss"] for entry in one] == pytest.approx([entry["loss"] for entry in other], abs=1e-5)


def test_a_finished_run_is_left_alone_and_another_recipe_is_refused(finished, recipe_of, make_recipe):
    before = (finished / "model" / "model.safetensors").stat().st_mtime_ns
    messages: list[str] = []
    recipe = make_recipe(validation={"every": 5, "tokens": 200}, running={"rows_at_a_time": 4}, name="Else")
    run_recipe(recipe, finished, Observer(on_message=messages.append))
    assert messages == [f"{finished / 'model'} is there already"]
    assert (finished / "model" / "model.safetensors").stat().st_mtime_ns == before
    other = make_recipe(validation={"every": 5, "tokens": 200}, training={"learning_rate": 0.02})
    with pytest.raises(RecipeError, match=r"differs in training.learning_rate \(there 0.01, here 0.02\)"):
        run_recipe(other, finished)


def test_an_interrupted_run_goes_on_on_other_machinery(finished, make_recipe, tmp_path):
    steps: list[int] = []

    def on_step(step: int) -> None:
        steps.append(step)
        if len(steps) == 9:
            raise _StopError

    validation = {"every": 5, "tokens": 200}
    with pytest.raises(_StopError):
        run_recipe(make_recipe(validation=validation), tmp_path, Observer(on_step=on_step))
    assert not (tmp_path / "model").exists()
    run_recipe(make_recipe(validation=validation, running={"rows_at_a_time": 1}), tmp_path, Observer(on_step=on_step))
    assert steps == [*range(1, 10), *range(9, 13)]
    assert _furthest(_weights(tmp_path), _weights(finished)) < 1e-5


def test_bfloat16_computes_and_keeps_float32_weights(finished, make_recipe, tmp_path):
    run_recipe(make_recipe(training={"precision": "bfloat16"}), tmp_path)
    weights = _weights(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert 1e-5 < _furthest(weights, _weights(finished)) < 0.2


def test_prepared_tokens_serve_several_recipes(finished, make_recipe, tmp_path):
    recipe = make_recipe(data={"text": None, "shards": str(finished / "data")}, tokenizer=None)
    run_recipe(recipe, tmp_path)
    assert not (tmp_path / "data").exists()
    assert _furthest(_weights(tmp_path), _weights(finished)) == 0


def test_a_corrupt_shard_ends_the_training_and_is_named(finished, make_recipe, tmp_path):
    folder = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    shard = folder / "train-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    recipe = make_recipe(data={"text": None, "shards": str(folder)}, tokenizer=None)
    with pytest.raises(ShardError, match=r"train-00000\.tokens\.npy is corrupt.*attention-priors prepare"):
        run_recipe(recipe, tmp_path / "run")


# ---- other models


def _hugging_face(tmp_path: Path, config: Any) -> str:
    folder = tmp_path / "architecture"
    config.save_pretrained(folder)
    return str(folder)


LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_a_hugging_face_architecture_is_trained_and_then_its_weights_further(make_recipe, finished, tmp_path):
    data = {"text": None, "shards": str(finished / "data")}
    name = _hugging_face(tmp_path, LlamaConfig(**LLAMA))
    first = run_recipe(make_recipe(model={"config": name}, data=data, tokenizer=None), tmp_path / "one")
    assert first["prior_parameters"] == 0
    assert first["history"][-1]["loss"] < first["history"][0]["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    recipe = make_recipe(model={"pretrained": str(tmp_path / "one" / "model")}, data=data, tokenizer=None)
    further = run_recipe(recipe, tmp_path / "two")
    assert further["history"][0]["loss"] < first["history"][3]["loss"]


def test_attached_priors_are_trained_and_go_on_with_the_model(make_recipe, finished, tmp_path):
    data = {"text": None, "shards": str(finished / "data")}
    name = _hugging_face(tmp_path, LlamaConfig(**LLAMA))
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


def test_a_model_that_was_frozen_stays_frozen_in_its_extension(make_recipe, finished, tmp_path):
    data = {"text": None, "shards": str(finished / "data")}
    name = _hugging_face(tmp_path, LlamaConfig(**LLAMA))
    model = {"config": name, "attach": {"prior": "generalized_gaussian", "freeze_model": True}}
    run_recipe(make_recipe(model=model, data=data, tokenizer=None), tmp_path / "one")
    for before, after in (("one", "two"), ("two", "three")):
        extend(tmp_path / before, tmp_path / after, length="2x", steps=2, learning_rate=0.1, test_tokens=200)
        old, new = (load_model(tmp_path / folder / "model").state_dict() for folder in (before, after))
        changed = {name for name, tensor in old.items() if not torch.equal(tensor, new[name])}
        assert changed
        assert all("attached_prior" in name for name in changed)


def test_what_a_killed_run_was_saving_is_no_part_of_the_model(make_recipe, finished, tmp_path):
    left = tmp_path / "model.unfinished" / "adapter_config.json"
    left.parent.mkdir()
    left.write_bytes(b"half")
    data = {"text": None, "shards": str(finished / "data")}
    run_recipe(make_recipe(data=data, tokenizer=None), tmp_path)
    assert not (tmp_path / "model" / left.name).exists()
    assert not left.parent.exists()


def test_nothing_attached_that_could_learn_alone(make_recipe, finished, tmp_path):
    data = {"text": None, "shards": str(finished / "data")}
    model = {"pretrained": str(finished / "model"), "train_only": "attached"}
    with pytest.raises(ValueError, match=r"model\.train_only: nothing that learns is attached"):
        run_recipe(make_recipe(model=model, data=data, tokenizer=None), tmp_path / "one")


def test_packed_documents_of_a_hugging_face_model_are_apart():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=20, initializer_range=0.5, **LLAMA)).eval()
    check_documents_apart(model)
    ids = torch.randint(20, (1, 9))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    with torch.no_grad():
        packed = model(**packed_inputs(model, ids, documents)).logits
        apart = torch.cat([model(part).logits for part in ids.split([4, 3, 2], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)


class _Leaky(torch.nn.Module):
    """Takes positions and does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids).cumsum(1)
        return type("Output", (), {"logits": hidden})


def test_a_model_that_mixes_packed_documents_is_refused():
    with pytest.raises(ValueError, match=r"_Leaky .* lets a packed document see the one before it"):
        check_documents_apart(_Leaky())


def test_a_model_without_positions_to_tell_is_refused():
    with pytest.raises(ValueError, match="Embedding takes neither document_ids nor position_ids"):
        check_documents_apart(torch.nn.Embedding(20, 4))


def test_a_table_of_positions_that_is_too_short_is_an_error(make_recipe, finished, tmp_path):
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=20)
    recipe = make_recipe(
        model={"config": _hugging_face(tmp_path, config)},
        data={"text": None, "shards": str(finished / "data")},
        tokenizer=None,
    )
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has a table of 20 positions; .* rows of 24 tokens"):
        run_recipe(recipe, tmp_path / "run")


def test_a_vocabulary_that_is_too_small_is_an_error(make_recipe, finished, tmp_path):
    model = {"decoder": recipe_decoder(make_recipe) | {"vocab_size": 200}}
    with pytest.raises(ValueError, match="the model's vocabulary has 200 entries, the tokenizer's 300"):
        run_recipe(make_recipe(model=model), tmp_path)


def recipe_decoder(make_recipe: Callable[..., TrainRecipe]) -> dict[str, Any]:
    decoder = make_recipe().model.decoder
    assert decoder is not None
    return decoder.model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": {}}, "give one of decoder, config and pretrained, got none"),
        ({"model": {"config": "a", "pretrained": "b"}}, "got config and pretrained"),
        ({"model": {"decoder": LLAMA, "attach": {"prior": "laplace"}}}, "attach is for models of other makes"),
        ({"model": {"decoder": {"hidden_size": 8}}}, "intermediate_size"),
        ({"model": {"config": "a", "train_only": "attached"}}, "train_only is for a trained model"),
        ({"tokenizer": None}, "tokenizer must be given"),
        ({"data": {"shards": "x", "text": None}}, "tokenizer must be given, except with data.shards"),
        ({"running": {"report_to": ["paper"]}}, "'tensorboard' or 'wandb'"),
    ],
)
def test_recipes_that_say_too_little_or_too_much_are_refused(make_recipe, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_recipe(**changes)


# ---- extension


def test_a_model_is_extended_and_the_losses_written(finished, tmp_path):
    result = extend(finished, tmp_path / "long", length="2x", steps=8, learning_rate=0.003)
    assert (result["from"], result["to"], result["steps"]) == (24, 48, 8)
    assert result["loss"]["before"].keys() == result["loss"]["after"].keys() == {"24", "48"}
    assert all(result["loss"]["after"][size] < result["loss"]["before"][size] for size in ("24", "48"))
    assert result == read_json(tmp_path / "long" / "extension.json")
    trained = read_json(tmp_path / "long" / "recipe.json")
    assert trained["training"]["context_length"] == 48
    assert trained["training"]["tokens_per_step"] == 96  # as before
    again = extend(finished / "model", tmp_path / "long", length="48", steps=8, learning_rate=0.003)
    assert again == result


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length": "24"}, "length must be above the 24 tokens that the model was trained at, got 24"),
        ({"length": "twice"}, "length must be a number of tokens or a multiple such as 2x, got 'twice'"),
        ({"length": "100000"}, "tokens_per_step=96 must be a multiple of context_length=100000"),
    ],
)
def test_an_extension_that_cannot_be_is_an_error(finished, tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        extend(finished, tmp_path / "long", steps=2, **options)
    assert not (tmp_path / "long").exists()


def test_a_model_of_unknown_training_needs_data_and_rate(finished, tmp_path):
    loose = tmp_path / "loose" / "model"
    loose.parent.mkdir()
    loose.symlink_to(finished / "model")
    with pytest.raises(ValueError, match=r"data must be given: .* has no recipe\.json beside it"):
        extend(loose, tmp_path / "long", length="48", steps=2)
    with pytest.raises(ValueError, match="learning_rate must be given"):
        extend(loose, tmp_path / "long", length="48", steps=2, data=finished / "data")
    options: dict[str, Any] = {"steps": 2, "data": finished / "data", "learning_rate": 1e-3}
    with pytest.raises(ValueError, match="length='2x': what the model was trained at is not known"):
        extend(loose, tmp_path / "long", length="2x", **options)
    result = extend(loose, tmp_path / "long", length="48", tokens_per_step=96, **options)
    assert result["loss"]["after"].keys() == {"48"}


# ---- the command


def test_the_commands_prepare_train_and_extend(write_recipe, tmp_path):
    recipe, output = write_recipe(training={"steps": 3}, running={"report_to": ["tensorboard"]}), tmp_path / "run"
    for arguments, said in (
        (["prepare", str(recipe), "--output", str(output / "data")], "Tokens: "),
        (["train", str(recipe), "--output", str(output)], "Model: "),
        (["train", str(recipe), "--output", str(output)], "is there already"),
        (["extend", str(output), "--steps", "2"], "tokens: loss "),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert said in result.output
    assert (output / "extended-2x" / "model" / "model.safetensors").exists()
    assert list((output / "tensorboard").glob("events.*"))


def test_a_mistake_is_one_message(write_recipe, tmp_path):
    recipe = write_recipe(running={"rows_at_a_time": 3})
    result = CliRunner().invoke(app, ["train", str(recipe), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "error: 4 rows a step (96 tokens) are no multiple of rows_at_a_time=3 on 1 process" in result.output
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverges_is_one_message(write_recipe, tmp_path):
    recipe = write_recipe(training={"learning_rate": 1e30})
    result = CliRunner().invoke(app, ["train", str(recipe), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "try a lower learning_rate" in result.output
