import hashlib
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import nltk.data
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from attention_priors.lab.data import Document, load_corpus
from attention_priors.lab.tasks import Haystack, PunktSplitter, RulerTask, load_haystack, match_all
from attention_priors.lab.tasks.ruler.haystack import RegexSplitter
from attention_priors.lab.tasks.ruler.needles import (
    DEPTHS,
    NEEDLE_TASKS,
    CompoundWords,
    NeedleSettings,
    at_depth,
    draw,
    key_words,
    render,
)

ONE_ANSWER = [name for name, settings in NEEDLE_TASKS.items() if settings.num_answers == 1]


@pytest.fixture(scope="module")
def essay(documents: tuple[Document, ...]) -> Haystack:
    return Haystack("made up", " ".join(document.text for document in documents))


@pytest.fixture(scope="module")
def tasks(tokenizer: PreTrainedTokenizerFast, essay: Haystack) -> dict[str, RulerTask]:
    return {name: RulerTask(tokenizer, name, essay) for name in NEEDLE_TASKS}


def test_prompts_have_the_documented_text(tokenizer: PreTrainedTokenizerFast):
    settings = NeedleSettings("essay", num_keys=2)
    task = RulerTask(
        tokenizer, settings, Haystack("short", "It rains. The sun comes.\nAll  is well."), tokens_to_generate=16
    )
    sample = task.sample(600, seed=1)

    key = re.search(r"number for (\S+) mentioned", sample.text)
    assert key is not None
    match = re.fullmatch(
        r"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you "
        r"about the number afterwards\.\n(?P<context>.*)\n"
        r"What is the special magic number for (?P<key>\S+) mentioned in the provided text\?"
        r"(?P<prefix> The special magic number for (?P=key) mentioned in the provided text is)",
        sample.text,
    )
    assert match is not None
    assert match["prefix"] == sample.answer_prefix
    assert f"One of the special magic numbers for {match['key']} is: {sample.expected[0]}." in match["context"]
    assert match["context"].count("One of the special magic numbers for") == 2
    text = re.sub(r"One of the special magic numbers for \S+ is: \d{7}\.", "", match["context"])
    assert "It rains. The sun comes. All is well. It rains." in " ".join(text.split())


@pytest.mark.parametrize("length", [650, 1500])
@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_samples_fit_below_rulers_smallest_haystack(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, name: str, length: int
):
    task = RulerTask(tokenizer, name, essay, tokens_to_generate=8)
    if name == "niah_multiquery" and length == 650:
        with pytest.raises(ValueError, match=r"length 650 is too short: with the smallest haystack the prompt has \d+"):
            task.sample(length, 0)
        return
    for seed in range(5):
        sample = task.sample(length, seed)
        assert sample.length == len(tokenizer.encode(sample.text, add_special_tokens=False)) + 8 <= length
        assert all(sample.text.count(value) == 1 for value in sample.expected)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_samples_depend_only_on_length_and_seed(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, tasks: dict[str, RulerTask], name: str
):
    first = tasks[name].sample(2900, 7)
    tasks[name].sample(3100, 5)
    assert tasks[name].sample(2900, 7) == first
    assert RulerTask(tokenizer, name, essay).sample(2900, 7) == first
    assert tasks[name].sample(2900, 8) != first


@given(depth=st.floats(0, 1), seed=st.integers(0, 2**40), units=st.integers(4, 60))
@pytest.mark.parametrize("name", ONE_ANSWER)
def test_a_given_depth_moves_only_one_needle(name: str, depth: float, seed: int, units: int):
    settings = NEEDLE_TASKS[name]
    haystack = [f"Sentence {index}." for index in range(units)]
    drawn = draw(settings, units, Random(seed))
    moved = at_depth(drawn, units, depth)
    before, after = (render(settings, draws, haystack) for draws in (drawn, moved))

    assert moved.expected_depths == (100 * depth,)
    assert moved.expected == drawn.expected
    needle = re.search(rf"One of the special magic \w+ for \S+( \S+)? is: {drawn.expected[0]}\.", before.text)
    assert needle is not None
    assert after.text.count(needle[0]) == 1
    assert before.text.replace(needle[0], "").split() == after.text.replace(needle[0], "").split()
    start = after.text[: after.text.index(needle[0])]
    unit = r"Sentence \d" if settings.haystack == "essay" else r"(Sentence \d+\.|One of the special [^\n]*)\n"
    assert len(re.findall(unit, start)) == int(units * depth)


