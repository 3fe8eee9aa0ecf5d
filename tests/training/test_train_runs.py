"""``train`` and ``extend``: what they write, how they go on, and which models they take."""

import importlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, GPT2Config, LlamaConfig
from typer.testing import CliRunner

from attention_priors.cli import app
from attention_priors.data.preparation import prepare
from attention_priors.data.shards import ShardError
from attention_priors.files import read_json, write_json
from attention_priors.hub import attach, attached_priors, load_model
from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.strict_yaml import RecipeError
from attention_priors.training import Observer, Trained, TrainRecipe, default_output, extend, run_recipe
from attention_priors.training.packed import check_documents_apart, packed_inputs

# Its function has its name in the package.
extend_module = importlib.import_module("attention_priors.training.extend")


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
    (session,) = read_json(finished / "machine.json")
    assert {"torch", "transformers", "python"} <= set(session["versions"])
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


def _elsewhere(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("attention_priors.training.run.machine", lambda: {"versions": {}, "processor": machine})


def test_a_finished_run_keeps_its_machine_and_prepares_nothing(finished, make_recipe, tmp_path, monkeypatch):
    output = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(output / "data")
    _elsewhere(monkeypatch, "a new one")
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    again = run_recipe(make_recipe(validation={"every": 5, "tokens": 200}), output)
    assert again == read_json(finished / "training.json")
    assert before == {path: path.stat().st_mtime_ns for path in output.iterdir()}


def _interrupt(recipe: TrainRecipe, output: Path, at: int) -> None:
    def on_step(step: int) -> None:
        if step == at:
            raise _StopError

    with pytest.raises(_StopError):
        run_recipe(recipe, output, Observer(on_step=on_step))


def test_every_machine_of_a_run_is_noted_once(make_recipe, tmp_path, monkeypatch):
    for at, machine in ((2, "one"), (5, "two"), (6, "one")):
        _elsewhere(monkeypatch, machine)
        _interrupt(make_recipe(), tmp_path, at)
    run_recipe(make_recipe(), tmp_path)
    assert [session["processor"] for session in read_json(tmp_path / "machine.json")] == ["one", "two"]


def test_the_time_of_a_training_survives_a_failure_to_save_it(make_recipe, tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Trained, "save", full)
        with pytest.raises(OSError, match="No space left"):
            run_recipe(make_recipe(), tmp_path)
    seconds = tmp_path / "train_seconds.json"
    assert read_json(seconds) > 0
    write_json(seconds, 1000.0)
    assert run_recipe(make_recipe(), tmp_path)["train_seconds"] >= 1000
    assert not seconds.exists()


def test_a_validation_loss_that_is_not_finite_is_null(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("attention_priors.training.trainer._mean_of_sums", lambda prediction: {"loss": math.nan})
    recipe = make_recipe(training={"steps": 2}, validation={"every": 1, "tokens": 200})
    found = run_recipe(recipe, tmp_path)
    assert [entry["loss"] for entry in found["validation"]] == [None, None]
    assert found == read_json(tmp_path / "training.json") == run_recipe(recipe, tmp_path)


def test_other_tokens_in_the_same_folder_are_another_run(finished, make_recipe, tmp_path):
    shards = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    recipe = make_recipe(data={"shards": str(shards)}, tokenizer=None)
    _interrupt(recipe, tmp_path / "run", 5)
    for limit in (None, 2000):
        # The same ones are no others, whenever they were prepared.
        shutil.rmtree(shards)
        prepare(make_recipe(data={"max_tokens": limit}).preparation(), shards)
        manifest = read_json(shards / "manifest.json")
        write_json(shards / "manifest.json", manifest | {"versions": {"tokenizers": "0"}})
        if limit is None:
            _interrupt(recipe, tmp_path / "run", 6)
    with pytest.raises(RecipeError, match=r"differs in fingerprints\.data\.shards \(there '[0-9a-f]{64}', here"):
        run_recipe(recipe, tmp_path / "run")


def test_tokens_that_are_not_all_prepared_leave_nothing_in_the_way(finished, make_recipe, tmp_path):
    shards = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    manifest = read_json(shards / "manifest.json")
    write_json(shards / "manifest.json", manifest | {"complete": False})
    (tmp_path / "run").mkdir()
    recipe = make_recipe(data={"shards": str(shards)}, tokenizer=None)
    with pytest.raises(ShardError, match="are not all prepared"):
        run_recipe(recipe, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    write_json(shards / "manifest.json", manifest)
    _interrupt(recipe, tmp_path / "run", 1)


@pytest.mark.parametrize(("key", "file"), [("pretrained", "model.safetensors"), ("config", "config.json")])
def test_another_model_in_the_same_folder_is_another_run(finished, make_recipe, tmp_path, key, file):
    base = Path(shutil.copytree(finished / "model", tmp_path / "base"))
    data = {"shards": str(finished / "data")}
    recipe = make_recipe(model={key: str(base)}, data=data, tokenizer=None, training={"steps": 2})
    run_recipe(recipe, tmp_path / "run")
    # What is not read may change, and what a finished run has read may be gone.
    (base / "README.md").write_text("a word")
    run_recipe(recipe, tmp_path / "run")
    shutil.move(base, tmp_path / "aside")
    run_recipe(recipe, tmp_path / "run")
    shutil.move(tmp_path / "aside", base)
    if file == "config.json":
        write_json(base / file, read_json(base / file) | {"rms_norm_eps": 0.01})
    else:
        save_file({name: tensor + 1 for name, tensor in load_file(base / file).items()}, base / file, {"format": "pt"})
    with pytest.raises(RecipeError, match=rf"differs in fingerprints\.model\.{key} \("):
        run_recipe(recipe, tmp_path / "run")


def test_bfloat16_computes_and_keeps_float32_weights(finished, make_recipe, tmp_path):
    run_recipe(make_recipe(training={"precision": "bfloat16"}), tmp_path)
    weights = _weights(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert 1e-5 < _furthest(weights, _weights(finished)) < 0.2


def test_prepared_tokens_serve_several_recipes(finished, make_recipe, tmp_path):
    recipe = make_recipe(data={"shards": str(finished / "data")}, tokenizer=None)
    run_recipe(recipe, tmp_path)
    assert not (tmp_path / "data").exists()
    assert _furthest(_weights(tmp_path), _weights(finished)) == 0


def test_a_corrupt_shard_ends_the_training_and_is_named(finished, make_recipe, tmp_path):
    folder = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    shard = folder / "train-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    recipe = make_recipe(data={"shards": str(folder)}, tokenizer=None)
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
    data = {"shards": str(finished / "data")}
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
    data = {"shards": str(finished / "data")}
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
    data = {"shards": str(finished / "data")}
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
    data = {"shards": str(finished / "data")}
    run_recipe(make_recipe(data=data, tokenizer=None), tmp_path)
    assert not (tmp_path / "model" / left.name).exists()
    assert not left.parent.exists()


def test_nothing_attached_that_could_learn_alone(make_recipe, finished, tmp_path):
    data = {"shards": str(finished / "data")}
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
        data={"shards": str(finished / "data")},
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
        ({"data": {"shards": "x"}}, "tokenizer must be given, except with data.shards"),
        ({"running": {"report_to": ["paper"]}}, "'tensorboard' or 'wandb'"),
    ],
)
def test_recipes_that_say_too_little_or_too_much_are_refused(make_recipe, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": {"config": "llama", "attach": {"prior": "generalised"}}}, "model.attach: .*unknown prior 'general"),
        ({"model": {"config": "llama", "attach": {"prior": "laplace", "layers": [7]}}}, "model.attach: layers holds 7"),
        ({"model": {"pretrained": "./nowhere"}}, "model.pretrained: model './nowhere': there is no such folder"),
        ({"model": {"config": "./nowhere"}}, "model.config: model './nowhere': there is no such folder"),
        ({"model": {"pretrained": "bloom", "attach": {"prior": "laplace"}}}, "model.attach: BloomForCausalLM has no"),
        ({"model": {"pretrained": "attached", "attach": {"prior": "laplace"}}}, "already; leave model.attach out"),
        ({"model": {"pretrained": "llama", "train_only": "attached"}}, "model.train_only: nothing that learns"),
        ({"model": {"pretrained": "bloom"}, "tokenizer": 400}, "the model's vocabulary has 300 entries, .* 400"),
        ({"model": {"config": "gpt2"}}, "has a table of 20 positions"),
    ],
)
def test_a_model_that_cannot_be_is_found_before_any_work(make_recipe, tmp_path, monkeypatch, changes, complaint):
    monkeypatch.chdir(tmp_path)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, vocab_size=300))
    llama.save_pretrained("llama")
    attach(llama, "laplace").save_pretrained("attached")
    BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)).save_pretrained("bloom")
    GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=20).save_pretrained("gpt2")
    told: list[Any] = []
    observer = Observer(on_tokens=lambda part, tokens: told.append(part), on_message=told.append)
    with pytest.raises((ValueError, OSError), match=complaint):
        run_recipe(make_recipe(**changes), tmp_path / "runs" / "one", observer)
    assert not told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": {"text": "nowhere"}}, "source 'nowhere' does not exist"),
        ({"data": {"shards": "nowhere"}, "tokenizer": None}, "nowhere holds no prepared tokens"),
        (
            {"data": {"text": None, "dataset": {"path": "json", "data_files": "nope*.jsonl"}}},
            r"no file .*'nope\*.jsonl'",
        ),
        ({"tokenizer": "./nowhere"}, "tokenizer './nowhere': there is no such folder"),
        ({"tokenizer": 60_000}, "too few pairs"),
    ],
)
def test_nothing_is_left_of_data_that_cannot_be_read(make_recipe, tmp_path, monkeypatch, changes, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=complaint):
        run_recipe(make_recipe(**changes), tmp_path / "runs" / "one")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises((ValueError, OSError), match=complaint):
        run_recipe(make_recipe(**changes), tmp_path / "runs" / "one")
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "mine"]


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


