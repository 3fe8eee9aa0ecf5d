"""All priors of the library. A new prior is a new file in this folder and a new line here.

The documentation lists the priors in this order.
"""
# ruff: isort: skip_file

from attention_priors.priors.uniform import Uniform as Uniform
from attention_priors.priors.laplace import Laplace as Laplace
from attention_priors.priors.generalized_gaussian import GeneralizedGaussian as GeneralizedGaussian
from attention_priors.priors.kerple import Kerple as Kerple
from attention_priors.priors.fire import Fire as Fire
from attention_priors.priors.spectral import Spectral as Spectral
from attention_priors.priors.key_sink import KeySink as KeySink
from attention_priors.priors.relative_buckets import RelativeBuckets as RelativeBuckets
from attention_priors.priors.clipped_offsets import ClippedOffsets as ClippedOffsets
from attention_priors.priors.window import Window as Window
from attention_priors.priors.axial import Axial as Axial
from attention_priors.priors.axial import Spectral2d as Spectral2d
from attention_priors.priors.axial import Radial as Radial
from attention_priors.priors.key_sink import KeySink2d as KeySink2d

__all__ = [name for name in globals() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
