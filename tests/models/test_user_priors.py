"""Priors of a user's own class in models: built on the meta device, saved, loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor, nn

from attention_priors import SSMax
from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.priors import CATALOGUE, Laplace, Prior, Structure, Uniform


class Tent(Prior):
    """Prior ``-slope · |d|``, whose slope only ``__init__`` sets."""

    name = "tent"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slope = nn.Parameter(torch.full((num_heads,), 0.25))

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (-self.slope.double().view(-1, *(1,) * distance.dim()) * distance.abs()).to(dtype)


class ResetTent(Tent):
    """Prior in the shape of a tent, filled by ``reset_parameters``."""

    name = "reset_tent"

    def reset_parameters(self) -> None:
        nn.init.constant_(self.slope, 0.25)


class SteepLaplace(Laplace):
    """Prior that resets the parameters of its parent class, but not its own."""

    name = "steep_laplace"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.factor = nn.Parameter(torch.ones(num_heads))


class BufferedTent(ResetTent):
    """Prior with a non-persistent buffer."""

    name = "buffered_tent"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.register_buffer("scale", torch.full((num_heads,), 0.5), persistent=False)


class Flat(Uniform):
    """Reset nothing."""

    name = "flat"


@pytest.fixture(autouse=True)
def catalogued(monkeypatch: pytest.MonkeyPatch) -> None:
    for prior in (Tent, ResetTent, SteepLaplace, BufferedTent, Flat):
        monkeypatch.setitem(CATALOGUE.registered, prior.name, prior)


class Layered(Tent):
    """Prior that contains a module of PyTorch."""

    name = "layered"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.layer = torch.nn.Linear(num_heads, 1)


def test_priors_are_built_in_float32_in_models_of_any_dtype() -> None:
    config = tiny_config(prior="reset_tent")
    model = PriorDecoderForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for n, p in model.named_parameters() if ".prior." in n} == {torch.float32}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in Layered(2).parameters()} == {torch.float32}
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def save_without_prior(folder: Path) -> None:
    """Return a folder whose config names a prior that its weights lack."""
    tiny_decoder(torch.float32).save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "left_out"), [("tent", "slope"), ("steep_laplace", "factor"), ("buffered_tent", "scale")]
)
def test_a_prior_that_does_not_reset_all_parameters_is_refused(name: str, left_out: str, tmp_path: Path) -> None:
    match = (
        rf"{CATALOGUE[name].__name__}\.reset_parameters\(\) must .*does not set {left_out}\. .*set them in reset_param"
    )
    for prior in (name, ["laplace", name]):
        with pytest.raises(NotImplementedError, match=match):
            tiny_decoder(torch.float32, prior=prior)
        save_without_prior(tmp_path)
        with pytest.raises(NotImplementedError, match=match):
            PriorDecoderForCausalLM.from_pretrained(tmp_path, config=tiny_config(prior=prior))


@pytest.mark.parametrize("name", ["reset_tent", "flat"])
def test_a_missing_prior_is_initialised(name: str, tmp_path: Path) -> None:
    save_without_prior(tmp_path)
    model: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, config=tiny_config(prior=name)).eval()
    if name == "reset_tent":
        assert torch.equal(model.model.layers[1].self_attn.prior.slope, torch.full((4,), 0.25))
    model.save_pretrained(tmp_path / "again")
    again = PriorDecoderForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits_of(again, tokens(1, 7)), logits_of(model, tokens(1, 7)))


class Lopsided(Laplace):
    """Prior with the name of its parent class."""


def replace_prior(prior: Prior) -> PriorDecoderForCausalLM:
    model: Any = tiny_decoder(torch.float32, prior="uniform")
    model.model.layers[1].self_attn.prior = prior
    return model


@pytest.mark.parametrize(
    ("prior", "match"),
    [
        (
            ResetTent(4),
            r"cannot save the prior ResetTent: .* there is no 'reset_tent'\. .* register it with .*register_prior",
        ),
        (
            Lopsided(4),
            r"cannot save the prior Lopsided: .* 'laplace' is Laplace\. Give the class a unique name",
        ),
    ],
)
@pytest.mark.parametrize("summed", [True, False])
def test_a_prior_outside_the_catalogue_is_not_saved(
    prior: Prior, match: str, summed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace_prior(prior + Laplace(4) if summed else prior)
    monkeypatch.delitem(CATALOGUE.registered, "reset_tent")
    with pytest.raises(ValueError, match=match):
        model.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


class Doubled(ResetTent):
    """Prior that contains another prior, which no config describes."""

    name = "doubled"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.inner = Lopsided(num_heads)


def test_a_prior_inside_a_registered_one_needs_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE.registered, "doubled", Doubled)
    replace_prior(Doubled(4)).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_logit_scale_outside_the_catalogue_is_not_saved(tmp_path: Path) -> None:
    class Steady(SSMax):
        pass

    model: Any = tiny_decoder(torch.float32, logit_scale="ssmax")
    model.model.layers[0].self_attn.logit_scale = Steady(4)
    with pytest.raises(ValueError, match=r"cannot save the logit scale Steady: .* 'ssmax' is SSMax"):
        model.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())
