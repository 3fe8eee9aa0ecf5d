"""Comparisons of image classifiers: trained at one resolution, tested at others."""

from attention_priors.lab.study.images.pictures import Pictures, load_pictures
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.images.study import ImageStudy

__all__ = ["ImageRecipe", "ImageStudy", "Pictures", "load_pictures"]
