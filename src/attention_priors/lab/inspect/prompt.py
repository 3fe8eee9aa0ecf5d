"""The passkey prompt on which BAM's Figure 4 shows attention maps."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from attention_priors.lab.tasks import PasskeyTask
from attention_priors.lab.tasks.passkey import PasskeySample

FILLER = 768
"""Tokens of filler between the pass key and the question."""
_SEED = 4


def figure_4_prompt(tokenizer: PreTrainedTokenizerBase) -> PasskeySample:
    """The instruction, the pass key, 768 tokens of filler, the question; the answer follows.

    Source: BAM, Figure 4, a prompt of 32 + 25 + 768 + 16 = 841 tokens. With the paper's tokenizer (Mistral-7B v0.3) it
    is 32 + 28 + 768 + 13 = 841 here: the pass key's sentence has 3 tokens of line ends and the question 2, and the 5
    of the answer are no part of the prompt. Without the former and with the latter they are 25 and 16. With other
    tokenizers the parts but for the filler have other numbers of tokens.

    Raises:
        ValueError: the tokenizer joins a pass key to the words before it.
    """
    task = PasskeyTask(tokenizer, wording="long")
    length = task.minimum_length + FILLER
    while True:
        sample = task.sample(length, 0.0, torch.Generator().manual_seed(_SEED))
        missing = FILLER - (sample.question_start - sample.needle_end)
        # A tokenizer that joins digits needs less room for this key than for the longest one.
        if not missing:
            return sample
        length += missing
