"""The prompt of BAM's Figure 4, token by token."""

from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.inspect.inspection import figure_4_prompt

PIECES = (
    "▁There ▁is ▁an ▁important ▁info ▁hidden ▁inside ▁a ▁lot ▁of ▁irrelevant ▁text . ▁Find ▁it ▁and ▁memor ize ▁I "
    "▁will ▁qu iz ▁you ▁about ▁the ▁information ▁there The ▁The ▁pass ▁key ▁Remember What ▁What ? ▁grass ▁green ▁sky "
    "▁blue ▁sun ▁yellow ▁Here ▁we ▁go ▁back ▁again ▁ 0 1 2 3 4 5 6 7 8 9 <0x0A>"
)
"""Pieces of the prompt's words in the SentencePiece model of Mistral-7B v0.3 (32768 pieces)."""


@pytest.fixture(scope="module")
def mistrals() -> PreTrainedTokenizerFast:
    """Build a tokenizer of these pieces only. It splits the prompt as the whole model does, into the fewest pieces."""
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((piece, -10.0) for piece in PIECES.split())]
    cuts = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    # Like SentencePiece, it puts a space before the text, and encodes line ends as bytes.
    cuts.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    cuts.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=cuts, eos_token="</s>", unk_token="<unk>")


def test_the_prompt_is_as_long_as_the_papers(mistrals: PreTrainedTokenizerFast) -> None:
    sample = figure_4_prompt(mistrals)
    ends = [0, sample.needle_start, sample.needle_end, sample.question_start, sample.answer_start, len(sample.tokens)]
    instruction, needle, filler, question, answer = (
        list(mistrals.convert_ids_to_tokens(sample.tokens[start:stop].tolist())) for start, stop in pairwise(ends)
    )
    assert [len(part) for part in (instruction, needle, filler, question)] == [32, 28, 768, 13]
    assert len(sample.prompt) == 32 + 25 + 768 + 16 == 841
    assert "<unk>" not in {*instruction, *needle, *filler, *question}
    # The parts differ from the paper's by the line ends, with the space that SentencePiece puts before them, ...
    assert needle[:2] == question[:2] == ["▁", "<0x0A>"]
    assert needle[-1] == "<0x0A>"
    assert len(needle[2:-1]) == 25
    # ... and by the answer.
    assert answer == list(str(sample.key))
    assert len(question[2:] + answer) == 16
