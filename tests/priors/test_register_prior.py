"""Requirements on a user's class for registration, and entry points of installed packages."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_priors import Laplace, Prior, Structure, prior_from_config, register_prior
from attention_priors.priors import CATALOGUE, Uniform


@pytest.fixture(autouse=True)
def _registered_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CATALOGUE, "registered", dict(CATALOGUE.registered))


class Cosine(Prior):
    """Prior ``K(i, j) = a · cos(2π d / period)``."""

    name = "cosine"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int, period: float, phases: list[float] | None = None) -> None:
        super().__init__(num_heads)
        self.period, self.phases = period, phases
        self.amplitude = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        return (cls(num_heads, 3.0),)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.amplitude)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        amplitude = self.amplitude.double().view(-1, *[1] * distance.dim())
        return (amplitude * torch.cos(2 * torch.pi * distance / self.period)).to(dtype)


def test_a_registered_class_is_built_from_its_name() -> None:
    with pytest.raises(ValueError, match=r"unknown prior 'cosine'.*register_prior"):
        prior_from_config({"name": "cosine", "period": 7.0}, 2)
    state = torch.get_rng_state()
    assert register_prior(Cosine) is Cosine
    assert torch.equal(torch.get_rng_state(), state)
    prior = prior_from_config(["laplace", {"name": "cosine", "period": 7.0}], 2)
    again = prior_from_config(json.loads(json.dumps(prior.to_config())))
    assert [type(term) for term in again.terms()] == [Laplace, Cosine]
    assert again.to_config() == prior.to_config()
    assert "cosine" in CATALOGUE
    assert [*CATALOGUE][-1] == "cosine"


def test_a_notebook_cell_may_register_twice() -> None:
    first, second = (type("Cosine", (Cosine,), {"name": "cosine"}) for _ in range(2))
    assert register_prior(register_prior(first)) is first
    register_prior(second)
    assert CATALOGUE["cosine"] is second


def test_registration_works_under_the_meta_device() -> None:
    with torch.device("meta"):
        register_prior(Cosine)


class _OwnName(Cosine):
    """Class with the name of its parent."""


class _Anonymous(Cosine):
    name = "two words"


class _Taken(Cosine):
    name = "laplace"


class _Sum(Cosine):
    name = "sum"


class _Formless(Prior):
    name = "formless"


class _HeadsSecond(Uniform):
    name = "heads_second"

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__(num_heads)
        self.size = size


class _Anything(Uniform):
    name = "anything"

    def __init__(self, num_heads: int, **others: float) -> None:
        super().__init__(num_heads)
        self.others = others


class _Needy(Uniform):
    name = "needy"

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__(num_heads)
        self.size = size


class _Forgetful(Uniform):
    name = "forgetful"

    def __init__(self, num_heads: int, size: int = 3) -> None:
        super().__init__(num_heads)
        self.length = size


class _NotPlain(Uniform):
    name = "not_plain"

    def __init__(self, num_heads: int, sizes: Any = torch.float32) -> None:
        super().__init__(num_heads)
        self.sizes = sizes


class _Doubling(Uniform):
    name = "doubling"

    def __init__(self, num_heads: int, size: int = 3) -> None:
        super().__init__(num_heads)
        self.size = 2 * size


class _NoReset(Uniform):
    name = "no_reset"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slope = nn.Parameter(torch.ones(num_heads))


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (nn.Linear, r"takes a subclass of Prior, got <class '.*Linear'>"),
        (Cosine(2, 3.0), r"takes a subclass of Prior, got Cosine\("),
        (_OwnName, r"_OwnName cannot be registered: it needs its own name.*got None"),
        (_Anonymous, r"name = 'my_prior'; got 'two words'"),
        (_Taken, r"the name 'laplace' is taken by attention_priors\.priors\.laplace\.Laplace"),
        (_Sum, r"the name 'sum' is taken by attention_priors\.priors\.sum\.Sum"),
        (_Formless, r"it needs a structure, such as structure = Structure\.STATIONARY"),
        (_HeadsSecond, r"its constructor must take num_heads first, got \['size', 'num_heads'\]"),
        (_Anything, r"must not have \*args or \*\*kwargs"),
        (_Needy, r"also needs size: define the classmethod examples\(num_heads\)"),
        (_Forgetful, r"must keep the argument 'size' as the attribute"),
        (_NotPlain, r"must be plain data .*torch\.float32"),
        (_Doubling, r"its description \{.*'size': 6\} has another description, \{.*'size': 12\}"),
        (_NoReset, r"reset_parameters\(\) must set every parameter and buffer; it does not set \['slope'\]"),
    ],
)
def test_invalid_classes_are_refused(prior: Any, message: str) -> None:
    before = dict(CATALOGUE.registered)
    with pytest.raises(ValueError, match=message):
        register_prior(prior)
    assert CATALOGUE.registered == before


def install(folder: Path, package: str, entry_points: str) -> None:
    """Write the metadata that pip writes for an installed package."""
    place = folder / f"{package}-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text(f"[attention_priors.priors]\n{entry_points}\n")


SOURCE = """
from attention_priors import Uniform

class Flat(Uniform):
    name = "{name}"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("flat_prior", None)


def test_an_installed_prior_is_imported_when_its_name_is_read(site: Path) -> None:
    (site / "flat_prior.py").write_text(SOURCE.format(name="flat"))
    install(site, "flat", "flat = flat_prior:Flat\nother = no_such_module:Other")
    assert {"flat", "other"} <= set(CATALOGUE)
    with pytest.raises(ValueError, match=r"unknown prior 'flatt'; expected one of .*, flat, other;"):
        prior_from_config("flatt", 2)
    prior_from_config("uniform", 2)
    assert "flat_prior" not in sys.modules
    assert prior_from_config("flat", 2).to_config() == {"name": "flat", "num_heads": 2}
    with pytest.raises(
        ValueError, match=r"'other' cannot be imported from no_such_module:Other \(package flat\): No mod"
    ):
        prior_from_config("other", 2)


def test_an_entry_point_must_have_the_priors_name(site: Path) -> None:
    (site / "flat_prior.py").write_text(SOURCE.format(name="level"))
    install(site, "flat", "flat = flat_prior:Flat")
    with pytest.raises(ValueError, match=r"flat_prior:Flat \(package flat\) is <class .*, not a prior named 'flat'"):
        prior_from_config("flat", 2)


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    install(site, "one", "flat = one:Flat")
    install(site, "two", "flat = two:Flat")
    match = r"two packages have a prior 'flat': one:Flat \(package one\) and two:Flat \(package two\); uninstall one"
    with pytest.raises(ValueError, match=match):
        prior_from_config("flat", 2)
