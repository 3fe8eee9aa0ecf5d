"""Named documents, and tokenizers with an end-of-text token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
"""Token that begins, ends and pads sequences."""

NO_LENGTH_LIMIT = int(1e30)
"""transformers' value for "no limit". It prevents warnings about long texts: here the model limits the length."""


@dataclass(frozen=True)
class Document:
    """A named text; the name is unique within its corpus."""

    name: str
    text: str


def texts_of(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the text of each document.

    Raises:
        ValueError: ``documents`` is a string, or has an element that is not a `Document`.
    """
    for document in documents if not isinstance(documents, str) else (documents,):
        if not isinstance(document, Document):
            raise ValueError(
                f"documents must hold Document objects, such as Document('name', text); got a "
                f"{type(document).__name__}, {str(document)[:20]!r}"
            )
        yield document.text


def document_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer whose only special token, ``<|endoftext|>``, begins, ends and pads sequences."""
    # transformers takes more than a second to import.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        clean_up_tokenization_spaces=False,
        model_max_length=NO_LENGTH_LIMIT,
    )
