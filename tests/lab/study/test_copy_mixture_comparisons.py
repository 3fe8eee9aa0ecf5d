"""Comparisons on the copy-mixture task instead of text: recipes, runs, results, figures and tables."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_cases import carry_out, decoder_recipe, of_kind

from attention_priors.lab.report import write_report
from attention_priors.lab.report.figures.heads import causal_weights
from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.study import Recipe, RecipeError
from attention_priors.lab.study import materials as materials_module
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.materials import HELD_OUT_SEED, Materials
from attention_priors.lab.study.runs import run_folder
from attention_priors.lab.tasks import CopyMixture
from attention_priors.lab.tasks.copying import copying_rows

CONTENT: dict[str, Any] = {
    "name": "Tiny copies",
    "corpus": {"copy_mixture": {"vocabulary_size": 6, "first": 0.3, "previous": 0.5}},
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "training": {
        "context_length": 12,
        "steps": 20,
        "batch_size": 8,
        "learning_rate": 0.01,
        "prior_learning_rate_multiplier": 5,
    },
    "evaluation": {
        "copying": {"lengths": [12, 24], "tokens": 240},
        "sink_mass": {"length": 12, "texts": 2, "factors": [0, 1, 4]},
        "perplexity": {"length": 16, "documents": 3},
        "chunk": 8,
    },
    "seeds": [1, 2],
    "schemes": {
        "GOAT": {
            "prior": [{"name": "spectral"}, {"name": "key_sink", "train_length": 12}],
            "extensions": {"longer": {"context_length": 24, "steps": 2}},
        },
        "RoPE": {"encoding": "rotary", "training": {"steps": 2}},
    },
}


def _recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(CONTENT | changes)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every scheme of the recipe in this process."""
    folder = tmp_path_factory.mktemp("copies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materials_module, "HELD_OUT_TOKENS", 96)
        carry_out(_recipe(), folder)
    assert not [*(folder / "cache").iterdir()]  # the task has no tokenizer
    return folder


@pytest.fixture(scope="module")
def rows(output: Path) -> list[dict[str, Any]]:
    return read_rows(output)


@pytest.fixture(scope="module")
def exact(output: Path) -> list[dict[str, Any]]:
    """Return the rows before their curves are rounded."""
    recipe = _recipe()
    runs = [(scheme, seed) for seed in recipe.seeds for scheme in recipe.schemes]
    return DecoderStudy(recipe, output / "cache").collect(output, runs, 0.0)


# ---- rows


def test_test_rows_are_never_trained_on(tmp_path):
    materials = Materials.load(_recipe(corpus={"copy_mixture": {}}), tmp_path)  # few of its rows are equal by chance
    settings = materials.recipe.training
    trained = {
        tuple(row["input_ids"].tolist()) for row in map(materials.training_rows(settings, 1).__getitem__, range(99))
    }
    assert HELD_OUT_SEED not in range(2**33)
    assert not trained & {tuple(text.tolist()) for text in materials.texts(12, 20)}
    rows = list(materials.held_out_rows(32768))
    assert [len(row["input_ids"]) for row in rows] == [32768] * 2


def test_descriptions_state_the_task(rows):
    assert {key: value for key, value in rows[0]["corpus"].items() if key != "fingerprint"} == {
        "name": "copy mixture",
        "vocabulary_size": 6,
        "lag": 2,
        "shares": {"first": 0.3, "previous": 0.5, "noise": pytest.approx(0.2)},
    }


def test_other_shares_are_another_run(tmp_path):
    studies = (DecoderStudy(_recipe(corpus={"copy_mixture": {"first": first}}), tmp_path) for first in (0.3, 0.4))
    one, other = (next(iter(study.identities(tmp_path, "GOAT", 1).values())) for study in studies)
    assert one["corpus"]["copy_mixture"]["first"] == 0.3
    assert one["tokenizer"] is None
    assert one["corpus_fingerprint"] != other["corpus_fingerprint"]


def test_recipes_survive_json():
    for recipe in (_recipe(), Recipe.model_validate({key: CONTENT[key] for key in CONTENT if key != "corpus"})):
        assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


# ---- results


def test_losses_by_kind_are_beside_the_optimum(rows):
    task = _recipe().corpus.copy_mixture
    assert task is not None
    for scheme in ("GOAT", "GOAT, extended to 24: longer", "RoPE"):
        for seed in (1, 2):
            own = of_kind(rows, "copying", scheme=scheme, seed=seed)
            assert [(row["length"], row["kind"]) for row in own] == [
                (length, kind) for length in (12, 24) for kind in ("first", "previous", "noise", "all")
            ]
            for row in own:
                assert row["expected_nll"] == task.optimal_losses(row["length"])[row["kind"]]
            for length, count in ((12, 20 * 11), (24, 10 * 23)):
                *kinds, whole = (row for row in own if row["length"] == length)
                assert sum(row["tokens"] for row in kinds) == whole["tokens"] == count
                for loss in ("nll", "optimal_nll"):
                    mean = sum(row[loss] * row["tokens"] for row in kinds) / count
                    assert whole[loss] == pytest.approx(mean)
                assert whole["nll"] > whole["optimal_nll"]
                assert whole["optimal_nll"] == pytest.approx(whole["expected_nll"], abs=0.3)


def test_every_model_reads_equal_tokens(rows):
    optima = {(row["length"], row["kind"], row["optimal_nll"]) for row in of_kind(rows, "copying")}
    assert len(optima) == 8


def test_training_makes_the_loss_smaller(rows):
    whole = {row["scheme"]: row["nll"] for row in of_kind(rows, "copying", length=12, kind="all")}
    assert whole["GOAT"] < whole["RoPE"] - 0.1  # 60 steps, and 2


def test_sinks_and_priors_have_their_rows(exact):
    goat = of_kind(exact, "sink_mass", scheme="GOAT", seed=1)
    assert [(row["layer"], row["head"], row["factor"]) for row in goat] == [
        (layer, head, factor) for layer in (0, 1) for head in (0, 1) for factor in (0, 1, 4)
    ]
    masses = of_kind(exact, "prior_mass", scheme="GOAT", seed=1)
    for row in masses:
        (sunk,) = (r["mass"] for r in goat if (r["layer"], r["head"], r["factor"]) == (row["layer"], row["head"], 0))
        # Without content, the weight of the first token comes from the prior. The second query also gives itself
        # weight.
        place = {"scheme": "GOAT", "seed": 1, "layer": row["layer"], "head": row["head"]}
        terms = [term["log_prior"] for term in of_kind(exact, "prior_term", **place)]
        second = torch.tensor([terms[0][1] + terms[1][0], terms[0][0] + terms[1][1]]).softmax(0)[0]
        assert sunk == pytest.approx((10 * row["first"] + float(second)) / 11, rel=1e-4)
    reaches = of_kind(exact, "prior_reach")
    assert len(reaches) == len(of_kind(exact, "prior_mass"))
    assert [*reaches[0]["half"]] == ["12", "24"]
    assert not any(of_kind(exact, kind, scheme="RoPE") for kind in ("prior_mass", "prior_term", "prior_reach"))


def test_interrupted_evaluations_resume(output, tmp_path, monkeypatch):
    run = run_folder(tmp_path, "RoPE", 2)
    shutil.copytree(run_folder(output, "RoPE", 2), run)
    before = (run / "results.jsonl").read_text()
    first, second, *_ = lines = [line for line in before.splitlines(keepends=True) if '"copying"' in line]
    assert [json.loads(line).get("length") for line in lines] == [None, 12, 24]
    (run / "results.jsonl").write_text(first + second)
    for name in ("measured.json", "done.json"):
        (run / name).unlink()
    read: list[int] = []

    def remember(model: Any, mixture: Any, samples: Any, **options: Any) -> Any:
        read.append(len(samples[0].tokens))
        return copying_rows(model, mixture, samples, **options)

    monkeypatch.setattr("attention_priors.lab.tasks.copying.copying_rows", remember)
    DecoderStudy(_recipe(), tmp_path).execute(tmp_path, "RoPE", 2, lambda *arguments: None)
    assert read == [24]
    assert sorted((run / "results.jsonl").read_text().splitlines()) == sorted(before.splitlines())


def test_maps_show_the_learned_prior(exact):
    place = {"scheme": "GOAT", "seed": 2, "layer": 1, "head": 0}
    (masses,) = of_kind(exact, "prior_mass", **place)
    terms = Results.of(exact)["prior_term"].query("scheme == 'GOAT' and seed == 2 and layer == 1 and head == 0")
    weights = torch.from_numpy(causal_weights(terms))
    assert weights.shape == (12, 12)
    torch.testing.assert_close(weights.nansum(-1), torch.ones(12, dtype=torch.float64))
    assert float(weights[2:, 0].mean()) == pytest.approx(masses["first"], rel=1e-6)
    assert float(weights.diagonal(-1)[1:].mean()) == pytest.approx(masses["previous"], rel=1e-6)


def test_tables_and_report_show_every_result(rows, tmp_path, undrawn):
    page = write_report(Results.of(rows), tmp_path).read_text(encoding="utf-8")
    tables = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "tables").iterdir()}
    lines = [line.split(" | ") for line in tables["copying.md"].splitlines()]
    optimum = next(line for line in lines if line[0] == "| the optimum")
    expected = of_kind(rows, "copying", kind="all")[0]["expected_nll"]
    assert optimum[1:3] == ["all tokens", f"{expected:.3f}"]
    (cell,) = (line[2] for line in lines if line[0] == "| RoPE")
    own = of_kind(rows, "copying", scheme="RoPE", length=12, kind="all")
    losses = [row["nll"] - row["optimal_nll"] for row in own]
    assert re.fullmatch(rf"{sum(losses) / 2:.3f} \[−?[\d.]+, [\d.]+\]", cell)
    assert "\\begin{tabular}{llrr}" in tables["copying.tex"]
    assert "| GOAT | 0 | 2 |" in tables["prior_mass.md"]
    for words in (
        "Copy-mixture task",
        'alt="Loss above the optimum in the copy-mixture task against length: GOAT, GOAT, extended to 24: longer and',
        "Attention sink",
        'alt="Weight of the first token against the range of the content logits: ',
        "Mass of the priors",
        "Terms of each head&#39;s log-prior, against distance or key: GOAT.",
        "Attention weights of each head&#39;s prior alone: GOAT, extended to 24: longer.",
    ):
        assert words in page


