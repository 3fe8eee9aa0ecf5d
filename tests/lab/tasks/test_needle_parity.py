"""Needle prompts against the installed lm-evaluation-harness copy of RULER's generator."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import nltk.data
import pytest
import wonderwords
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document
from attention_priors.lab.tasks import Haystack, RulerTask, load_haystack, match_all
from attention_priors.lab.tasks.ruler.haystack import RegexSplitter
from attention_priors.lab.tasks.ruler.needles import (
    DEPTHS,
    NEEDLE_TASKS,
    CompoundWords,
    NeedleSettings,
    draw,
    key_words,
    render,
)
from attention_priors.lab.tasks.ruler.settings import NOISE

PREPARE, UTILS = "lm_eval.tasks.ruler.prepare_niah", "lm_eval.tasks.ruler.niah_utils"
ANSWER_PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"
NOUNS = ["e-mail", "mail", "tune-up", "up", "zebra", "eyed-mail", "apple"]
ADJECTIVES = ["blue", "blue-eyed", "old", "ad hoc", "old", "old-fashioned", "x"]


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    """Import lm-eval's module without its download and its sorting of six million words."""
    categories = {"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": []}
    for name in (PREPARE, UTILS):
        sys.modules.pop(name, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "find", lambda *_: "found")
        patch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=categories))
        module = importlib.import_module(PREPARE)
        importlib.import_module(UTILS)
    yield module
    for name in (PREPARE, UTILS):  # later imports get it with all its words
        package, _, child = name.rpartition(".")
        delattr(sys.modules[package], child)
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _reference_as_ours(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the reference our splitter and keys, and restore the global generator afterwards."""
    monkeypatch.setattr(reference, "cached_sent_tokenize", RegexSplitter())
    monkeypatch.setattr(reference, "WORDS", key_words())
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture(scope="module")
def essay(documents: tuple[Document, ...]) -> Haystack:
    return Haystack("made up", " ".join(document.text for document in documents))


def _template() -> str:
    return sys.modules[UTILS].TEMPLATE


def _reference_arguments(settings: NeedleSettings, essay: Haystack) -> dict[str, Any]:
    haystacks = {"noise": NOISE, "essay": list(essay.words), "needle": "{type_needle_v}"}
    haystacks["needle"] = "One of the special magic {type_needle_v} for {key} is: {value}."
    return {
        "haystack": haystacks[settings.haystack],
        "type_haystack": "repeat" if settings.haystack == "noise" else settings.haystack,
        "type_needle_k": settings.key_kind,
        "type_needle_v": settings.value_kind,
        "num_needle_k": settings.num_keys,
        "num_needle_v": settings.num_values,
        "num_needle_q": settings.num_queries,
    }


def _reference_prompt(reference: ModuleType, settings: NeedleSettings, essay: Haystack, size: int):
    """Build the prompt as NVIDIA's generator does, with the answer prefix in the template and the essay repeated."""
    arguments = _reference_arguments(settings, essay)
    if settings.haystack == "essay":
        arguments["haystack"] *= -(-size // len(essay.words))
    template = _template() + ANSWER_PREFIX
    prompt, answers, _ = reference.generate_input_output(size, template=template, **arguments)
    return prompt, tuple(answers)


def _our_prompt(settings: NeedleSettings, essay: Haystack, size: int, rng: random.Random):
    haystack = RegexSplitter()(essay.first(size).strip()) if settings.haystack == "essay" else [NOISE] * size
    draws = draw(settings, len(haystack), rng)
    return draws, render(settings, draws, haystack if settings.haystack != "needle" else ())


@pytest.mark.parametrize("size", [1, 5, 61, 700, 12_000])
@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_equal_draws_give_equal_prompts_and_answers(reference: ModuleType, essay: Haystack, name: str, size: int):
    settings = NEEDLE_TASKS[name]
    for seed in range(3 if size > 700 else 20):
        random.seed(seed)
        prompt, answers = _reference_prompt(reference, settings, essay, size)
        rng = random.Random(seed)
        draws, ours = _our_prompt(settings, essay, size, rng)

        assert ours.text == prompt
        assert draws.expected == answers
        assert rng.getstate() == random.getstate()  # equal states, so that the next prompt is equal too
        assert ours.text.endswith(ours.answer_prefix)
        assert all(value in prompt for value in answers)


@given(
    kinds=st.tuples(
        st.sampled_from(["noise", "essay", "needle"]),
        st.sampled_from(["words", "uuids"]),
        st.sampled_from(["numbers", "uuids"]),
    ),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    data=st.data(),
)
def test_equal_draws_give_equal_prompts_for_any_settings(
    reference: ModuleType, essay: Haystack, kinds: tuple[Any, Any, Any], counts: tuple[int, int], data: st.DataObject
):
    settings = NeedleSettings(*kinds, *counts, num_queries=data.draw(st.integers(1, counts[0])))
    size = data.draw(st.integers(1 if kinds[0] == "essay" else settings.num_sentences, 200))
    seed = data.draw(st.integers(0, 2**32))
    random.seed(seed)
    prompt, answers = _reference_prompt(reference, settings, essay, size)

    draws, ours = _our_prompt(settings, essay, size, random.Random(seed))

    assert (ours.text, draws.expected) == (prompt, answers)


def _ruler_size(reference: ModuleType, tokenizer: PreTrainedTokenizerFast, settings: NeedleSettings, essay, length):
    """Run RULER's own search, which builds every prompt by the reference and tokenises it whole."""

    def tokens(size: int) -> int:
        return len(tokenizer.tokenize(_reference_prompt(reference, settings, essay, size)[0]))

    random.seed(42)
    smallest = 500 if settings.haystack == "essay" else 5 if length < 4096 else 25
    per_unit = tokens(smallest) / smallest
    low, high, size = smallest, max(int((length / per_unit) * 3), 2 * smallest), None
    while low <= high:
        middle = (low + high) // 2
        if tokens(middle) + 128 <= length:
            size, low = middle, middle + 1
        else:
            high = middle - 1
    return smallest, size


@pytest.mark.parametrize("length", [2900, 4200])
@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_haystack_size_and_samples_match_ruler(
    reference: ModuleType, tokenizer: PreTrainedTokenizerFast, essay: Haystack, name: str, length: int
):
    task, settings = RulerTask(tokenizer, name, essay), NEEDLE_TASKS[name]
    step, size = _ruler_size(reference, tokenizer, settings, essay, length)
    assert size is not None
    assert task.haystack_size(length) == size

    for seed in range(4):
        random.seed(seed)
        used, prompt, answers = size, *_reference_prompt(reference, settings, essay, size)
        while len(tokenizer.tokenize(prompt)) + 128 > length:
            used -= step if used > step else 0
            prompt, answers = _reference_prompt(reference, settings, essay, used)
        sample = task.sample(length, seed)
        assert (sample.text, sample.expected) == (prompt, answers)
        assert sample.length == len(tokenizer.tokenize(prompt)) + 128


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_our_samples_match_the_harness(
    reference: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    essay: Haystack,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    settings, states = NEEDLE_TASKS[name], []
    generate = reference.generate_input_output

    def recorded(size: int, *args: Any, **kwargs: Any):
        states.append((size, random.getstate()))
        return generate(size, *args, **kwargs)

    monkeypatch.setattr(reference, "generate_input_output", recorded)
    random.seed(11)
    arguments = _reference_arguments(settings, essay)
    samples = reference.generate_samples(
        TOKENIZER=tokenizer, template=_template(), max_seq_length=5000, num_samples=3, **arguments
    )

    ours = []
    for size, state in states:
        rng = random.Random()
        rng.setstate(state)
        draws, rendered = _our_prompt(settings, essay, size, rng)
        ours.append((rendered.text, rendered.answer_prefix, draws.expected))
    for sample in samples:  # the harness joins question and prefix by its target_delimiter, a space
        prefix = f" {sample['gen_prefix']}"
        assert (sample["input"] + prefix, prefix, tuple(sample["outputs"])) in ours


def test_the_files_of_a_folder_are_joined_as_the_reference_joins_essays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for downloader in ("bs4", "html2text", "httpx"):  # the module imports them, but joining files needs none
        monkeypatch.setitem(sys.modules, downloader, MagicMock())
    essays = importlib.import_module("lm_eval.tasks.ruler.essays")
    for name, text in {"b.txt": "Second one.", "c.txt": "Third\n\none.\n", "a.txt": "\tThe first."}.items():
        (tmp_path / name).write_text(text)
    paths = sorted(str(path) for path in tmp_path.glob("*.txt"))
    (tmp_path / "essays.json").write_text(json.dumps({"text": essays._read_all_text(paths)}))
    by_the_reference = load_haystack(tmp_path / "essays.json")
    (tmp_path / "essays.json").unlink()
    assert load_haystack(tmp_path).words == by_the_reference.words
    assert by_the_reference.words == ("", "The", "first.Second", "one.Third", "one.", "")


def test_tasks_and_depths_match_the_harness(reference: ModuleType, monkeypatch: pytest.MonkeyPatch):
    niah_utils = sys.modules[UTILS]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda _: None)
    monkeypatch.setattr(niah_utils, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(niah_utils, "generate_samples", lambda *_, **kwargs: asked.append(kwargs) or [{"input": ""}])
    for name, settings in NEEDLE_TASKS.items():
        getattr(niah_utils, name)()
        ask = asked.pop()
        queries = ask.get("num_needle_q", 1)
        assert settings == NeedleSettings(
            haystack=ask["type_haystack"].replace("repeat", "noise"),
            key_kind=ask["type_needle_k"],
            value_kind=ask["type_needle_v"],
            num_keys=max(ask.get("num_needle_k", 1), queries),
            num_values=ask.get("num_needle_v", 1),
            num_queries=queries,
        )
    assert len(NEEDLE_TASKS) == 8
    assert list(DEPTHS) == reference.DEPTHS


def test_keys_match_the_reference_for_a_part_of_the_lists(reference: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    words = CompoundWords(ADJECTIVES, NOUNS)
    assert [words[index] for index in range(len(words))] == reference.WORDS


_LETTERS = st.text(alphabet="aB1 \n\té", max_size=4)


@given(
    expected=st.lists(st.text(alphabet="aB1-", min_size=1, max_size=3), min_size=1, max_size=4),
    noise=st.lists(_LETTERS, min_size=5, max_size=5),
    kept=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_scores_match_the_reference(expected: list[str], noise: list[str], kept: list[bool]):
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    said = [answer.swapcase() if keep else "" for answer, keep in zip(expected, kept, strict=False)]
    output = "".join(part for pair in zip(noise, said, strict=False) for part in pair) + noise[-1]

    assert match_all(output, expected) == pytest.approx(string_match_all(postprocess_pred([output]), [expected]))
