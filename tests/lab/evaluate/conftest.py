import random
from pathlib import Path

import model_folders
import pytest

from attention_priors.lab.data import Document, PasskeyTask, token_stream, train_tokenizer


@pytest.fixture(scope="session")
def short_task() -> PasskeyTask:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 8))) for _ in range(300)]
    documents = [Document(str(index), " ".join(draw.choices(words, k=400))) for index in range(5)]
    tokenizer = train_tokenizer(documents, vocab_size=300)
    return PasskeyTask(tokenizer, token_stream(tokenizer, documents))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each kind, with its tokenizer, and under "texts" a corpus."""
    parent = tmp_path_factory.mktemp("models")
    words = model_folders.tokenizer()
    made = {kind: model_folders.save(model_folders.model(kind), words, parent / kind) for kind in model_folders.KINDS}
    texts = parent / "texts"
    texts.mkdir()
    for document in model_folders.documents():
        (texts / document.name).write_text(document.text)
    return made | {"texts": texts}
