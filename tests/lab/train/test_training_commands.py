"""``prepare``, ``train`` and ``extend`` as commands."""

import math

import pytest
from training_cases import extend_module
from typer.testing import CliRunner

from attention_priors._io import read_json
from attention_priors.lab.cli import app


def test_commands_prepare_train_and_extend(write_recipe, tmp_path):
    recipe, output = write_recipe(training={"steps": 3}, running={"report_to": ["tensorboard"]}), tmp_path / "run"
    for arguments, said in (
        (["prepare", str(recipe), "--output", str(output / "data")], "Tokens: "),
        (["train", str(recipe), "--output", str(output)], "Model: "),
        (["train", str(recipe), "--output", str(output)], "exists already"),
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


def test_sizes_may_be_quoted(make_recipe):
    assert make_recipe(tokenizer="300").preparation() == make_recipe(tokenizer=300).preparation()
    with pytest.raises(ValueError, match="greater than 256"):
        make_recipe(tokenizer="5")


def test_keys_of_several_types_are_named_once(write_recipe, tmp_path):
    result = CliRunner().invoke(app, ["train", str(write_recipe(tokenizer=5)), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "tokenizer: Input should be greater than 256, got 5" in output
    assert "constrained" not in output
    assert "tokenizer.str" not in output


def test_errors_are_one_message(write_recipe, tmp_path):
    recipe = write_recipe(running={"rows_at_a_time": 3})
    result = CliRunner().invoke(app, ["train", str(recipe), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "error: 4 rows a step (96 tokens) are not a multiple of rows_at_a_time=3 on 1 process" in result.output
    assert not (tmp_path / "run").exists()


def test_diverging_training_is_one_message(write_recipe, tmp_path):
    recipe = write_recipe(training={"learning_rate": 1e30})
    result = CliRunner().invoke(app, ["train", str(recipe), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "try a lower learning_rate" in result.output
