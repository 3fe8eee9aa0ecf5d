"""Base class of priors, and checks of the results of custom priors."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.config import Described
from attention_priors.precision import KeepsFloat32, can_be_read

if TYPE_CHECKING:
    from attention_priors.priors.sum import Sum

LOG_PRIOR_FLOOR = -1e30
"""Smallest log-prior in nats; smaller values are raised to this floor, so that log-priors are finite.

float32 ends near -3.4e38. The floor leaves room for the logit scale that multiplies the log-prior.
"""


class Structure(enum.Flag):
    """Dependence of a log-prior ``K(i, j)`` on the two positions. The structure decides how attention is computed.

    - ``STATIONARY``: ``K`` depends on the distance ``d = i - j`` alone. One table of ``Lq + Lk - 1`` numbers per head
      holds it.
    - ``OF_KEYS``: ``K`` depends on the key alone. One number per key and head holds it.
    - ``FACTORED``: ``K(i, j) = <phi(i), psi(j)>`` with a few features, called *lanes*. Queries and keys are extended by
      them.
    - ``SCALED_DISTANCE``: ``K(i, j) = f_h(u(i) · ψ(d))``, a small ReLU network of a transformed distance that each
      query scales.
    """

    STATIONARY = enum.auto()
    OF_KEYS = enum.auto()
    FACTORED = enum.auto()
    SCALED_DISTANCE = enum.auto()


class Lanes(NamedTuple):
    """Features of a factored log-prior: ``K(i, j) = sum_r query[h, i, r] * key[j, r]``.

    Only the query features depend on the head, so that heads may share keys (GQA).
    """

    query: Tensor
    """Query features, ``(..., H, Lq, R)``."""
    key: Tensor
    """Key features, ``(..., Lk, R)``."""


def join_lanes(parts: Sequence[Lanes]) -> Lanes:
    """Return the lanes of the sum of several priors: their features, concatenated."""
    return Lanes(torch.cat([part.query for part in parts], dim=-1), torch.cat([part.key for part in parts], dim=-1))


class ScaledDistance(NamedTuple):
    """Log-prior ``K(i, j) = f_h(u(i) · ψ(i - j))``, where ``f_h`` is a ReLU network with one hidden layer.

    ``f_h(x) = b_h + Σ_k a_hk max(0, w_k x + v_k)``; all heads share the hidden units.
    """

    row: Tensor
    """Scale of each query, ``u(i)``, ``(..., Lq)``."""
    distance: Tensor
    """``ψ`` of each distance, in the shape of the distances."""
    hidden: Tensor
    """Weights ``w`` and constants ``v`` of the hidden units, ``(2, W)``."""
    outer: Tensor
    """Output weights ``a``, and ``b`` in the last column, ``(H, W + 1)``."""

    def log_prior(self) -> Tensor:
        """Return ``K`` of every pair, ``(H, ..., Lq, Lk)``, for ``distance`` of shape ``(..., Lq, Lk)``."""
        scaled = self.row.unsqueeze(-1) * self.distance
        weight, constant = (per_head(numbers, scaled) for numbers in self.hidden)
        units = torch.relu(weight * scaled + constant)
        return torch.tensordot(self.outer[:, :-1], units, dims=1) + per_head(self.outer[:, -1], scaled)


class Prior(Described, KeepsFloat32):
    """Log-prior ``K(i, j)`` per head, for query position ``i`` and key position ``j``, in nats.

    ``K`` is unnormalised and added to the content score: ``p_ij ∝ exp(content_ij) · exp(K_ij)``. Positions are integers
    in tokens. The distance is ``d = i - j``, so past keys have ``d >= 0``.

    A subclass sets ``structure`` and defines the matching method.

    - :meth:`log_prior_at` if the prior is stationary.
    - :meth:`log_prior_of_key` if the prior depends on the key alone.
    - :meth:`lanes` if the prior is factored. The result is a pair of feature tensors.
    - :meth:`scaled_distance` if the prior is a network of a scaled distance.

    A prior that hides keys also defines :meth:`visible_at`. Constructors take ``num_heads`` first, and every
    constructor argument is part of the description (:meth:`to_config`). :func:`register_prior` gives a custom class a
    name in configs, recipes and saved models.

    Parameters stay in float32 when the model is cast to another dtype.

    *Cached tables.* Between calls without gradients, :func:`attend` caches the table of a prior. The cache is
    invalidated when a parameter, a buffer or an attribute of the prior or a submodule changes. Attributes are compared
    by value: numbers, strings, tensors, and tuples, lists, sets and dicts of them. A prior with an attribute of another
    kind (an array, a function, an object) gets a new table in every call. A prior's values must not depend on global
    variables, class attributes or random numbers: :func:`attend` does not detect their changes.

    *Checks.* :func:`attend` raises a ValueError if :meth:`log_prior_at` or :meth:`lanes` of a custom prior returns a
    wrong shape. Non-finite values raise a ValueError too, if all parameters are finite. Values are checked on the CPU
    in eager mode only; elsewhere a check would synchronise with the device.
    """

    structure: Structure
    over_grid: bool | None = False
    """Whether positions are rows and columns (``grid.py``) or places on a line; None if the prior fits both."""
    learnable: ClassVar[tuple[str, ...]] = ()
    """Names that ``learn=`` may contain."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads)
        self.num_heads = num_heads
        self._attributes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return priors of this class that together use every constructor argument, the plainest first.

        Tests use these examples. A class with further constructor arguments must define this method.
        """
        return (cls(num_heads),)

    # ---- the mathematics

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the log-prior of a stationary prior.

        Args:
            distance: integers ``d = i - j`` in tokens, any shape.
            dtype: dtype of the result. Compute in float64: powers and phases of large distances lose precision in
                float32.

        Returns:
            Log-prior in nats, ``(H, *distance.shape)``. It is finite at every distance, also at ``d < 0``, which a
                causal mask hides.
        """
        raise TypeError(f"{type(self).__name__} is not stationary and has no log_prior_at")

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the log-prior of a prior that depends on the key alone.

        Args:
            key_positions: integers, any shape.
            dtype: dtype of the result.

        Returns:
            Finite log-prior in nats, ``(H, *key_positions.shape)``.
        """
        raise TypeError(f"{type(self).__name__} does not depend on the key alone and has no log_prior_of_key")

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return the features of a factored prior.

        Args:
            query_positions: integers ``(..., Lq)``.
            key_positions: integers ``(..., Lk)``.
            dtype: dtype of the features.

        Returns:
            Finite features, in the shapes of :class:`Lanes`.
        """
        raise TypeError(f"{type(self).__name__} is not factored and has no lanes")

    def scaled_distance(self, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
        """Return the network of a prior of a scaled distance, in float64.

        Args:
            query_positions: integers ``(..., Lq)``.
            distance: integers ``d = i - j`` in tokens, any shape.
        """
        raise TypeError(f"{type(self).__name__} is not a network of a scaled distance and has no scaled_distance")

    def visible_at(self, distance: Tensor) -> Tensor | None:
        """Return which distances a query may see, a boolean tensor like ``distance``, or None for all.

        The mask is separate from the log-prior because a logit scale must not multiply an infinity.
        """
        return None

    def is_zero_within(self, distance: int) -> bool:
        """Return whether all pairs up to ``distance`` apart are visible and have a log-prior of 0.

        :func:`attend` then leaves the prior out.
        """
        return False

    def check(self, *, causal: bool) -> None:
        """Raise a ValueError if this prior cannot be used with (or without) a causal mask."""

    def terms(self) -> Iterator[Prior]:
        """Yield the summands of a :class:`Sum`; any other prior yields itself."""
        yield self

    def log_prior(self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the log-prior of every pair, ``(..., H, Lq, Lk)`` in nats, ``-inf`` where the prior hides a key.

        Use it for inspection and tests: the matrix is dense.

        Args:
            query_positions: integers ``(..., Lq)``.
            key_positions: integers ``(..., Lk)``.
            dtype: dtype of the result.
        """
        bias, visible = self.bias_and_visibility(query_positions, key_positions, dtype)
        return bias if visible is None else bias.masked_fill(~visible.unsqueeze(-3), float("-inf"))

    def bias_and_visibility(
        self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        """Return the finite log-prior ``(..., H, Lq, Lk)`` and the visibility mask ``(..., Lq, Lk)``.

        The mask is None if the prior hides no key. The log-prior is computed in float64 and rounded once.
        """
        check_positions("query_positions", query_positions)
        check_positions("key_positions", key_positions)
        distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        bias = None
        for term in self.terms():
            if Structure.STATIONARY in term.structure:
                part = checked_log_prior(term, distance, torch.float64).movedim(0, -3)
            elif Structure.OF_KEYS in term.structure:
                part = checked_log_prior(term, key_positions, torch.float64).movedim(0, -2).unsqueeze(-2)
            elif Structure.SCALED_DISTANCE in term.structure:
                part = checked_scaled_distance(term, query_positions, distance).log_prior().movedim(0, -3)
            else:
                lanes = checked_lanes(term, query_positions, key_positions, torch.float64)
                part = lanes.query @ lanes.key.unsqueeze(-3).mT
            bias = part if bias is None else bias + part
        assert bias is not None
        return bias.expand(*distance.shape[:-2], -1, *distance.shape[-2:]).to(dtype), self.visible_at(distance)

    # ---- parameters

    def reset_parameters(self) -> None:
        """Reset every parameter to its initial value. By default, only those of priors that this prior is made of.

        A prior with parameters or buffers must define this method: transformers builds models on the meta device and
        calls it to fill them.
        """
        for part in self.children():
            if isinstance(part, Prior):
                part.reset_parameters()

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """Return the parameters in the units of the literature, each ``(H,)`` or ``(H, ...)``, detached.

        By default, these are the tensors that :attr:`learnable` names.
        """
        values = {name: getattr(self, name, None) for name in self.learnable}
        return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}

    def present_values(self) -> Mapping[str, Tensor]:
        """Return the natural parameters. A prior made of priors has none here, because its parts print theirs."""
        return {} if any(isinstance(child, Prior) for child in self.children()) else self.natural_parameters()

    def _set_learned(self, learn: bool | str | Collection[str], **attributes: str) -> None:
        """Make only the parameters in ``learn`` trainable: True (all), False (none), or a name or collection of names.

        ``attributes`` maps each name in ``learn`` to the attribute that holds the parameter.
        """
        if isinstance(learn, bool):
            chosen = tuple(self.learnable) if learn else ()
        else:
            chosen = (learn,) if isinstance(learn, str) else learn
        if not isinstance(chosen, Collection):
            raise ValueError(f"learn must be True, False, or some of {', '.join(self.learnable)}; got {learn!r}")
        for name in chosen:
            if name not in self.learnable:
                raise ValueError(
                    f"learn={learn!r}: {type(self).__name__} can learn {', '.join(self.learnable)}, not {name!r}"
                )
        self.learn = tuple(name for name in self.learnable if name in chosen)
        self._attributes = tuple(attributes.items())
        self.freeze_what_is_fixed()

    def freeze_what_is_fixed(self) -> None:
        """Make exactly the parameters in ``learn`` trainable, where loading a checkpoint created new parameters."""
        for name, attribute in self._attributes:
            getattr(self, attribute).requires_grad_(name in self.learn)

    # ---- composition

    def __add__(self, other: Prior) -> Sum:
        """Return the product of two priors, whose log-priors add."""
        from attention_priors.priors.sum import Sum

        if not isinstance(other, Prior):
            return NotImplemented
        return Sum([*self.terms(), *other.terms()])


def checked_log_prior(term: Prior, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-prior of a stationary or key-only prior, cast to ``dtype``.

    Calls ``term.log_prior_at(at)``, or ``term.log_prior_of_key(at)`` if the prior depends on the key alone.

    Raises:
        ValueError: the prior is not on the device of ``at``, or the result is not ``(H, *at.shape)``. On the CPU in
            eager mode, also if a value is not finite although all parameters are.
    """
    stationary = Structure.STATIONARY in term.structure
    try:
        table = term.log_prior_at(at, dtype) if stationary else term.log_prior_of_key(at, dtype)
    except RuntimeError:
        _check_device(term, at.device)
        raise
    if _is_of_this_package(term):
        return table.to(dtype)
    name, place = ("log_prior_at", "distance") if stationary else ("log_prior_of_key", "position")
    table = _of_shape((term.num_heads, *at.shape), table, term, f"the result of {{}}.{name}")
    _check_device(term, at.device)
    if not _is_finite(table) and _has_finite_parameters(term):
        index = (~table.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{type(term).__name__}.{name} returned {float(table[tuple(index)])} at {place} "
            f"{int(at[tuple(index[1:])])}; a log-prior must be finite at every position, including those that a "
            "causal mask hides; to hide keys, define visible_at"
        )
    return table.to(dtype)


def checked_lanes(term: Prior, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Lanes:
    """Return ``term.lanes(query_positions, key_positions)``.

    Raises:
        ValueError: as :func:`checked_log_prior`, for the shapes of :class:`Lanes`.
    """
    try:
        lanes = term.lanes(query_positions, key_positions, dtype=dtype)
    except RuntimeError:
        _check_device(term, key_positions.device)
        raise
    if _is_of_this_package(term):
        return lanes
    if not isinstance(lanes, Lanes):
        raise ValueError(f"{type(term).__name__}.lanes must return Lanes, got {type(lanes).__name__}")
    _check_device(term, key_positions.device)
    number, rows = lanes.key.shape[-1:], (*query_positions.shape[:-1], term.num_heads, query_positions.shape[-1])
    shapes = ((*rows, *number), (*key_positions.shape, *number))
    for part, numbers, shape in zip(Lanes._fields, lanes, shapes, strict=True):
        if not _is_finite(_of_shape(shape, numbers, term, f"{part} of {{}}.lanes")) and _has_finite_parameters(term):
            raise ValueError(f"{part} of {type(term).__name__}.lanes must be finite, got NaN or infinity")
    return lanes


def checked_scaled_distance(term: Prior, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
    """Return ``term.scaled_distance(query_positions, distance)``.

    Raises:
        ValueError: the prior is on another device, or a shape differs from :class:`ScaledDistance`.
    """
    try:
        network = term.scaled_distance(query_positions, distance)
    except RuntimeError:
        _check_device(term, distance.device)
        raise
    if not _is_of_this_package(term):
        units = network.hidden.shape[-1]
        shapes = (query_positions.shape, distance.shape, (2, units), (term.num_heads, units + 1))
        for part, numbers, shape in zip(ScaledDistance._fields, network, shapes, strict=True):
            _of_shape(tuple(shape), numbers, term, f"{part} of {{}}.scaled_distance")
    return network


def _is_of_this_package(term: Prior) -> bool:
    # Tests cover the shapes and values of the library's own priors; a check would take 4 % of a short call.
    return type(term).__module__.startswith("attention_priors.priors.")


def _check_device(term: Prior, device: torch.device) -> None:
    for tensor in (*term.parameters(), *term.buffers()):
        if tensor.device != device and tensor.dim() > 0:  # scalars may stay on the CPU
            raise ValueError(
                f"prior {type(term).__name__} is on {tensor.device}, but query and key are on {device}; "
                f"call prior.to({str(device)!r})"
            )


def _of_shape(shape: tuple[int, ...], returned: object, term: Prior, what: str) -> Tensor:
    if not isinstance(returned, Tensor) or returned.shape != shape:
        got = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise ValueError(f"{what.format(type(term).__name__)} must be a tensor of shape {shape}, got {got}")
    return returned


def _is_finite(numbers: Tensor) -> bool:
    """Return whether all values are finite, or True if they cannot be read."""
    if not can_be_read(numbers) or math.isfinite(float(numbers.detach().sum())):
        return True
    # The sum of finite numbers may overflow.
    return bool(numbers.isfinite().all())


def _has_finite_parameters(term: Prior) -> bool:
    # NaN in parameters comes from diverged training, not from the prior's code.
    return all(bool(x.isfinite().all()) for x in (*term.parameters(), *term.buffers()))


@torch.no_grad()
def unset_after_reset(module: nn.Module) -> list[str]:
    """Call ``reset_parameters()``, if defined, and return the names of parameters and buffers that it does not set."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    getattr(module, "reset_parameters", lambda: None)()
    return [name for name, tensor in tensors.items() if not tensor.is_meta and tensor.isnan().any()]


def check_over_line(prior: Prior | None) -> None:
    """Raise a ValueError if a prior is over a grid: tokens of a sequence have no rows and columns."""
    for term in () if prior is None else prior.terms():
        if term.over_grid:
            raise ValueError(
                f"prior must be over a line, got {term.name!r}, which is over a grid: tokens of a sequence have no "
                "rows and columns"
            )


def check_on_grid(prior: Prior | None) -> None:
    """Raise a ValueError if a prior is over a line: patches have rows and columns."""
    for term in () if prior is None else prior.terms():
        if term.over_grid is False:
            raise ValueError(f"prior must be over a grid (axial, spectral_2d, radial, key_sink_2d), got {term.name!r}")


def check_in_use(prior: Prior | None, *, causal: bool, key_positions: Tensor | None) -> tuple[Prior, ...]:
    """Return the terms of a prior after checking how it is used.

    Raises:
        ValueError: :meth:`Prior.check` fails, or the prior is over a grid and ``key_positions`` is None.
    """
    if prior is None:
        return ()
    prior.check(causal=causal)
    terms = tuple(prior.terms())
    for term in terms:
        if term.over_grid and key_positions is None:
            raise ValueError(
                f"prior {term.name!r} is over a grid and needs key_positions, the row and column of each key "
                "(see grid_positions); got None"
            )
    return terms


def check_positions(name: str, positions: Tensor) -> None:
    """Raise a ValueError unless ``positions`` is an integer tensor with at least one dimension."""
    if not isinstance(positions, Tensor) or positions.dim() < 1:
        raise ValueError(f"{name} must be a tensor of integers (..., L), got {positions!r}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers (tokens), got dtype {positions.dtype}")


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``(H,)`` to ``(H, 1, ..., 1)`` so that it broadcasts over the dimensions of ``like``."""
    return values.view(-1, *(1,) * like.dim())


Init: TypeAlias = "str | Mapping[str, Any]"


def checked_init(init: Init, names: Sequence[str], **shapes: tuple[int, ...]) -> str | dict[str, Any]:
    """Check ``init`` and return it as a name, or as plain lists of numbers by parameter.

    Args:
        init: one of ``names``, or a mapping from parameters to numbers. A scalar sets all heads; a list must broadcast
            to the parameter's shape.
        names: valid names.
        shapes: shape ``(H, ...)`` of each parameter that a mapping may set.

    Raises:
        ValueError: unknown name or parameter, or a value that is not finite or does not broadcast.
    """
    if not isinstance(init, Mapping):
        check_choice("init", init, names)
        return init
    unknown = [*(init.keys() - shapes.keys())]
    if unknown or not init:
        got = ", ".join(map(str, unknown)) or "{}"
        raise ValueError(f"init must be one of {', '.join(names)}, or a mapping of {', '.join(shapes)}; got {got}")
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in init.items()}
    for name in plain:
        started(plain, name, shapes[name])
    return plain


def started(init: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the initial value of one parameter, float32 on the CPU; zeros if ``init`` does not set it.

    Raises:
        ValueError: as :func:`checked_init`.
    """
    given = init.get(name, 0.0)
    try:
        values = torch.as_tensor(given, dtype=torch.float32, device="cpu")
        whole = values.expand(shape).clone()
    except (TypeError, ValueError, RuntimeError):
        whole = None
    if whole is None or not bool(torch.isfinite(whole).all()):
        raise ValueError(f"init[{name!r}] must be finite numbers that broadcast to shape {shape}, got {given!r}")
    return whole
