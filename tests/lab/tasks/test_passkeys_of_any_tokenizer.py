"""Pass keys for tokenizers that join digits, with other numbers of digits and other words. Earlier texts are
unchanged.
"""

import hashlib
import itertools
import random
import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, RetrievalShare, token_stream, train_tokenizer
from attention_priors.lab.data.tokenizer import digit_token_ids
from attention_priors.lab.tasks import PasskeyTexts
from attention_priors.lab.tasks.passkey import WORDINGS
from thoroughness import every_other_deep, examples

# Hash of the texts that the task made when five digits were the only choice.
FIVE_DIGITS = "346af48b5a35fe8d993567bf6f880acaa837d8092385bdfcb75036bd2ee31f4f"


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _texts() -> list[str]:
    draw = random.Random(0)
    lines = [f"The pass key is {draw.randint(0, 99999)}. Remember {draw.randint(0, 10**8)}.\n" for _ in range(400)]
    return [*lines, *(part for wording in WORDINGS.values() for part in wording * 3)]


def _joining(kind: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer that does not split digits."""
    tokenizer = Tokenizer(models.BPE())
    # Digits are joined in threes from the left, and the space before them is separate, as in Llama 3 and others.
    threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"), "isolated")
    split, decoder = {
        "threes": (
            pre_tokenizers.Sequence([threes, pre_tokenizers.ByteLevel(False, use_regex=False)]),
            decoders.ByteLevel(),
        ),
        "words": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        "words and spaces before texts": (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
        "pieces": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
        "small letters": (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
            decoders.Metaspace(),
        ),
        "anything": (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()),
    }[kind]
    if kind == "small letters":
        tokenizer.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


JOINING = [*itertools.product(["words", "words and spaces before texts", "pieces", "threes"], [300, 1500], [1, 5, 8])]


@pytest.mark.parametrize("case", every_other_deep(JOINING, JOINING[::5]), ids=str)
def test_lengths_are_exact_with_joined_digits(case: tuple[str, int, int]):
    kind, vocab_size, digits = case
    tokenizer = _joining(kind, vocab_size)
    assert digit_token_ids(tokenizer) is None
    stream = token_stream(tokenizer, [Document("a", " ".join(_texts()[:20]))])
    sizes = set()
    for filler in (None, stream):
        task = PasskeyTexts(tokenizer, filler, digits=digits, wording="long" if filler is None else "short")
        longest = task.minimum_length + (900 if filler is None else 2 * len(filler))
        for seed in range(examples(11)):  # all depths
            for length in (task.minimum_length, task.minimum_length + seed, longest):
                depth = (seed % 11) / 10
                sample = task.sample(length, depth, _generator(seed))
                assert len(sample.prompt) == sample.answer_start == length
                assert len(str(sample.key)) == digits
                assert str(tokenizer.decode(sample.answer)).strip() == str(sample.key)
                # The sentence about the key is at its depth, and the question ends the text.
                text = str(tokenizer.decode(sample.tokens))
                assert re.search(rf"The pass key is {sample.key}\. Remember it\. {sample.key} is the pass key\.", text)
                assert text.endswith(f"What is the pass key? The pass key is {sample.key}")
                sizes.add(len(sample.answer))
                room = length - (len(task.sample(length, 1.0, _generator(seed)).tokens) - len(sample.answer))
                assert room == 0
                first, last = (task.sample(length, end, _generator(seed)).needle_start for end in (0.0, 1.0))
                assert sample.needle_start - first == round(depth * (last - first))
    if digits > 1 and vocab_size > 300:
        assert len(sizes) > 1  # otherwise, nothing here is joined


@pytest.mark.parametrize("vocab_size", [300, 1500])
def test_tokenizers_may_drop_case_and_line_ends(vocab_size: int):
    tokenizer = _joining("small letters", vocab_size)
    stream = token_stream(tokenizer, [Document(name, " ".join(_texts()[:20])) for name in "ab"])
    for filler in (None, stream):
        task = PasskeyTexts(tokenizer, filler)
        sample = task.sample(task.minimum_length + 60, 0.5, _generator(0))
        assert int(tokenizer.eos_token_id) not in sample.tokens  # pyright: ignore[reportArgumentType]
        text = "".join(str(tokenizer.decode(sample.tokens)).split())
        assert f"thepasskeyis{sample.key}.rememberit." in text
        assert text.endswith(f"whatisthepasskey?thepasskeyis{sample.key}")


def test_keys_must_not_share_a_token_with_the_words_before():
    with pytest.raises(ValueError, match="joins a pass key to the words before it"):
        PasskeyTexts(_joining("anything", 1500))


def test_training_needs_a_tokenizer_that_splits_digits():
    with pytest.raises(ValueError, match=r"decoys=2 need a tokenizer that .* tokenizer '' joins digits"):
        PasskeyTexts(_joining("words", 400), decoys=2)
    task = PasskeyTexts(_joining("words", 400))
    with pytest.raises(ValueError, match="joins digits: expected one token for each, to train on pass keys"):
        RetrievalShare(task, 0.5).least_length(10_000)


@pytest.mark.parametrize("digits", [1, 4, 8, 9])
def test_numbers_of_digits_can_be_chosen(tokenizer: PreTrainedTokenizerFast, digits: int):
    task = PasskeyTexts(tokenizer, digits=digits)
    keys = set()
    for seed in range(40):
        sample = task.sample(task.minimum_length + seed, 0.5, _generator(seed))
        assert 10 ** (digits - 1) <= sample.key < 10**digits
        assert str(tokenizer.decode(sample.answer)) == str(sample.key)
        assert len(sample.answer) == digits
        assert len(sample.prompt) == task.minimum_length + seed
        assert str(tokenizer.decode(sample.tokens)).count(str(sample.key)) >= 3
        keys.add(sample.key)
    assert len(keys) > 30 or digits == 1


@pytest.mark.parametrize("digits", [0, 10, -1])
def test_numbers_of_digits_outside_their_range_are_refused(tokenizer: PreTrainedTokenizerFast, digits: int):
    with pytest.raises(ValueError, match=f"digits must be from 1 to 9; it is {digits}"):
        PasskeyTexts(tokenizer, digits=digits)


def test_wordings_can_be_chosen(tokenizer: PreTrainedTokenizerFast):
    short, long = (PasskeyTexts(tokenizer, wording=name) for name in ("short", "long"))
    assert long.minimum_length > short.minimum_length
    text = str(tokenizer.decode(long.sample(long.minimum_length, 0.0, _generator(0)).tokens))
    assert text.startswith(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it."
    )
    with pytest.raises(ValueError, match="wording must be one of short, long; it is 'loud'"):
        PasskeyTexts(tokenizer, wording="loud")


def test_texts_of_five_digits_are_unchanged():
    documents = [
        Document(str(index), "".join(f"Line {index * 100 + line} of a text.\n" for line in range(60)))
        for index in range(4)
    ]
    tokenizer = train_tokenizer(documents, vocab_size=257)
    digest = hashlib.sha256()
    for filler in (None, token_stream(tokenizer, documents)):
        for decoys in (0, 3):
            task = PasskeyTexts(tokenizer, filler, decoys=decoys)
            for seed in range(20):
                sample = task.sample(task.minimum_length + 37 * seed, seed / 19, _generator(seed))
                places = f"{sample.answer_start} {sample.needle_start} {sample.key}"
                digest.update(f"{places} {tokenizer.decode(sample.tokens)}\n".encode())
            longest = None if filler is None else task.minimum_length + len(filler)
            digest.update(f"{task.minimum_length} {longest}\n".encode())
    assert digest.hexdigest() == FIVE_DIGITS
