"""``train``: written files, resumption, and errors."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_cases import LLAMA, InterruptionError, furthest, interrupt
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, GPT2Config, LlamaConfig

from attention_priors._io import read_json, write_json
from attention_priors.hf import attach, load_model
from attention_priors.lab.data.preparation import prepare
from attention_priors.lab.data.shards import ShardError
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.train import Observer, run_recipe
from attention_priors.lab.train.engine import Trained
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.lab.train.run import prepare_data
from attention_priors.models import PriorDecoderForCausalLM
from thoroughness import every_other_deep


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def test_everything_is_written_beside_the_model(finished: Path, tmp_path: Path):
    names = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert names == {"recipe.json", "identity.json", "machine.json", "data", "checkpoints", "model", "training.json"}
    training = read_json(finished / "training.json")
    assert training["steps"] == 12
    assert training["tokens"] == 12 * 96
    assert training["prior_parameters"] == 2 * (2 * 2 + 2)  # as in results of compare: θα, β and s train
    assert [entry["step"] for entry in training["history"]] == list(range(1, 13))
    assert [entry["step"] for entry in training["validation"]] == [5, 10, 12]
    assert training["history"][-1]["loss"] < training["history"][0]["loss"]
    (session,) = read_json(finished / "machine.json")
    assert {"torch", "transformers", "python"} <= set(session["versions"])
    assert not (finished / "model" / "training_args.bin").exists()
    model = load_model(finished / "model")
    assert isinstance(model, PriorDecoderForCausalLM)
    # The model's config keeps the facts of its training, so its card states them after every save.
    model.save_pretrained(tmp_path)
    for folder in (finished / "model", tmp_path):
        lines = (folder / "README.md").read_text().splitlines()
        assert {line for line in lines if line.startswith("- ")} >= {
            "- recipe: Tiny",
            "- steps: 12 of 4 rows a step (96 tokens)",
            "- learning rate: 0.01",
            "- seed: 0",
            "- context length: 24 tokens",
        }


RUNNING = [{"rows_at_a_time": 4}, {"rows_at_a_time": 1}, {"workers": 1, "activation_checkpointing": True}]


@pytest.mark.parametrize("running", every_other_deep(RUNNING, quick=[RUNNING[0], RUNNING[2]]))
def test_running_settings_do_not_change_the_result(finished, make_recipe, tmp_path, running):
    run_recipe(make_recipe(validation={"every": 5, "tokens": 200}, running=running), tmp_path)
    assert furthest(_weights(tmp_path), _weights(finished)) < 1e-5
    one, other = (read_json(output / "training.json")["validation"] for output in (finished, tmp_path))
    assert [entry["loss"] for entry in one] == pytest.approx([entry["loss"] for entry in other], abs=1e-5)


def test_finished_runs_are_unchanged_and_other_recipes_refused(finished, recipe_of, make_recipe):
    before = (finished / "model" / "model.safetensors").stat().st_mtime_ns
    messages: list[str] = []
    recipe = make_recipe(validation={"every": 5, "tokens": 200}, running={"rows_at_a_time": 4}, name="Else")
    run_recipe(recipe, finished, Observer(on_message=messages.append))
    assert messages == [f"{finished / 'model'} exists already"]
    assert (finished / "model" / "model.safetensors").stat().st_mtime_ns == before
    other = make_recipe(validation={"every": 5, "tokens": 200}, training={"learning_rate": 0.02})
    with pytest.raises(RecipeError, match=r"differs in training.learning_rate \(there 0.01, here 0.02\)"):
        run_recipe(other, finished)


def test_interrupted_runs_resume_with_other_running_settings(finished, make_recipe, tmp_path):
    steps: list[int] = []

    def on_step(step: int) -> None:
        steps.append(step)
        if len(steps) == 9:
            raise InterruptionError

    validation = {"every": 5, "tokens": 200}
    with pytest.raises(InterruptionError):
        run_recipe(make_recipe(validation=validation), tmp_path, Observer(on_step=on_step))
    assert not (tmp_path / "model").exists()
    run_recipe(make_recipe(validation=validation, running={"rows_at_a_time": 1}), tmp_path, Observer(on_step=on_step))
    assert steps == [*range(1, 10), *range(9, 13)]
    assert furthest(_weights(tmp_path), _weights(finished)) < 1e-5


def _elsewhere(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("attention_priors.lab.train.run.machine", lambda: {"versions": {}, "processor": machine})


def test_finished_runs_keep_their_machine_and_prepare_nothing(finished, make_recipe, tmp_path, monkeypatch):
    output = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(output / "data")
    _elsewhere(monkeypatch, "a new one")
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    again = run_recipe(make_recipe(validation={"every": 5, "tokens": 200}), output)
    assert again == read_json(finished / "training.json")
    assert before == {path: path.stat().st_mtime_ns for path in output.iterdir()}


def test_every_machine_of_a_run_is_recorded_once(make_recipe, tmp_path, monkeypatch):
    for at, machine in ((2, "one"), (5, "two")):
        _elsewhere(monkeypatch, machine)
        interrupt(make_recipe(), tmp_path, at)
    _elsewhere(monkeypatch, "one")
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
    monkeypatch.setattr("attention_priors.lab.train.trainer._mean_of_sums", lambda prediction: {"loss": math.nan})
    recipe = make_recipe(training={"steps": 2}, validation={"every": 1, "tokens": 200})
    found = run_recipe(recipe, tmp_path)
    assert [entry["loss"] for entry in found["validation"]] == [None, None]
    assert found == read_json(tmp_path / "training.json") == run_recipe(recipe, tmp_path)


def test_other_tokens_in_the_folder_are_another_run(finished, make_recipe, tmp_path):
    shards = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    recipe = make_recipe(data={"shards": str(shards)}, tokenizer=None)
    interrupt(recipe, tmp_path / "run", 5)
    for limit in (None, 2000):
        # Equal tokens are the same run, whenever they were prepared.
        shutil.rmtree(shards)
        prepare(make_recipe(data={"max_tokens": limit}).preparation(), shards)
        manifest = read_json(shards / "manifest.json")
        write_json(shards / "manifest.json", manifest | {"versions": {"tokenizers": "0"}})
        if limit is None:
            interrupt(recipe, tmp_path / "run", 6)
    with pytest.raises(RecipeError, match=r"differs in fingerprints\.data\.shards \(there '[0-9a-f]{64}', here"):
        run_recipe(recipe, tmp_path / "run")


def test_incomplete_tokens_leave_no_files(finished, make_recipe, tmp_path):
    shards = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    manifest = read_json(shards / "manifest.json")
    write_json(shards / "manifest.json", manifest | {"complete": False})
    (tmp_path / "run").mkdir()
    recipe = make_recipe(data={"shards": str(shards)}, tokenizer=None)
    with pytest.raises(ShardError, match="are not all prepared"):
        run_recipe(recipe, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    write_json(shards / "manifest.json", manifest)
    interrupt(recipe, tmp_path / "run", 1)


def test_recipes_refused_after_preparation_leave_no_files(make_recipe, tmp_path):
    with pytest.raises(ValueError, match="expected at least 100000"):
        run_recipe(make_recipe(training={"context_length": 100000, "tokens_per_step": 200000}), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")} == {"data"}
    interrupt(make_recipe(), tmp_path / "run", 1)


def test_foreign_files_beside_a_refused_run_stay(make_recipe, tmp_path, monkeypatch):
    def refused(*arguments: object) -> None:
        (tmp_path / "run" / "thesis.txt").write_text("of another")
        raise ValueError("cannot be read")

    monkeypatch.setattr("attention_priors.lab.train.run.prepare_data", refused)
    with pytest.raises(ValueError, match="cannot be read"):
        run_recipe(make_recipe(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_skipped_files_are_reported(make_recipe, texts, tmp_path):
    folder = Path(shutil.copytree(texts, tmp_path / "texts"))
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    told: list[str] = []
    prepare_data(make_recipe(data={"text": str(folder)}), tmp_path / "run", Observer(on_message=told.append))
    assert told == ["data: left out: latin.txt: it is not UTF-8 (byte 0)"]


@pytest.mark.parametrize(("key", "file"), [("pretrained", "model.safetensors"), ("config", "config.json")])
def test_another_model_in_the_folder_is_another_run(finished, make_recipe, tmp_path, key, file):
    base = Path(shutil.copytree(finished / "model", tmp_path / "base"))
    data = {"shards": str(finished / "data")}
    recipe = make_recipe(model={key: str(base)}, data=data, tokenizer=None, training={"steps": 2})
    run_recipe(recipe, tmp_path / "run")
    # Unread files may change, and files that a finished run has read may be gone.
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
    assert 1e-5 < furthest(weights, _weights(finished)) < 0.2


def test_prepared_tokens_serve_several_recipes(finished, make_recipe, tmp_path):
    left = tmp_path / "model.unfinished" / "adapter_config.json"
    left.parent.mkdir()
    left.write_bytes(b"half")  # of a run that was killed while it saved its model
    recipe = make_recipe(data={"shards": str(finished / "data")}, tokenizer=None)
    run_recipe(recipe, tmp_path)
    assert not (tmp_path / "data").exists()
    assert furthest(_weights(tmp_path), _weights(finished)) == 0
    assert not (tmp_path / "model" / left.name).exists()
    assert not left.parent.exists()


def test_corrupt_shards_end_training_and_are_named(finished, make_recipe, tmp_path):
    folder = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    shard = folder / "train-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    recipe = make_recipe(data={"shards": str(folder)}, tokenizer=None)
    with pytest.raises(ShardError, match=r"train-00000\.tokens\.npy is corrupt.*attention-priors prepare"):
        run_recipe(recipe, tmp_path / "run")


def test_too_small_vocabularies_are_refused(make_recipe, finished, tmp_path):
    model = {"decoder": recipe_decoder(make_recipe) | {"vocab_size": 200}}
    with pytest.raises(ValueError, match="the tokenizer has 300 entries: expected at most 200"):
        run_recipe(make_recipe(model=model), tmp_path)


def recipe_decoder(make_recipe: Callable[..., TrainRecipe]) -> dict[str, Any]:
    decoder = make_recipe().model.decoder
    assert decoder is not None
    return decoder.model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": {}}, "set exactly one of decoder, config and pretrained; got none"),
        ({"model": {"config": "a", "pretrained": "b"}}, "got config and pretrained"),
        ({"model": {"decoder": LLAMA, "attach": {"prior": "laplace"}}}, "attach is not allowed with model.decoder"),
        ({"model": {"decoder": {"hidden_size": 8}}}, "intermediate_size"),
        ({"model": {"config": "a", "train_only": "attached"}}, "train_only needs model.pretrained"),
        ({"tokenizer": None}, "tokenizer is required"),
        ({"data": {"max_tokens": 5}}, "data.max_tokens must be at least one row, training.context_length=24; it is 5"),
        ({"data": {"shards": "x"}}, "tokenizer is required without data.shards and not allowed"),
        ({"running": {"report_to": ["paper"]}}, "'tensorboard' or 'wandb'"),
    ],
)
def test_recipes_with_missing_or_extra_keys_are_refused(make_recipe, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_recipe(**changes)


SHORT_TABLE = {"name": "learned", "max_length": 10}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": {"config": "llama", "attach": {"prior": "generalised"}}}, "model.attach: .*unknown prior 'general"),
        (
            {"model": {"config": "llama", "attach": {"prior": "laplace", "layers": [7]}}},
            "model.attach: layers contains 7",
        ),
        ({"model": {"pretrained": "./nowhere"}}, "model.pretrained: model './nowhere' does not exist as a folder"),
        ({"model": {"config": "./nowhere"}}, "model.config: model './nowhere' does not exist as a folder"),
        ({"model": {"pretrained": "bloom", "attach": {"prior": "laplace"}}}, "model.attach: BloomForCausalLM has no"),
        ({"model": {"pretrained": "attached", "attach": {"prior": "laplace"}}}, "already has attached priors"),
        ({"model": {"pretrained": "llama", "train_only": "attached"}}, "model.train_only: no trainable prior"),
        ({"model": {"pretrained": "bloom"}, "tokenizer": 400}, "the tokenizer has 400 entries: expected at most 300"),
        ({"model": {"config": "gpt2"}}, "has a table of 20 positions"),
        ({"model": {"decoder": LLAMA | {"encoding": SHORT_TABLE}}}, "has a table of 10 positions"),
    ],
)
def test_invalid_models_are_refused_before_any_work(make_recipe, tmp_path, monkeypatch, changes, complaint):
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
        ({"tokenizer": "./nowhere"}, "tokenizer './nowhere' does not exist as a folder"),
        ({"tokenizer": 60_000}, "too few pairs"),
    ],
)
def test_unreadable_data_leave_no_files(make_recipe, tmp_path, monkeypatch, changes, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=complaint):
        run_recipe(make_recipe(**changes), tmp_path / "runs" / "one")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for output in ("one", "mine"):  # which exists
        with pytest.raises((ValueError, OSError), match=complaint):
            run_recipe(make_recipe(**changes), tmp_path / "runs" / output)
        left = [path for path in tmp_path.rglob("*") if path.name != ".lock"]
        assert left == [tmp_path / "runs", tmp_path / "runs" / "mine"]
