"""Training and loading of tokenizers, and encoding of documents."""

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
from safetensors.numpy import load_file, save_file
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

# transformers takes more than a second to import, so the functions that use it import it.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MINIMUM_VOCAB_SIZE = 257  # the 256 bytes and END_OF_TEXT

DOCUMENTS_PER_BATCH = 64  # small, because the tokenizer's output takes far more memory than the token ids


# ---- training and loading


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token.

    The tokenizer encodes any text without loss. ``<|endoftext|>`` begins, ends and pads sequences. Training is
    deterministic.

    Args:
        documents: Training text.
        vocab_size: Number of tokens, at least 257 (the bytes and the special token).

    Raises:
        ValueError: ``vocab_size`` is below 257, or the documents repeat too few pairs of tokens for this size. Or
            ``documents`` is a string, or has an element that is not a `Document`.
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
            f"than {tokenizer.get_vocab_size()} tokens; use a smaller vocab_size or more text"
        )
    return document_tokenizer(tokenizer)


def tokenizer_spec(given: Any) -> Any:
    """Return a recipe's tokenizer setting, with a vocabulary size in quotes converted to a number."""
    return int(given) if isinstance(given, str) and given.isdecimal() else given


def load_tokenizer(spec: int | str | Path, corpus: Corpus, cache_dir: str | Path) -> PreTrainedTokenizerBase:
    """Train a tokenizer on a corpus or reuse it from the cache, or load a pretrained tokenizer.

    Args:
        spec: Vocabulary size (``2048`` or ``"2048"``) of a tokenizer trained on ``corpus.train``. ``nucleotides`` is
            :func:`nucleotide_tokenizer`. Any other string is a folder or a name on the Hugging Face Hub.
        corpus: Training text if ``spec`` is a vocabulary size.
        cache_dir: Folder of trained tokenizers, one for each vocabulary size and corpus. It is created if missing.
            Several processes may share it.

    Raises:
        OSError: ``spec`` is neither a folder with a tokenizer nor a name that can be loaded.
        ValueError: The vocabulary size does not suit the corpus (see :func:`train_tokenizer`), or the loaded tokenizer
            has no end-of-text token.
    """
    spec = tokenizer_spec(spec)
    if not isinstance(spec, int):
        return pretrained_tokenizer(spec)
    folder = Path(cache_dir, f"tokenizer-{spec}-{corpus.fingerprint[:16]}")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # One process trains the tokenizer, and all others wait.
        with sole_writer(folder.parent, wait=math.inf):
            if not folder.is_dir():
                tokenizer = train_tokenizer(corpus.train, spec)
                with replacing(folder) as unfinished:
                    tokenizer.save_pretrained(unfinished)
    return pretrained_tokenizer(folder)


