"""Corpora, tokenizers, token shards and training rows."""

from attention_priors.lab.data.corpora import EMBEDDED, Corpus, load_corpus
from attention_priors.lab.data.document import END_OF_TEXT, Document
from attention_priors.lab.data.genomes import (
    NUCLEOTIDES,
    FastaError,
    FastaFile,
    is_nucleotide_tokenizer,
    nucleotide_tokenizer,
)
from attention_priors.lab.data.packing import (
    IGNORED_LABEL,
    RetrievalShare,
    TrainingMixture,
    collate_rows,
)
from attention_priors.lab.data.tokenizer import (
    TokenStream,
    digit_token_ids,
    load_tokenizer,
    token_stream,
    tokenizer_fingerprint,
    train_tokenizer,
)

__all__ = [
    "EMBEDDED",
    "END_OF_TEXT",
    "IGNORED_LABEL",
    "NUCLEOTIDES",
    "Corpus",
    "Document",
    "FastaError",
    "FastaFile",
    "RetrievalShare",
    "TokenStream",
    "TrainingMixture",
    "collate_rows",
    "digit_token_ids",
    "is_nucleotide_tokenizer",
    "load_corpus",
    "load_tokenizer",
    "nucleotide_tokenizer",
    "token_stream",
    "tokenizer_fingerprint",
    "train_tokenizer",
]
