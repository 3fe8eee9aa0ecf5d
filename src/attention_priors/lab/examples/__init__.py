"""Small trained decoders that come with the package, for the tour, tutorials and tests.

Each folder beside this file is a saved model in bfloat16 with its tokenizer. The module ``export`` writes
them from the runs of the recipe ``demo``.
"""

from __future__ import annotations

from pathlib import Path

from attention_priors.hf.loading import load_model
from attention_priors.models.decoder import PriorDecoderForCausalLM

EXAMPLES = {
    "bam-ssmax": "BAM+SSMax",
    "bam": "BAM",
    "alibi": "ALiBi",
    "alibi-local-first": "ALiBi, local layers first",
    "rope": "RoPE",
}
"""Scheme of each example in the recipe ``demo``."""

TRAINED = 128
"""Length in tokens of the examples' training rows. A pass key's answer takes the last 5."""


def example_folder(name: str) -> Path:
    """Return the folder of an example: a saved model, for ``from_pretrained`` and for the package's commands.

    Args:
        name: A key of :data:`EXAMPLES`.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in EXAMPLES:
        raise ValueError(f"name must be one of {', '.join(EXAMPLES)}; got {name!r}")
    return Path(__file__).with_name(name)


def example_model(name: str) -> PriorDecoderForCausalLM:
    """Return an example: a decoder of 0.9 million parameters, trained on 128 tokens at most to repeat pass keys.

    Its tokenizer is ``AutoTokenizer.from_pretrained(example_folder(name))``.

    Args:
        name: A key of :data:`EXAMPLES`.

    Returns:
        Model in float32 and in evaluation mode; its weights are rounded to bfloat16.

    Raises:
        ValueError: the name is unknown.
    """
    model = load_model(example_folder(name))
    assert isinstance(model, PriorDecoderForCausalLM)
    return model.eval()