@pytest.mark.parametrize("name", ONE_ANSWER)
def test_samples_at_a_depth_fit_and_differ_from_the_drawn_ones_in_depth(tasks: dict[str, RulerTask], name: str):
    same = 0
    for seed in range(12):
        drawn, moved = (tasks[name].sample(3000, seed, depth) for depth in (None, 0.3))
        assert moved.length <= 3000
        assert moved.depths == (pytest.approx(30),)
        assert moved.expected[0] in moved.text
        same += moved.expected == drawn.expected
    assert same >= 6  # the others were drawn again, because one of the two prompts was too long


def test_depths_reach_both_ends(tasks: dict[str, RulerTask]):
    for name in ONE_ANSWER:
        start, end = (tasks[name].sample(3000, 3, depth) for depth in (0, 1))
        assert start.text.split("\n", 1)[1].lstrip().startswith("One of the special magic")
        assert start.expected[0] in start.text[:400]
        assert end.text.rsplit("\n", 1)[0].rstrip().endswith(f"{end.expected[0]}.")


def test_reported_depths_match_the_needles(essay: Haystack, tasks: dict[str, RulerTask]):
    for name in NEEDLE_TASKS:
        settings = NEEDLE_TASKS[name]
        for seed in range(10):
            sample = tasks[name].sample(4500, seed)
            context = sample.text[sample.text.index("\n") : sample.text.rindex("\n")]
            assert len(sample.depths) == len(sample.expected) == settings.num_answers
            for value, depth in zip(sample.expected, sample.depths, strict=True):
                assert context.index(value) / len(context) == pytest.approx(depth / 100, abs=0.06)
            if settings.haystack == "essay":
                assert set(sample.depths) <= set(DEPTHS)


def test_keys_and_values_have_their_formats():
    for name, settings in NEEDLE_TASKS.items():
        draws = draw(settings, 50, Random(5))
        keys = [*draws.keys, *(key for key, _ in draws.distractors)]
        values = [*sum(draws.values, ()), *(value for _, value in draws.distractors)]
        uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        forms = {"numbers": r"[1-9]\d{6}", "uuids": uuid4, "words": r"[a-z -]+-[a-z -]+"}
        assert all(re.fullmatch(forms[settings.key_kind], key) for key in keys), name
        assert all(re.fullmatch(forms[settings.value_kind], value) for value in values), name
        assert len(draws.distractors) == (50 if settings.haystack == "needle" else 0)


@given(first=st.lists(st.text("ab-'", max_size=4), max_size=8), second=st.lists(st.text("ab-", max_size=3), max_size=5))
def test_compound_words_are_the_sorted_distinct_pairs(first: list[str], second: list[str]):
    words = CompoundWords(first, second)
    listed = sorted({f"{one}-{other}" for one in first for other in second})

    assert len(words) == len(listed)
    assert [words[index] for index in range(len(listed))] == listed
    assert [words[-index] for index in range(1, len(listed) + 1)] == listed[::-1]
    with pytest.raises(IndexError):
        words[len(listed)]


def test_words_come_from_the_pinned_lists():
    words = key_words()
    # 6782 nouns and 912 adjectives, with two duplicates. The digest is that of the reference's full list.
    assert len(words) == 6782 * 910
    assert len({words[index] for index in range(20_000)}) == 20_000
    digest = hashlib.sha256()
    for index in range(0, len(words), 997):
        digest.update(words[index].encode() + b"\n")
    assert digest.hexdigest() == "147a567d5c93baeb5838b2fc41f97b422fd3bb9736ae0e23195c9a36b7913b79"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("See e.g. this one. It is 3.5 m. (Yes.) No.", ["See e.g. this one.", "It is 3.5 m.", "(Yes.)", "No."]),
        ('He said "stop." Then he went.', ['He said "stop."', "Then he went."]),
        ("no end here", ["no end here"]),
    ],
)
def test_the_regex_splitter_splits_sentences(text: str, sentences: list[str]):
    assert RegexSplitter()(text) == sentences


