"""Generated schemes: inheritance, sweeps, and names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from recipe_cases import RECIPE, changed, decoder_recipe

from attention_priors.lab.study import Recipe, RecipeError
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.runs import LONGEST_FOLDER_NAME, folder_name
from attention_priors.lab.study.sweep import label
from attention_priors.lab.train.recipe import PositionSettings

BAM = "BAM + SSMax"
AXES: dict[str, Any] = {
    "init": {"prior.init": ["roles", "uniform", "laplace"]},
    "learn": {"prior.learn": [["beta"], ["alpha", "beta"]]},
    "length": {"training.context_length": [150, 300], "training.batch_size": [2, 1]},
    "ssmax": {"logit_scale": {"none": None, "both": "ssmax", "content": {"name": "ssmax", "include_prior": False}}},
    "size": {"model.hidden_size": [16, 8]},
}
BASE = {"init": "roles", "learn": ["alpha", "beta"], "length": 150, "ssmax": "both", "size": 16}


def _recipe(changes: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(changed(changes))


def _sweep(**sweep: Any) -> Recipe:
    return _recipe({"sweep": {"schemes": [BAM], **sweep}})


# ---- one scheme with its own settings


def test_schemes_may_have_their_own_sizes_and_measurements():
    recipe = _recipe(
        {
            "schemes.ALiBi.model": {"num_hidden_layers": 5},
            "schemes.ALiBi.evaluation": {"passkey": {"lengths": [40, 900]}, "perplexity": None},
        }
    )
    assert recipe.config_of("ALiBi", vocab_size=9).num_hidden_layers == 5
    assert recipe.config_of(BAM, vocab_size=9).num_hidden_layers == 2
    own, shared = recipe.evaluation_of("ALiBi"), recipe.evaluation_of(BAM)
    assert own.passkey is not None
    assert shared.passkey is not None
    assert (own.passkey.lengths, own.passkey.depths, own.perplexity) == ((40, 900), shared.passkey.depths, None)
    assert shared == recipe.evaluation.model_copy(update={"tolerance": 0.01})
    assert recipe.longest_text == 905


@pytest.mark.parametrize(
    ("own", "steps", "rows"),
    [({"tokens": 3000}, 10, 2), ({"tokens_per_step": 600}, 120, 4), ({"steps": 7}, 7, 2), ({}, 120, 2)],
)
def test_the_schemes_own_alternative_wins(own, steps, rows):
    settings = _recipe({"schemes.ALiBi.training": own}).training_of("ALiBi")
    assert (settings.total_steps, settings.rows_per_step) == (steps, rows)


def test_schemes_inherit_sections_by_key_and_other_values_whole():
    recipe = _recipe(
        {
            "schemes.parent": {"extends": BAM, "training": {"learning_rate": 0.5}, "model": {"hidden_size": 8}},
            "schemes.child": {
                "extends": "parent",
                "logit_scale": None,
                "training": {"tokens": 600},
                "evaluation": {},
            },
            "schemes.other": {"extends": "child", "prior": "laplace"},
        }
    )
    child, parent = recipe.schemes["child"], recipe.schemes["parent"]
    assert parent.prior == recipe.schemes[BAM].prior
    assert parent.logit_scale == "ssmax"
    assert child.logit_scale is None
    assert child.training == {"learning_rate": 0.5, "tokens": 600}  # in place of the inherited steps
    assert child.evaluation == {"tolerance": 0.01}
    assert child.model == {"hidden_size": 8}
    assert recipe.schemes["other"].prior == "laplace"
    assert all(scheme.extends is None for scheme in recipe.schemes.values())


@pytest.mark.parametrize(
    ("extends", "complaint"),
    [
        ({"ALiBi": "RoPE"}, r"schemes\.ALiBi\.extends: unknown scheme 'RoPE'; the recipe has ALiBi, BAM \+ SSMax"),
        ({"ALiBi": "ALiBi"}, r"schemes\.ALiBi\.extends: circular inheritance, ALiBi extends ALiBi"),
        ({"ALiBi": BAM, BAM: "ALiBi"}, r"ALiBi extends BAM \+ SSMax extends ALiBi"),
        ({"ALiBi": 3}, r"schemes\.ALiBi\.extends: unknown scheme 3"),
    ],
)
def test_invalid_inheritance_is_named(extends, complaint):
    with pytest.raises(ValueError, match=complaint):
        _recipe({f"schemes.{name}.extends": parent for name, parent in extends.items()})


# ---- sweeps


def test_one_axis_at_a_time_varies_the_base():
    recipe = _sweep(axes=AXES, base=BASE)
    base = {"scheme": BAM, "init": "roles", "learn": "alpha+beta", "length": 150, "ssmax": "both", "size": 16}
    made = {name: scheme.axes for name, scheme in recipe.schemes.items()}
    assert made.pop("ALiBi") == {}
    assert made == {
        BAM: base,
        f"{BAM} · init=uniform": base | {"init": "uniform"},
        f"{BAM} · init=laplace": base | {"init": "laplace"},
        f"{BAM} · learn=beta": base | {"learn": "beta"},
        f"{BAM} · length=300": base | {"length": 300},
        f"{BAM} · ssmax=none": base | {"ssmax": "none"},
        f"{BAM} · ssmax=content": base | {"ssmax": "content"},
        f"{BAM} · size=8": base | {"size": 8},
    }
    assert recipe.schemes[BAM].prior == {"name": "generalized_gaussian", "init": "roles", "learn": ["alpha", "beta"]}
    longer = recipe.training_of(f"{BAM} · length=300")
    assert (longer.context_length, longer.batch_size, longer.steps) == (300, 1, 3)
    assert recipe.schemes[f"{BAM} · ssmax=content"].logit_scale == {"name": "ssmax", "include_prior": False}
    assert recipe.schemes[f"{BAM} · ssmax=none"].logit_scale is None
    assert recipe.config_of(f"{BAM} · size=8", vocab_size=9).hidden_size == 8
    assert recipe.evaluation_of(f"{BAM} · size=8").tolerance == 0.01


def test_without_a_base_every_combination_is_generated():
    axes = {"init": AXES["init"], "size": AXES["size"]}
    recipe = _sweep(axes=axes)
    names = [f"{BAM} · init={init} · size={size}" for init in ("roles", "uniform", "laplace") for size in (16, 8)]
    assert list(recipe.schemes) == ["ALiBi", *names]
    assert recipe.schemes[names[3]].axes == {"scheme": BAM, "init": "uniform", "size": 8}


def test_all_schemes_are_swept_by_default_in_order():
    recipe = _recipe({"sweep": {"axes": {"rate": {"training.learning_rate": [0.1, 0.2]}}}})
    assert list(recipe.schemes) == [f"{name} · rate={rate}" for name in ("ALiBi", BAM) for rate in (0.1, 0.2)]
    assert recipe.training_of("ALiBi · rate=0.2").learning_rate == 0.2


def test_priors_given_by_name_accept_arguments():
    recipe = _recipe({"sweep": {"schemes": ["ALiBi"], "axes": {"learn": {"prior.learn": [True, False]}}}})
    assert recipe.schemes["ALiBi · learn=true"].prior == {"name": "laplace", "learn": True}


def test_expanded_recipes_survive_json():
    recipe = _recipe(
        {"sweep": {"axes": {"size": AXES["size"]}}, "schemes.other": {"extends": BAM, "logit_scale": None}}
    )
    assert recipe.schemes["other · size=8"].logit_scale is None
    for dumped in (recipe.model_dump(mode="json"), recipe.model_dump(mode="json", exclude_defaults=True)):
        assert Recipe.model_validate(json.loads(json.dumps(dumped))) == recipe


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "none"),
        (True, "true"),
        (1e-3, "0.001"),
        ("laplace", "laplace"),
        (["alpha", "beta"], "alpha+beta"),
        ([], "nothing"),
        ({"name": "ssmax"}, "ssmax"),
        ({"name": "ssmax", "include_prior": False}, "ssmax(include_prior=false)"),
        ({"depths": 3}, "depths=3"),
    ],
)
def test_values_have_labels(value, words):
    assert label(value) == words


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": (
        {"axes": {"init": {"prior.init": ["roles", "zeros"]}}},
        r"schemes\.BAM \+ SSMax · init=zeros: init must be one of uniform, laplace.*got 'zeros'",
    ),
    "an impossible base, whose name says nothing": (
        {"axes": {"rate": {"training.learning_rate": [-1]}}, "base": {"rate": -1}},
        r"schemes\.BAM \+ SSMax \(rate=-1\)\.training: learning_rate: .*greater than 0, got -1",
    ),
    "an impossible size": (
        {"axes": {"size": {"model.hidden_size": [16, 7]}}},
        r"BAM \+ SSMax · size=7: hidden_size=7 must be a multiple of num_attention_heads=2",
    ),
    "an unknown size": (
        {"axes": {"size": {"model.width": [16]}}},
        r"schemes\.BAM \+ SSMax · size=16\.model: width: unknown key \(value 16\); allowed here are hidden_size",
    ),
    "an unknown key of the training": (
        {"axes": {"rate": {"training.rate": [1]}}},
        r"schemes\.BAM \+ SSMax · rate=1\.training: rate: unknown key",
    ),
    "a measurement that does not exist": (
        {"axes": {"test": {"evaluation.needles": [1]}}},
        r"schemes\.BAM \+ SSMax · test=1\.evaluation: needles: unknown key",
    ),
    "a value of the wrong type": (
        {"axes": {"tolerance": {"evaluation.tolerance": [-1]}}},
        r"schemes\.BAM \+ SSMax · tolerance=-1\.evaluation: tolerance: .*greater than or equal to 0, got -1",
    ),
    "no setting of a scheme": (
        {"axes": {"init": {"priors.init": ["roles"]}}},
        r"sweep\.axes\.init: priors\.init=roles is impossible for the scheme 'BAM \+ SSMax': a setting must begin with",
    ),
    "an argument of nothing": (
        {"axes": {"base": {"encoding.base": [100]}}},
        r"sweep\.axes\.base: encoding\.base=100 is impossible for the scheme 'BAM \+ SSMax': it has no setting",
    ),
    "an unknown scheme": (
        {"schemes": ["RoPE"], "axes": {"size": {"model.hidden_size": [16]}}},
        r"sweep\.schemes: unknown scheme 'RoPE'; the recipe has ALiBi",
    ),
    "no axes": ({"axes": {}}, r"sweep\.axes: .*at least 1 item"),
    "an unknown key of the sweep": (
        {"axis": {}, "axes": {"size": {"model.hidden_size": [16]}}},
        r"sweep\.axis: unknown key \(value \{\}\); allowed here are schemes, axes, base",
    ),
    "an axis without values": (
        {"axes": {"size": {"model.hidden_size": []}}},
        r"sweep\.axes: axis 'size' needs settings with equally many values, at least one, got .*size': 0\}",
    ),
    "settings with unequally many values": (
        {"axes": {"size": {"model.hidden_size": [16, 32], "model.intermediate_size": [16]}}},
        r"axis 'size' needs .* got \{'model\.hidden_size': 2, 'model\.intermediate_size': 1\}",
    ),
    "the same value twice": (
        {"axes": {"size": {"model.hidden_size": [16, 16]}}},
        r"axis 'size' has the duplicate value '16'",
    ),
    "a reserved name": (
        {"axes": {"scheme": {"model.hidden_size": [16]}}},
        r"an axis cannot be called 'scheme'",
    ),
    "a base without an axis": (
        {"axes": {"size": {"model.hidden_size": [16]}, "init": AXES["init"]}, "base": {"size": 16}},
        r"sweep\.base needs a value for each of the axes size, init, got size",
    ),
    "a base that is no value": (
        {"axes": {"size": {"model.hidden_size": [16]}}, "base": {"size": 17}},
        r"sweep\.base\.size: must be one of 16, got '17'",
    ),
    "values that share a folder": (
        {"axes": {"rate": {"training.learning_rate": {"a/b": 0.1, "a b": 0.2}}}},
        r"schemes 'BAM \+ SSMax · rate=a/b' and 'BAM \+ SSMax · rate=a b' would share the folder",
    ),
}


@pytest.mark.parametrize(("sweep", "complaint"), MISTAKES.values(), ids=MISTAKES.keys())
def test_errors_in_a_sweep_name_axis_and_value(tmp_path, sweep, complaint):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(changed({"sweep": {"schemes": [BAM], **sweep}}), sort_keys=False))
    with pytest.raises(RecipeError, match=complaint):
        decoder_recipe(path)


@pytest.mark.parametrize(
    ("schemes", "complaint"),
    [
        ({2024: {"prior": "laplace"}}, r"schemes.*2024.*valid string"),
        ({"A": {"prior": "laplace", "axes": None}}, r"schemes\.A\.axes: .*valid dictionary"),
        ({"A": {"prior": "laplace", "axes": ["a"]}}, r"schemes\.A\.axes: .*valid dictionary"),
        ({"A": {"prior": "laplace", "extensions": ["YaRN"]}}, r"schemes\.A\.extensions: .*valid dictionary"),
        ({"A": {"prior": "laplace", "extensions": {"YaRN": "abc"}}}, r"schemes\.A\.extensions\.YaRN: "),
    ],
)
def test_schemes_that_a_sweep_cannot_change_are_named(tmp_path, schemes, complaint):
    path = tmp_path / "recipe.yaml"
    sweep = {"axes": {"way": {"extensions.YaRN.prior.init": ["uniform", "laplace"]}}}
    path.write_text(yaml.safe_dump(changed({"sweep": sweep}) | {"schemes": schemes}, sort_keys=False))
    with pytest.raises(RecipeError, match=complaint):
        decoder_recipe(path)


def test_schemes_with_the_name_of_a_generated_one_are_refused():
    with pytest.raises(ValueError, match=r"duplicate scheme 'BAM \+ SSMax · size=8'"):
        _recipe({"sweep": {"schemes": [BAM], "axes": {"size": AXES["size"]}}, f"schemes.{BAM} · size=8": {}})


def test_folders_of_long_names_are_distinct_and_short_enough():
    names = [f"BAM · {'x' * 300}{end}" for end in ("a", "b")]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == 2
    assert all(folder.startswith("BAM_xxx") and len(folder) == LONGEST_FOLDER_NAME for folder in folders)


def test_documented_examples_generate_their_schemes():
    docs = Path(__file__).parents[3] / "docs"
    if not docs.exists():
        pytest.skip("not a checkout of the project")
    pages = ("compare-recipes.md", "compare-extensions.md")
    text = "".join((docs / page).read_text(encoding="utf-8") for page in pages)
    blocks = (yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml")[1:])
    start, rows, plans, sweep, extension, ways = blocks
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = {"model": sizes, "training": {"context_length": 160, "steps": 9, "batch_size": 4, "learning_rate": 0.1}}
    schemes = Recipe.model_validate({**RECIPE, **base, **sweep}).schemes
    assert f"makes {len(schemes) - 1} schemes of BAM" in text
    assert "BAM · init=laplace" in schemes
    published = {key: value for key, value in RECIPE.items() if key not in ("model", "tokenizer")}
    assert len(Recipe.model_validate({**published, "training": base["training"], **start}).schemes) == 3
    del sweep["sweep"]["base"]
    product = Recipe.model_validate({**RECIPE, **base, **sweep}).schemes
    assert f"{len(product) - 1} of them above" in text
    extended = Recipe.model_validate({**RECIPE, **base, **extension})
    assert _names(extended, "BAM") == ["BAM, extended to 320: trained on"]
    several = Recipe.model_validate({**RECIPE, **base, **ways})
    assert _names(several, "RoPE") == [
        f"RoPE, extended to 640: {way}"
        for way in ("trained on", "interpolated", "YaRN", "YaRN, untrained", "DroPE", "DroPE + BAM")
    ]
    assert "`RoPE, extended to 640: YaRN`" in text
    assert len(Recipe.model_validate({**RECIPE, **base, **plans}).evaluation.plans) == 3
    mixture = {"training": base["training"] | rows["training"]}
    assert Recipe.model_validate({**RECIPE, **base, **mixture}).training.needle_ratio == 0.8


# ---- extensions


def _names(recipe: Recipe, scheme: str) -> list[str]:
    return [extension.name for extension in recipe.extensions_of(scheme).values()]


def test_extensions_continue_the_training():
    recipe = _recipe({f"schemes.{BAM}.extensions": {"longer": {"context_length": 300}}})
    first, extension = recipe.training_of(BAM), recipe.extensions_of(BAM)["longer"]
    second = extension.training
    assert second is not None
    assert (second.context_length, second.total_steps, second.step_tokens) == (300, 256, first.step_tokens)
    assert second.learning_rate == pytest.approx(0.1 * first.learning_rate)
    assert (second.minimum_learning_rate_ratio, second.warmup_steps) == (1.0, 0)
    assert second.passkey_ratio == first.passkey_ratio
    assert extension.name == f"{BAM}, extended to 300: longer"
    assert extension.positions == PositionSettings(
        prior={"name": "generalized_gaussian", "init": "roles"}, logit_scale="ssmax"
    )
    assert recipe.longest_text == 300
    assert recipe.extensions_of("ALiBi") == {}


def test_extensions_may_change_positions():
    changes = {"context_length": 600, "encoding": "rotary", "prior": None, "tokens_per_step": 600, "steps": 7}
    none = {"context_length": 300, "steps": 0, "logit_scale": None}
    same = {"context_length": 150, "prior": "laplace", "tokens": 900}
    recipe = _recipe({f"schemes.{BAM}.extensions": {"RoPE": changes, "bare": none, "same length": same}})
    one, two, three = recipe.extensions_of(BAM).values()
    assert one.positions == PositionSettings(encoding="rotary", logit_scale="ssmax")
    assert one.training is not None
    assert (one.training.total_steps, one.training.rows_per_step) == (7, 1)
    assert two.training is None
    assert (two.context_length, two.positions.logit_scale) == (300, None)
    assert three.training is not None
    assert three.training.total_steps == 3
    assert three.name == f"{BAM}, changed at 150: same length"
    assert recipe.longest_text == 600
    # The scheme itself is unchanged.
    assert recipe.schemes[BAM].logit_scale == "ssmax"


def test_extensions_are_inherited_key_by_key_and_positions_whole():
    ways = {
        "a": {"context_length": 300, "steps": 5, "prior": {"name": "generalized_gaussian", "init": "uniform"}},
        "b": {"context_length": 300},
        "c": {"context_length": 300},
    }
    own = {"a": {"tokens": 900, "prior": {"name": "laplace"}}, "b": None, "d": {"context_length": 450, "batch_size": 1}}
    recipe = _recipe({f"schemes.{BAM}.extensions": ways, "schemes.child": {"extends": BAM, "extensions": own}})
    found = recipe.extensions_of("child")
    assert list(found) == ["a", "c", "d"]
    assert found["a"].positions.prior == {"name": "laplace"}
    assert found["a"].training is not None
    assert (found["a"].training.tokens, found["a"].training.steps) == (900, None)
    assert list(recipe.extensions_of(BAM)) == ["a", "b", "c"]
    ways = {"prior": {"context_length": 300, "null_logit": {"name": "null_key"}}}
    own = {"prior": {"steps": 5, "null_logit": "null_key"}}
    recipe = _recipe({f"schemes.{BAM}.extensions": ways, "schemes.child": {"extends": BAM, "extensions": own}})
    (found,) = recipe.extensions_of("child").values()
    assert (found.way, found.context_length, found.positions.null_logit) == ("prior", 300, "null_key")


def test_a_sweep_reaches_into_extensions():
    ways = {
        "BAM": {"context_length": 300, "tokens": 900, "prior": "generalized_gaussian"},
        "on": {"context_length": 300},
    }
    axes = {
        "steps": {"extensions.BAM.steps": [3, 4]},
        "start": {"extensions.BAM.prior.init": ["uniform", "roles"]},
        "length": {"extensions.on.context_length": [300, 450], "extensions.on.tokens_per_step": [300, 450]},
        "scale": {"extensions.BAM.logit_scale": {"none": None, "ssmax": {"name": "ssmax", "init": 0.2}}},
        "new": {"extensions.new": {"no": None, "yes": {"context_length": 300, "steps": 2}}},
    }
    base = {"steps": 3, "start": "uniform", "length": 300, "scale": "none", "new": "no"}
    swept = {"sweep": {"schemes": ["ALiBi"], "axes": axes, "base": base}}
    recipe = _recipe({"schemes.ALiBi.extensions": ways, **swept})
    base_ways = recipe.extensions_of("ALiBi")
    assert base_ways["BAM"].training is not None
    assert base_ways["BAM"].training.total_steps == 3
    assert list(base_ways) == ["BAM", "on"]
    started = recipe.extensions_of("ALiBi · start=roles")["BAM"].positions
    assert started.prior == {"name": "generalized_gaussian", "init": "roles"}
    assert recipe.extensions_of("ALiBi · length=450")["on"].context_length == 450
    assert recipe.extensions_of("ALiBi · scale=ssmax")["BAM"].positions.logit_scale == {"name": "ssmax", "init": 0.2}
    assert list(recipe.extensions_of("ALiBi · new=yes")) == ["BAM", "on", "new"]
    # If the base of a one-axis sweep has no such prior, the error names it.
    swept["sweep"] = {"schemes": ["ALiBi"], "axes": {"start": {"extensions.on.prior.init": ["uniform"]}}}
    with pytest.raises(ValueError, match=r"sweep\.axes\.start: .* 'ALiBi': it has no setting prior\.init"):
        _recipe({"schemes.ALiBi.extensions": ways, **swept})


@pytest.mark.parametrize(
    ("extension", "complaint"),
    [
        (
            {},
            r"ALiBi\.extensions\.longer\.context_length must be above the 150 tokens of the first training, .*got None",
        ),
        (
            {"context_length": 150},
            r"above the 150 tokens of the first training, or equal if positions change; got 150",
        ),
        ({"context_length": 150, "prior": "laplace"}, r"or equal if positions change; got 150"),
        ({"context_length": 149, "prior": None}, r"above the 150 tokens of the first training, .* got 149"),
        (
            {"context_length": 300, "steps": 0},
            r"extensions\.longer: 0 steps with the positions .* change nothing",
        ),
        ({"context_length": 300, "steps": -1}, r"extensions\.longer: steps: Input should be greater than 0, got -1"),
        (
            {"context_length": 300, "step": 3},
            r"ALiBi\.extensions\.longer: step: unknown key \(value 3\); .*logit_scale",
        ),
        ({"context_length": 310}, r"tokens_per_step=300 must be a multiple of context_length=310"),
        ({"context_length": 300, "encoding": "rope"}, r"ALiBi\.extensions\.longer: unknown encoding 'rope'"),
        ({"context_length": 300, "prior": 3}, r"ALiBi\.extensions\.longer: prior"),
        (
            {"context_length": 300, "encoding": {"name": "learned", "max_length": 200}},
            r"extensions\.longer\.encoding: the learned table has max_length=200 positions, but .* texts of 300 tokens",
        ),
    ],
)
def test_invalid_extensions_are_named(extension, complaint):
    with pytest.raises(ValueError, match=complaint):
        _recipe({"schemes.ALiBi.extensions": {"longer": extension}})


def test_extensions_have_distinct_names_and_folders():
    longer = {"context_length": 300}
    for ways, complaint in (
        ({"before": longer}, r"schemes\.ALiBi\.extensions\s.*an extension cannot be called 'before'"),
        ({"": longer}, r"schemes\.ALiBi\.extensions\.+\[key\]\s.*at least 1 character"),
        ({"a b": longer, "a/b": longer}, r"extensions 'a b' and 'a/b' would share the folder 'a_b'"),
        (longer, r"schemes\.ALiBi\.extensions\.context_length\s.*Input should be a valid dictionary"),
    ):
        with pytest.raises(ValueError, match=complaint):
            _recipe({"schemes.ALiBi.extensions": ways})
    with pytest.raises(ValueError, match=r"the extended model of 'ALiBi' has this name too"):
        _recipe({"schemes.ALiBi.extensions": {"on": longer}, "schemes.ALiBi, extended to 300: on": {}})


def test_published_extensions_have_equal_cost():
    path = Path(__file__).parents[3] / "recipes" / "results" / "extension.yaml"
    if not path.exists():
        pytest.skip("not a checkout of the project")
    ways = decoder_recipe(path).extensions_of("RoPE")
    trained = {way: extension.training for way, extension in ways.items() if extension.training is not None}
    assert set(ways) - set(trained) == {"YaRN, untrained"}
    longer = {way for way in trained if way.endswith(", 4 × as long")}
    assert (len(trained), len(longer)) == (12, 4)
    for way, training in trained.items():
        if way in longer:
            assert training.total_steps == 4 * trained["DroPE"].total_steps
            training = training.model_copy(update={"steps": trained["DroPE"].steps})
        assert training == trained["DroPE"]
    assert {extension.context_length for extension in ways.values()} == {512}
    assert len({json.dumps(extension.positions.model_dump()) for extension in ways.values()}) == 8  # YaRN's are equal
    for way in longer:
        assert ways[way].positions == ways[way.removesuffix(", 4 × as long")].positions


# ---- identities


def _identities(recipe: Recipe, scheme: str, seed: int = 3) -> dict[Path, dict[str, Any]]:
    """Return the identities of a run and its extensions, with a fictitious corpus and tokenizer."""
    study = object.__new__(DecoderStudy)
    study.recipe = recipe
    hashes = {"corpus_fingerprint": "corpus", "tokenizer_fingerprint": "tokenizer"}
    study.materials = cast(Materials, SimpleNamespace(fingerprints=hashes))
    return study.identities(Path(), scheme, seed)


def _identity(recipe: Recipe, scheme: str, seed: int = 3) -> dict[str, Any]:
    return next(iter(_identities(recipe, scheme, seed).values()))


def test_identities_do_not_depend_on_the_notation_of_a_scheme():
    written = _recipe({"schemes.ALiBi.model": {"hidden_size": 8}})
    swept = _recipe({"sweep": {"schemes": ["ALiBi"], "axes": {"size": {"model.hidden_size": [8]}}}})
    one = _identity(written, "ALiBi")
    assert one == _identity(swept, "ALiBi · size=8")
    assert one != _identity(_recipe({}), "ALiBi")
    ways = {"on": {"context_length": 300}, "no prior": {"context_length": 300, "steps": 0, "prior": None}}
    files = _identities(_recipe({"schemes.ALiBi.extensions": ways}), "ALiBi")
    run = Path() / "runs" / "ALiBi" / "seed-3"
    parts = [run, run / "extended" / "on", run / "extended" / "no_prior"]
    assert list(files) == [part / "identity.json" for part in parts]
    assert files[parts[1] / "identity.json"]["positions"]["prior"] == "laplace"
    assert files[parts[2] / "identity.json"] == {
        "context_length": 300,
        "positions": PositionSettings().model_dump(mode="json"),
        "training": None,
    }
    assert files[run / "identity.json"] == _identity(_recipe({}), "ALiBi")
    assert RECIPE["schemes"]["ALiBi"] == {"prior": "laplace"}
