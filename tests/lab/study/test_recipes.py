import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_cases import RECIPE, changed, decoder_recipe
from transformers import LlamaConfig

from attention_priors.lab.strict_yaml import read_yaml
from attention_priors.lab.study import Recipe, RecipeError
from attention_priors.lab.train.recipe import check_model
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

TRAINING_KEYS = "optimizer, learning_rate, betas, epsilon, weight_decay, gradient_clip, warmup_steps"
PRIORS = (
    "uniform, laplace, generalized_gaussian, kerple, fire, spectral, key_sink, "
    "relative_buckets, clipped_offsets, window"
)


def _write(folder: Path, content: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def test_recipes_are_read_with_defaults(tmp_path):
    recipe = decoder_recipe(_write(tmp_path, RECIPE))
    assert list(recipe.schemes) == ["ALiBi", "BAM + SSMax"]
    assert recipe.training.optimizer == "radam"
    assert recipe.training_of("ALiBi").steps == 120
    own = recipe.training_of("BAM + SSMax")
    assert (own.steps, own.passkey_ratio, own.context_length) == (3, 0.5, 150)
    assert recipe.longest_text == 170 + 5


def test_a_recipe_survives_json(tmp_path):
    recipe = decoder_recipe(_write(tmp_path, RECIPE))
    assert Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json")))) == recipe


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"evaluation": {}}, 150),
        ({"schemes.BAM + SSMax.training": {"context_length": 400}}, 400),
        ({"evaluation.perplexity.length": 300}, 300),
        ({"evaluation.passkey.lengths": [20, 900]}, 905),
        ({"evaluation.plans": {"far": {"tasks": ["perplexity", "passkey"], "lengths": [900]}}}, 908),
        ({"evaluation.plans": {"far": {"tasks": ["genome_completion"], "lengths": [900]}}}, 1099),
    ],
)
def test_the_longest_text_covers_all_evaluations(tmp_path, changes, longest):
    assert decoder_recipe(_write(tmp_path, changed(changes))).longest_text == longest


def test_plans_default_to_the_recipes_corpus(tmp_path: Path):
    plans = {
        "here": {"tasks": ["passkey"], "lengths": [64]},
        "there": {"tasks": ["passkey"], "lengths": [64], "corpus": "embedded"},
    }
    own = {"plans": {"here": {"lengths": [32]}, "there": {"trials": 2}, "besides": plans["here"]}}
    changes = {"corpus": {"source": "texts"}, "evaluation.plans": plans, "schemes.ALiBi.evaluation": own}
    recipe = decoder_recipe(_write(tmp_path, changed(changes)))
    recipe = Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json"))))
    for scheme, expected in (
        ("BAM + SSMax", {"here": "texts", "there": "embedded"}),
        ("ALiBi", {"here": "texts", "there": "embedded", "besides": "texts"}),
    ):
        found = recipe.plans_of(scheme)
        assert {name: plan.corpus for name, plan in found if name is not None} == expected
        assert [(plan.tasks[0], plan.corpus, plan.seeding) for name, plan in found if name is None] == [
            ("passkey_corpus", "texts", "mixed"),
            ("perplexity", "texts", "hashed"),
        ]
    embedded = decoder_recipe(_write(tmp_path, changed({"corpus": {}, "evaluation.plans": plans})))
    assert {plan.corpus for _, plan in embedded.plans_of("ALiBi")} == {"embedded"}


RECIPES = Path(__file__).parents[3] / "recipes"
COMPARISONS = [RECIPES / "demo.yaml", *sorted((RECIPES / "results").glob("*.yaml"))]


