"""Generated texts never change: every result on every page was measured on them.

Each case draws some texts and compares their SHA-256 with the one in ``generated_texts.json``. A changed hash means
that older results cannot be compared with new ones. To record a new case, run this file with ``RECORD_TEXTS=1``.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, RetrievalShare, TrainingMixture, token_stream
from attention_priors.lab.tasks import (
    CopyMixture,
    CopyMixtureRows,
    Haystack,
    PasskeyTexts,
    RulerTask,
    RulerTexts,
)
from attention_priors.lab.tasks.retrieval import text_seed
from attention_priors.lab.tasks.ruler.needles import NEEDLE_TASKS

RECORDED = Path(__file__).with_name("generated_texts.json")
LENGTHS, DEPTHS = (150, 400), (0.0, 0.4, 1.0)

Texts = Iterator[torch.Tensor | str]
Words = tuple[PreTrainedTokenizerFast, tuple[Document, ...]]


def _passkeys(words: Words, *, corpus: bool, **settings: object) -> Texts:
    tokenizer, documents = words
    task = PasskeyTexts(tokenizer, token_stream(tokenizer, documents) if corpus else None, **settings)  # pyright: ignore[reportArgumentType]
    for length in LENGTHS:
        for seed, depth in enumerate(DEPTHS):
            yield task.sample(length + task.minimum_length, depth, torch.Generator().manual_seed(seed)).tokens


def _prompts(words: Words, name: str) -> Texts:
    tokenizer, documents = words
    task = RulerTask(tokenizer, name, Haystack.of("texts", documents))
    for seed in range(3):
        sample = task.sample(3000, seed)
        yield sample.text
        yield " ".join(sample.expected)


def _copies(words: Words) -> Texts:
    rows = CopyMixtureRows(CopyMixture(), context_length=64, num_rows=4, seed=1)
    for index in range(4):
        sample = rows.sample(index)
        yield sample.tokens
        yield sample.kinds


def _mixture(words: Words) -> Texts:
    tokenizer, documents = words
    stream = token_stream(tokenizer, documents)
    passkeys = PasskeyTexts(tokenizer, stream, decoys=4, decoy_overlap=0.5)
    needles = RulerTexts(tokenizer, "niah_single_1", Haystack.of("texts", documents))
    shares = [RetrievalShare(passkeys, 0.4), RetrievalShare(needles, 0.4, answer_weight=10.0)]
    rows = TrainingMixture(stream, context_length=512, num_rows=8, seed=3, retrieval=shares)
    for row in rows:
        yield from row.values()


CASES: dict[str, Callable[[Words], Texts]] = {
    "tokenizer": lambda words: iter([json.dumps(words[0].get_vocab(), sort_keys=True)]),
    "passkey, repeated sentence, short": lambda words: _passkeys(words, corpus=False),
    "passkey, repeated sentence, long, 8 digits": lambda words: _passkeys(
        words, corpus=False, digits=8, wording="long"
    ),
    "passkey, corpus": lambda words: _passkeys(words, corpus=True),
    "passkey, corpus, decoys": lambda words: _passkeys(words, corpus=True, decoys=5),
    "passkey, corpus, overlapping decoys": lambda words: _passkeys(words, corpus=True, decoys=5, decoy_overlap=0.5),
    **{f"needles, {name}": (lambda words, name=name: _prompts(words, name)) for name in NEEDLE_TASKS},
    # RULER's own files fix the prompts of variable_tracking, in test_variable_tracking.py.
    "variable_tracking_2_hops": lambda words: _prompts(words, "variable_tracking_2_hops"),
    "copy mixture": _copies,
    "training rows": _mixture,
    "seeds of comparisons": lambda words: _seeds("mixed"),
    "seeds of evaluations": lambda words: _seeds("hashed"),
}


def _seeds(rule: str) -> Texts:
    for seed, length, depth, trial in [(0, 123, 0, 0), (0, 123, 1, 0), (1, 8192, 19, 4)]:
        yield str(text_seed(rule, seed, length, depth, trial))


def _digest(texts: Texts) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() if isinstance(text, str) else text.contiguous().numpy().tobytes())
        digest.update(b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_texts_match_the_recorded_hashes(
    case: str, tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]
) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found = _digest(CASES[case]((tokenizer, documents)))
    if case not in recorded and os.environ.get("RECORD_TEXTS"):
        RECORDED.write_text(json.dumps(recorded | {case: found}, indent=2) + "\n", encoding="utf-8")
        return
    assert found == recorded[case]
