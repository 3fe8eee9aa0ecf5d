from pathlib import Path

import model_folders
import pytest
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, token_stream, train_tokenizer
from attention_priors.lab.tasks import PasskeyTexts
from thoroughness import DEEP


@pytest.fixture(scope="session")
def documents() -> tuple[Document, ...]:
    return tuple(Document(f"document-{index}", model_folders.made_up_text(index, sentences=40)) for index in range(20))


@pytest.fixture(scope="session")
def tokenizer(documents: tuple[Document, ...]) -> PreTrainedTokenizerFast:
    return train_tokenizer(documents, vocab_size=400)


@pytest.fixture(scope="session")
def sentence_task(tokenizer: PreTrainedTokenizerFast) -> PasskeyTexts:
    return PasskeyTexts(tokenizer)


@pytest.fixture(scope="session")
def corpus_task(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]) -> PasskeyTexts:
    return PasskeyTexts(tokenizer, token_stream(tokenizer, documents))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a model of each kind with its tokenizer, and a corpus under "texts"."""
    parent = tmp_path_factory.mktemp("models")
    words = model_folders.tokenizer()
    made = {kind: model_folders.save(model_folders.model(kind), words, parent / kind) for kind in model_folders.KINDS}
    texts = parent / "texts"
    texts.mkdir()
    for document in model_folders.documents():
        (texts / document.name).write_text(document.text)
    return made | {"texts": texts}


@pytest.fixture
def drawn() -> None:
    """Let a test draw its figures, which takes a third of a second each."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures without drawing them, except in tests that use ``drawn`` and in a deep run."""
    if "drawn" not in request.fixturenames and not DEEP:
        for module in ("bench.figures", "report.evaluation", "report.pages.inspection", "report.pages.study"):
            monkeypatch.setattr(f"attention_priors.lab.{module}.png", lambda figure: b"\x89PNG")
