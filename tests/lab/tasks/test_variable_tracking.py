"""Variable tracking against RULER's own files and lm-evaluation-harness' copy of its generator, and alone."""

import hashlib
import json
import random
import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lm_eval.tasks.ruler import vt_utils
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from attention_priors.lab.data import Document, train_tokenizer
from attention_priors.lab.data.document import END_OF_TEXT
from attention_priors.lab.tasks import EvaluationPlan, RulerTask, RulerTexts, Subject, VariableSettings, match_all
from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.ruler.settings import NOISE, Generators
from attention_priors.lab.tasks.ruler.variables import VARIABLE_TASKS
from attention_priors.lab.tasks.task import Setting
from written_pages import ROOT, run_page

WORDS = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text. Question: Find all variables "
    "that are assigned the value in the text above. Answer: According to the chain(s), variables are assigned the "
    "value, they are: VAR ABC = VAR DEF = 12345. "
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)

RULERS_FILES = {
    (1024, 1, 4): "eff102ecf1671c39865b898d55961a1a2ccc570e30a6b50cfa1beff7c2d265c9",
    (1024, 3, 3): "dd0b06010aca765bd5adff9fc7fae47918e71663be354feb263e53b39a411478",
    (1500, 2, 2): "7590b3d4490c25aacb7f76b2a6483e518ef304e0de35d07c159b273e91924078",
    (4500, 1, 4): "bc05e3436fb8a66544e443d5c770260c1db994138b729b7706afaaaa446af0a5",
}
"""Hashes of four samples that NVIDIA/RULER's ``variable_tracking.py`` (commit c3f5e3b4) wrote with seed 42 and the
tokenizer below, by length, number of chains and number of hops."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer for the words of the prompts, because RULER's example must fit 500 tokens."""
    return train_tokenizer([Document("words", WORDS * 20)], vocab_size=380)


@pytest.fixture(scope="module")
def tasks(tokenizer: PreTrainedTokenizerFast) -> dict[str, RulerTask]:
    return {name: RulerTask(tokenizer, name) for name in VARIABLE_TASKS}


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    """Restore the generators that the reference seeds."""
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _seed_both(seed: int) -> Generators:
    random.seed(seed)
    np.random.seed(seed)
    return Generators.seeded(seed)


def _states_are_equal(ours: Generators) -> bool:
    same = zip(ours.numpy.get_state(legacy=True), np.random.get_state(legacy=True), strict=True)
    return ours.python.getstate() == random.getstate() and all(np.array_equal(one, other) for one, other in same)


# ---- against RULER


@pytest.mark.parametrize(("length", "num_chains", "num_hops"), RULERS_FILES)
def test_samples_from_one_seed_equal_rulers_file(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, length: int, num_chains: int, num_hops: int
):
    task = RulerTask(tokenizer, VariableSettings(num_chains, num_hops), tokens_to_generate=30)
    generators = Generators.seeded(42)
    monkeypatch.setattr(Generators, "seeded", lambda _: generators)  # in sequence: example, search, samples
    task.haystack_size(length)
    samples = [task.sample(length, seed) for seed in range(4)]

    file = json.dumps([[sample.text, sample.expected, sample.length] for sample in samples])
    assert hashlib.sha256(file.encode()).hexdigest() == RULERS_FILES[length, num_chains, num_hops]


# ---- against the harness


def _as_ruler(text: str) -> str:
    """Undo the harness' changes: its spelling, its layout, and the line ends after the example."""

    def lines(match: re.Match[str]) -> str:
        units = re.findall(r"The grass [^\n]*again\.|VAR [A-Z]+ = (?:\d+|VAR [A-Z]+ )", match[0])
        return "text.\n\n" + "\n".join(units) + "\nQuestion"

    text = re.sub(r"text\.\n\n.*?\nQuestion", lines, text.replace("assgined", "assigned"), flags=re.DOTALL)
    return text.replace("\n\n\n\nMemorize", "\n\nMemorize")