@given(st.text(alphabet="aB. !\"'1", max_size=60).map(lambda text: " ".join(text.split())))
def test_the_regex_splitter_loses_only_spaces(text: str):
    assert " ".join(RegexSplitter()(text)) == text


def test_punkt_splits_by_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast):
    # The format of NLTK's own data, with a language whose abbreviations are "dr" and "mr".
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in {
        "abbrev_types.txt": "dr\nmr",
        "collocations.tab": "",
        "ortho_context.tab": "",
        "sent_starters.txt": "",
    }.items():
        (folder / name).write_text(content)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    punkt = PunktSplitter()

    text = "Dr. Who met Mr. Hyde. They talked. "
    assert punkt(text) == ["Dr. Who met Mr. Hyde.", "They talked."]
    assert RegexSplitter()(text.strip()) == ["Dr.", "Who met Mr.", "Hyde.", "They talked."]
    assert punkt.name == f"nltk-{nltk.__version__}/punkt_tab/english"
    sample = RulerTask(tokenizer, "niah_single_2", Haystack("doctors", text), split_sentences=punkt).sample(600, 1)
    assert not re.search(r"[DM]r\. +One of the special", sample.text)
    with pytest.raises(LookupError, match="punkt_tab"):
        PunktSplitter("german")


def test_token_counts_ignore_the_tokenizers_truncation(
    tokenizer: PreTrainedTokenizerFast, essay: Haystack, tasks: dict[str, RulerTask]
):
    tokenizer("some text", truncation=True, max_length=16, padding="max_length")
    try:
        task = RulerTask(tokenizer, "niah_single_2", essay)
        assert task.sample(2900, 1) == tasks["niah_single_2"].sample(2900, 1)
    finally:
        tokenizer("some text")


def test_slow_tokenizers_count_tokens(essay: Haystack):
    tokenizer = ByT5Tokenizer()  # bytes
    sample = RulerTask(tokenizer, "niah_multikey_1", essay).sample(1500, 0)
    assert 1300 < sample.length == len(sample.text.encode()) + 128 <= 1500


def test_haystacks_are_read_in_full(tmp_path: Path):
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "b.txt").write_text("Second one. \n")
    (tmp_path / "essays" / "a.txt").write_text("The first\n\none.\t")
    (tmp_path / "essays.json").write_text(json.dumps({"text": "The first one. Second one."}))

    folder = load_haystack(tmp_path / "essays")
    assert folder.name == "essays"
    assert folder.words == ("The", "first", "one.", "Second", "one.", "")
    assert folder.first(8) == "The first one. Second one.  The first"
    file = load_haystack(tmp_path / "essays" / "a.txt")
    assert (file.name, file.words) == ("a.txt", ("The", "first", "one.", ""))
    rulers = load_haystack(tmp_path / "essays.json")
    assert (rulers.name, rulers.words) == ("essays.json", ("The", "first", "one.", "Second", "one."))
    assert len({folder.fingerprint, file.fingerprint, rulers.fingerprint}) == 3
    assert Haystack("other", "The first\none. Second one.").fingerprint == rulers.fingerprint

    embedded = load_haystack("embedded")
    assert embedded.name == "embedded (held out)"
    assert load_corpus("embedded").held_out[0].text.split()[:50] == [word for word in embedded.words if word][:50]


