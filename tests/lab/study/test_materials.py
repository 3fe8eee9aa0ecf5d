"""Texts of a recipe are checked before any training."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import decoder_recipe, of_kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document
from attention_priors.lab.data.corpora import read_documents
from attention_priors.lab.report import write_report
from attention_priors.lab.results import Results
from attention_priors.lab.study import RecipeError
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.results import collect
from attention_priors.lab.study.runs import run_folder
from thoroughness import every_other_deep

RECIPES = Path(__file__).parents[3] / "recipes"
COMPARISONS = [RECIPES / "demo.yaml", *sorted((RECIPES / "results").glob("*.yaml"))]


@pytest.fixture
def joining(tmp_path: Path) -> str:
    """Save a tokenizer that joins digits, as most tokenizers on the Hugging Face Hub do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(["12 12 34 34 5678 5678 the key is"] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "joining")
    return str(tmp_path / "joining")


WITHOUT_KEYS: dict[str, Any] = {"training.passkey_ratio": 0, "training.steps": 1, "evaluation.passkey": None}


def test_recipes_without_pass_keys_accept_tokenizers_that_join_digits(tiny, joining, tmp_path):
    study = DecoderStudy(tiny(WITHOUT_KEYS | {"tokenizer": joining}), tmp_path / "cache")
    study.check()
    folder = run_folder(tmp_path, "ALiBi", 3)
    folder.mkdir(parents=True)
    study.execute(tmp_path, "ALiBi", 3, lambda *step: None)
    assert (folder / "done.json").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"training.passkey_ratio": 0.5}, r"schemes\.ALiBi: tokenizer .* joins digits: .* to train on pass keys"),
        (
            {"training.passkey_ratio": 0.5, "training.passkey_decoys": 1},
            r"schemes\.ALiBi: decoys=1 need .* joins digits",
        ),
    ],
)
def test_pass_keys_need_one_token_per_digit(tiny, joining, tmp_path, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        Materials.load(tiny(WITHOUT_KEYS | {"tokenizer": joining} | changes), tmp_path).check()


def test_plans_may_use_pass_keys_with_tokenizers_that_join_digits(tiny, joining, tmp_path):
    plans = {"keys": {"tasks": ["passkey"], "lengths": [400]}}
    Materials.load(tiny(WITHOUT_KEYS | {"tokenizer": joining, "evaluation.plans": plans}), tmp_path).check()


FEWER = {
    "perplexity": (
        {"evaluation.perplexity": {"length": 100, "documents": 4}},
        r"evaluation\.perplexity: documents: .* \(held out\) has 1 of the 4 texts of 100 tokens that the task "
        r"'perplexity' needs: set documents: 1 or shorter lengths, or minimum_documents: 1",
    ),
    "of a scheme": (
        {"schemes.ALiBi.evaluation": {"perplexity": {"documents": 3, "minimum_documents": 2}}},
        r"schemes\.ALiBi\.evaluation\.perplexity: documents: .* has 1 of the 3 texts",
    ),
    "sink mass": (
        {"evaluation.sink_mass": {"length": 64, "texts": 2}},
        r"evaluation\.sink_mass\.texts: the held-out .* has 1 of the 2 texts of 64 tokens: set texts: 1",
    ),
    "a plan": (
        {"evaluation.plans": {"more": {"tasks": ["perplexity"], "lengths": [64, 100]}}},
        r"evaluation\.plans\.more: documents: '.*' \(held out\) has 1 of the 8 texts of 64 tokens that the task "
        r"'perplexity' needs: set documents: 1 or shorter lengths, or minimum_documents: 1",
    ),
}


@pytest.mark.parametrize(("changes", "complaint"), FEWER.values(), ids=FEWER)
def test_too_few_long_documents_are_refused(tiny, tmp_path, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        Materials.load(tiny(changes), tmp_path).check()


def test_minimum_documents_is_at_most_documents(tiny):
    settings = {"length": 100, "documents": 4, "minimum_documents": 5}
    plan = {"tasks": ["perplexity"], "lengths": [64], "documents": 4, "minimum_documents": 5}
    for changes in ({"evaluation.perplexity": settings}, {"evaluation.plans": {"more": plan}}):
        with pytest.raises(ValueError, match="minimum_documents must be at most documents, 4; got 5"):
            tiny(changes)


def test_recipes_may_accept_fewer_documents(tiny, tmp_path):
    plan = {"tasks": ["perplexity", "perplexity_windows"], "lengths": [64], "documents": 99, "minimum_documents": 1}
    perplexity = {"length": 100, "documents": 4, "minimum_documents": 1}
    recipe = tiny(WITHOUT_KEYS | {"evaluation.plans": {"more": plan}, "evaluation.perplexity": perplexity})
    study = DecoderStudy(recipe, tmp_path / "cache")
    study.check()
    run_folder(tmp_path, "ALiBi", 3).mkdir(parents=True)
    study.execute(tmp_path, "ALiBi", 3, lambda *step: None)
    rows = collect(recipe, tmp_path, [("ALiBi", 3)], wall_seconds=1.0, corpus={"name": "texts"})
    assert {row["documents"] for row in of_kind(rows, "perplexity", plan=None)} == {1}
    write_report(Results.of(rows), tmp_path)
    assert "Documents: 1." in (tmp_path / "tables" / "perplexity.md").read_text()
    (windows,) = {row["documents"] for row in of_kind(rows, "perplexity", task="perplexity_windows")}
    losses = (tmp_path / "tables" / "losses.md").read_text()
    assert "more: perplexity, texts of 64 tokens; documents: 1 " in losses
    assert f"more: perplexity\\_windows, texts of 64 tokens; documents: {windows} " in losses


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache the tokenizers that several recipes train on one corpus."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def short_corpora(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plan read only the first documents of its corpus. Encoding all of SciPy's source takes half a minute."""

    def first_documents(source: str) -> tuple[str, Sequence[Document], tuple[str, ...]]:
        name, documents, skipped = read_documents(source)
        ends = accumulate(len(document.text) for document in documents)
        return name, [document for document, end in zip(documents, ends, strict=True) if end < 2_000_000], skipped

    monkeypatch.setattr("attention_priors.lab.tasks.task.read_documents", first_documents)


@pytest.mark.usefixtures("short_corpora")
@pytest.mark.parametrize("path", every_other_deep(COMPARISONS, COMPARISONS[::4]), ids=lambda path: path.stem)
def test_committed_recipes_have_their_texts(path: Path, cache: Path):
    recipe = decoder_recipe(path)
    try:
        materials = Materials.load(recipe, cache)
    except FileNotFoundError:
        pytest.skip("the package whose files are the corpus is not installed")
    except OSError:
        if recipe.pretrained is None:
            raise
        pytest.skip("the published tokenizer is not in the cache of the Hugging Face Hub, which cannot be reached")
    for scheme in recipe.schemes:
        materials._check_evaluation(scheme)
