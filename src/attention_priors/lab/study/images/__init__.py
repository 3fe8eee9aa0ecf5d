"""Comparisons of image classifiers: trained at one resolution, tested at others."""

from attention_priors.lab.study.images.pictures import load_pictures
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.images.study import ImageStudy

__all__ = ["ImageRecipe", "ImageStudy", "load_pictures"]
