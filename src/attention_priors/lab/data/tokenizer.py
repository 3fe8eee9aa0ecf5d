"""Tokenizers, trained on a corpus or loaded from elsewhere, and the tokens of documents."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from attention_priors._io import replacing
from attention_priors.hf.files import folder_or_repository
from attention_priors.lab.data.corpora import Corpus
from attention_priors.lab.data.document import END_OF_TEXT, NO_LENGTH_LIMIT, Document, document_tokenizer, texts_of
from attention_priors.lab.data.genomes import (
    NUCLEOTIDES,
    check_nucleotides,
    encode_nucleotides,
    is_nucleotide_tokenizer,
    nucleotide_tokenizer,
)
from attention_priors.lab.output_folder import sole_writer

# transformers takes more than a second to import: each function that needs it imports it.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MINIMUM_VOCAB_SIZE = 257  # the 256 bytes and END_OF_TEXT

DOCUMENTS_PER_BATCH = 64  # an encoded document takes far more memory than its token ids, which are kept


# ---- training and loading


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a token of its own.

    Any text can be encoded and decodes to itself. ``<|endoftext|>`` begins, ends and pads sequences. The same
    documents give the same tokenizer.

    Args:
        documents: Text to count pairs in.
        vocab_size: Number of tokens, at least 257 (the bytes and the special token).

    Raises:
        ValueError: ``vocab_size`` is below 257, or above what the documents have repeated pairs for; or ``documents``
            holds something else than documents, as a string does.
    """
    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be at least {MINIMUM_VOCAB_SIZE} (256 bytes and one special token); it is {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(documents), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the documents repeat too few pairs of tokens to train more "
            f"than {tokenizer.get_vocab_size()} tokens: ask for fewer, or give more text"
        )
    return document_tokenizer(tokenizer)


def tokenizer_spec(given: Any) -> Any:
    """Return the description of a tokenizer in a recipe, with a vocabulary size in quotes as a number."""
    return int(given) if isinstance(given, str) and given.isdecimal() else given


def load_tokenizer(spec: int | str | Path, corpus: Corpus, cache_dir: str | Path) -> PreTrainedTokenizerBase:
    """Train a tokenizer on a corpus, or reuse one that was trained before, or load one from elsewhere.

    Args:
        spec: A vocabulary size (``2048`` or ``"2048"``): train on ``corpus.train``; ``nucleotides``:
            :func:`nucleotide_tokenizer`. Anything else is a folder or a name on the Hugging Face Hub.
        corpus: The training text, used when ``spec`` is a vocabulary size.
        cache_dir: Folder in which trained tokenizers are kept, one for each vocabulary size and corpus; made
            if it is missing. Several processes may share it.

    Raises:
        OSError: ``spec`` is neither a folder with a tokenizer nor a name that can be loaded.
        ValueError: the vocabulary size does not suit the corpus (see `train_tokenizer`), or the loaded
            tokenizer lacks an end-of-text token.
    """
    spec = tokenizer_spec(spec)
    if not isinstance(spec, int):
        return pretrained_tokenizer(spec)
    folder = Path(cache_dir, f"tokenizer-{spec}-{corpus.fingerprint[:16]}")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of several processes one trains the tokenizer, and the others wait for it.
        with sole_writer(folder.parent, wait=math.inf):
            if not folder.is_dir():
                tokenizer = train_tokenizer(corpus.train, spec)
                with replacing(folder) as unfinished:
                    tokenizer.save_pretrained(unfinished)
    return pretrained_tokenizer(folder)