def pretrained_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer and remove its length limit.

    Args:
        spec: Folder, name on the Hugging Face Hub, or ``nucleotides`` for :func:`nucleotide_tokenizer`.

    Raises:
        OSError: ``spec`` is neither a folder with a tokenizer nor a name that can be loaded.
        ValueError: The tokenizer has no end-of-text token.
    """
    if spec == NUCLEOTIDES:
        return nucleotide_tokenizer()
    from transformers import AutoTokenizer

    with folder_or_repository("tokenizer", spec, first="tokenizer_config.json"):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(spec))
        except ValueError as error:
            # transformers raises a ValueError for some missing files and an OSError for others.
            raise OSError(str(error)) from error
    if not tokenizer.encode("a", add_special_tokens=False):
        # For a model without a tokenizer, transformers makes an empty tokenizer.
        raise OSError(f"tokenizer {str(spec)!r} cannot be loaded: it is missing or has no entries")
    tokenizer.model_max_length = NO_LENGTH_LIMIT
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {str(spec)!r} has no eos_token: expected a token that ends documents")
    return tokenizer


# ---- encoding


@dataclass(frozen=True)
class TokenStream:
    """Tokens of consecutive documents, each followed by an end-of-text token.

    Attributes:
        tokens: Token ids, int64, shape ``(N,)``.
        document_ids: Index of each token's document, int64, shape ``(N,)``, non-decreasing.
    """

    tokens: Tensor
    document_ids: Tensor

    def __len__(self) -> int:
        return self.tokens.numel()


def token_stream(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], cache_dir: str | Path | None = None
) -> TokenStream:
    """Encode documents, each followed by the end-of-text token and without other special tokens.

    Args:
        tokenizer: Tokenizer with an end-of-text token, for example from :func:`load_tokenizer`.
        documents: At least one document.
        cache_dir: Folder that keeps the tokens, so that equal documents are encoded once. Several processes may share
            it.

    Raises:
        ValueError: ``documents`` is empty or has an element that is not a `Document`; ``tokenizer`` has no end-of-text
            token; or ``tokenizer`` reads bases and the texts are not bases.
    """
    if not documents:
        raise ValueError("documents is empty: expected at least one document")
    texts = list(texts_of(documents))
    if cache_dir is None:
        encoded = _encoded(tokenizer, texts)
    else:
        file = Path(cache_dir, f"tokens-{_fingerprint(tokenizer, texts)[:16]}.safetensors")
        if not file.exists():
            with replacing(file) as unfinished:
                save_file(_encoded(tokenizer, texts), unfinished)
        encoded = load_file(file)
    return TokenStream(
        torch.from_numpy(encoded["tokens"].astype(np.int64)),
        torch.repeat_interleave(torch.arange(len(texts)), torch.from_numpy(encoded["sizes"])),
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the tokens of all texts and the number of tokens of each text."""
    batches = (texts[start : start + DOCUMENTS_PER_BATCH] for start in range(0, len(texts), DOCUMENTS_PER_BATCH))
    tokens = [ids for batch in batches for ids in encode_documents(tokenizer, batch)]
    return {"tokens": np.concatenate(tokens), "sizes": np.array([len(ids) for ids in tokens])}


def _fingerprint(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str:
    """Return the SHA-256 of a tokenizer, its end-of-text token and texts."""
    hashed = hashlib.sha256(f"{tokenizer_fingerprint(tokenizer)} {tokenizer.eos_token_id}".encode())
    for text in texts:
        hashed.update(hashlib.sha256(text.encode()).digest())
    return hashed.hexdigest()


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of each text, followed by the end-of-text token and without other special tokens.

    The arrays have shape ``(N,)`` and dtype uint16, or uint32 for more than 65536 tokens.

    Raises:
        ValueError: ``tokenizer`` has no end-of-text token, or reads bases and the texts are not bases.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos_token: expected a token that ends documents")
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
    """Encoder of texts without special tokens; for fast tokenizers, twice as fast as calling the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A copy, so that the settings of the original tokenizer do not change.
        self._backend: Tokenizer | None = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


# ---- abilities of a tokenizer


def digit_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    """Return the token ids of the digits 0 to 9.

    Returns:
        None if the tokenizer joins digits to each other or to the text before them.
    """
    # A tokenizer that joins digits joins some pair of digits; this text has every pair.
    pairs = "".join(first + second for first in string.digits for second in string.digits)
    ids = tokenizer.encode(f" {pairs}", add_special_tokens=False)[-len(pairs) :]
    token_of = dict(zip(pairs, ids, strict=False))
    apart = len(ids) == len(pairs) and ids == [token_of[digit] for digit in pairs]
    if not apart or len(set(token_of.values())) != len(string.digits):
        return None
    return tuple(token_of[digit] for digit in string.digits)


def check_writes(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Check that a tokenizer can express a text, up to white space and the case of letters.

    Raises:
        ValueError: The tokens of the text decode to another text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    written = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    if letters(text) not in letters(written):
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} cannot write {text!r}: its tokens decode to {written!r}; use "
            "another tokenizer"
        )


def letters(text: str) -> str:
    """Return a text in lower case without white space, because some tokenizers do not preserve either."""
    return "".join(text.split()).lower()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 (64 hex digits) of a fast tokenizer, or of the vocabulary of a slow tokenizer."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    content = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(content.encode()).hexdigest()
