import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, RetrievalShare, TrainingMixture, token_stream
from attention_priors.lab.data.document import END_OF_TEXT
from attention_priors.lab.tasks import EvaluationPlan, Haystack, RulerTask, RulerTexts, Subject, match_all
from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.ruler.haystack import RegexSplitter
from attention_priors.lab.tasks.ruler.needles import NEEDLE_TASKS, NeedleSettings, draw
from attention_priors.lab.tasks.ruler.task import RulerRetrieval
from attention_priors.lab.tasks.task import Setting
from thoroughness import examples

FREE = 128
"""Number of tokens that evaluation reserves for an answer."""


@pytest.fixture(scope="module")
def essay(documents: tuple[Document, ...]) -> Haystack:
    # White space at an end would be an empty word, as in RULER, and would change where ends are joined.
    return Haystack("made up", " ".join(document.text for document in documents).strip())


@pytest.fixture(scope="module")
def texts(tokenizer: PreTrainedTokenizerFast, essay: Haystack) -> dict[str, RulerTexts]:
    return {name: RulerTexts(tokenizer, name, essay) for name in NEEDLE_TASKS}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_texts_are_the_questions_of_evaluation_with_right_answers(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, texts: dict[str, RulerTexts], name: str, tmp_path: Path
):
    (tmp_path / "essay.json").write_text(json.dumps({"text": essay.text}))
    length = 2000
    plan = EvaluationPlan(tasks=(name,), lengths=(length,), corpus=str(tmp_path / "essay.json"))
    asked = make_task(name, Setting(Subject("without a model", cast(Any, None), tokenizer), plan, chunk=64))
    assert isinstance(asked, RulerRetrieval)
    size = RulerTask(tokenizer, name, essay).haystack_size(length)
    same = 0
    for seed in range(12):
        text = texts[name].text(size, seed)
        if text.answer_start + FREE > length:
            continue  # evaluation draws again if a text is too long
        same += 1
        question = asked.question(length, None, seed)
        assert torch.equal(text.prompt, question.prompt)
        assert text.answer.tolist().count(cast(int, tokenizer.eos_token_id)) == 1
        assert int(text.answer[-1]) == tokenizer.eos_token_id  # where evaluation stops reading an answer
        output = str(tokenizer.decode(text.answer[:-1]))
        assert asked.score(output, question.expected) == 1
        assert text.answer.numel() <= question.new_tokens or NEEDLE_TASKS[name].num_answers > 1
    assert same >= 3


@settings(max_examples=examples(5))
@given(data=st.data())
def test_essays_may_begin_at_any_word(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, texts: dict[str, RulerTexts], data: st.DataObject
):
    near_the_end = st.integers(len(essay.words) - 200, len(essay.words) - 1)
    start = data.draw(st.integers(0, len(essay.words) - 1) | near_the_end)
    size, seed = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 2**40))
    turned = Haystack("turned", " ".join(essay.words[start:] + essay.words[:start]))
    name = data.draw(st.sampled_from(["niah_single_2", "niah_multikey_1"]))

    text = texts[name].text(size, seed, start)
    assert torch.equal(text.tokens, RulerTexts(tokenizer, name, turned).text(size, seed).tokens)


def test_several_values_are_listed_like_keys(tokenizer: PreTrainedTokenizerFast, texts: dict[str, RulerTexts]):
    task = NEEDLE_TASKS["niah_multiquery"]
    text = texts["niah_multiquery"].text(30, seed=5)
    a, b, c, d = draw(task, 1, Random(5)).expected

    assert str(tokenizer.decode(text.answer)) == f" {a}, {b}, {c}, and {d}{END_OF_TEXT}"
    assert match_all(str(tokenizer.decode(text.answer)), (a, b, c, d)) == 1


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_drawn_texts_fill_the_requested_length(texts: dict[str, RulerTexts], name: str):
    shortest = texts[name].shortest_text
    unit = {"noise": 0.1, "essay": 0.02, "needle": 0.15}[NEEDLE_TASKS[name].haystack]
    missing = []
    for index in range(40):
        length = shortest + 40 * index
        size = texts[name].draw_text(length, _seeded(index)).tokens.numel()
        assert size <= length
        missing.append(1 - size / length)
    assert sum(missing) / len(missing) <= unit


@settings(max_examples=examples(25))
@given(name=st.sampled_from(list(NEEDLE_TASKS)), seed=st.integers(0, 2**32), extra=st.integers(0, 50))
def test_draws_fit_short_lengths(texts: dict[str, RulerTexts], name: str, seed: int, extra: int):
    length = texts[name].shortest_text + extra
    text = texts[name].draw_text(length, _seeded(seed))

    assert text.tokens.numel() <= length
    assert 0 < text.answer_start < text.tokens.numel()
    assert torch.equal(text.tokens, texts[name].draw_text(length, _seeded(seed)).tokens)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_have_all_depths_and_essays_begin_anywhere(
    tokenizer: PreTrainedTokenizerFast, texts: dict[str, RulerTexts], name: str
):
    depths, beginnings = [], set()
    for seed in range(80):
        text = texts[name].draw_text(1500, _seeded(seed))
        prompt = str(tokenizer.decode(text.prompt))
        context = prompt[prompt.index("\n") : prompt.rindex("\n")]
        value = str(tokenizer.decode(text.answer[:-1])).strip()
        depths.append(context.index(value) / len(context))
        beginnings.add(context[:60])
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert 0.35 < sum(depths) / len(depths) < 0.65
    assert len(beginnings) > (70 if name != "niah_single_1" else 1)


