"""The base class of priors: a log-prior, its structure, and a description of itself."""

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
"""Log-priors are finite: anything below this many nats is raised to it.

float32 ends near -3.4e38; the floor leaves room for the logit scale that multiplies the log-prior.
"""


class Structure(enum.Flag):
    """How a log-prior ``K(i, j)`` depends on the two positions; it decides how attention is computed.

    ``STATIONARY``: ``K`` depends on the distance ``d = i - j`` alone, so one table of ``Lq + Lk - 1``
    numbers per head holds all of it. ``OF_KEYS``: ``K`` depends on the key alone, one number per key and head.
    ``FACTORED``: ``K(i, j) = <phi(i), psi(j)>`` with a few features, so it rides along in the query-key product
    ("lanes"). ``SCALED_DISTANCE``: ``K(i, j) = f_h(u(i) · ψ(d))``, a small ReLU network of a number per distance that
    each query scales.
    """

    STATIONARY = enum.auto()
    OF_KEYS = enum.auto()
    FACTORED = enum.auto()
    SCALED_DISTANCE = enum.auto()


class Lanes(NamedTuple):
    """A factored log-prior: ``K(i, j) = sum_r query[h, i, r] * key[j, r]``.

    All that differs between heads stands on the query side, so that heads may share keys (GQA).
    """

    query: Tensor
    """``(..., H, Lq, R)``."""
    key: Tensor
    """``(..., Lk, R)``."""


def join_lanes(parts: Sequence[Lanes]) -> Lanes:
    """The lanes of several priors side by side: those of their sum."""
    return Lanes(torch.cat([part.query for part in parts], dim=-1), torch.cat([part.key for part in parts], dim=-1))


class ScaledDistance(NamedTuple):
    """A log-prior ``K(i, j) = f_h(u(i) · ψ(i - j))``, where ``f`` is a ReLU network with one hidden layer.

    ``f_h(x) = b_h + Σ_k a_hk max(0, w_k x + v_k)``: heads share the hidden units.
    """

    row: Tensor
    """``u(i)``, ``(..., Lq)``."""
    distance: Tensor
    """``ψ`` of each distance, like the distances."""
    hidden: Tensor
    """``w`` and ``v``, ``(2, W)``."""
    outer: Tensor
    """``a``, and ``b`` in the last column, ``(H, W + 1)``."""

    def log_prior(self) -> Tensor:
        """Return ``K`` of every pair, ``(H, ..., Lq, Lk)``, where ``distance`` is ``(..., Lq, Lk)``."""
        scaled = self.row.unsqueeze(-1) * self.distance
        weight, constant = (per_head(numbers, scaled) for numbers in self.hidden)
        units = torch.relu(weight * scaled + constant)
        return torch.tensordot(self.outer[:, :-1], units, dims=1) + per_head(self.outer[:, -1], scaled)


