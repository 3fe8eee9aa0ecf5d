"""Corpora, tokenizers, token shards and training rows."""

from attention_priors.lab.data.corpora import EMBEDDED, Corpus, load_corpus
from attention_priors.lab.data.document import Document
from attention_priors.lab.data.packing import RetrievalShare, TrainingMixture
from attention_priors.lab.data.tokenizer import TokenStream, token_stream, tokenizer_fingerprint, train_tokenizer

__all__ = [
    "EMBEDDED",
    "Corpus",
    "Document",
    "RetrievalShare",
    "TokenStream",
    "TrainingMixture",
    "load_corpus",
    "token_stream",
    "tokenizer_fingerprint",
    "train_tokenizer",
]