# ---- committed recipes

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not (ROOT / "recipes").exists(), reason="not a checkout of the project")
def test_the_papers_recipe_is_valid(tmp_path):
    materials = Materials.load(decoder_recipe(ROOT / "recipes" / "results" / "copy-mixture.yaml"), tmp_path)
    materials.check()
    assert {"NoPE", "ALiBi", "RoPE", "T5", "GOAT", "BAM"} <= materials.recipe.schemes.keys()


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not a checkout of the project")
def test_examples_of_the_page_run():
    page = (ROOT / "docs" / "copy-mixture.md").read_text(encoding="utf-8")
    corpus, sinks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    sections = {key: yaml.safe_load(corpus)[key] for key in ("corpus", "evaluation")}
    sections["evaluation"] |= yaml.safe_load(sinks)["evaluation"]
    recipe = _recipe(**sections)
    assert recipe.corpus.copy_mixture is not None
    assert recipe.evaluation.sink_mass is not None
    assert recipe.evaluation.sink_mass.factors[:3] == (0, 1 / 8, 1 / 4)
    told = re.search(r"optimal_losses\(64\)  # ({.*?}), nats", page)
    assert told is not None
    assert json.loads(told[1]) == pytest.approx(CopyMixture().optimal_losses(64), abs=5e-4)
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {})