@cache  # many schemes have equal models: trials of learning rates, and baselines of several recipes
def number_of_layers(described: str) -> int:
    """Return the number of layers of the model of a config in JSON."""
    with torch.device("meta"):
        return len(PriorDecoderForCausalLM(PriorDecoderConfig(**json.loads(described))).model.layers)


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_committed_recipes_build_models(path: Path, tmp_path: Path):
    recipe = decoder_recipe(path)
    if recipe.pretrained is not None:
        # The config of SmolLM2-135M, but for sizes.
        sizes: dict[str, Any] = {"hidden_size": 18, "intermediate_size": 8, "vocab_size": 100}
        sizes |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        LlamaConfig(**sizes, max_position_embeddings=8192).save_pretrained(tmp_path)
        recipe = recipe.model_copy(update={"pretrained": str(tmp_path)})
        for name in recipe.schemes:
            model = check_model(recipe.start_of(name), length=recipe.training_of(name).context_length)
            assert len(model.model.layers) == 30
        return
    for name in recipe.schemes:
        described = recipe.config_of(name, vocab_size=100).to_json_string()
        assert number_of_layers(described) == recipe.model_of(name).num_hidden_layers


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": (
        {"shemes": 1},
        [
            "shemes: unknown key (value 1); allowed here are plugins, name, description, corpus, pretrained, "
            "tokenizer, model, training, evaluation, seeds, threads_per_run, processes, schemes"
        ],
    ),
    "string for a number in a prior": (
        {"schemes.ALiBi.prior": {"name": "laplace", "slopes": 5}},
        ["schemes.ALiBi: slopes must be numbers such as [0.5, 0.25], got 5"],
    ),
    "a number with a unit": (
        {"schemes.ALiBi.encoding": {"name": "rotary", "base": "10k"}},
        ["schemes.ALiBi: base must be a finite number above 1, got '10k'"],
    ),
    "infinite learning rate": ({"training.learning_rate": float("inf")}, ["training.learning_rate", "finite number"]),
    "impossible betas": ({"training.betas": [0.9, 1.0]}, ["training.betas.1", "less than 1"]),
    "seed beyond 32 bits": ({"seeds": [2**32]}, ["seeds.0", "less than 4294967296"]),
    "lengths out of order": ({"evaluation.passkey.lengths": [160, 150]}, ["lengths must rise, got [160, 150]"]),
    "unknown key of the corpus": (
        {"corpus.size": 5},
        ["corpus.size: unknown key (value 5); allowed here are source, max_characters"],
    ),
    "unknown key of the model": (
        {"model.layers": 5},
        ["model.layers: unknown key (value 5); allowed here are hidden_size, intermediate_size, num_hidden_layers"],
    ),
    "unknown key of the training": (
        {"training.lr": 0.1},
        [f"training.lr: unknown key (value 0.1); allowed here are {TRAINING_KEYS}"],
    ),
    "unknown key of the evaluation": (
        {"evaluation.passkeys": {}},
        [
            "evaluation.passkeys: unknown key (value {}); allowed here are passkey, perplexity, copying, sink_mass, "
            "plans, chunk"
        ],
    ),
    "unknown key of the passkey test": (
        {"evaluation.passkey.depth": 3},
        ["evaluation.passkey.depth: unknown key (value 3); allowed here are lengths, depths, trials, filler"],
    ),
    "unknown key of the perplexity test": (
        {"evaluation.perplexity.texts": 3},
        ["evaluation.perplexity.texts: unknown key (value 3); allowed here are length, documents"],
    ),
    "unknown key of a scheme": (
        {"schemes.ALiBi.priors": "laplace"},
        [
            "schemes.ALiBi.priors: unknown key (value 'laplace'); allowed here are prior, share_prior, encoding"
            ", logit_scale, null_logit, key_bias, layer_pattern, layer_kinds, extends, attach, rope_parameters, model, "
            "training, evaluation, "
            "extensions, axes"
        ],
    ),
    "unknown key of a scheme's training": (
        {"schemes.ALiBi.training.step": 3},
        ["schemes.ALiBi.training: step: unknown key (value 3)", f"allowed here are {TRAINING_KEYS}"],
    ),
    "an overlap of no decoys": (
        {"training.passkey_decoy_overlap": 0.5},
        ["training: passkey_decoy_overlap=0.5 is a share of passkey_decoys, which is 0"],
    ),
    "unknown key of a plan": (
        {"evaluation.plans": {"far": {"tasks": ["passkey"], "lengths": [128], "trial": 2}}},
        ["evaluation.plans.far.trial: unknown key (value 2); allowed here are tasks, lengths, depths, trials"],
    ),
    "unknown key of a scheme's plan": (
        {"schemes.ALiBi.evaluation": {"plans": {"far": {"tasks": ["passkey"], "lengths": [128], "trial": 2}}}},
        ["schemes.ALiBi.evaluation: plans.far.trial: unknown key (value 2); allowed here are tasks, lengths"],
    ),
    "unknown prior": (
        {"schemes.ALiBi.prior": "alibi"},
        [f"schemes.ALiBi: unknown prior 'alibi'; expected one of {PRIORS}"],
    ),
    "unknown prior in a sum": (
        {"schemes.ALiBi.prior": [{"name": "laplace"}, {"name": "cauchy"}]},
        ["schemes.ALiBi: unknown prior 'cauchy'; expected one of"],
    ),
    "unknown encoding": (
        {"schemes.ALiBi.encoding": "rope"},
        ["schemes.ALiBi: unknown encoding 'rope'; expected one of sinusoidal, learned, rotary, shaw, linear"],
    ),
    "unknown logit scale": (
        {"schemes.ALiBi.logit_scale": "max"},
        ["schemes.ALiBi: unknown logit scale 'max'; expected one of ssmax"],
    ),
    "unknown argument of a prior": (
        {"schemes.ALiBi.prior": {"name": "laplace", "slope": 1}},
        ["schemes.ALiBi: prior 'laplace' has no argument 'slope'; expected one of num_heads, slopes, learn"],
    ),
    "missing argument of a prior": (
        {"schemes.ALiBi.prior": "window"},
        ["schemes.ALiBi: prior 'window' needs the argument 'size'"],
    ),
    "impossible argument of a prior": (
        {"schemes.ALiBi.prior": {"name": "generalized_gaussian", "init": "zeros"}},
        ["schemes.ALiBi: init must be one of uniform, laplace", "got 'zeros'"],
    ),
    "a prior without a name": (
        {"schemes.ALiBi.prior": {"init": "uniform"}},
        ["schemes.ALiBi: the description of a prior needs a name, one of uniform, laplace"],
    ),
    "negative steps": ({"training.steps": -4}, ["training.steps:", "greater than 0, got -4"]),
    "no batch": ({"training.batch_size": 0}, ["training.batch_size:", "greater than 0, got 0"]),
    "a context of one token": (
        {"training.context_length": 1},
        ["training.context_length:", "greater than 1, got 1"],
    ),
    "too large a ratio": (
        {"training.passkey_ratio": 2},
        ["training.passkey_ratio:", "less than or equal to 1, got 2"],
    ),
    "ratios that sum to more than one": (
        {"training.needle_ratio": 0.6, "training.needle_tasks": ["niah_single_1"]},
        ["training: passkey_ratio and needle_ratio must sum to at most 1, got 0.5 and 0.6"],
    ),
    "ratios of one scheme that sum to more than one": (
        {
            "training.needle_ratio": 0.4,
            "training.needle_tasks": ["niah_single_1"],
            "schemes.ALiBi.training": {"passkey_ratio": 0.7},
        },
        ["schemes.ALiBi.training: passkey_ratio and needle_ratio must sum to at most 1, got 0.7 and 0.4"],
    ),
    "unknown needle task": (
        {"training.needle_ratio": 0.5, "training.needle_tasks": ["niah_single_1", "niah_single_9"]},
        ["training.needle_tasks: unknown task 'niah_single_9'; expected one of niah_single_1, niah_single_2"],
    ),
    "the same needle task twice": (
        {"training.needle_ratio": 0.5, "training.needle_tasks": ["niah_single_1", "niah_single_1"]},
        ["training.needle_tasks: tasks must be distinct, got niah_single_1, niah_single_1"],
    ),
    "needles of no task": (
        {"training.needle_ratio": 0.5},
        ["training: needle_ratio and needle_tasks must be set together, got 0.5 and None"],
    ),
    "a length of needles that there are none of": (
        {"training.needle_minimum_length": 100},
        ["training: needle_minimum_length, needle_answer_weight, needle_questions and needle_restatements need needle"],
    ),
    "several questions about chains": (
        {
            "training.needle_ratio": 0.5,
            "training.needle_tasks": ["niah_single_1", "variable_tracking"],
            "training.needle_questions": 2,
        },
        ["training: needle_questions and needle_restatements need needle tasks (niah_...), got ['variable_tracking']"],
    ),
    "restated needles that there are none of": (
        {"training.needle_restatements": 3},
        ["training: needle_minimum_length, needle_answer_weight, needle_questions and needle_restatements need needle"],
    ),
    "a rate that is no number": ({"training.learning_rate": "fast"}, ["training.learning_rate:", "got 'fast'"]),
    "a rate that is nan": ({"training.learning_rate": float("nan")}, ["training.learning_rate:", "got nan"]),
    "unknown optimiser": (
        {"training.optimizer": "sgd"},
        ["training.optimizer:", "'adamw' or 'radam', got 'sgd'"],
    ),
    "negative steps of one scheme": (
        {"schemes.BAM + SSMax.training.steps": -1},
        ["schemes.BAM + SSMax.training: steps:", "greater than 0, got -1"],
    ),
    "a scheme without a name": ({"schemes": {"": {}}}, ["schemes", "at least 1 character"]),
    "no schemes": ({"schemes": {}}, ["schemes:", "at least 1 item", "got {}"]),
    "a scheme that is nothing": ({"schemes.ALiBi": None}, ["schemes.ALiBi:", "dictionary", "got None"]),
    "no seeds": ({"seeds": []}, ["seeds:", "at least 1 item", "got []"]),
    "the same seed twice": ({"seeds": [1, 0, 1]}, ["seeds: seeds must be distinct, got [1, 0, 1]"]),
    "a negative seed": ({"seeds": [0, -1]}, ["seeds.1:", "greater than or equal to 0, got -1"]),
    "too few tokens": ({"tokenizer": 256}, ["tokenizer", "greater than 256, got 256"]),
    "one depth": ({"evaluation.passkey.depths": 1}, ["evaluation.passkey.depths:", "equal to 2, got 1"]),
    "no lengths": (
        {"evaluation.passkey.lengths": []},
        ["evaluation.passkey.lengths: at least one length must be given"],
    ),
    "a length of zero": (
        {"evaluation.passkey.lengths": [20, 0]},
        ["evaluation.passkey.lengths.1:", "greater than 1, got 0"],
    ),
    "no chunk": ({"evaluation.chunk": 0}, ["evaluation.chunk:", "greater than 0, got 0"]),
    "a tolerance that leaves nothing": (
        {"schemes.ALiBi.evaluation": {"tolerance": 1}},
        ["schemes.ALiBi.evaluation: tolerance:", "less than 1, got 1"],
    ),
    "heads that do not divide the width": (
        {"model.num_attention_heads": 3},
        ["hidden_size=16 must be a multiple of num_attention_heads=3"],
    ),
    "key heads that do not divide the heads": (
        {"model.num_key_value_heads": 3},
        ["num_attention_heads=2 must be a multiple of num_key_value_heads=3"],
    ),
    "a head too odd for rotary positions": (
        {"model.hidden_size": 6, "schemes.ALiBi.encoding": "rotary"},
        ["schemes.ALiBi: head_dim must be a positive even integer for rotary positions, got 3"],
    ),
    "a learned table shorter than the longest text": (
        {"schemes.table": {"encoding": {"name": "learned", "max_length": 174}}},
        ["schemes.table.encoding:", "max_length=174 positions", "the model reads texts of 175 tokens"],
    ),
    "a panel without a scheme": (
        {"panels": {"All": ["*"], "Sinks": ["GOAT*"]}},
        ["panels.Sinks: no scheme matches 'GOAT*'; the schemes are ALiBi, BAM + SSMax"],
    ),
    "schemes that share a folder": (
        {"schemes": {"a b": {}, "a/b": {}}},
        ["schemes: schemes 'a b' and 'a/b' would share the folder 'a_b'"],
    ),
    "a missing section": ({"model": ...}, ["set exactly one of model and pretrained; got none"]),
    "a missing key": ({"training.learning_rate": ...}, ["training.learning_rate: missing"]),
    "no name": ({"name": ""}, ["name:", "at least 1 character, got ''"]),
}


