"""The tokenizer of genomes: a token for each base."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from attention_priors.lab.data.document import END_OF_TEXT, document_tokenizer
from attention_priors.lab.data.fasta import SUFFIXES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NUCLEOTIDES = "nucleotides"
"""Name of :func:`nucleotide_tokenizer` in recipes."""

BASES = "ACGT"
UNKNOWN_BASE = "N"


def nucleotide_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of six tokens: ``<|endoftext|>``, A, C, G, T, and N for every other character.

    Lower case is read as upper case, and U as T. ``<|endoftext|>`` begins, ends and pads sequences. Text decodes to
    itself but for that.
    """
    return document_tokenizer(_backend())


def is_nucleotide_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer gives text the tokens that :func:`nucleotide_tokenizer` gives it."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() != _backend().get_vocab_size():
        return False  # at once: to write down a large tokenizer takes a second
    return _meaning(backend) == _meaning(_backend())


def encode_nucleotides(texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of ``nucleotide_tokenizer()`` for each text, a hundred times as fast; uint8.

    Chromosomes have hundreds of millions of bases.
    """
    table = _token_of_byte()
    return [table[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)] for text in texts]


def check_nucleotides(text: str) -> None:
    """Make sure that a text is bases: half of any other text would be read as N, and the rest as bases that are none.

    Raises:
        ValueError: less than half of its first 4096 characters are A, C, G, T, U and N, of either case; or there are
            FASTA's headers among them, whose letters would be read as bases too, or line ends, which would be N.
    """
    beginning = text[:4096]
    reads_bases = f"the tokenizer {NUCLEOTIDES!r} reads bases"
    expected = (
        f"expected a file that is read as FASTA, whose name ends with {', '.join(SUFFIXES)} (and .gz or another "
        "compression)"
    )
    header = re.search(r"^>.*", beginning, re.MULTILINE)
    if header is not None:
        raise ValueError(f"{reads_bases}, and the text holds a header of FASTA, {header[0][:40]!r}: {expected}")
    if "\n" in beginning.rstrip():
        raise ValueError(f"{reads_bases}, and the text holds line ends, which would be read as N: {expected}")
    known = sum(map(beginning.upper().count, "ACGTUN"))
    if known < len(beginning) / 2:
        raise ValueError(
            f"{reads_bases}; of the text's first {len(beginning)} characters, which begin "
            f"{beginning[:40]!r}, {100 * known / len(beginning):.0f} % are any: expected a genome, such as a FASTA file"
        )


@cache
def _token_of_byte() -> np.ndarray:
    return np.array([_backend().encode(chr(byte)).ids[0] for byte in range(128)], dtype=np.uint8)


@cache
def _backend() -> Tokenizer:
    tokens = [END_OF_TEXT, *BASES, UNKNOWN_BASE]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, UNKNOWN_BASE))
    letters = {**{base.lower(): base for base in BASES}, "u": "T", "U": "T"}
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in letters.items()])
    # Any character, line ends too.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _meaning(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the parts of a tokenizer that decide the tokens of a text: all but padding and truncation."""
    content = json.loads(tokenizer.to_str())
    return {part: content[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
