"""Text, tokens, texts that hide something, the copy-mixture task, and training rows."""

from attention_priors.lab.data.copy_mixture import COPY_KINDS, CopyMixture, CopyMixtureRows, CopySample
from attention_priors.lab.data.corpora import EMBEDDED, Corpus, load_corpus
from attention_priors.lab.data.document import END_OF_TEXT, Document
from attention_priors.lab.data.fasta import FastaError, FastaFile, FastaSummary
from attention_priors.lab.data.needles import (
    NEEDLE_TASKS,
    Haystack,
    NeedleSample,
    NeedleSettings,
    NeedleTask,
    NeedleTexts,
    PunktSplitter,
    load_haystack,
    match_all,
)
from attention_priors.lab.data.nucleotides import NUCLEOTIDES, is_nucleotide_tokenizer, nucleotide_tokenizer
from attention_priors.lab.data.packing import IGNORED_LABEL, TrainingMixture, collate_rows
from attention_priors.lab.data.passkey import ANSWER_LENGTH, PasskeySample, PasskeyTask, depths
from attention_priors.lab.data.retrieval import RetrievalShare, RetrievalText, RetrievalTexts
from attention_priors.lab.data.tokenizer import (
    TokenStream,
    digit_token_ids,
    load_tokenizer,
    token_stream,
    tokenizer_fingerprint,
    train_tokenizer,
)

__all__ = [
    "ANSWER_LENGTH",
    "COPY_KINDS",
    "EMBEDDED",
    "END_OF_TEXT",
    "IGNORED_LABEL",
    "NEEDLE_TASKS",
    "NUCLEOTIDES",
    "CopyMixture",
    "CopyMixtureRows",
    "CopySample",
    "Corpus",
    "Document",
    "FastaError",
    "FastaFile",
    "FastaSummary",
    "Haystack",
    "NeedleSample",
    "NeedleSettings",
    "NeedleTask",
    "NeedleTexts",
    "PasskeySample",
    "PasskeyTask",
    "PunktSplitter",
    "RetrievalShare",
    "RetrievalText",
    "RetrievalTexts",
    "TokenStream",
    "TrainingMixture",
    "collate_rows",
    "depths",
    "digit_token_ids",
    "is_nucleotide_tokenizer",
    "load_corpus",
    "load_haystack",
    "load_tokenizer",
    "match_all",
    "nucleotide_tokenizer",
    "token_stream",
    "tokenizer_fingerprint",
    "train_tokenizer",
]
