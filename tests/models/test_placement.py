"""Priors on a device other than the tokens' device."""

import torch

from attention_priors import GeneralizedGaussian
from attention_priors.models.pretrained import beside


def test_shared_priors_work_on_several_devices() -> None:
    """The optimiser's parameters stay, and other devices compute with copies of them."""
    prior = GeneralizedGaussian(2) + GeneralizedGaussian(2, init="laplace")
    before = dict(prior.named_parameters())
    assert any(parameter.requires_grad for parameter in before.values())
    with beside(torch.empty(0, device="meta"), prior, None):
        away = {name: p for module, lead in _modules(prior) for name, p in _own(module, lead)}
        assert away.keys() == before.keys()
        assert all(parameter.device.type == "meta" for parameter in away.values())
        assert all((away[name].grad_fn is not None) == p.requires_grad for name, p in before.items())
    after = dict(prior.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    with beside(torch.empty(0), prior, None):
        assert all(p is before[name] for name, p in prior.named_parameters())


def _modules(root: torch.nn.Module):
    return ((module, lead and f"{lead}.") for lead, module in root.named_modules())


def _own(module: torch.nn.Module, lead: str):
    return ((f"{lead}{name}", p) for name, p in module._parameters.items() if p is not None)
