"""Cached tables and lanes always match the prior as it is now."""

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import examples
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_priors import (
    Axial,
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    Spectral,
    attend,
    grid_positions,
    prior_from_config,
)
from attention_priors.attention import tables
from attention_priors.attention.tables import consecutive_table
from attention_priors.priors import CATALOGUE, Structure

H = 2
CPU = torch.device("cpu")


def directly(prior: GeneralizedGaussian, highest: int, lowest: int) -> torch.Tensor:
    return prior.log_prior_at(torch.arange(highest, lowest - 1, -1), torch.float64).detach()


@examples(25)
@given(
    st.lists(
        st.tuples(st.integers(-50, 3000), st.integers(0, 3000), st.booleans()),
        min_size=2,
        max_size=8,
    )
)
def test_any_sequence_of_requests_gets_exact_tables(requests: list[tuple[int, int, bool]]) -> None:
    prior = GeneralizedGaussian(H, init="spread")
    for lowest, extent, change in requests:
        if change:
            with torch.no_grad():
                prior.theta_alpha.add_(0.1)
        with torch.no_grad():
            found = consecutive_table([prior, prior], lowest + extent, lowest, CPU)
        assert found is not None
        assert torch.equal(found, 2 * directly(prior, lowest + extent, lowest))


def _write_data(prior: GeneralizedGaussian) -> None:
    prior.theta_alpha.data.add_(0.5)


def _replace_data(prior: GeneralizedGaussian) -> None:
    prior.theta_alpha.data = prior.theta_alpha.data + 0.5


def _load(prior: GeneralizedGaussian) -> None:
    state = copy.deepcopy(prior.state_dict())
    state["theta_beta"] = state["theta_beta"] + 0.5
    prior.load_state_dict(state)


def _train(prior: GeneralizedGaussian) -> None:
    optimizer = torch.optim.SGD(prior.parameters(), lr=0.1)
    with torch.enable_grad():
        prior.log_prior_at(torch.arange(9)).sum().backward()
    optimizer.step()


class _WithBuffer(GeneralizedGaussian):
    """Custom prior whose numbers come from a buffer and an attribute."""

    name = "with_buffer"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, init="spread")
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.zeros(num_heads))
        self.steps = (1.0, 2.0)

    def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        height = (self.shift + self.steps[1]).view(-1, *[1] * distance.dim())
        return super().log_prior_at(distance, dtype) + height * (distance % 2).to(dtype)


def _fill_buffer(prior: _WithBuffer) -> None:
    prior.shift.fill_(3.0)


def _load_buffer(prior: _WithBuffer) -> None:
    prior.load_state_dict(prior.state_dict() | {"shift": torch.full((H,), 3.0)})


def _set_attribute(prior: _WithBuffer) -> None:
    prior.steps = (1.0, 5.0)


@pytest.mark.parametrize("change", [_fill_buffer, _load_buffer, _set_attribute])
def test_changed_buffers_and_attributes_invalidate_tables(change) -> None:
    prior = _WithBuffer(H)
    query, key = torch.randn(1, H, 1, 4), torch.randn(1, H, 50, 4)
    with torch.no_grad():
        before = attend(query, key, key, prior, backend="toeplitz")
        change(prior)
        after = attend(query, key, key, prior, backend="toeplitz")
        expected = attend(query, key, key, prior, backend="reference")
    torch.testing.assert_close(after, expected)
    assert float((after - before).abs().max()) > 1e-3


def test_changed_attributes_invalidate_lanes() -> None:
    prior = Spectral(H, 3)
    torch.nn.init.normal_(prior.alpha)
    query, key = torch.randn(1, H, 50, 4), torch.randn(1, H, 50, 4)
    with torch.no_grad():
        before = attend(query, key, key, prior, backend="lanes")
        prior.base *= 10
        after = attend(query, key, key, prior, backend="lanes")
        expected = attend(query, key, key, prior, backend="reference")
    torch.testing.assert_close(after, expected)
    assert float((after - before).abs().max()) > 1e-3