@pytest.mark.parametrize(("changes", "complaints"), MISTAKES.values(), ids=MISTAKES.keys())
def test_errors_name_key_value_and_expected_values(tmp_path, changes, complaints):
    path = _write(tmp_path, changed(changes))
    with pytest.raises(RecipeError) as caught:
        decoder_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    for complaint in complaints:
        assert complaint in message
    # One error is one line. A value that may have several types has one line for each.
    assert len(message.splitlines()) == (2 if "tokenizer" in changes else 1)


def test_all_errors_are_named_at_once(tmp_path):
    path = _write(tmp_path, changed({"training.steps": 0, "modle": 1, "evaluation.chunk": -2}))
    with pytest.raises(RecipeError) as caught:
        decoder_recipe(path)
    lines = str(caught.value).removeprefix(f"{path}: ").splitlines()
    assert [line.split(":")[0] for line in lines] == ["training.steps", "evaluation.chunk", "modle"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("name: [1", "is not a YAML file: while parsing a flow sequence"),
        ("name: *nobody", "is not a YAML file: found undefined alias"),
        ("- name", "must hold keys and values, got list"),
        ("just words", "must hold keys and values, got str"),
        ("", "must hold keys and values, got NoneType"),
    ],
)
def test_files_that_are_not_recipes_are_named(tmp_path, content, complaint):
    path = _write(tmp_path, content)
    with pytest.raises(RecipeError) as caught:
        decoder_recipe(path)
    assert str(caught.value).startswith(f"{path} {complaint}")


