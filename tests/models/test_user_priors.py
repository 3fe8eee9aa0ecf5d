"""Priors of a user's own class in models of this package: built without memory, saved, loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor, nn

from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.priors import CATALOGUE, Laplace, Prior, Structure, Uniform


class Tent(Prior):
    """``-slope · |d|``, with a slope that only ``__init__`` sets."""

    name = "tent"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slope = nn.Parameter(torch.full((num_heads,), 0.25))

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (-self.slope.double().view(-1, *(1,) * distance.dim()) * distance.abs()).to(dtype)


class ResetTent(Tent):
    """A tent that ``reset_parameters`` fills."""

    name = "reset_tent"

    def reset_parameters(self) -> None:
        nn.init.constant_(self.slope, 0.25)


class SteepLaplace(Laplace):
    """A prior that resets the parameters of its parent class, and not its own."""

    name = "steep_laplace"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.factor = nn.Parameter(torch.ones(num_heads))


class BufferedTent(ResetTent):
    """A buffer that no state dict holds."""

    name = "buffered_tent"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.register_buffer("scale", torch.full((num_heads,), 0.5), persistent=False)


class Flat(Uniform):
    """Nothing to reset."""

    name = "flat"


@pytest.fixture(autouse=True)
def catalogued(monkeypatch: pytest.MonkeyPatch) -> None:
    for prior in (Tent, ResetTent, SteepLaplace, BufferedTent, Flat):
        monkeypatch.setitem(CATALOGUE, prior.name, prior)


def save_without_prior(folder: Path) -> None:
    """A folder whose config names a prior that its weights do not have."""
    tiny_decoder(torch.float32).save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "left_out"), [("tent", "slope"), ("steep_laplace", "factor"), ("buffered_tent", "scale")]
)
def test_a_prior_that_does_not_reset_all_parameters_is_refused(name: str, left_out: str, tmp_path: Path) -> None:
    match = (
        rf"{CATALOGUE[name].__name__}\.reset_parameters\(\) must .*leaves out {left_out}\. .*set them in reset_param"
    )
    for prior in (name, ["laplace", name]):
        with pytest.raises(NotImplementedError, match=match):
            tiny_decoder(torch.float32, prior=prior)
        save_without_prior(tmp_path)
        with pytest.raises(NotImplementedError, match=match):
            PriorDecoderForCausalLM.from_pretrained(tmp_path, config=tiny_config(prior=prior))


@pytest.mark.parametrize("name", ["reset_tent", "flat"])
def test_a_prior_that_resets_its_parameters_is_newly_added(name: str, tmp_path: Path) -> None:
    save_without_prior(tmp_path)
    model: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, config=tiny_config(prior=name)).eval()
    if name == "reset_tent":
        assert torch.equal(model.model.layers[1].self_attn.prior.slope, torch.full((4,), 0.25))
    model.save_pretrained(tmp_path / "again")
    again = PriorDecoderForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits_of(again, tokens(1, 7)), logits_of(model, tokens(1, 7)))