def test_changed_attributes_of_a_part_invalidate_tables() -> None:
    prior = Axial(H, {"name": "spectral", "num_frequencies": 3, "init": {"alpha": [1.0, 2.0, 3.0]}})
    row = grid_positions(1, 8)
    query, key = torch.randn(1, H, 8, 4), torch.randn(1, H, 8, 4)
    places: dict[str, Any] = {"causal": False, "query_positions": row, "key_positions": row}
    with torch.no_grad():
        before = attend(query, key, key, prior, **places, backend="toeplitz")
        columns: Any = prior.over_columns
        columns.base = 7.0
        after = attend(query, key, key, prior, **places, backend="toeplitz")
        expected = attend(query, key, key, prior, **places, backend="reference")
    torch.testing.assert_close(after, expected)
    assert float((after - before).abs().max()) > 1e-3


class _Steps(Prior):
    """Custom prior whose numbers come from attributes that are neither parameters nor buffers."""

    name = "steps"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.tensor = torch.zeros(num_heads)
        self.numbers = [0.0, 0.0]
        self.nested = {"even": {"height": (0.0, [0.0])}}
        self.curve = torch.nn.Sequential(torch.nn.Softplus(), torch.nn.Identity())

    def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        first, odd = self.numbers
        height = self.nested["even"]["height"][1][0]
        numbers = -first * (distance == 0) - odd * (distance % 2) - height * (distance % 3)
        slope = self.curve(self.tensor).view(-1, *[1] * distance.dim())
        return numbers.to(dtype) - slope.to(dtype) * distance.abs()


def _write_to_tensor(prior: _Steps) -> None:
    prior.tensor += 1.0


def _write_to_data(prior: _Steps) -> None:
    prior.tensor.data.add_(1.0)  # this changes no version of the tensor


def _write_to_list(prior: _Steps) -> None:
    prior.numbers[1] = 2.0


def _write_to_dict(prior: _Steps) -> None:
    prior.nested["even"]["height"][1][0] = 3.0


def _write_to_submodule(prior: _Steps) -> None:
    softplus: Any = prior.curve[0]
    softplus.beta = 0.2


def _replace_submodule(prior: _Steps) -> None:
    prior.curve[1] = torch.nn.Hardtanh(0.0, 0.1)


IN_PLACE = [_write_to_tensor, _write_to_data, _write_to_list, _write_to_dict, _write_to_submodule, _replace_submodule]


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("queries", [1, 50])
def test_in_place_changes_of_attributes_invalidate_tables(queries: int, change: Any) -> None:
    prior = _Steps(H)
    query, key = torch.randn(1, H, queries, 4), torch.randn(1, H, 50, 4)
    with torch.no_grad():
        before = attend(query, key, key, prior)
        assert prior in tables._kept
        change(prior)
        after = attend(query, key, key, prior)
        expected = attend(query, key, key, prior, backend="reference")
    torch.testing.assert_close(after, expected)
    assert float((after - before).abs().max()) > 1e-3


class _Height:
    """Object whose changes no comparison shows."""

    value = 0.0


class _WithObject(GeneralizedGaussian):
    """A prior whose numbers come from an object."""

    name = "with_object"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, init="spread")
        self.height: Any = 0.0

    def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        height = self.height.value if isinstance(self.height, _Height) else self.height
        return super().log_prior_at(distance, dtype) + height * (distance % 2).to(dtype)


def test_tables_of_incomparable_priors_are_not_cached() -> None:
    prior = _WithObject(H)
    query, key = torch.randn(1, H, 1, 4), torch.randn(1, H, 50, 4)
    with torch.no_grad():
        attend(query, key, key, prior)
        assert prior in tables._kept
        prior.height = _Height()
        for prior.height.value in (1.0, 3e5):  # the second position is too far from 0 for float32
            found = attend(query, key, key, prior)
            torch.testing.assert_close(found, attend(query, key, key, prior, backend="reference"))
            assert prior not in tables._kept


