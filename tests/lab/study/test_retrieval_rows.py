"""Training rows of a recipe: retrieval texts at their start, and documents."""

from pathlib import Path
from typing import Any

import pytest
import recipe_cases

from attention_priors.lab.data import load_corpus
from attention_priors.lab.data.document import END_OF_TEXT
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.recipe import Recipe

NEEDLES = {
    "training.context_length": 1100,
    "training.passkey_ratio": 0.2,
    "training.passkey_answer_weight": 3.0,
    "training.needle_ratio": 0.6,
    "training.needle_tasks": ["niah_single_2", "niah_multikey_1"],
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("retrieval")
    texts = recipe_cases.write_texts(folder / "texts")

    def materials(changes: dict[str, Any]) -> Materials:
        recipe = Recipe.model_validate(recipe_cases.changed(NEEDLES | {"corpus.source": str(texts)} | changes))
        return Materials.load(recipe, folder / "cache")

    return materials


def _rows(materials: Materials, count: int) -> list[dict[str, Any]]:
    rows = materials.training_rows(materials.recipe.training, seed=1)
    return [rows[index] for index in range(count)]


def _runs_of_words(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def test_rows_have_no_held_out_text(load):
    materials = load({})
    corpus = load_corpus(Path(materials.recipe.corpus.source))
    held_out, train = (
        set().union(*(_runs_of_words(document.text, 4) for document in part))
        for part in (corpus.held_out, corpus.train)
    )
    held_out -= train
    assert held_out

    needles = 0
    for row in _rows(materials, 150):
        first = str(materials.tokenizer.decode(row["input_ids"][row["document_ids"] == 0]))
        found = _runs_of_words(str(materials.tokenizer.decode(row["input_ids"])), 4)
        assert not found & held_out
        if "special magic" in first:
            needles += 1
            assert _runs_of_words(first, 4) & train
    assert needles > 60


def test_needles_share_rows_evenly_with_the_weight_of_pass_keys(load):
    materials = load({"training.needle_minimum_length": 900})
    kinds = {"corpus": 0, "passkey": 0, "niah_single_2": 0, "niah_multikey_1": 0}
    for row in _rows(materials, 240):
        first = row["document_ids"] == 0
        text = str(materials.tokenizer.decode(row["input_ids"][first]))
        needles = text.count("One of the special magic")
        kind = {0: "passkey" if "pass key" in text else "corpus", 1: "niah_single_2", 4: "niah_multikey_1"}[needles]
        kinds[kind] += 1
        assert float(row["loss_weights"].max()) == (1.0 if kind == "corpus" else 3.0)
        if needles:
            assert int(first.sum()) > 800
    for kind, ratio in {"corpus": 0.2, "passkey": 0.2, "niah_single_2": 0.3, "niah_multikey_1": 0.3}.items():
        assert abs(kinds[kind] - 240 * ratio) <= 4 * (240 * ratio * (1 - ratio)) ** 0.5


def test_pass_keys_may_have_other_digits_and_words(load):
    alone = {"training.passkey_ratio": 1.0, "training.needle_ratio": None, "training.needle_tasks": None}
    changes: dict[str, Any] = {"training.passkey_digits": 8, "training.passkey_wording": "long"}
    for materials, digits, words in ((load(alone), 5, "in this text."), (load(alone | changes), 8, "memorize it.")):
        for row in _rows(materials, 20):
            answer = row["input_ids"][row["loss_weights"] == 3.0]
            assert len(answer) == digits
            text = str(materials.tokenizer.decode(row["input_ids"][row["document_ids"] == 0]))
            assert text.count(str(materials.tokenizer.decode(answer))) == 3
            assert words in text


def test_needles_may_have_another_weight(load):
    materials = load({"training.needle_answer_weight": 9.0})
    weights = {float(row["loss_weights"].max()) for row in _rows(materials, 60)}

    assert weights == {1.0, 3.0, 9.0}


def test_needles_ask_as_many_questions_as_fit(load):
    settings = {"training.needle_questions": 8, "training.needle_tasks": ["niah_multikey_1", "niah_multiquery"]}
    materials = load(settings | {"training.context_length": 1900})
    asked: dict[str, set[int]] = {"numbers": set(), "number": set()}
    for row in _rows(materials, 40):
        text = str(materials.tokenizer.decode(row["input_ids"][row["document_ids"] == 0]))
        if "special magic" in text:
            kind = "number" if "A special magic number is" in text else "numbers"
            asked[kind].add(
                text.count("mentioned in the provided text is" if kind == "number" else "provided text are")
            )
    assert asked["number"] == {8}
    (several,) = asked["numbers"]
    assert 1 < several < 8


def test_variable_tracking_shares_rows_with_needles(load):
    materials = load({"training.needle_tasks": ["niah_single_2", "variable_tracking_2_hops"]})
    tracked = 0
    for row in _rows(materials, 60):
        text = str(materials.tokenizer.decode(row["input_ids"][row["document_ids"] == 0]))
        if "VAR " in text:
            tracked += 1
            answer = str(materials.tokenizer.decode(row["input_ids"][row["loss_weights"] == 3.0]))
            asked, number = text.rsplit("they are: ", 1)[0], text.split("value ")[1].split(" ")[0]
            first, second, third = answer.removesuffix(END_OF_TEXT).split()
            assert f"VAR {first} = {number}" in asked
            assert f"VAR {third} = VAR {second} " in asked
    assert 8 < tracked < 30
