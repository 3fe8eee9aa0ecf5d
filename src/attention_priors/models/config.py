"""What the configurations of all models of this package have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from attention_priors._io import write_bytes
from attention_priors.attention import SSMax, logit_scale_from_config
from attention_priors.checks import check_booleans
from attention_priors.priors import Prior, prior_from_config

_SOURCE = '''"""Where ``trust_remote_code=True`` finds the classes of this model: in attention-priors."""

from {module} import {names}

__all__ = [{quoted}]
'''


class PriorConfig(PreTrainedConfig):
    """The description of a model whose attention has a prior: plain data, from which its parts are made.

    Beside ``config.json`` goes a module of three lines, so that ``trust_remote_code=True`` finds the classes of a saved
    model in this package; without it, they are found by those who have imported the model's module.
    """

    auto_classes: ClassVar[dict[str, str]] = {}
    """The classes of the model, by the Auto class that finds them."""

    num_attention_heads: int = 1
    prior: dict[str, Any] | list[dict[str, Any]] | str | None = None
    share_prior: bool = False
    logit_scale: dict[str, Any] | str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_booleans(share_prior=self.share_prior)
        super().__post_init__(**kwargs)

    def make_prior(self) -> Prior | None:
        """The prior that is described."""
        return None if self.prior is None else prior_from_config(self.prior, self.num_attention_heads)

    def make_logit_scale(self) -> SSMax | None:
        """The logit scale that is described."""
        return logit_scale_from_config(self.logit_scale, self.num_attention_heads)

    def to_dict(self) -> dict[str, Any]:
        """As transformers', and where classes are found by those who have not imported this package."""
        found = {auto: f"{self._auto_module()}.{name}" for auto, name in self.auto_classes.items()}
        return super().to_dict() | {"auto_map": found}

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """As transformers', and the module that ``auto_map`` names beside it."""
        names = sorted(self.auto_classes.values())
        quoted = ", ".join(f'"{name}"' for name in names)
        source = _SOURCE.format(module=type(self).__module__, names=", ".join(names), quoted=quoted)
        write_bytes(Path(json_file_path).with_name(f"{self._auto_module()}.py"), source.encode())
        super().to_json_file(json_file_path, use_diff)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing is left to do, and no source is to be copied: what is saved names this package's classes."""

    def _auto_module(self) -> str:
        return f"modeling_{self.model_type}"