class Prior(Described, KeepsFloat32):
    """A log-prior ``K(i, j)`` per head over query position ``i`` and key position ``j``, in nats.

    ``K`` is unnormalised and is added to the content score: ``p_ij ∝ exp(content_ij) · exp(K_ij)``.
    Positions are integers in tokens; the distance is ``d = i - j``, so the past is ``d >= 0``.

    A subclass defines the method of its structure: :meth:`log_prior_at` if it is stationary, :meth:`log_prior_of_key`
    if it depends on the key alone, :meth:`lanes` if it is factored, :meth:`scaled_distance` if it is a network of a
    scaled distance. One that hides keys altogether also defines :meth:`visible_at`.
    Constructors take ``num_heads`` first, and every constructor argument becomes a part of the prior's description
    (:meth:`to_config`).
    :func:`register_prior` gives a class of your own a name in configs, recipes and saved models.

    Parameters stay in float32 whatever dtype the model is cast to.

    *Kept tables.* Between calls without gradients, :func:`attend` keeps the table of a prior. It makes a new table
    after any change of a parameter, a buffer or an attribute, of the prior or a submodule. Attributes are compared by
    value: numbers, strings, tensors, and tuples, lists, sets and dicts of them. A prior with an attribute of another
    kind (an array, a function, an object) gets a new table in every call. Global variables, class attributes and random
    numbers must not change a prior's numbers: :func:`attend` does not see such a change.

    *Checks.* :func:`attend` raises a ValueError if :meth:`log_prior_at` or :meth:`lanes` of a prior of your own returns
    another shape than documented or, with finite parameters, a number that is not finite. Finite numbers are checked
    on the CPU in eager mode alone: elsewhere a check would wait for the device.
    """

    structure: Structure
    over_grid: bool | None = False
    """Whether positions are rows and columns (``grid.py``) rather than places in a line; None where it is all one."""
    learnable: ClassVar[tuple[str, ...]] = ()
    """The names that ``learn=`` may hold."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads)
        self.num_heads = num_heads
        self._attributes: dict[str, str] = {}

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return priors of this class that together use every argument of its constructor, the plainest first.

        Tests and checks try them. A class defines this method if its constructor has more arguments.
        """
        return (cls(num_heads),)

    # ---- the mathematics

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The log-prior of stationary priors.

        Args:
            distance: integers ``d = i - j`` in tokens, any shape.
            dtype: of the result; the computation itself is in float64, because powers and phases of large
                distances lose their meaning in float32.

        Returns:
            ``(H, *distance.shape)``, finite, in nats, at every distance: also at ``d < 0``, which a causal mask hides.
        """
        raise TypeError(f"{type(self).__name__} is not stationary: it has no table over distances")

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The log-prior of priors that depend on the key alone.

        Args:
            key_positions: integers, any shape.
            dtype: of the result.

        Returns:
            ``(H, *key_positions.shape)``, finite, in nats.
        """
        raise TypeError(f"{type(self).__name__} depends on more than the key")

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """The features of factored priors.

        Args:
            query_positions: integers ``(..., Lq)``.
            key_positions: integers ``(..., Lk)``.
            dtype: of the query and key features.

        Returns:
            Finite features, of the shapes that :class:`Lanes` states.
        """
        raise TypeError(f"{type(self).__name__} is not factored: it has no lanes")

    def scaled_distance(self, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
        """Return the log-prior of priors of a scaled distance, in float64.

        Args:
            query_positions: integers ``(..., Lq)``.
            distance: integers ``d = i - j`` in tokens, any shape.
        """
        raise TypeError(f"{type(self).__name__} is not a network of a scaled distance")

    def visible_at(self, distance: Tensor) -> Tensor | None:
        """Which distances the prior lets a query see at all: a boolean like ``distance``; None means all.

        A mask is kept apart from the log-prior because a logit scale must not multiply an infinity.
        """
        return None

    def check(self, *, causal: bool) -> None:
        """Raise a ValueError if this prior has no meaning with (or without) a causal mask."""

    def terms(self) -> Iterator[Prior]:
        """The priors whose sum this one is: itself, unless it is a :class:`Sum`."""
        yield self

    def log_prior(self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole log-prior, for people and tests: ``(..., H, Lq, Lk)`` in nats, ``-inf`` where hidden.

        Args:
            query_positions: integers ``(..., Lq)``.
            key_positions: integers ``(..., Lk)``.
            dtype: of the result.
        """
        bias, visible = self.bias_and_visibility(query_positions, key_positions, dtype)
        return bias if visible is None else bias.masked_fill(~visible.unsqueeze(-3), float("-inf"))

    def bias_and_visibility(
        self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        """The finite log-prior ``(..., H, Lq, Lk)`` and, apart from it, what is visible ``(..., Lq, Lk)``.

        It is computed in float64 and rounded once.
        """
        check_positions("query_positions", query_positions)
        check_positions("key_positions", key_positions)
        distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        bias, visible = None, None
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
            seen = term.visible_at(distance)
            if seen is not None:
                visible = seen if visible is None else visible & seen
        assert bias is not None
        return bias.expand(*distance.shape[:-2], -1, *distance.shape[-2:]).to(dtype), visible

    # ---- parameters

    def reset_parameters(self) -> None:
        """Put every parameter back to the named initialisation.

        A prior with parameters or buffers defines this method: transformers makes models without memory, and fills them
        by it.
        """

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """The parameters in the terms of the literature, each ``(H,)`` or ``(H, ...)``, detached."""
        return {}

    def _set_learned(self, learn: bool | str | Collection[str], **attributes: str) -> None:
        """Let only the named parameters train. ``learn`` is True (all), False (none) or a choice of names.

        ``attributes`` says which attribute holds what ``learn`` calls by each name.
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
        self._attributes = attributes
        self.freeze_what_is_fixed()

    def freeze_what_is_fixed(self) -> None:
        """Let exactly the parameters in ``learn`` train. Needed where loading a checkpoint made new ones."""
        for name, attribute in self._attributes.items():
            getattr(self, attribute).requires_grad_(name in self.learn)

    # ---- composition

    def __add__(self, other: Prior) -> Sum:
        """The product of two priors: their log-priors add."""
        from attention_priors.priors.sum import Sum

        if not isinstance(other, Prior):
            return NotImplemented
        return Sum([*self.terms(), *other.terms()])


def checked_log_prior(term: Prior, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``term.log_prior_at(at)``, or ``log_prior_of_key`` where it depends on the key alone, cast to ``dtype``.

    Raises:
        ValueError: for a prior on another device than ``at``, another shape than ``(H, *at.shape)``, and
            numbers that are not finite although the prior's parameters are (on the CPU in eager mode).
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
            f"{int(at[tuple(index[1:])])}; a log-prior must be finite everywhere, also where a causal mask hides: hide "
            "keys by visible_at instead"
        )
    return table.to(dtype)


def checked_lanes(term: Prior, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Lanes:
    """Return ``term.lanes(query_positions, key_positions)``.

    Raises:
        ValueError: as :func:`checked_log_prior`, for the shapes that :class:`Lanes` states.
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
        ValueError: for a prior on another device, and other shapes than :class:`ScaledDistance` states.
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
    # Tests show that these have the right shapes and finite numbers; a check would be 4 % of a short call.
    return type(term).__module__.startswith("attention_priors.priors.")


def _check_device(term: Prior, device: torch.device) -> None:
    for tensor in (*term.parameters(), *term.buffers()):
        if tensor.device != device and tensor.dim() > 0:  # a number may stay on the CPU
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
    """Whether all numbers are finite; True where they cannot be read."""
    if not can_be_read(numbers) or math.isfinite(float(numbers.detach().sum())):
        return True
    # Finite numbers may have a sum that overflows.
    return bool(numbers.isfinite().all())


def _has_finite_parameters(term: Prior) -> bool:
    # Parameters that are NaN come from a training that diverged, not from a mistake in the prior's code.
    return all(bool(x.isfinite().all()) for x in (*term.parameters(), *term.buffers()))


@torch.no_grad()
def unset_after_reset(module: nn.Module) -> list[str]:
    """Call ``reset_parameters()``, if the module has it, and return the parameters and buffers that it leaves out."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    getattr(module, "reset_parameters", lambda: None)()
    return [name for name, tensor in tensors.items() if not tensor.is_meta and tensor.isnan().any()]


def check_over_line(prior: Prior | None) -> None:
    """Raise a ValueError where a prior is over a grid, but positions stand in a line, as those of texts do."""
    for term in () if prior is None else prior.terms():
        if term.over_grid:
            raise ValueError(
                f"prior must be one over a line, got {term.name!r}, which is one on grids: a text has positions on a "
                "line, not rows and columns"
            )


def check_on_grid(prior: Prior | None) -> None:
    """Raise a ValueError where a prior is over a line, but positions are rows and columns, as those of patches are."""
    for term in () if prior is None else prior.terms():
        if term.over_grid is False:
            raise ValueError(f"prior must be one on grids (axial, spectral_2d, radial, key_sink_2d), got {term.name!r}")


def check_in_use(prior: Prior | None, *, causal: bool, key_positions: Tensor | None) -> tuple[Prior, ...]:
    """Return the terms of a prior; raise a ValueError where it does not fit how it is used.

    As :meth:`Prior.check` has it; and where it is over a grid, and nobody says which row and column each key stands at.
    """
    if prior is None:
        return ()
    prior.check(causal=causal)
    terms = tuple(prior.terms())
    for term in terms:
        if term.over_grid and key_positions is None:
            raise ValueError(
                f"key_positions must say where on the grid each key stands (as grid_positions does), for prior is "
                f"{term.name!r}, one on grids; got None"
            )
    return terms


def check_positions(name: str, positions: Tensor) -> None:
    """Positions are integer tensors with at least one dimension."""
    if not isinstance(positions, Tensor) or positions.dim() < 1:
        raise ValueError(f"{name} must be a tensor of integers (..., L), got {positions!r}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers (tokens), got dtype {positions.dtype}")


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``(H,)`` to ``(H, 1, ..., 1)`` so that it broadcasts over the dimensions of ``like``."""
    return values.view(-1, *(1,) * like.dim())


Init: TypeAlias = "str | Mapping[str, Any]"


def checked_init(init: Init, names: Sequence[str], **shapes: tuple[int, ...]) -> str | dict[str, Any]:
    """Check an ``init`` and return it as a name, or as plain lists of numbers by parameter.

    Args:
        init: one of the names, or a mapping from some of the parameters to a number for all heads or to what expands to
            its shape.
        names: which ones there are.
        shapes: of the parameters that may be given, ``(H, ...)``.

    Raises:
        ValueError: the name or a parameter is unknown, or a value is no finite number, or does not fit.
    """
    if not isinstance(init, Mapping):
        check_choice("init", init, names)
        return init
    unknown = [*(init.keys() - shapes.keys())]
    if unknown or not init:
        got = ", ".join(map(str, unknown)) or "{}"
        raise ValueError(f"init may give {', '.join(shapes)}, or be one of {', '.join(names)}; got {got}")
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in init.items()}
    for name in plain:
        started(plain, name, shapes[name])
    return plain


def started(init: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """The start of one parameter, float32 on the CPU; zeros where it is not given.

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
        raise ValueError(f"init[{name!r}] must be finite numbers of shape {shape}, or one for all; got {given!r}")
    return whole