@pytest.fixture(scope="module")
def mixture(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...], sentence_task, texts):
    def make(**changes: Any) -> TrainingMixture:
        least = 900
        shares = [
            RetrievalShare(sentence_task, 0.2, answer_weight=3.0),
            RetrievalShare(texts["niah_single_1"], 0.3, least, 5.0),
            RetrievalShare(texts["niah_multikey_1"], 0.4, None, 7.0),
        ]
        arguments: dict[str, Any] = {"context_length": 1300, "num_rows": 300, "seed": 4, "retrieval": shares}
        return TrainingMixture(token_stream(tokenizer, documents), **(arguments | changes))

    return make


def test_rows_begin_with_each_kind_at_the_stated_ratio(mixture, tokenizer: PreTrainedTokenizerFast):
    rows = mixture()
    found = {1.0: 0, 3.0: 0, 5.0: 0, 7.0: 0}
    lengths = []
    for index in range(300):
        row = rows[index]
        heaviest = float(row["loss_weights"].max())
        found[heaviest] += 1
        if heaviest == 5:
            lengths.append(int((row["document_ids"] == 0).sum()))
    for weight, ratio in ((1.0, 0.1), (3.0, 0.2), (5.0, 0.3), (7.0, 0.4)):
        assert abs(found[weight] - 300 * ratio) <= 4 * (300 * ratio * (1 - ratio)) ** 0.5
    line = len(
        tokenizer.encode("\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.")
    )
    assert 900 - line <= min(lengths) < 950
    assert 1250 < max(lengths) <= 1300


def test_answers_have_their_weight_and_end_the_text(mixture, tokenizer: PreTrainedTokenizerFast):
    rows = mixture()
    for row in (rows[index] for index in range(100)):
        weights = row["loss_weights"]
        if float(weights.max()) < 5:
            continue
        own = row["document_ids"] == 0
        answer = (weights == weights.max()).nonzero().flatten()
        assert answer.tolist() == list(range(int(answer[0]), int(own.sum())))
        assert torch.equal(row["labels"][answer], row["input_ids"][answer])
        value, end = str(tokenizer.decode(row["input_ids"][answer])).split(END_OF_TEXT)
        assert (value[0], len(value), end) == (" ", 8, "")
        asked = str(tokenizer.decode(row["input_ids"][: int(answer[0])]))
        assert asked.endswith("mentioned in the provided text is")
        key = asked.rsplit("magic number for ", 1)[1].split(" mentioned")[0]
        assert f"One of the special magic numbers for {key} is: {value[1:]}." in asked
        assert float(weights[own].sum()) == float(weights.max()) * len(answer) + int(own.sum()) - len(answer) - 1


def test_rows_depend_only_on_seed_and_index(mixture):
    rows, again, other = mixture(), mixture(num_rows=900), mixture(seed=5)
    backwards = {index: again[index] for index in reversed(range(25))}

    assert all(torch.equal(rows[index][field], backwards[index][field]) for index in range(25) for field in rows[index])
    assert not torch.equal(rows[0]["input_ids"], other[0]["input_ids"])


def test_workers_without_shared_memory_make_equal_rows(mixture):
    rows = mixture()
    elsewhere = pickle.loads(pickle.dumps(rows))  # as in a worker that is not forked

    assert all(torch.equal(rows[index]["input_ids"], elsewhere[index]["input_ids"]) for index in range(10))


def test_ratios_above_one_are_refused(mixture, texts: dict[str, RulerTexts]):
    shares = [RetrievalShare(texts["niah_single_1"], 0.7), RetrievalShare(texts["niah_single_2"], 0.5)]
    with pytest.raises(ValueError, match=r"the ratios of retrieval must sum to 1 at most; they sum to 1\.2"):
        mixture(retrieval=shares)
    thirds = [RetrievalShare(texts[f"niah_single_{number}"], 1 / 3) for number in (1, 2, 3)]
    assert len(mixture(retrieval=thirds)) == 300


