"""``extend``: written files, resumption, and errors."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from training_cases import extend_module, interrupt

from attention_priors._io import read_json, write_json
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.train import default_output, extend


def test_models_are_extended_and_losses_written(finished, tmp_path):
    result = extend(finished, tmp_path / "long", length="2x", steps=8, learning_rate=0.003)
    assert (result["from"], result["to"], result["steps"]) == (24, 48, 8)
    assert result["loss"]["before"].keys() == result["loss"]["after"].keys() == {"24", "48"}
    assert all(result["loss"]["after"][size] < result["loss"]["before"][size] for size in ("24", "48"))
    assert result == read_json(tmp_path / "long" / "extension.json")
    trained = read_json(tmp_path / "long" / "recipe.json")
    assert trained["training"]["context_length"] == 48
    assert trained["training"]["tokens_per_step"] == 96  # unchanged
    again = extend(finished / "model", tmp_path / "long", length="48", steps=8, learning_rate=0.003)
    assert again == result


def test_refused_extensions_write_nothing(finished, make_recipe, tmp_path):
    options: dict[str, Any] = {"length": "2x", "steps": 2, "learning_rate": 0.003, "test_tokens": 200}
    interrupt(make_recipe(), tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        extend(finished, tmp_path, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_losses_belong_to_the_present_training(finished, tmp_path, monkeypatch):
    base, output = Path(shutil.copytree(finished / "model", tmp_path / "base" / "model")), tmp_path / "long"
    options: dict[str, Any] = {"length": "48", "steps": 1, "learning_rate": 0.003, "tokens_per_step": 48}
    options |= {"data": finished / "data", "test_tokens": 200}
    of_another = {"model": str(base), "from": None, "to": 48, "steps": 1, "loss": {"before": {}}}
    write_json(output / "extension.json", of_another)
    result = extend(base, output, **options)
    assert result["loss"]["before"].keys() == result["loss"]["after"].keys() == {"48"}
    assert result == read_json(output / "extension.json")
    # Losses are not measured again, except on another part of the text.
    with monkeypatch.context() as patch:
        patch.setattr(extend_module, "mean_loss", lambda *arguments: pytest.fail("measured again"))
        assert extend(base, output, **options) == result
    less: dict[str, Any] = options | {"test_tokens": 100}
    assert extend(base, output, **less)["loss"] != result["loss"]
    # Losses of a replaced model are not returned.
    weights = {name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"differs in fingerprints\.model\.pretrained"):
        extend(base, output, **options)


def test_rows_at_a_time_must_divide_a_step(finished, tmp_path):
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
        ({"length": "24"}, "length must be above the model's training length, 24 tokens; got 24"),
        ({"length": "twice"}, "length must be a number of tokens or a multiple such as 2x, got 'twice'"),
        (
            {"length": "100000"},
            "tokens_per_step is missing: 96 tokens, the value of the model's training, are not",
        ),
        ({"length": "2x", "tokens_per_step": 50}, "tokens_per_step must be a multiple of the new length, 48; got 50"),
        ({"length": "9600", "tokens_per_step": 9600}, "held-out tokens: expected at least one row of 9600 tokens"),
        ({"length": "2x", "learning_rate": -1}, "learning_rate must be a finite number above 0, got -1"),
    ],
)
def test_invalid_extensions_are_refused(finished, tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        extend(finished, tmp_path / "long", steps=2, **options)
    assert not (tmp_path / "long").exists()


def test_models_may_be_moved_or_given_by_another_path(finished, tmp_path, monkeypatch):
    options: dict[str, Any] = {"length": "2x", "steps": 2, "learning_rate": 0.003, "test_tokens": 200}
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    first = extend(run, run / "long", **options)
    monkeypatch.chdir(tmp_path)
    assert extend(Path("run"), Path("run/long"), **options) == first
    run.rename(tmp_path / "renamed")
    assert extend(Path("renamed"), Path("renamed/long"), **options) == first


def test_the_current_folder_may_be_the_model(finished, tmp_path, monkeypatch):
    options: dict[str, Any] = {"length": "2x", "steps": 2, "test_tokens": 200}
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    first = extend(run, tmp_path / "long", **options)
    monkeypatch.chdir(run / "model")
    assert extend(Path("."), tmp_path / "long", **options) == first


def test_other_folders_are_refused(finished, tmp_path):
    options: dict[str, Any] = {"length": "2x", "steps": 2}
    (tmp_path / "begun").mkdir()
    shutil.copy(finished / "recipe.json", tmp_path / "begun" / "recipe.json")
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipe.yaml").touch()
    for given, complaint in (
        ("nowhere", "model: folder .*nowhere does not exist"),
        ("recipe.yaml", "recipe.yaml is a file; expected the folder of a saved model"),
        ("begun", "the training in .*begun has not finished: .* run attention-priors train again"),
        ("empty", "empty holds no model: it has no config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=complaint):
            extend(tmp_path / given, tmp_path / "long", **options)
    assert not (tmp_path / "long").exists()


def test_recipes_beside_a_model_import_no_plugins(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    write_json(run / "recipe.json", read_json(run / "recipe.json") | {"plugins": ["no_such_module"]})
    with pytest.raises(ValueError, match="length must be above the model's training length, 24 tokens"):
        extend(run, tmp_path / "long", length="12", steps=2)


def test_extensions_have_default_output_folders(finished, tmp_path):
    assert default_output(finished, "2x") == finished / "extended-2x"
    assert default_output(finished / "model", "2x") == finished / "extended-2x"
    assert default_output(tmp_path / "llama", "4096") == tmp_path / "llama-extended-4096"


def test_a_model_of_unknown_training_needs_data_and_rate(finished, tmp_path):
    loose = tmp_path / "loose" / "model"
    loose.parent.mkdir()
    loose.symlink_to(finished / "model")
    with pytest.raises(ValueError, match=r"data is missing: no recipe\.json beside .* names the training data"):
        extend(loose, tmp_path / "long", length="48", steps=2)
    with pytest.raises(ValueError, match="learning_rate is missing"):
        extend(loose, tmp_path / "long", length="48", steps=2, data=finished / "data")
    options: dict[str, Any] = {"steps": 2, "data": finished / "data", "learning_rate": 1e-3}
    with pytest.raises(ValueError, match="length='2x': the model's training length is unknown"):
        extend(loose, tmp_path / "long", length="2x", **options)
    result = extend(loose, tmp_path / "long", length="48", tokens_per_step=96, **options)
    assert result["loss"]["after"].keys() == {"48"}