def test_files_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\0name")
    with pytest.raises(RecipeError, match=r"recipe\.yaml is not a YAML file"):
        decoder_recipe(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        decoder_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"schemes.table": {"encoding": {"name": "learned", "max_length": 175}}},
        {"schemes.rope": {"encoding": {"name": "rotary", "base_multiplier": 50}}},
        {"schemes.sum": {"prior": [{"name": "laplace"}, {"name": "window", "size": 4}], "share_prior": True}},
        {"schemes.sum": {"prior": ["spectral", {"name": "key_sink", "train_length": 4}]}},
        {"schemes": {"NoPE": {}}},
        {"evaluation": {}},
        {"model.num_key_value_heads": 1},
        {"tokenizer": "a-name"},
        {"evaluation.passkey.stop_after_zeros": None},
    ],
)
def test_valid_recipes_are_accepted(tmp_path, changes):
    decoder_recipe(_write(tmp_path, changed(changes)))


def test_duplicate_keys_are_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("name: A\nschemes:\n  BAM: {}\n  BAM: {}\n")
    with pytest.raises(RecipeError, match=r"duplicate key 'BAM'\n.*line 4, column 3"):
        decoder_recipe(path)


def test_merged_keys_may_be_overridden(tmp_path):
    path = tmp_path / "merged.yaml"
    # The innermost mapping is merged into the outer one before it is read itself.
    path.write_text("a: {b: {c: &c {<<: &d {x: 1, y: 2}, y: 3}}}\ne: {<<: *c, x: 4}\nf: *d\n")
    assert read_yaml(path) == {"a": {"b": {"c": {"x": 1, "y": 3}}}, "e": {"x": 4, "y": 3}, "f": {"x": 1, "y": 2}}
    path.write_text("c: &c {x: 1}\ne: {<<: *c, x: 4, x: 5}\n")
    with pytest.raises(RecipeError, match="duplicate key 'x'"):
        read_yaml(path)


def test_aliases_may_lie_in_their_anchors(tmp_path):
    path = tmp_path / "recursive.yaml"
    path.write_text("a: &a [1, {b: *a}]\n")
    found = read_yaml(path)["a"]
    assert found[0] == 1
    assert found[1]["b"] is found
