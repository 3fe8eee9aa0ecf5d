import random

import pytest
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, PasskeyTask, token_stream, train_tokenizer

_SYLLABLES = ["ka", "to", "mi", "ren", "su", "lo", "vai", "ne", "pol", "dra"]


def made_up_text(seed: int, sentences: int) -> str:
    draw = random.Random(seed)
    words = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(200)]
    lines = []
    for _ in range(sentences):
        sentence = " ".join(draw.choices(words, k=draw.randint(4, 12)))
        lines.append(f"{sentence.capitalize()}, {draw.randint(0, 9999)}.")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def documents() -> tuple[Document, ...]:
    return tuple(Document(f"document-{index}", made_up_text(index, sentences=40)) for index in range(20))


@pytest.fixture(scope="session")
def tokenizer(documents: tuple[Document, ...]) -> PreTrainedTokenizerFast:
    return train_tokenizer(documents, vocab_size=400)


@pytest.fixture(scope="session")
def sentence_task(tokenizer: PreTrainedTokenizerFast) -> PasskeyTask:
    return PasskeyTask(tokenizer)


@pytest.fixture(scope="session")
def corpus_task(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]) -> PasskeyTask:
    return PasskeyTask(tokenizer, token_stream(tokenizer, documents))
