"""Comparisons of classifiers of images: trained at one resolution, tested at others."""

from attention_priors.experiments.images.pictures import Pictures, load_pictures
from attention_priors.experiments.images.recipe import ImageRecipe
from attention_priors.experiments.images.study import ImageStudy

__all__ = ["ImageRecipe", "ImageStudy", "Pictures", "load_pictures"]
