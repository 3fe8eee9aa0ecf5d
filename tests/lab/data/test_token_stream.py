import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, token_stream
from attention_priors.lab.data.genomes import nucleotide_tokenizer


def test_each_document_is_followed_by_the_end_token(tokenizer: PreTrainedTokenizerFast):
    documents = [Document("a", "ka to 12"), Document("b", ""), Document("c", "mi")]

    stream = token_stream(tokenizer, documents)

    assert tokenizer.decode(stream.tokens) == "ka to 12<|endoftext|><|endoftext|>mi<|endoftext|>"
    assert stream.tokens.dtype == stream.document_ids.dtype == torch.int64
    assert len(stream) == len(stream.document_ids)


def test_document_ids_number_the_documents(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]):
    many = [document for document in documents for _ in range(4)]  # more than one batch of the encoder

    stream = token_stream(tokenizer, many)

    for index in (0, 63, 64, len(many) - 1):
        own = stream.tokens[stream.document_ids == index]
        assert own.tolist() == [*tokenizer.encode(many[index].text), tokenizer.eos_token_id]


def test_an_end_token_written_in_a_text_does_not_end_its_document(tokenizer: PreTrainedTokenizerFast):
    stream = token_stream(tokenizer, [Document("a", "ka<|endoftext|>to"), Document("b", "mi")])

    assert int(stream.document_ids[-1]) == 1
    assert tokenizer.decode(stream.tokens[stream.document_ids == 0]) == "ka<|endoftext|>to<|endoftext|>"


def test_cached_tokens_are_those_of_the_same_documents_and_tokenizer(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = copy.deepcopy(tokenizer)
    other.eos_token = "a"
    cases = [(one, [Document("a", text), Document("b", "")]) for one in (tokenizer, other) for text in ("ka to", "mi")]
    expected = [token_stream(*case) for case in cases]

    for again in (False, True):
        if again:  # nothing is encoded
            monkeypatch.setattr("attention_priors.lab.data.tokenizer.encode_documents", None)
        for case, stream in zip(cases, expected, strict=True):
            found = token_stream(*case, cache_dir=tmp_path)
            torch.testing.assert_close((found.tokens, found.document_ids), (stream.tokens, stream.document_ids))
    assert len(list(tmp_path.iterdir())) == len(cases)


def test_nucleotide_tokenizers_refuse_other_texts():
    tokenizer = nucleotide_tokenizer()
    assert len(token_stream(tokenizer, [Document("genome", "ACGTNNacgtu")]).tokens) == 12
    with pytest.raises(ValueError, match=r"reads bases, but only 42 % of the text's first 38 characters"):
        token_stream(tokenizer, [Document("source", "def main(): print('A cat in GATTACA')\n")])
    for text in (">chr1 a b\nACGTACGTACGTACGT\n", "ACGTACGTACGTACGTACGT\n>chr2\nACGT\n"):
        with pytest.raises(
            ValueError, match=r"holds a header of FASTA, '>chr(1 a b|2)': expected a file that is read as"
        ):
            token_stream(tokenizer, [Document("genome.seq", text)])


def test_missing_documents_are_refused(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="documents is empty"):
        token_stream(tokenizer, [])


def test_tokenizers_without_an_end_token_are_refused(tokenizer: PreTrainedTokenizerFast):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)

    with pytest.raises(ValueError, match="no eos_token"):
        token_stream(without, [Document("a", "text")])