def test_attributes_that_require_gradients_get_them() -> None:
    prior = _Steps(H)
    key = torch.randn(1, H, 20, 4)
    with torch.no_grad():
        attend(key, key, key, prior)
    prior.tensor.requires_grad_()
    attend(key, key, key, prior).sum().backward()
    assert prior.tensor.grad is not None
    assert float(prior.tensor.grad.abs().max()) > 0


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"sum"}))
def test_every_prior_of_the_catalogue_can_be_compared(name: str) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "key_sink": {"train_length": 8},
        "key_sink_2d": {"rows": 2, "columns": 2},
        "window": {"size": 3},
        "axial": {"rows": "spectral"},
        "radial": {"prior": "laplace"},
    }
    prior = prior_from_config({"name": name, **sizes.get(name, {})}, H)
    state = tables._State.of(prior)
    assert state is not None
    assert state.is_of(prior)


@pytest.mark.parametrize("change", [_write_data, _replace_data, _load, _train])
def test_every_change_of_parameters_invalidates_tables(change) -> None:
    prior = GeneralizedGaussian(H, init="spread")
    query, key = torch.randn(1, H, 1, 4), torch.randn(1, H, 50, 4)
    with torch.no_grad():
        before = attend(query, key, key, prior)
        change(prior)
        after = attend(query, key, key, prior)
        expected = attend(query, key, key, prior, backend="reference")
    torch.testing.assert_close(after, expected)
    assert float((after - before).abs().max()) > 1e-4


def test_decoding_makes_few_tables() -> None:
    prior = Laplace(H)
    key = torch.randn(1, H, 3000, 4)
    with (
        torch.no_grad(),
        mock.patch.object(Laplace, "log_prior_at", autospec=True, side_effect=Laplace.log_prior_at) as made,
    ):
        for length in range(1, 3000, 7):
            found = attend(key[:, :, length - 1 : length], key[:, :, :length], key[:, :, :length], prior)
            assert found.shape == (1, H, 1, 4)
    assert made.call_count <= 6


@pytest.mark.parametrize("prior", [Laplace(H, learn=True), Spectral(H)])
def test_nothing_is_cached_with_gradients(prior) -> None:
    gc.collect()
    before = len(tables._kept)
    key = torch.randn(1, H, 20, 4)
    attend(key, key, key, prior, backend="toeplitz").sum().backward()
    assert len(tables._kept) == before
    assert all(parameter.grad is not None for parameter in prior.parameters() if parameter.requires_grad)


def test_cached_tables_cover_only_requested_distances() -> None:
    prior = Laplace(H)
    key = torch.randn(1, H, 8, 4)
    for start in (0, 10**7, 40, -(10**7), 0):
        positions = torch.arange(8)
        with torch.no_grad():
            attend(key, key, key, prior, causal=False, query_positions=positions + start, key_positions=positions)
        assert tables._kept[prior].table.shape[1] <= tables.SPAN * 15 + tables.GROWTH


def test_cached_tables_do_not_drift() -> None:
    """Each request is near the request before."""
    prior = Laplace(H)
    for start in range(0, 20_000, 20):
        with torch.no_grad():
            found = consecutive_table([prior], start + 20, start, CPU)
        assert found is not None
        assert torch.equal(found, prior.log_prior_at(torch.arange(start + 20, start - 1, -1), torch.float64))
        assert tables._kept[prior].table.shape[1] <= tables.SPAN * 21 + tables.GROWTH


@pytest.mark.parametrize("positions", [None, torch.arange(20)], ids=["", "positions"])
@pytest.mark.parametrize("first", [False, True])
def test_meta_tensors_leave_nothing_in_the_cache(first: bool, positions: torch.Tensor | None) -> None:
    prior = GeneralizedGaussian(H, init="spread") + Spectral(H)
    query, key, value = (torch.randn(1, H, 20, 4) for _ in range(3))

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        places = None if positions is None else positions[-query.shape[2] :]
        return attend(query, key, value, prior, query_positions=places, key_positions=positions)

    with torch.no_grad():
        if not first:
            call(query, key, value)
        for number in (1, 20):  # as in decoding, and as in prefill
            with FakeTensorMode(allow_non_fake_inputs=True):
                fake = (torch.empty(1, H, n, 4) for n in (number, 20, 20))
                assert call(*fake).shape == (1, H, number, 4)
        found, found_last = call(query, key, value), call(query[:, :, -1:], key, value)
        expected = attend(query, key, value, prior, backend="reference")
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_last, expected[:, :, -1:])


