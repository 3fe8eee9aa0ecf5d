import random

import pytest

from attention_priors.data import Document, PasskeyTask, token_stream, train_tokenizer


@pytest.fixture(scope="session")
def short_task() -> PasskeyTask:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 8))) for _ in range(300)]
    documents = [Document(str(index), " ".join(draw.choices(words, k=400))) for index in range(5)]
    tokenizer = train_tokenizer(documents, vocab_size=300)
    return PasskeyTask(tokenizer, token_stream(tokenizer, documents))