def pretrained_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load any tokenizer that has an end-of-text token.

    Args:
        spec: A folder, a name on the Hugging Face Hub, or ``nucleotides``: :func:`nucleotide_tokenizer`.

    Raises:
        OSError: ``spec`` is neither a folder with a tokenizer nor a name that can be loaded.
        ValueError: the tokenizer lacks an end-of-text token.
    """
    if spec == NUCLEOTIDES:
        return nucleotide_tokenizer()
    from transformers import AutoTokenizer

    with folder_or_repository("tokenizer", spec, first="tokenizer_config.json"):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(spec))
        except ValueError as error:
            # Whether it is one depends on what is missing.
            raise OSError(str(error)) from error
    if not tokenizer.encode("a", add_special_tokens=False):
        # transformers makes an empty one where a model has none.
        raise OSError(f"tokenizer {str(spec)!r} cannot be loaded: there are no words in it, if there is one at all")
    tokenizer.model_max_length = NO_LENGTH_LIMIT
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {str(spec)!r} has no eos_token: expected one to mark where a document ends")
    return tokenizer


# ---- encoding


@dataclass(frozen=True)
class TokenStream:
    """Documents one after another, each ended by an end-of-text token.

    Attributes:
        tokens: Token ids, int64, shape ``(N,)``.
        document_ids: For each token, the index of its document, int64, shape ``(N,)``; never decreases.
    """

    tokens: Tensor
    document_ids: Tensor

    def __len__(self) -> int:
        return self.tokens.numel()


def token_stream(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> TokenStream:
    """Encode documents, without special tokens but for the end-of-text token that follows each.

    Args:
        tokenizer: A tokenizer with an end-of-text token, such as `load_tokenizer` returns.
        documents: At least one document.

    Raises:
        ValueError: ``documents`` is empty or holds something else than documents, or ``tokenizer`` has no end-of-text
            token or reads bases and these are none.
    """
    if not documents:
        raise ValueError("documents is empty: expected at least one document")
    texts = list(texts_of(documents))
    batches = (texts[start : start + DOCUMENTS_PER_BATCH] for start in range(0, len(texts), DOCUMENTS_PER_BATCH))
    encoded = [
        torch.from_numpy(ids.astype(np.int64)) for batch in batches for ids in encode_documents(tokenizer, batch)
    ]
    sizes = torch.tensor([tokens.numel() for tokens in encoded])
    return TokenStream(torch.cat(encoded), torch.repeat_interleave(torch.arange(len(encoded)), sizes))


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of each text, without special tokens but for the end-of-text token that follows.

    They are integers of a type with room for each token of the tokenizer, ``(N,)``.

    Raises:
        ValueError: ``tokenizer`` has no end-of-text token, or reads bases and these are none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos_token: expected one")
    kind = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    if is_nucleotide_tokenizer(tokenizer):
        for text in texts:
            check_nucleotides(text)
        encoded: Sequence[Any] = encode_nucleotides(texts)
    else:
        batch = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        encoded = batch["input_ids"]
    return [np.append(np.array(ids, dtype=kind), kind(end)) for ids in encoded]


class TextEncoder:
    """Token ids of a text, without special tokens; twice as fast as a call of the tokenizer if it is a fast one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A copy: truncation and padding of the original stay as they are.
        self._backend: Tokenizer | None = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


# ---- what a tokenizer can write


def digit_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids of the digits 0 to 9, of a tokenizer that never joins digits.

    Raises:
        ValueError: the tokenizer joins digits to each other or to what stands before them.
    """
    ids = _digit_ids(tokenizer)
    if ids is None:
        count = len(tokenizer.encode("12345", add_special_tokens=False))
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} does not give every digit its own token (it encodes "
            f"'12345' as {count} tokens): expected one token for each of the ten digits"
        )
    return ids


def joins_digits(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer joins digits to each other or to what stands before them."""
    return _digit_ids(tokenizer) is None


def _digit_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    # A tokenizer that joins digits joins some pair of them, and this text has every pair.
    pairs = "".join(first + second for first in string.digits for second in string.digits)
    ids = tokenizer.encode(f" {pairs}", add_special_tokens=False)[-len(pairs) :]
    token_of = dict(zip(pairs, ids, strict=False))
    apart = len(ids) == len(pairs) and ids == [token_of[digit] for digit in pairs]
    if not apart or len(set(token_of.values())) != len(string.digits):
        return None
    return tuple(token_of[digit] for digit in string.digits)


def check_writes(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Make sure that a tokenizer can write a text, but for white space and the case of letters.

    Raises:
        ValueError: the tokens of the text are those of another.
    """
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    written = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    if letters(text) not in letters(written):
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} cannot write {text!r}: expected one that can; it makes {written!r} "
            "of it"
        )


def letters(text: str) -> str:
    """A text without white space and the case of its letters, which some tokenizers do not keep."""
    return "".join(text.split()).lower()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (64 hex digits) of what turns text into tokens; of the vocabulary alone, if it is a slow tokenizer."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    content = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(content.encode()).hexdigest()