def test_a_table_made_in_inference_mode_serves_training() -> None:
    prior = Laplace(H)
    key = torch.randn(1, H, 20, 4, requires_grad=True)
    with torch.inference_mode():
        attend(key, key, key, prior)
    attend(key, key, key, prior).sum().backward()
    assert key.grad is not None


def test_tables_are_freed_with_their_prior() -> None:
    gc.collect()
    before = len(tables._kept)
    prior = Laplace(H)
    with torch.no_grad():
        consecutive_table([prior], 10, 0, CPU)
    assert len(tables._kept) == before + 1
    del prior
    gc.collect()
    assert len(tables._kept) == before


# ---- lanes


def key_sink() -> KeySink:
    sink = KeySink(H, train_length=32, init="recency")
    with torch.no_grad():
        sink.gain.copy_(torch.tensor([1.0, -2.0]))
        sink.bump.fill_(1.5)
    return sink


@examples(15)
@given(
    st.lists(st.tuples(st.integers(1, 2500), st.integers(0, 3), st.booleans()), min_size=2, max_size=6),
    st.booleans(),
)
def test_any_sequence_of_positions_gets_exact_lanes(requests: list[tuple[int, int, bool]], spectral: bool) -> None:
    """Key positions are the default, explicit, with gaps, or before the first token."""
    prior = Spectral(H, num_frequencies=2, init="recency") if spectral else key_sink()
    for length, kind, change in requests:
        if change:
            with torch.no_grad():
                next(prior.parameters()).add_(0.1)
        query, key = torch.randn(1, H, 1, 4), torch.randn(1, H, length, 4)
        given_positions = {
            0: None,
            1: torch.arange(length) + 7,
            2: torch.arange(length) * 9,
            3: torch.arange(length) - 3,
        }[kind]
        options = (
            {}
            if given_positions is None
            else {"key_positions": given_positions, "query_positions": torch.tensor([9 * length])}
        )
        with torch.no_grad():
            found = attend(query, key, key, prior, backend="toeplitz", **options)
            expected = attend(query.double(), key.double(), key.double(), prior, backend="reference", **options)
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_decoding_computes_few_numbers_of_keys() -> None:
    sink, key, lengths = key_sink(), torch.randn(1, H, 3000, 4), []
    of_keys = KeySink.log_prior_of_key

    def watched(self, key_positions, dtype):
        lengths.append(key_positions.shape[-1])
        return of_keys(self, key_positions, dtype)

    with torch.no_grad(), mock.patch.object(KeySink, "log_prior_of_key", watched):
        for length in range(1, 3000, 7):
            attend(key[:, :, length - 1 : length], key[:, :, :length], key[:, :, :length], sink)
    assert sum(length > 1 for length in lengths) <= 6


def test_key_numbers_with_gradients_are_not_cached() -> None:
    sink, key = key_sink(), torch.randn(1, H, 20, 4)
    attend(key, key, key, sink).sum().backward()
    assert sink not in tables._kept
    assert all(parameter.grad is not None for parameter in sink.parameters())


def test_cached_numbers_do_not_serve_learned_parameters() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 200, 8)
    prior = ClippedOffsets(2)
    with torch.no_grad():
        attend(x, x, x, prior)
        prior.bias.normal_().sub_(3e5)
    out = attend(x, x, x, prior)
    expected = attend(x.double(), x.double(), x.double(), prior, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_a_sum_uses_tables_cached_for_its_summands() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 200, 8)
    one, other = ClippedOffsets(2, init="normal"), ClippedOffsets(2, init="normal")
    with torch.no_grad():
        attend(x, x, x, one)
        attend(x, x, x, other, query_positions=torch.arange(200) + 10**6, key_positions=torch.arange(200))
    out = attend(x, x, x, one + other)
    expected = attend(x.double(), x.double(), x.double(), one + other, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
