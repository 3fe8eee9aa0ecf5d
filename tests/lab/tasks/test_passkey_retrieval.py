"""Pass keys as a task of an evaluation: texts and scores."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from known_models import SCHEMES, Copier, Reciter, random_text, tiny_decoder
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attention_priors.lab.data import Corpus, Document
from attention_priors.lab.tasks import EvaluationPlan, PasskeyTexts, Subject
from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.generation import forced_predictions
from attention_priors.lab.tasks.passkey import PasskeyRetrieval
from attention_priors.lab.tasks.retrieval import Question
from attention_priors.lab.tasks.task import Setting, Unit
from thoroughness import every_other_deep

Make = Callable[..., PasskeyRetrieval]


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]) -> Make:
    """Build a task for a model, with changes of the plan."""

    def task(model: Any = None, *, chunk: int = 64, name: str = "passkey_corpus", **changes: Any) -> PasskeyRetrieval:
        settings = {"tasks": (name,), "lengths": (200,), "depths": 3, "seeding": "mixed", "corpus": "made up"}
        plan = EvaluationPlan.model_validate(settings | changes)
        corpus = Corpus("made up", (), documents)
        subject = Subject("known", cast(PreTrainedModel, model), tokenizer, ("made up", corpus))
        made = make_task(name, Setting(subject, plan, chunk))
        assert isinstance(made, PasskeyRetrieval)
        return made

    return task


def units(task: PasskeyRetrieval, length: int) -> list[Unit]:
    return [unit for group in task.groups(length) for unit in group]


def ask(task: PasskeyRetrieval, length: int) -> list[dict[str, Any]]:
    return [record for unit in units(task, length) for record in task.ask(length, [unit])]


def whole(question: Question) -> Tensor:
    assert question.answer is not None
    return torch.cat([question.prompt, question.answer])


@pytest.mark.parametrize("name", every_other_deep(SCHEMES, [*SCHEMES][::2]))
def test_right_answers_match_generate(name: str):
    for seed in range(2):
        model = tiny_decoder(seed, **SCHEMES[name])
        prompt = random_text(seed, 20)[None]
        generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
        answer = generate(prompt, max_new_tokens=5, do_sample=False)[:, 20:]
        for chunk in (1, 7, 64):
            assert torch.equal(forced_predictions(model, prompt, answer, chunk=chunk)[0], answer)
            for digit in range(5):
                wrong = answer.clone()
                wrong[0, digit] = (wrong[0, digit] + 1) % model.config.vocab_size
                assert not torch.equal(forced_predictions(model, prompt, wrong, chunk=chunk)[0], wrong)


@pytest.mark.parametrize("chunk", [1, 3, 5, 1000])
def test_all_five_digits_must_be_right(make: Make, chunk: int):
    task = make()
    unit = units(task, 200)[1]
    (question,) = task.questions(200, [unit])
    text, (key,) = whole(question), question.expected

    def record(*wrong: int) -> dict[str, Any]:
        (found,) = make(Reciter(text, wrong), chunk=chunk).ask(200, [unit])
        return found

    right = {"depth": 0.5, "tokens": 200, "score": 1.0, "output": key, "token_accuracy": 1.0}
    found = record()
    assert min(found.pop("margins")) > 0
    assert found == right | {"tokens_right": [True] * 5, "expected": [key]}
    for place in range(200, 205):
        found = record(place)
        assert (found["score"], found["token_accuracy"]) == (0.0, 0.8)
        assert found["tokens_right"] == [margin > 0 for margin in found["margins"]]
        assert found["tokens_right"] == [index != place for index in range(200, 205)]
    # Only the digits count.
    assert record(*range(200))["score"] == 1


def test_a_short_sighted_model_finds_only_near_keys(make: Make, corpus_task: PasskeyTexts):
    length = corpus_task.minimum_length + 200
    found = ask(make(Copier(reach=10_000), trials=2), length)
    assert [(record["depth"], record["score"]) for record in found] == [(0.0, 1), (0.5, 1), (1.0, 1)] * 2
    # The whole needle and question fit into the reach, but half of the filler does not.
    found = ask(make(Copier(reach=corpus_task.minimum_length + 50), trials=2), length)
    assert [(record["depth"], record["score"]) for record in found] == [(0.0, 0), (0.5, 0), (1.0, 1)] * 2


@pytest.mark.parametrize("seeding", ["mixed", "hashed"])
@pytest.mark.parametrize("name", ["passkey", "passkey_8", "passkey_corpus", "passkey_sentence"])
def test_texts_depend_only_on_seed_length_depth_and_trial(make: Make, name: str, seeding: str):
    digits = 8 if name == "passkey_8" else 5

    def read(*lengths: int, **changes: Any) -> list[list[int]]:
        task = make(name=name, seeding=seeding, lengths=lengths, **changes)
        return [whole(question).tolist() for one in lengths for question in task.questions(one, units(task, one))]

    both = read(310, 330, trials=2)
    assert [len(text) for text in both] == [310 + digits] * 6 + [330 + digits] * 6
    assert len({tuple(text) for text in both}) == 12
    assert len({tuple(text[-digits:]) for text in both}) == 12  # distinct pass keys
    assert read(330, trials=2) == both[6:]
    assert read(310, 330, trials=1) == both[:3] + both[6:9]
    others = read(310, 330, trials=2, seed=1)
    assert not any(one == other for one, other in zip(both, others, strict=True))


def test_texts_of_comparisons_match_published_results(
    make: Make, corpus_task: PasskeyTexts, sentence_task: PasskeyTexts
):
    """``seeding="mixed"`` draws the text that ``PasskeyTexts`` makes from the published rule's seed."""
    for name, texts in (("passkey_corpus", corpus_task), ("passkey_sentence", sentence_task)):
        task = make(name=name)
        for index, question in enumerate(task.questions(200, units(task, 200))):
            seed = 0
            for part in (200, index, 0):
                seed = (seed * 1_000_003 + part + 1) % (2**31 - 1)
            expected = texts.sample(200, index / 2, torch.Generator().manual_seed(seed))
            assert torch.equal(whole(question), expected.tokens)