def test_invalid_arguments_are_named(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, texts: dict[str, RulerTexts], mixture
):
    shortest = texts["niah_multiquery"].shortest_text
    with pytest.raises(ValueError, match=rf"context_length must be at least {shortest}, .*niah_multiquery.*; it is 90"):
        mixture(context_length=90, retrieval=[RetrievalShare(texts["niah_multiquery"], 0.1)])
    with pytest.raises(ValueError, match=rf"minimum_length of niah_multiquery must be from {shortest}.*; it is 200"):
        mixture(retrieval=[RetrievalShare(texts["niah_multiquery"], 0.1, 200)])
    with pytest.raises(ValueError, match=rf"length must be at least shortest_text, {shortest} tokens; it is 200"):
        texts["niah_multiquery"].draw_text(200, _seeded(0))
    with pytest.raises(ValueError, match="ratio of niah_single_1 must be above 0 and at most 1; it is 0"):
        RetrievalShare(texts["niah_single_1"], 0)
    with pytest.raises(ValueError, match="minimum_length must be a positive integer, got -3"):
        RetrievalShare(texts["niah_single_1"], 0.5, -3)
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1.*got 'niah_single_9'"):
        RulerTexts(tokenizer, "niah_single_9", essay)
    with pytest.raises(ValueError, match="haystack must be given for a task whose haystack is an essay"):
        RulerTexts(tokenizer, "niah_single_2")
    without_end = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="has no eos_token: expected one to end each text"):
        RulerTexts(without_end, "niah_single_1")


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multivalue", "niah_multikey_2"])
def test_each_further_question_is_about_the_same_needles_and_its_answer_has_the_weight(
    tokenizer: PreTrainedTokenizerFast,
    documents: tuple[Document, ...],
    essay: Haystack,
    texts: dict[str, RulerTexts],
    name: str,
):
    made = RulerTexts(tokenizer, replace(NEEDLE_TASKS[name], num_questions=4), essay)
    asked = []
    for seed in range(8):
        text, alone = made.text(60, seed), texts[name].text(60, seed)
        assert torch.equal(text.prompt, alone.prompt)
        assert torch.equal(text.answer, alone.answer)  # with the end-of-text token
        assert len(text.answers) == 4
        needles: dict[str, set[str]] = {}
        for key, value in re.findall(
            r"special magic numbers for (\S+) is: (\d+)\.", str(tokenizer.decode(text.prompt))
        ):
            needles.setdefault(key, set()).add(value)
        ends = [0, *(end for _, end in text.answers)]
        keys = []
        for before, (start, end) in zip(ends, text.answers, strict=False):
            question = str(tokenizer.decode(text.tokens[before:start]))
            (key,) = re.findall(r" The special magic numbers? for (\S+) mentioned in the provided text \w+$", question)
            answer = str(tokenizer.decode(text.tokens[start:end], skip_special_tokens=True))
            assert set(re.findall(r"\d+", answer)) == needles[key]
            keys.append(key)
        asked.append(keys)
        assert [int(text.tokens[end - 1]) for _, end in text.answers] == [tokenizer.eos_token_id] * 4
        assert text.answers[-1][1] == text.tokens.numel()
    most = NEEDLE_TASKS[name].num_keys
    assert any(min(most, 2) <= len(set(keys)) <= max(1, most - 1) for keys in asked)  # keys repeat

    share = RetrievalShare(made, 1.0, answer_weight=30)
    length = made.shortest_text
    rows = TrainingMixture(
        token_stream(tokenizer, documents), context_length=length, num_rows=1, seed=0, retrieval=[share]
    )
    row = rows[0]
    runs, counts = (row["loss_weights"] == 30).unique_consecutive(return_counts=True)
    assert int(runs.sum()) == 4
    assert all(count >= 8 for run, count in zip(runs, counts, strict=True) if run)


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multivalue", "niah_multikey_2"])
def test_needles_are_stated_again_after_all_questions(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, texts: dict[str, RulerTexts], name: str
):
    asking = RulerTexts(tokenizer, replace(NEEDLE_TASKS[name], num_questions=2), essay)
    made = RulerTexts(tokenizer, replace(NEEDLE_TASKS[name], num_questions=2, num_restatements=3), essay)
    restated = set()
    for seed in range(8):
        text, asked = made.text(60, seed), asking.text(60, seed)
        before = asked.tokens.numel()
        assert torch.equal(text.tokens[:before], asked.tokens)
        assert text.answers[:2] == asked.answers
        needles = re.findall(r"One of the special magic numbers for \S+ is: \d+\.", str(tokenizer.decode(text.prompt)))
        for start, end in text.answers[2:]:
            needle = str(tokenizer.decode(text.tokens[before:end]))
            assert needle.removeprefix("\n").removesuffix(END_OF_TEXT) in needles
            assert re.fullmatch(r" \d+\." + re.escape(END_OF_TEXT), str(tokenizer.decode(text.tokens[start:end])))
            restated.add((seed, needle))
            before = end
        assert before == text.tokens.numel()
    assert len(restated) > 8 or NEEDLE_TASKS[name].num_sentences == 1


def test_custom_settings_and_splitters_work(tokenizer: PreTrainedTokenizerFast, essay: Haystack):
    class Halves(RegexSplitter):
        def __call__(self, text: str) -> list[str]:
            words = text.split(" ")
            return [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])]

    made = RulerTexts(tokenizer, NeedleSettings("essay", num_keys=2), essay, split_sentences=Halves())
    prompt = str(tokenizer.decode(made.text(9, seed=1).prompt))
    context = prompt[prompt.index("\n") + 1 : prompt.rindex("\n")]
    first, second = essay.first(9).strip().split(" ")[:4], essay.first(9).strip().split(" ")[4:]

    assert context.count("One of the special magic numbers") == 2
    assert " ".join(first) in context
    assert " ".join(second) in context