# ---- errors


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer": 2048}, "tokenizer: corpus.copy_mixture has tokens of its own, got 2048"),
        (
            {"corpus": {"source": "embedded", "copy_mixture": {}}},
            "corpus: set either a text (source, max_characters) or copy_mixture, got both",
        ),
        (
            {"corpus": {"copy_mixture": {"first": 0.9}}},
            "corpus.copy_mixture: first and previous must sum to less than 1",
        ),
        (
            {"corpus": {"copy_mixture": {"lags": 1}}},
            "corpus.copy_mixture.lags: unknown key (value 1); allowed here are vocabulary_size, first, previous, lag",
        ),
        (
            {"evaluation": {"copying": {"lengths": [24, 12]}}},
            "evaluation.copying.lengths: lengths must rise, got [24, 12]",
        ),
        ({"evaluation": {"sink_mass": {"length": 12, "factors": [-1]}}}, "evaluation.sink_mass.factors.0"),
        ({"schemes": {"table": {"encoding": {"name": "learned", "max_length": 23}}}}, "reads texts of 24 tokens"),
    ],
)
def test_impossible_recipes_are_named(tmp_path, changes, complaint):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(CONTENT | changes))
    with pytest.raises(RecipeError, match=re.escape(complaint)):
        decoder_recipe(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"evaluation": {"passkey": {"lengths": [100]}}},
            "evaluation.passkey: model 'GOAT' has no tokenizer: expected a model of text for this task",
        ),
        (
            {"training": CONTENT["training"] | {"passkey_ratio": 0.5}},
            "schemes.GOAT: passkey_ratio=0.5 needs a text corpus; the corpus is copy_mixture",
        ),
    ],
)
def test_settings_that_need_text_are_refused(tmp_path, changes, complaint):
    with pytest.raises(RecipeError, match=re.escape(complaint)):
        Materials.load(_recipe(**changes), tmp_path).check()


def test_copying_needs_a_copy_mixture(tiny, tmp_path):
    materials = Materials.load(tiny({"evaluation.copying": {"lengths": [10]}}), tmp_path)
    with pytest.raises(
        RecipeError,
        match=re.escape("evaluation.copying: tasks: 'copying' needs a model of a recipe with corpus.copy_mixture"),
    ):
        materials.check()


def test_sinks_are_measured_on_text(tiny, tmp_path):
    materials = Materials.load(tiny({"evaluation.sink_mass": {"length": 10**7}}), tmp_path)
    with pytest.raises(
        RecipeError, match=r"evaluation.sink_mass.length: no held-out document of corpus .* has 10000000"
    ):
        materials.check()
    Materials.load(tiny({"evaluation.sink_mass": {"length": 50, "texts": 1}}), tmp_path).check()
