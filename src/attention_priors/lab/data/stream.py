"""Documents as one long row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attention_priors.lab.data.document import Document, texts_of
from attention_priors.lab.data.nucleotides import check_nucleotides, encode_nucleotides, is_nucleotide_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_BATCH = 64  # an encoded document takes far more memory than its token ids, which are kept


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
        tokenizer: A tokenizer with an end-of-text token, such as `load_tokenizer` gives.
        documents: At least one document.

    Raises:
        ValueError: ``documents`` is empty or holds something else than documents, or ``tokenizer`` has no end-of-text
            token or reads bases and these are none.
    """
    if not documents:
        raise ValueError("documents is empty: expected at least one document")
    texts, encoded = list(texts_of(documents)), list[Tensor]()
    for start in range(0, len(texts), DOCUMENTS_PER_BATCH):
        batch = encode_documents(tokenizer, texts[start : start + DOCUMENTS_PER_BATCH])
        encoded += [torch.from_numpy(ids.astype(np.int64)) for ids in batch]
    sizes = torch.tensor([tokens.numel() for tokens in encoded])
    return TokenStream(
        tokens=torch.cat(encoded),
        document_ids=torch.repeat_interleave(torch.arange(len(encoded)), sizes),
    )


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, without special tokens but for the end-of-text token that follows.

    Integers of a type with room for each token of the tokenizer, ``(N,)``.

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