@given(chains=st.integers(1, 4), hops=st.integers(1, 10), extra=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("shot", [False, True])
def test_equal_draws_give_the_harness_prompts(shot: bool, chains: int, hops: int, extra: int, seed: int):
    settings: Any = VariableSettings(chains, hops)
    settings = settings.example_settings if shot else settings
    size = hops + 1 + extra  # the harness cuts chains that are longer than the haystack
    ours = _seed_both(seed)
    try:
        reference, names = vt_utils.generate_input_output(size, chains, hops, is_icl=shot)
    except IndexError:
        assume(False)  # the reference fails if two names coincide
        raise
    prompt = settings.write([NOISE] * size, ours)

    reference = _as_ruler(reference)
    if shot:  # the harness draws the numbers of its example
        reference = re.sub(r"\d{5}", "12345", reference)
    assert prompt.text == reference
    assert prompt.expected == tuple(names)
    assert shot or _states_are_equal(ours)
    assert prompt.text.endswith(prompt.answer_prefix)


@given(chains=st.integers(1, 3), hops=st.integers(1, 10), seed=st.integers(0, 2**32 - 1))
def test_names_of_the_example_are_replaced_like_the_harness_does(chains: int, hops: int, seed: int):
    settings = VariableSettings(chains, hops)
    shot = cast(VariableSettings, settings.example_settings).write([NOISE] * 20, Generators.seeded(seed))
    example = f"{shot.text}{shot.answer}\n"
    ours = _seed_both(seed)
    reference = vt_utils.randomize_icl(example.replace("are assigned", "are assgined"))

    made = settings._with_new_names(example, ours)
    (number,) = set(re.findall(r"\d{5}", made)) & set(re.findall(r"\d{5}", made.rsplit("Question", 1)[1]))
    assert made == _as_ruler(reference).replace("12345", number)
    assert ours.python.getstate() == random.getstate()
    assert number == str(np.random.RandomState(seed).randint(10000, 99999))


def test_samples_of_the_harness_equal_ours_up_to_its_changes(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    states, examples = [], []
    generate, rename = vt_utils.generate_input_output, vt_utils.randomize_icl

    def recorded(size: int, *args: Any, **kwargs: Any):
        states.append((size, random.getstate(), np.random.get_state()))
        return generate(size, *args, **kwargs)

    def renamed(example: str) -> str:
        examples.append((states[-1], example))
        return rename(example)

    monkeypatch.setattr(vt_utils, "generate_input_output", recorded)
    monkeypatch.setattr(vt_utils, "randomize_icl", renamed)
    _seed_both(3)
    (shot,) = vt_utils.sys_vartrack_w_noise_random(tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    samples = vt_utils.sys_vartrack_w_noise_random(tokenizer, num_samples=3, max_seq_length=1200, icl_example=shot)

    assert len(samples) == len(examples) == 3
    for sample, ((size, python, numpy), example) in zip(samples, examples, strict=True):
        ours = Generators.seeded(0)
        ours.python.setstate(python)
        ours.numpy.set_state(numpy)
        own = _as_ruler(example).rstrip("\n") + "\n"
        (number,) = set(re.findall(r"\d{5}", example))  # the harness keeps it
        prompt = VariableSettings().write([NOISE] * size, ours, example=own)
        reference = _as_ruler(f"{sample['input']} {sample['gen_prefix']} ")  # the harness strips the last space
        assert prompt.text == reference
        assert number in prompt.text
        assert prompt.expected == tuple(sample["outputs"])


# ---- prompts


def _variables_of(text: str, number: str) -> list[str]:
    """Solve a prompt: the variables that hold a number, found by reading its lines in order."""
    values: dict[str, str] = {}
    for name, value in re.findall(r"^VAR ([A-Z]+) = (\d+|VAR [A-Z]+ )$", text, re.MULTILINE):
        values[name] = values[value[4:-1]] if value.startswith("VAR") else value
    return [name for name, value in values.items() if value == number]


def test_prompts_have_the_documented_text(tasks: dict[str, RulerTask]):
    sample = tasks["variable_tracking_2_hops"].sample(300, seed=1)
    number = sample.text.split("value ")[-1].split(",")[0]
    a, b, c = sample.expected
    lines = sample.text.split("\n")

    assert lines[:2] == ["Memorize and track the chain(s) of variable assignment hidden in the following text.", ""]
    assert sorted(set(lines[2:-1])) == sorted(
        {NOISE, f"VAR {a} = {number}", f"VAR {b} = VAR {a} ", f"VAR {c} = VAR {b} "}
    )
    assert lines[-1] == (
        f"Question: Find all variables that are assigned the value {number} in the text above.{sample.answer_prefix}"
    )
    assert sample.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 3 variables "
        f"are assigned the value {number}, they are: "
    )


@given(chains=st.integers(1, 5), hops=st.integers(1, 6), size=st.integers(7, 40), seed=st.integers(0, 2**70))
def test_prompts_have_one_right_answer(chains: int, hops: int, size: int, seed: int):
    prompt = VariableSettings(chains, hops, example=False).write([NOISE] * size, Generators.seeded(seed))
    number = prompt.answer_prefix.split("value ")[1].split(",")[0]
    numbers = re.findall(r"= (\d+)", prompt.text)
    assume(len(set(numbers)) == len(numbers) == chains)

    assert tuple(_variables_of(prompt.text, number)) == prompt.expected
    assert prompt.answer == " " + " ".join(prompt.expected)
    assert prompt.text.count(NOISE) == size
    before = [prompt.text.split(f"VAR {name} = ")[0].count(NOISE) for name in prompt.expected]
    assert [100 * count / size for count in before] == list(prompt.depths)


@given(chains=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_names_are_distinct_in_examples_too(chains: int, seed: int):
    settings = VariableSettings(chains, 10).example_settings
    assert settings is not None
    names = re.findall(r"VAR ([A-Z]{3}) = ", settings.write([NOISE] * 11, Generators.seeded(seed)).text)
    assert len(set(names)) == len(names) == 11 * chains


@pytest.mark.parametrize("length", [880, 1300, 4200])
@pytest.mark.parametrize("name", VARIABLE_TASKS)
def test_samples_fit_and_depend_only_on_length_and_seed(
    tokenizer: PreTrainedTokenizerFast, tasks: dict[str, RulerTask], name: str, length: int
):
    settings = VARIABLE_TASKS[name]
    again, examples, fill = RulerTask(tokenizer, name), set(), []
    for seed in range(6):
        sample = tasks[name].sample(length, seed)
        example, question = f"\n{sample.text}".rsplit("\nMemorize", 1)
        number = sample.answer_prefix.split("value ")[1].split(",")[0]

        assert again.sample(length, seed) == sample
        assert sample.length == len(tokenizer.tokenize(sample.text)) + 6 * settings.num_answers <= length
        assert tuple(_variables_of(question, number)) == sample.expected
        examples.add(example)
        fill.append(sample.length)
        if settings.example:
            asked, answer = example.strip().rsplit("they are:  ", 1)
            shown = asked.rsplit("value ", 1)[1].split(",")[0]
            assert answer.split() == _variables_of(asked, shown)
            assert len(tokenizer.tokenize(asked)) < 500
    assert len(examples) == (6 if settings.example else 1)
    assert max(fill) > length - 40


def test_short_prompts_need_no_example(tokenizer: PreTrainedTokenizerFast, tasks: dict[str, RulerTask]):
    assert tasks["variable_tracking_2_hops"].sample(300, 0).length <= 300
    with pytest.raises(ValueError, match="length 300 is too short: with the smallest haystack the prompt has"):
        tasks["variable_tracking"].sample(300, 0)
    with pytest.raises(
        ValueError, match=r"few-shot example: length 500 is too short.*Use example=False or variable_tracking_2_hops"
    ):
        RulerTask(ByT5Tokenizer(), "variable_tracking")
    assert RulerTask(ByT5Tokenizer(), "variable_tracking_2_hops").sample(900, 0).length <= 900


def test_tokens_for_letters_and_spaces_hold_any_answer():
    assert {name: settings.answer_tokens for name, settings in VARIABLE_TASKS.items()} == {
        "variable_tracking": 30,  # RULER's number
        "variable_tracking_2_hops": 18,
    }
    sample = RulerTask(ByT5Tokenizer(), "variable_tracking_2_hops").sample(900, 0)
    assert len(ByT5Tokenizer().tokenize(" " + " ".join(sample.expected))) == 18


def test_invalid_arguments_are_named(tasks: dict[str, RulerTask]):
    with pytest.raises(ValueError, match="num_hops must be a positive integer, got 0"):
        VariableSettings(num_hops=0)
    with pytest.raises(ValueError, match="num_hops must be at most 10 with an example; it is 11"):
        VariableSettings(num_hops=11)
    with pytest.raises(ValueError, match="example must be True or False, got 'no'"):
        VariableSettings(example=cast(Any, "no"))
    with pytest.raises(ValueError, match=r"depth must be None for a task with 3 answers; it is 0\.5"):
        tasks["variable_tracking_2_hops"].sample(400, 0, depth=0.5)


def test_the_page_shows_the_prompt_and_the_shortest_lengths(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs/variable-tracking.md").read_text(encoding="utf-8")
    names = run_page("docs/variable-tracking.md")
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert f"```text\n{printed}\n```" in page
    assert "`{}` is `{}`".format("sample.expected", str(names["sample"].expected).replace("'", '"')) in page

    tokenizer = names["tokenizer"]
    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    lengths = re.findall(r"(\d+)\s+for\s+`(variable_tracking\w*)`", page)
    assert (len(rows), len(lengths)) == (4, 2)
    for hops, *shortest in rows:
        settings = (VariableSettings(num_hops=int(hops), example=example) for example in (False, True))
        assert [RulerTexts(tokenizer, each).shortest_text for each in settings] == [int(each) for each in shortest]
    for length, name in lengths:
        task = RulerTask(tokenizer, name)
        assert task.haystack_size(int(length)) == VARIABLE_TASKS[name].num_answers
        with pytest.raises(ValueError, match="is too short"):
            task.haystack_size(int(length) - 1)


# ---- training and evaluation


@pytest.mark.parametrize("name", VARIABLE_TASKS)
def test_texts_are_the_questions_of_evaluation_with_right_answers(
    tokenizer: PreTrainedTokenizerFast, tasks: dict[str, RulerTask], name: str
):
    length, texts = 1200, RulerTexts(tokenizer, name)
    plan = EvaluationPlan(tasks=(name,), lengths=(length,))
    asked = make_task(name, Setting(Subject("without a model", cast(Any, None), tokenizer), plan, chunk=64))
    size, same = tasks[name].haystack_size(length), 0
    for seed in range(12):
        text = texts.text(size, seed)
        question = cast(Any, asked).question(length, None, seed)
        if text.answer_start + question.new_tokens > length:
            continue  # evaluation draws again if a text is too long
        same += 1
        output = str(tokenizer.decode(text.answer))
        assert torch.equal(text.prompt, question.prompt)
        assert output == f" {' '.join(question.expected)}{END_OF_TEXT}"
        assert match_all(output, question.expected) == 1
        assert text.answer.numel() - 1 <= question.new_tokens  # without the end
        assert question.depth is None
    assert same >= 3


@pytest.mark.parametrize("name", VARIABLE_TASKS)
def test_drawn_texts_fill_the_requested_length(tokenizer: PreTrainedTokenizerFast, name: str):
    texts = RulerTexts(tokenizer, name)
    for index in range(20):
        length = texts.shortest_text + 40 * index
        text = texts.draw_text(length, torch.Generator().manual_seed(index))
        assert length - 40 < text.tokens.numel() <= length
