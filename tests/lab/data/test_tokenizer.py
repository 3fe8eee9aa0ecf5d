import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from attention_priors.lab.data import Corpus, Document, token_stream, train_tokenizer
from attention_priors.lab.data.tokenizer import digit_token_ids, load_tokenizer
from processes import run_command


@pytest.fixture(scope="module")
def corpus(documents: tuple[Document, ...]) -> Corpus:
    return Corpus("made-up", documents[:-1], documents[-1:])


def _kept(cache: Path) -> list[Path]:
    """List the files of a cache, except the lock file."""
    return [path for path in cache.iterdir() if path.name != ".lock"]


def _joining_digits() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["1 2 73 73 73 73"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def test_vocabulary_has_the_requested_size(tokenizer: PreTrainedTokenizerFast):
    assert len(tokenizer) == 400
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token == "<|endoftext|>"


@given(st.integers(0, 10**12))
def test_every_digit_is_a_token(tokenizer: PreTrainedTokenizerFast, number: int):
    digits = digit_token_ids(tokenizer)
    assert digits is not None

    assert tokenizer.encode(str(number)) == [digits[int(digit)] for digit in str(number)]


def test_digits_do_not_merge_with_preceding_text(tokenizer: PreTrainedTokenizerFast):
    digits = digit_token_ids(tokenizer)
    assert digits is not None

    assert tokenizer.encode("key is 90210")[-5:] == [digits[digit] for digit in (9, 0, 2, 1, 0)]


@given(st.text())
def test_text_survives_encoding_and_decoding(tokenizer: PreTrainedTokenizerFast, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spaces_before_punctuation_survive_decoding(tokenizer: PreTrainedTokenizerFast):
    text = "do n't , stop . 's\n\n    x"

    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.deep
def test_training_is_equal_in_another_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    script = (
        "import sys; from model_folders import made_up_text\n"
        "from attention_priors.lab.data import Document, train_tokenizer\n"
        "documents = [Document('', made_up_text(i, sentences=40)) for i in range(20)]\n"
        "train_tokenizer(documents, 400).backend_tokenizer.save(sys.argv[1])\n"
    )
    path = tmp_path / "tokenizer.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run_command([sys.executable, "-c", script, path], folder=Path(__file__).parents[1], environment=environment)

    assert path.read_text() == tokenizer.backend_tokenizer.to_str(pretty=True)


def test_vocabularies_below_256_are_refused():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257.*it is 256"):
        train_tokenizer([Document("a", "text")], 256)


def test_vocabularies_too_large_for_the_text_are_refused():
    with pytest.raises(ValueError, match="vocab_size is 5000, but the documents repeat too few"):
        train_tokenizer([Document("a", "some text some text")], 5000)


@pytest.mark.parametrize("spec", [300, "300"])
def test_trained_tokenizer_is_cached_and_reused(corpus: Corpus, tmp_path: Path, spec: int | str):
    cache = tmp_path / "made" / "cache"
    first = load_tokenizer(spec, corpus, cache)
    (folder,) = _kept(cache)  # no temporary file is left
    file = folder / "tokenizer.json"
    before = file.stat()

    second = load_tokenizer(spec, corpus, cache)

    assert folder.name == f"tokenizer-300-{corpus.fingerprint[:16]}"
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert first.get_vocab() == second.get_vocab()
    text = corpus.held_out[0].text
    assert second.encode(text) == train_tokenizer(corpus.train, 300).encode(text)


def test_each_corpus_has_its_tokenizer(corpus: Corpus, tmp_path: Path):
    other = Corpus("other", corpus.train[1:], corpus.held_out)

    load_tokenizer(300, corpus, tmp_path)
    load_tokenizer(300, other, tmp_path)

    assert len(_kept(tmp_path)) == 2


def test_failed_training_leaves_nothing_in_the_cache(corpus: Corpus, tmp_path: Path):
    with pytest.raises(ValueError, match="vocab_size"):
        load_tokenizer(100_000, corpus, tmp_path)

    assert not _kept(tmp_path)


def test_several_processes_train_a_tokenizer_once(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two threads stand in for processes. Locks exclude both."""
    trained = []

    def train(documents: Any, vocab_size: int) -> PreTrainedTokenizerFast:
        trained.append(vocab_size)
        time.sleep(0.3)
        return train_tokenizer(documents, vocab_size)

    monkeypatch.setattr("attention_priors.lab.data.tokenizer.train_tokenizer", train)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load_tokenizer(300, corpus, tmp_path), range(2))
    assert trained == [300]
    assert first.get_vocab() == second.get_vocab()


def test_saved_tokenizer_is_loaded_from_its_folder(tokenizer: PreTrainedTokenizerFast, corpus: Corpus, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "saved")

    loaded = load_tokenizer(tmp_path / "saved", corpus, tmp_path / "unused")

    text = corpus.held_out[0].text
    assert loaded.encode(text) == tokenizer.encode(text)
    assert not (tmp_path / "unused").exists()


@pytest.fixture
def warnings_of_transformers(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Reset transformers' logger, which other tests and libraries may have changed."""
    logger, verbosity = logging.getLogger("transformers"), hf_logging.get_verbosity()
    hf_logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    hf_logging.set_verbosity(verbosity)


def test_long_texts_give_no_warning(
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    tmp_path: Path,
    warnings_of_transformers: pytest.LogCaptureFixture,
):
    caplog = warnings_of_transformers
    limited = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", model_max_length=10
    )
    limited.save_pretrained(tmp_path)
    limited.encode("a long text " * 10)
    assert "longer than" in caplog.text  # the warning to avoid
    caplog.clear()

    load_tokenizer(tmp_path, corpus, tmp_path).encode("a long text " * 10)

    assert caplog.text == ""


def test_tokenizers_that_join_digits_load(corpus: Corpus, tmp_path: Path):
    _joining_digits().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, corpus, tmp_path)
    assert len(loaded.encode("7373")) == 2
    assert digit_token_ids(loaded) is None


@pytest.mark.parametrize("strings", ["some text", ["some text"]])
def test_strings_in_place_of_documents_are_refused(tokenizer: PreTrainedTokenizerFast, strings: Any):
    for refused in (lambda: train_tokenizer(strings, 300), lambda: token_stream(tokenizer, strings)):
        with pytest.raises(ValueError, match=r"must hold Document objects, such as .*; got a str, 'some te"):
            refused()


def test_tokenizers_without_an_end_token_are_refused(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus, tmp_path: Path
):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path, corpus, tmp_path)


def test_folders_without_a_tokenizer_are_refused(corpus: Corpus, tmp_path: Path):
    with pytest.raises(OSError, match=f"{tmp_path.name}.*cannot be loaded"):
        load_tokenizer(tmp_path, corpus, tmp_path)


@pytest.mark.parametrize("missing", ["./nowhere", "../nowhere", "/nowhere", "a/b/c", "nowhere/", "~/nowhere"])
def test_missing_local_paths_cause_no_download(missing: str, corpus: Corpus, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"tokenizer '{missing}' does not exist as a folder"):
        load_tokenizer(missing, corpus, tmp_path)
