"""Log-priors over positions. Priors do not depend on how attention is computed."""

from attention_priors.priors import families
from attention_priors.priors.base import Lanes, Prior, Structure
from attention_priors.priors.catalogue import CATALOGUE, prior_from_config, register_prior
from attention_priors.priors.families import *  # noqa: F403
from attention_priors.priors.grid import PatchArea, at_spacing, grid_positions
from attention_priors.priors.laplace import alibi_slopes
from attention_priors.priors.sum import Sum

__all__ = [
    "CATALOGUE",
    "Lanes",
    "PatchArea",
    "Prior",
    "Structure",
    "Sum",
    "alibi_slopes",
    "at_spacing",
    "grid_positions",
    "prior_from_config",
    "register_prior",
]
__all__ += families.__all__
