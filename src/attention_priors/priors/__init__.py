"""Log-priors over positions: what each prior is, with no say in how attention is computed."""

from attention_priors.priors.axial import Axial, Radial, Spectral2d
from attention_priors.priors.base import Lanes, Prior, Structure
from attention_priors.priors.catalogue import CATALOGUE, prior_from_config
from attention_priors.priors.clipped_offsets import ClippedOffsets
from attention_priors.priors.generalized_gaussian import GeneralizedGaussian
from attention_priors.priors.grid import grid_positions
from attention_priors.priors.key_sink import KeySink
from attention_priors.priors.key_sink_2d import KeySink2d
from attention_priors.priors.laplace import Laplace
from attention_priors.priors.on_grid import PatchArea, at_spacing
from attention_priors.priors.relative_buckets import RelativeBuckets
from attention_priors.priors.slopes import alibi_slopes
from attention_priors.priors.spectral import Spectral
from attention_priors.priors.sum import Sum
from attention_priors.priors.uniform import Uniform
from attention_priors.priors.window import Window

__all__ = [
    "CATALOGUE",
    "Axial",
    "ClippedOffsets",
    "GeneralizedGaussian",
    "KeySink",
    "KeySink2d",
    "Lanes",
    "Laplace",
    "PatchArea",
    "Prior",
    "Radial",
    "RelativeBuckets",
    "Spectral",
    "Spectral2d",
    "Structure",
    "Sum",
    "Uniform",
    "Window",
    "alibi_slopes",
    "at_spacing",
    "grid_positions",
    "prior_from_config",
]
