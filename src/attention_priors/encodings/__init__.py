"""Encodings: positions that enter embeddings, queries, keys or values."""

from attention_priors.encodings.additive import LearnedTable, LinearToy, Sinusoidal
from attention_priors.encodings.base import AdditiveEncoding, Encoding
from attention_priors.encodings.catalogue import ENCODINGS, encoding_from_config
from attention_priors.encodings.rotary import Rotary
from attention_priors.encodings.shaw import ShawVectors

__all__ = [
    "ENCODINGS",
    "AdditiveEncoding",
    "Encoding",
    "LearnedTable",
    "LinearToy",
    "Rotary",
    "ShawVectors",
    "Sinusoidal",
    "encoding_from_config",
]