def test_unreadable_haystacks_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_haystack(tmp_path / "nowhere")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"source .*blank\.txt. cannot be used: it is empty or blank"):
        load_haystack(tmp_path / "blank.txt")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object with a string under 'text'"):
        load_haystack(tmp_path / "list.json")
    (tmp_path / "half.json").write_text('{"text": ')
    with pytest.raises(ValueError, match=r"source .*half\.json. is not valid JSON: Expecting value"):
        load_haystack(tmp_path / "half.json")
    (tmp_path / "binary.txt").write_bytes(b"Words.\0")
    with pytest.raises(ValueError, match=r"binary\.txt. cannot be used: it is binary \(it holds a NUL byte\)"):
        load_haystack(tmp_path / "binary.txt")


def test_genomes_are_haystacks_and_folders_list_skipped_files(tmp_path: Path):
    (tmp_path / "genome.fa").write_text(">chr1 human\nacgt\nACGT\n")
    (tmp_path / "latin.txt").write_bytes("Übermut.".encode("latin-1"))
    assert load_haystack(tmp_path / "genome.fa").words == ("ACGTACGT",)
    folder = load_haystack(tmp_path)
    assert folder.words == ("ACGTACGT",)
    assert folder.skipped == ("latin.txt: it is not UTF-8 (byte 0)",)


@pytest.mark.parametrize(("kind", "keys", "lengths"), [("noise", 20, (3500, 3800)), ("needle", 10, (1800, 2100))])
def test_haystacks_keep_room_for_all_needles(
    tokenizer: PreTrainedTokenizerFast, kind: Any, keys: int, lengths: tuple[int, ...]
):
    task = RulerTask(tokenizer, NeedleSettings(kind, num_keys=keys))
    for length in lengths:
        assert keys < task.haystack_size(length) < 2 * keys  # one step shorter, the needles do not fit
        for seed in range(12):
            sample = task.sample(length, seed)
            assert sample.length <= length
            assert sample.text.count(" is: ") >= keys


def test_invalid_arguments_are_named(tokenizer: PreTrainedTokenizerFast, essay: Haystack, tasks: dict[str, RulerTask]):
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1.*got 'niah_single_9'"):
        RulerTask(tokenizer, "niah_single_9", essay)
    with pytest.raises(ValueError, match="haystack must be given for a task whose haystack is an essay"):
        RulerTask(tokenizer, "niah_single_2")
    with pytest.raises(ValueError, match="tokens_to_generate must be a positive integer, got 0"):
        RulerTask(tokenizer, "niah_single_1", tokens_to_generate=0)
    with pytest.raises(ValueError, match="num_queries must be at most num_keys, 1; it is 2"):
        NeedleSettings("essay", num_queries=2)
    with pytest.raises(ValueError, match="haystack must be one of noise, essay, needle; got 'repeat'"):
        NeedleSettings("repeat")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_restatements must be an integer of at least 0; it is -1"):
        NeedleSettings("essay", num_restatements=-1)
    with pytest.raises(ValueError, match="must be at most 40 in an essay; it is 42"):
        NeedleSettings("essay", num_keys=6, num_values=7)
    with pytest.raises(ValueError, match="length must be above tokens_to_generate, 128; it is 128"):
        tasks["niah_single_1"].sample(128, 0)
    with pytest.raises(ValueError, match="length 140 is too short"):
        tasks["niah_single_1"].sample(140, 0)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0; it is -1"):
        tasks["niah_single_1"].sample(3000, -1)
    with pytest.raises(ValueError, match=r"depth must be from 0 to 1, or None; it is 50"):
        tasks["niah_single_1"].sample(3000, 0, depth=50)
    with pytest.raises(ValueError, match=r"depth must be None for a task with 4 answers; it is 0\.5"):
        tasks["niah_multivalue"].sample(3000, 0, depth=0.5)
    with pytest.raises(ValueError, match="expected must hold at least one string"):
        match_all("anything", [])
    assert tasks["niah_single_1"].haystack is None
    assert tasks["niah_single_2"].haystack is essay


def test_scores_count_expected_strings_in_any_case():
    assert match_all("It is ABC, and 12.", ["abc", "12"]) == 1
    assert match_all("It is ABC.", ["abc", "12"]) == 0.5
    assert match_all("", ["abc"]) == 0
