import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, token_stream
from attention_priors.lab.data.tokenizer import digit_token_ids
from attention_priors.lab.tasks import PasskeyTexts
from attention_priors.lab.tasks.retrieval import depths


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _needle(tokenizer: PreTrainedTokenizerFast, key: int) -> list[int]:
    return tokenizer.encode(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")


@given(extra=st.integers(0, 3000), depth=st.floats(0, 1), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("filler", ["sentence", "corpus"])
def test_lengths_answer_and_depth_are_exact(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerFast,
    filler: str,
    extra: int,
    depth: float,
    seed: int,
):
    task: PasskeyTexts = request.getfixturevalue(f"{filler}_task")
    length = task.minimum_length + extra

    sample = task.sample(length, depth, _generator(seed))

    digits = digit_token_ids(tokenizer)
    assert digits is not None
    assert 10_000 <= sample.key <= 99_999
    assert sample.answer_start == len(sample.prompt) == length
    assert sample.answer.tolist() == [digits[int(digit)] for digit in str(sample.key)]
    needle = _needle(tokenizer, sample.key)
    found = sample.tokens[sample.needle_start : sample.needle_start + len(needle)]
    assert found.tolist() == needle
    earliest = task.sample(length, 0.0, _generator(seed)).needle_start
    assert sample.needle_start - earliest == round(depth * extra)


@pytest.mark.parametrize("extra", [0, 1, 50])
def test_shortest_and_longer_texts_have_the_documented_words(
    tokenizer: PreTrainedTokenizerFast, sentence_task: PasskeyTexts, extra: int
):
    sample = sentence_task.sample(sentence_task.minimum_length + extra, 1.0, _generator())

    text = str(tokenizer.decode(sample.tokens))
    assert text.startswith("Remember the pass key")
    assert text.endswith(f"{sample.key} is the pass key.\n\nWhat is the pass key? The pass key is {sample.key}")
    assert text.count(str(sample.key)) == 3


def test_sentence_filler_repeats_without_a_seam(tokenizer: PreTrainedTokenizerFast, sentence_task: PasskeyTexts):
    sample = sentence_task.sample(2000, 1.0, _generator())

    text = tokenizer.decode(sample.prompt)
    assert " There and back again. The grass is green. The sky is blue." in text


def test_corpus_filler_is_a_contiguous_window_without_end_tokens(
    tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...], corpus_task: PasskeyTexts
):
    extra = 1500
    sample = corpus_task.sample(corpus_task.minimum_length + extra, 0.5, _generator(3))

    needle_size = len(_needle(tokenizer, sample.key))
    before = sample.tokens[sample.needle_start - extra // 2 : sample.needle_start]
    after = sample.tokens[sample.needle_start + needle_size :][: extra // 2]
    whole = str(tokenizer.decode(torch.cat([before, after]))).strip("\ufffd")
    assert whole in "\n".join(document.text for document in documents)
    assert tokenizer.eos_token_id not in sample.tokens


def test_corpus_filler_uses_all_of_its_documents_and_then_repeats_them(
    tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]
):
    stream = token_stream(tokenizer, documents[:1])
    task = PasskeyTexts(tokenizer, stream)
    whole = str(tokenizer.decode(stream.tokens[:-1])) + "\n"
    for extra in (0, 1, len(stream), 3 * len(stream) + 5):
        length = task.minimum_length + len(stream) + extra
        sample = task.sample(length, 1.0, _generator(extra))
        assert len(sample.prompt) == length
        begin = len(tokenizer.encode("Remember the pass key in this text.\n"))
        filler = sample.tokens[begin : sample.needle_start]
        assert len(filler) == len(stream) + extra
        if extra == 0:
            assert tokenizer.decode(filler) == whole
        # Tokens at a distance of a whole corpus are equal.
        assert torch.equal(filler[: -len(stream)], filler[len(stream) :])
        assert sorted(filler[: len(stream)].tolist()) == sorted(tokenizer.encode(whole))


def test_decoys_overwrite_only_filler_and_keep_the_length(tokenizer: PreTrainedTokenizerFast):
    plain, with_decoys = PasskeyTexts(tokenizer), PasskeyTexts(tokenizer, decoys=4)
    length = plain.minimum_length + 100
    runs = set()
    for seed in range(60):
        sample = with_decoys.sample(length, 0.5, _generator(seed))
        needle = _needle(tokenizer, sample.key)
        assert sample.needle_start == plain.sample(length, 0.5, _generator(seed)).needle_start
        assert sample.tokens[sample.needle_start :][: len(needle)].tolist() == needle
        assert len(sample.prompt) == length
        before = sample.tokens[sample.needle_start - 50 : sample.needle_start]
        runs.add(len(re.findall(r"\d+", str(tokenizer.decode(before)))))
        assert torch.equal(sample.tokens, with_decoys.sample(length, 0.5, _generator(seed)).tokens)
    assert min(runs) == 0
    assert max(runs) >= 3


@pytest.mark.parametrize("room", [0, 1, 3])
def test_decoys_longer_than_the_filler_are_omitted(tokenizer: PreTrainedTokenizerFast, room: int):
    task = PasskeyTexts(tokenizer, decoys=6)
    for seed in range(20):
        assert len(task.sample(task.minimum_length + room, 0.5, _generator(seed)).prompt) == task.minimum_length + room


def test_decoys_may_begin_like_the_key(tokenizer: PreTrainedTokenizerFast):
    task = PasskeyTexts(tokenizer, decoys=4, decoy_overlap=1.0)
    length = task.minimum_length + 100
    alike = equal = 0
    for seed in range(60):
        sample = task.sample(length, 0.5, _generator(seed))
        needle = _needle(tokenizer, sample.key)
        assert len(sample.prompt) == length
        assert sample.tokens[sample.needle_start :][: len(needle)].tolist() == needle
        key = str(sample.key)
        parts = {key[start:stop] for start in range(5) for stop in range(start + 1, 6)}
        around = torch.cat([sample.prompt[: sample.needle_start], sample.prompt[sample.needle_start + len(needle) :]])
        for number in re.findall(r"\d+", str(tokenizer.decode(around))):
            equal += key in number
            alike += any(len(part) > 1 and number.startswith(part) for part in parts)
        again = task.sample(length, 0.5, _generator(seed))
        assert torch.equal(sample.tokens, again.tokens)
    assert alike > 30
    # By chance, or because one decoy overlaps another.
    assert equal <= 2


@pytest.mark.parametrize("overlap", [-0.1, 1.1, float("nan")])
def test_overlaps_outside_their_range_are_refused(tokenizer: PreTrainedTokenizerFast, overlap: float):
    with pytest.raises(ValueError, match=f"decoy_overlap must be from 0 to 1; it is {overlap}"):
        PasskeyTexts(tokenizer, decoys=1, decoy_overlap=overlap)


def test_decoys_must_not_be_negative(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="decoys must be at least 0; it is -1"):
        PasskeyTexts(tokenizer, decoys=-1)


def test_equal_generators_give_equal_samples_and_others_differ(corpus_task: PasskeyTexts):
    first, again, other = (corpus_task.sample(400, 0.4, _generator(seed)) for seed in (1, 1, 2))

    assert torch.equal(first.tokens, again.tokens)
    assert first.key != other.key
    assert not torch.equal(first.tokens[: first.needle_start], other.tokens[: first.needle_start])


def test_keys_are_uniform(sentence_task: PasskeyTexts):
    generator = _generator()
    keys = torch.tensor([sentence_task.sample(sentence_task.minimum_length, 0.0, generator).key for _ in range(1800)])

    counts = torch.bincount(keys // 10_000, minlength=10)[1:]
    assert counts.sum() == 1800
    assert counts.min() > 130  # 200 expected, with a standard deviation of 13
    assert counts.max() < 270


def test_lengths_below_the_minimum_are_refused(sentence_task: PasskeyTexts):
    minimum = sentence_task.minimum_length

    with pytest.raises(ValueError, match=f"length must be at least.*{minimum}.*it is {minimum - 1}"):
        sentence_task.sample(minimum - 1, 0.5, _generator())


@pytest.mark.parametrize("depth", [-0.01, 1.01, float("nan")])
def test_depths_outside_their_range_are_refused(sentence_task: PasskeyTexts, depth: float):
    with pytest.raises(ValueError, match=f"depth must be from 0 to 1; it is {depth}"):
        sentence_task.sample(500, depth, _generator())


def test_filler_is_unchanged(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]):
    stream = token_stream(tokenizer, documents)
    before = stream.tokens.clone()
    PasskeyTexts(tokenizer, stream, decoys=3).sample(400, 0.5, _generator())
    assert torch.equal(stream.tokens, before)


def test_depths_are_even_from_end_to_end():
    assert depths(5) == (0, 0.25, 0.5, 0.75, 1)
    assert depths(2) == (0, 1)
    with pytest.raises(ValueError, match=r"count must be at least 2.*it is 1"):
        depths(1)
