"""KERPLE's two forms against their formulas, BAM's formula, and conditional positive definiteness, which names them."""

import numpy as np
import pytest
import torch

from attention_priors import GeneralizedGaussian, Kerple, Laplace

DISTANCES = torch.arange(-300, 301)
R1, R2 = [0.3, 1.0, 2.5], [0.02, 0.7, 2.0]


def kerple(form: str) -> Kerple:
    return Kerple(3, form=form, init={"r1": R1, "r2": R2})


@pytest.mark.parametrize("form", Kerple.forms)
def test_log_prior_matches_the_formula(form: str) -> None:
    apart = np.abs(DISTANCES.numpy())
    r1, r2 = (np.array(x, dtype=np.float32).astype(float)[:, None] for x in (R1, R2))
    expected = -r1 * np.log1p(r2 * apart) if form == "logarithmic" else -r1 * apart**r2
    found = kerple(form).log_prior_at(DISTANCES, torch.float64)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=2e-5)
    natural = kerple(form).natural_parameters()
    torch.testing.assert_close(natural["r1"], torch.tensor(R1))
    torch.testing.assert_close(natural["r2"], torch.tensor(R2), rtol=1e-5, atol=1e-5)


def test_the_power_form_is_the_generalized_gaussian_at_0_and_alibi_at_1() -> None:
    ours = kerple("power").log_prior_at(DISTANCES, torch.float64)
    bam = GeneralizedGaussian(3, init={"theta_alpha": torch.tensor(R1).log(), "beta": R2})
    beyond = DISTANCES != 0  # where BAM has ε
    torch.testing.assert_close(
        ours[:, beyond], bam.log_prior_at(DISTANCES[beyond], torch.float64), rtol=3e-5, atol=3e-5
    )
    alibi = Kerple(4, form="power", init={"r1": Laplace(4).slope.detach(), "r2": 1.0})
    torch.testing.assert_close(alibi.log_prior_at(DISTANCES), Laplace(4).log_prior_at(DISTANCES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", Kerple.forms)
def test_a_kernel_is_conditionally_positive_definite(form: str) -> None:
    """``Σ c_i c_j K(x_i, x_j) >= 0`` for all ``c`` with ``Σ c_i = 0`` (KERPLE, definition 1)."""
    positions = torch.randint(0, 5000, (60,), generator=torch.Generator().manual_seed(0)).unique()
    kernel = kerple(form).log_prior_at(positions.unsqueeze(1) - positions, torch.float64)
    centre = torch.eye(len(positions), dtype=torch.float64) - 1 / len(positions)
    eigenvalues = torch.linalg.eigvalsh(centre @ kernel @ centre)
    assert float((eigenvalues / eigenvalues.amax(-1, keepdim=True)).min()) > -1e-9


@pytest.mark.parametrize("form", Kerple.forms)
def test_sampled_init_is_in_the_ranges_of_the_source(form: str) -> None:
    torch.manual_seed(0)
    prior = Kerple(4000, form=form)
    wide, narrow = (prior.r1, prior.r2) if form == "logarithmic" else (prior.r2, prior.r1)
    for values, most in ((wide, 2.0), (narrow, 1.0)):
        assert 0.009 < float(values.min()) < 0.02
        assert float(values.max()) <= most + 1e-5
        assert float(values.mean()) == pytest.approx(most / 2, abs=0.05)


@pytest.mark.parametrize("form", Kerple.forms)
@pytest.mark.parametrize("theta", [-80.0, 0.0, 80.0])
def test_numbers_and_gradients_are_finite(form: str, theta: float) -> None:
    prior = Kerple(1, form=form)
    with torch.no_grad():
        prior.log_r1.fill_(theta)
        prior.theta_r2.fill_(theta)
    found = prior.log_prior_at(torch.tensor([-(2**20), -1, 0, 1, 2**20]), torch.float64)
    found.sum().backward()
    assert found.isfinite().all()
    assert found[0, 2] == 0
    assert all(x.grad is not None and x.grad.isfinite().all() for x in prior.parameters())


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of logarithmic, power"):
        Kerple(2, form="linear")
    with pytest.raises(ValueError, match=r"init\['r1'\] must be above 0 in the logarithmic form"):
        Kerple(2, init={"r2": 1.0})
    with pytest.raises(ValueError, match=r"init\['r2'\] must be above 0 and at most 2 in the power form"):
        Kerple(2, form="power", init={"r1": 1.0, "r2": 2.5})