def test_a_refused_extension_writes_nothing(finished, make_recipe, tmp_path):
    options: dict[str, Any] = {"length": "2x", "steps": 2, "learning_rate": 0.003, "test_tokens": 200}
    _interrupt(make_recipe(), tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        extend(finished, tmp_path, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_the_numbers_are_those_of_the_training_that_is_there(finished, tmp_path, monkeypatch):
    base, output = Path(shutil.copytree(finished / "model", tmp_path / "base" / "model")), tmp_path / "long"
    options: dict[str, Any] = {"length": "48", "steps": 1, "learning_rate": 0.003, "tokens_per_step": 48}
    options |= {"data": finished / "data", "test_tokens": 200}
    of_another = {"model": str(base), "from": None, "to": 48, "steps": 1, "loss": {"before": {}}}
    write_json(output / "extension.json", of_another)
    result = extend(base, output, **options)
    assert result["loss"]["before"].keys() == result["loss"]["after"].keys() == {"48"}
    assert result == read_json(output / "extension.json")
    # They are not measured again, unless on another part of the text.
    with monkeypatch.context() as patch:
        patch.setattr(extend_module, "mean_loss", lambda *arguments: pytest.fail("measured again"))
        assert extend(base, output, **options) == result
    less: dict[str, Any] = options | {"test_tokens": 100}
    assert extend(base, output, **less)["loss"] != result["loss"]
    # And not answered with those of a model that is gone.
    weights = {name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"differs in fingerprints\.model\.pretrained"):
        extend(base, output, **options)


def test_rows_at_a_time_of_an_extension_divide_a_step(finished, tmp_path):
    base = tmp_path / "base"
    for name in ("model", "data"):
        shutil.copytree(finished / name, base / name)
    recipe = read_json(finished / "recipe.json")
    for rows, fitting in ((5, 1), (10, 5)):
        recipe["training"]["tokens_per_step"], recipe["running"]["rows_at_a_time"] = 10 * 24, rows
        write_json(base / "recipe.json", recipe)
        extend(base, tmp_path / str(rows), length="2x", steps=1, test_tokens=100)
        found = read_json(tmp_path / str(rows) / "recipe.json")
        assert found["training"]["tokens_per_step"] == 5 * 48
        assert found["running"]["rows_at_a_time"] == fitting


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length": "24"}, "length must be above the 24 tokens that the model was trained at, got 24"),
        ({"length": "twice"}, "length must be a number of tokens or a multiple such as 2x, got 'twice'"),
        (
            {"length": "100000"},
            "tokens_per_step must be given: the 96 of the model.s own training are no",
        ),
        ({"length": "2x", "tokens_per_step": 50}, "tokens_per_step must be a multiple of the new length, 48; got 50"),
        ({"length": "2x", "learning_rate": -1}, "learning_rate must be a finite number above 0, got -1"),
    ],
)
def test_an_extension_that_cannot_be_is_an_error(finished, tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        extend(finished, tmp_path / "long", steps=2, **options)
    assert not (tmp_path / "long").exists()


def test_what_is_no_model_to_extend(finished, tmp_path):
    options: dict[str, Any] = {"length": "2x", "steps": 2}
    (tmp_path / "begun").mkdir()
    shutil.copy(finished / "recipe.json", tmp_path / "begun" / "recipe.json")
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipe.yaml").touch()
    for given, complaint in (
        ("nowhere", "model: there is no folder .*nowhere"),
        ("recipe.yaml", "recipe.yaml is a file; expected the folder of a saved model"),
        ("begun", "the training in .*begun has not finished, .* attention-priors train goes on with it"),
        ("empty", "empty holds no model, it has no config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=complaint):
            extend(tmp_path / given, tmp_path / "long", **options)
    assert not (tmp_path / "long").exists()


def test_where_an_extension_goes(finished, tmp_path):
    assert default_output(finished, "2x") == finished / "extended-2x"
    assert default_output(finished / "model", "2x") == finished / "extended-2x"
    assert default_output(tmp_path / "llama", "4096") == tmp_path / "llama-extended-4096"


@pytest.mark.parametrize(("scaling", "stated"), [("default", 24), ("dynamic", 20)])
def test_the_config_says_the_length_that_was_trained_at(make_recipe, finished, tmp_path, scaling, stated):
    """And where the number takes part in the rotary positions, it stays."""
    rotary = {"rope_type": scaling, "rope_theta": 10000.0} | ({} if scaling == "default" else {"factor": 2.0})
    config = LlamaConfig(**LLAMA, max_position_embeddings=20, rope_parameters=rotary)
    model = {"config": _hugging_face(tmp_path, config), "attach": {"prior": "generalized_gaussian"}}
    data = {"shards": str(finished / "data")}
    run_recipe(make_recipe(model=model, data=data, tokenizer=None, training={"steps": 2}), tmp_path / "one")
    assert load_model(tmp_path / "one" / "model").config.max_position_embeddings == stated
    if scaling == "default":
        extend(tmp_path / "one", tmp_path / "two", length="2x", steps=2, test_tokens=100)
        assert load_model(tmp_path / "two" / "model").config.max_position_embeddings == 48


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


def test_losses_that_are_not_finite_are_shown(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(extend_module, "mean_loss", lambda *arguments: math.nan)
    arguments = ["extend", str(finished), "--steps", "1", "--output", str(tmp_path / "long")]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "48 tokens: loss nan before, nan after" in result.output
    assert read_json(tmp_path / "long" / "extension.json")["loss"]["after"] == {"24": None, "48": None}


def test_a_size_may_be_written_in_quotes(make_recipe):
    assert make_recipe(tokenizer="300").preparation() == make_recipe(tokenizer=300).preparation()
    with pytest.raises(ValueError, match="greater than 256"):
        make_recipe(tokenizer="5")


def test_a_key_of_several_kinds_goes_by_its_own_name(write_recipe, tmp_path):
    result = CliRunner().invoke(app, ["train", str(write_recipe(tokenizer=5)), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "tokenizer: Input should be greater than 256, got 5" in output
    assert "constrained" not in output
    assert "tokenizer.str" not in output


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
