"""A prior attached to somebody else's model, and taken off again."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from attention_priors.attention import SSMax, logit_scale_from_config
from attention_priors.checks import check_booleans
from attention_priors.config import FORMAT
from attention_priors.hf.heads import OnHeads, ScaleOnHeads, on_heads
from attention_priors.hf.interface import ATTRIBUTE, IMPLEMENTATION, AttachedPrior, register
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.models.layer_kinds import check_layer_kinds, kind_of_layer
from attention_priors.models.pretrained import check_can_be_loaded
from attention_priors.priors import Prior, Structure, Sum, prior_from_config
from attention_priors.priors.base import check_over_line

CONFIG_KEY = "attached_priors"
"""Where a model's config describes what is attached to it."""
STATE = "_attached_state"
LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""Names of the tables of learned positions in models."""

LAYER_PARTS = ("prior", "logit_scale", "drop_positions")
"""Parts that may differ between kinds of layers."""
WITH_SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")
"""Types of models with learned sinks whose attention is otherwise plain: others choose or compress their keys."""

PriorLike = Prior | Mapping[str, Any] | Sequence[Mapping[str, Any] | str] | str
Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class _State:
    """State that is needed to restore the model."""

    implementation: str
    handles: list[RemovableHandle] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    """Parameters that learned before and were frozen: of the model, or of positions that were dropped.

    By name, so that the memory of layers that are taken out, or of weights that FSDP splits, is freed."""
    positions_dropped: bool = False
    """Whether no layer is left with positions of the model's own."""


def attach(
    model: Model,
    prior: PriorLike | None = None,
    *,
    logit_scale: SSMax | Mapping[str, Any] | str | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    share_prior: bool = False,
    drop_positions: bool = False,
    freeze_model: bool = False,
    layer_pattern: Sequence[str] | None = None,
    layer_kinds: Mapping[str, Mapping[str, Any]] | None = None,
) -> Model:
    """Give the attention of a transformers decoder a prior: it is changed in place.

    The layers' logits become ``c_i · (<q_i, k_j> · scaling + K_ij)``, as in :func:`attend`, under the model's own
    masks: causal, padding, sliding windows, packed sequences. With ``K = 0`` and ``c = 1`` the model computes what it
    did. Learned sinks of the model's own (GPT-OSS, Granite-SWA, MiMo-V2) stay and train; beside them a constant in
    ``K`` counts. Everything of transformers goes on working: ``generate``, caches, ``Trainer``, PEFT,
    ``save_pretrained`` (:func:`load_attached` loads what it saves, :func:`save_adapter` saves the attached part alone).

    The model's config then is a copy: others may have been made from the same, and to them nothing is attached.

    Args:
        model: a decoder whose attention goes through transformers' attention interface: Llama, Mistral, Qwen, Gemma,
            SmolLM, GPT-2, GPT-NeoX, OPT and most others.
        prior: its description (``"generalized_gaussian"``, ``{"name": "laplace", "learn": True}``, a list for a sum),
            or a prior, of which each layer gets a copy; None for none.
        logit_scale: likewise. ``"residual_ssmax"`` starts as the identity.
        layers: which ones, by index, negative ones from the end; None for all.
        heads: which query heads of them; None for all. A prior that is not a description has as many heads.
        share_prior: whether all layers have one prior, as in T5, rather than each its own.
        drop_positions: whether the layers' rotary positions, or the model's learned ones, are taken away (DroPE).
            The model then knows positions by its prior alone. Where a scaling of rotary positions also multiplies the
            logits, as YaRN's attention factor does, that stays. Learned ones are frozen: nothing depends on them, and
            a text may be longer than their table.
        freeze_model: whether nothing else learns.
        layer_pattern: names of kinds, repeated over all layers of the model; None if all layers are alike.
        layer_kinds: ``prior``, ``logit_scale`` and ``drop_positions`` of each kind, by name. A kind inherits the rest
            from the arguments above. Layers of a kind without any of the three stay unchanged.

    Returns:
        The model.

    Raises:
        ValueError: if an argument is impossible, or if the model cannot have a prior; it says which layer and why.
            The model is then as it was, as after any other error.
    """
    _check_model(model)
    check_layer_kinds(layer_pattern, layer_kinds, LAYER_PARTS)
    kinds = {} if layer_kinds is None else layer_kinds
    for_all: dict[str, Any] = {"prior": prior, "logit_scale": logit_scale, "drop_positions": drop_positions}
    if not any(_is_something(for_all | dict(kind)) for kind in (kinds.values() if kinds else ({},))):
        raise ValueError(
            "there is nothing to attach: prior, logit_scale and drop_positions are all missing; give one of them, such "
            "as prior='generalized_gaussian'"
        )
    if share_prior and any("prior" in kind for kind in kinds.values()):
        raise ValueError("share_prior: all layers share one prior, and layer_kinds describes another one")
    if hasattr(model, STATE):
        raise ValueError(f"this {type(model).__name__} has priors attached; detach(model) first")
    for kind in (for_all, *kinds.values()):
        check_booleans(drop_positions=kind.get("drop_positions", False))
    check_booleans(share_prior=share_prior, freeze_model=freeze_model)
    there_are = attention_layers(model)
    chosen = _chosen(there_are, _numbers("layers", layers))
    given = {index: for_all | dict(kind_of_layer(layer_pattern, layer_kinds, index)) for index in chosen}
    chosen = {index: module for index, module in chosen.items() if _is_something(given[index])}
    for index, module in there_are.items():
        if index not in chosen and (problem := _not_computed(module)) is not None:
            raise ValueError(f"layer {index} ({type(module).__name__}), which layers leaves as it is: {problem}")
    some_heads = _numbers("heads", heads)
    description = {
        "format": FORMAT,
        "prior": _described(prior),
        "logit_scale": _described(logit_scale),
        "layers": sorted(chosen),
        "heads": some_heads,
        "share_prior": share_prior,
        "drop_positions": drop_positions,
        "layer_pattern": None if layer_pattern is None else [*layer_pattern],
        "layer_kinds": None
        if layer_kinds is None
        else {name: {key: _described(part) for key, part in kind.items()} for name, kind in kinds.items()},
    }
    parts: dict[int, AttachedPrior] = {}
    shared: Prior | None = None
    for index, module in chosen.items():
        try:
            _check_attention(module)
            part = _make_part(module, given[index]["prior"], given[index]["logit_scale"], some_heads)
            if share_prior and shared is not None:
                part = AttachedPrior(shared, part.logit_scale, owns_prior=False)
            shared = part.prior
        except ValueError as error:
            raise ValueError(f"layer {index} ({type(module).__name__}): {error}") from error
        parts[index] = part.to(_device_of(module)).train(module.training)
    _warn_of_constants({index: part.prior for index, part in parts.items() if _has_sinks(chosen[index])}, model.device)
    state = _State(cast(str, model.config._attn_implementation))
    configs: list[tuple[nn.Module, PreTrainedConfig]] = []
    dropped = {index: module for index, module in chosen.items() if given[index]["drop_positions"]}
    try:
        if dropped:
            state.positions_dropped = len(dropped) == len(there_are)
            _drop_positions(model, dropped, state)
        _freeze(model, freeze_model, bool(dropped), state)
        for index, module in chosen.items():
            setattr(module, ATTRIBUTE, parts[index])
            state.handles.append(module.register_forward_pre_hook(_check_in_use, with_kwargs=True))
        configs = take_own_configs(model)
        register()
        model.set_attn_implementation(IMPLEMENTATION)
        setattr(model.config, CONFIG_KEY, description)
        setattr(model, STATE, state)
        try:
            check_attached_can_be_loaded(model)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            model.save_pretrained = partial(_save_if_loadable, model)
    except BaseException:
        _take_off(model, state)
        for module, config in configs:
            cast(Any, module).config = config
        raise
    return model


def detach(model: Model) -> Model:
    """Take off what :func:`attach` put on: the model is exactly what it was, but for what it has learned since.

    Layers and parameters that have been taken out of the model meanwhile are left as they are.

    Raises:
        ValueError: if nothing is attached.
    """
    _check_model(model)
    state: _State | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError(f"this {type(model).__name__} has no priors attached")
    # First what may fail: the rest does not, and nothing is left half done.
    model.set_attn_implementation(state.implementation)
    _take_off(model, state)
    delattr(model, STATE)
    if hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    return model


def _is_something(parts: Mapping[str, Any]) -> bool:
    return parts["prior"] is not None or parts["logit_scale"] is not None or parts["drop_positions"]


def dropped_layers(description: Mapping[str, Any]) -> list[int]:
    """Return the layers whose positions were dropped.

    Args:
        description: entry of a model's config that describes the attached priors.
    """
    pattern, kinds = description["layer_pattern"], description["layer_kinds"]
    return [
        index
        for index in description["layers"]
        if kind_of_layer(pattern, kinds, index).get("drop_positions", description["drop_positions"])
    ]


def _check_model(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        return
    parts = model.modules() if isinstance(model, nn.Module) else ()
    inside = next((part for part in parts if isinstance(part, PreTrainedModel)), None)
    cure = ""
    if hasattr(model, "peft_config"):
        cure = ": give its base model, model.get_base_model(), with which PEFT goes on computing"
    elif inside is not None:
        cure = f": give the {type(inside).__name__} inside it, and wrap that afterwards"
    raise ValueError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}{cure}")


def check_attached_can_be_loaded(model: nn.Module) -> None:
    """Raise a ValueError if loading cannot make one of the attached priors and logit scales from its name."""
    for part in attached_priors(model).values():
        check_can_be_loaded(part, wrappers=(Sum, OnHeads))


def _save_if_loadable(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``save_pretrained`` of a model whose priors are not in the catalogue."""
    check_attached_can_be_loaded(model)
    type(model).save_pretrained(model, *args, **kwargs)


def positions_are_dropped(model: nn.Module) -> bool:
    """Whether :func:`attach` took away the model's own positions; a table of them then sets no limit."""
    state: _State | None = getattr(model, STATE, None)
    return state is not None and state.positions_dropped


def _freeze(model: PreTrainedModel, whole: bool, positions: bool, state: _State) -> None:
    # DistributedDataParallel waits for a gradient of every parameter that learns.
    still = {*model.parameters()} if whole else set[nn.Parameter]()
    if positions:
        still |= {parameter for table in learned_positions(model) for parameter in table.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter in still:
            state.frozen.append(name)
            parameter.requires_grad_(False)


def _take_off(model: PreTrainedModel, state: _State) -> None:
    """Undo what :func:`attach` did to the model's modules and parameters, or the part of it that was done."""
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            delattr(module, ATTRIBUTE)
    vars(model).pop("save_pretrained", None)
    for handle in state.handles:
        handle.remove()
    there = dict(model.named_parameters())
    for name in state.frozen:
        if name in there:
            there[name].requires_grad_(True)


def attached_priors(model: nn.Module) -> dict[int, AttachedPrior]:
    """Return the attached parameters by layer, to look at, to train or to freeze.

    Args:
        model: the model :func:`attach` returned, or one around it (PEFT's, DDP's).
    """
    return {
        cast(int, module.layer_idx): cast(AttachedPrior, getattr(module, ATTRIBUTE))
        for module in model.modules()
        if isinstance(getattr(module, ATTRIBUTE, None), AttachedPrior)
    }


def train_attached(model: nn.Module) -> list[nn.Parameter]:
    """Let attached priors and logit scales train again, after something has frozen the whole model.

    ``peft.get_peft_model`` freezes it: call this function afterwards, and priors train together with the LoRA matrices.

    Args:
        model: the model :func:`attach` returned, or one around it (PEFT's).

    Returns:
        The attached parameters that train, which trained when they were attached too.
    """
    for part in attached_priors(model).values():
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name in part.learns)
    return [p for part in attached_priors(model).values() for p in part.parameters() if p.requires_grad]


def take_own_configs(model: nn.Module) -> list[tuple[nn.Module, PreTrainedConfig]]:
    """Give a model, and all of its modules, copies of their configs, which other models may have been made from too.

    Returns:
        The modules, and the configs that they had.
    """
    found = ((module, vars(module).get("config")) for module in model.modules())
    before = [(module, config) for module, config in found if isinstance(config, PreTrainedConfig)]
    copies: dict[int, Any] = {}
    own = [copy.deepcopy(config, copies) for _, config in before]
    for (module, _), config in zip(before, own, strict=True):
        cast(Any, module).config = config
    return before


def _check_in_use(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a RuntimeError if what is attached would be left out, and warn if it is frozen while the model trains."""
    part = getattr(module, ATTRIBUTE)
    if not isinstance(part, AttachedPrior):
        raise RuntimeError(
            f"a {type(part).__name__} holds what is attached to layer {cast(Any, module).layer_idx}: take "
            f"{ATTRIBUTE!r} out of PEFT's modules_to_save, call train_attached(model) to train what is attached, and "
            "save_adapter(model, folder) to save it"
        )
    implementation = cast(Any, module.config)._attn_implementation
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"the attention implementation is {implementation!r}, which would leave out what is attached to layer "
            f"{module.layer_idx}: model.set_attn_implementation({IMPLEMENTATION!r}) brings it back, detach(model) "
            "takes it off"
        )
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        part.is_saved = False
        frozen = part.learns and not any(parameter.requires_grad for parameter in part.parameters())
        inputs = (x for x in (*args, *kwargs.values(), *module.parameters()) if isinstance(x, Tensor))
        if frozen and any(x.requires_grad for x in inputs):
            warnings.warn(
                "attached priors and logit scales are frozen while the model trains, as peft.get_peft_model() leaves "
                "them: call train_attached(model) after it, and before the optimizer is made. If they are to stay as "
                "they are, ignore this warning",
                stacklevel=2,
            )


# ---- which modules


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The model's self-attention modules that go through transformers' attention interface, by layer.

    Raises:
        ValueError: if there are none; it names those that bypass it.
    """
    found: dict[int, nn.Module] = {}
    others: list[str] = []
    for module in model.modules():
        if not type(module).__name__.endswith("Attention"):
            continue
        if not _goes_through_interface(module):
            others.append(type(module).__name__)
        elif not (getattr(module, "is_cross_attention", False) or type(module).__name__.endswith("CrossAttention")):
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int) or index in found:
                raise ValueError(
                    f"{type(model).__name__} has several self-attention modules in a layer, or ones without a number "
                    f"(layer {index!r}, {type(module).__name__}): it is not a plain decoder{_other_way(model)}"
                )
            found[index] = module
    if not found:
        bypassing = ", ".join(sorted(set(others))) or "none was found"
        raise ValueError(
            f"{type(model).__name__} has no attention that goes through transformers' attention interface "
            f"(attention modules: {bypassing}){_other_way(model)}"
        )
    return found


def _other_way(model: PreTrainedModel) -> str:
    """How such a model gets a prior."""
    kind = model.config.model_type
    if kind == PriorDecoderConfig.model_type:
        return "; it computes a prior of its own: name it in its config, PriorDecoderConfig(prior=...)"
    if kind in ("bloom", "mpt") or any(map(has_buckets, model.modules())):
        return "; its own bias is computed as a prior by use_priors(model)"
    return ""


def has_buckets(module: nn.Module) -> bool:
    """Whether a module is an attention layer that computes T5's relative bias for the attention interface."""
    return hasattr(type(module), "compute_bias") and _goes_through_interface(module)


def _goes_through_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _numbers(name: str, given: Iterable[int] | None) -> list[int] | None:
    if given is None:
        return None
    numbers: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [None]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ValueError(f"{name} must be a list of numbers, such as [0, 1], or None for all; got {given!r}")
    return numbers


def _chosen(found: Mapping[int, nn.Module], layers: list[int] | None) -> dict[int, nn.Module]:
    if layers is None:
        return dict(sorted(found.items()))
    number = max(found) + 1
    chosen: dict[int, nn.Module] = {}
    for layer in layers:
        index = layer + number if layer < 0 else layer
        if index not in found:
            raise ValueError(f"layers holds {layer!r}, but the layers with attention are {_ranges(sorted(found))}")
        chosen[index] = found[index]
    if not chosen:
        raise ValueError("layers must hold at least one layer, or be None for all; got []")
    return dict(sorted(chosen.items()))


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _not_computed(module: nn.Module) -> str | None:
    """Return the part of a layer that neither attend() nor SDPA computes; SDPA would leave it out silently."""
    cap = getattr(module.config, "attn_logit_softcapping", None)
    if cap is not None:
        return f"its logits are capped (attn_logit_softcapping={cap!r}), which attend() does not compute"
    if _has_sinks(module) and cast(Any, module).config.model_type not in WITH_SINKS:
        return f"it has sinks, and of such models attention is known here in {', '.join(WITH_SINKS)} alone"
    return None


def _check_attention(module: nn.Module) -> None:
    if (problem := _not_computed(module)) is not None:
        raise ValueError(problem)
    if getattr(module, "is_causal", True) is False:
        raise ValueError("it is bidirectional; attach() is for decoders")


def _has_sinks(module: nn.Module) -> bool:
    """Whether a place beside the keys takes a share of the weight, as in GPT-OSS: its logits are parameters."""
    return isinstance(getattr(module, "sinks", None), Tensor)


@torch.no_grad()
def _warn_of_constants(priors: Mapping[int, Prior | None], device: torch.device) -> None:
    """Warn where a prior's constant, which a softmax over keys alone does not see, moves weight to sinks."""
    for index, prior in priors.items() if device.type != "meta" else ():
        if prior is None or Structure.STATIONARY not in prior.structure:
            continue
        best = copy.deepcopy(prior).to(device).log_prior_at(torch.arange(1024, device=device)).amax(-1)
        if float(best.abs().max()) > 0.01:
            warnings.warn(
                f"layer {index} has sinks beside its keys, and the prior is {float(best.min()):.2g} nats where it is "
                "largest: that much weight moves from the keys to the sinks, or back. A prior whose largest number is "
                "0, such as 'laplace' or 'relative_buckets', leaves their share as it was",
                stacklevel=3,
            )
            return


def _make_part(
    module: nn.Module,
    prior: PriorLike | None,
    logit_scale: SSMax | Mapping[str, Any] | str | None,
    heads: list[int] | None,
) -> AttachedPrior:
    total: int = cast(Any, module.config).num_attention_heads
    if heads is not None and (
        not heads or len(set(heads)) < len(heads) or any(not 0 <= head < total for head in heads)
    ):
        raise ValueError(f"heads must be distinct numbers from 0 to {total - 1}, got {heads}")
    number = total if heads is None else len(heads)
    if isinstance(prior, Prior):
        made = copy.deepcopy(prior)
    else:
        made = None if prior is None else prior_from_config(prior, number)
    scale = (
        copy.deepcopy(logit_scale) if isinstance(logit_scale, SSMax) else logit_scale_from_config(logit_scale, number)
    )
    for name, part in (("prior", made), ("logit_scale", scale)):
        if part is not None and part.num_heads != number:
            raise ValueError(f"{name} has num_heads={part.num_heads}, but there are {number} heads to attach it to")
    check_over_line(made)
    if made is not None:
        made.check(causal=True)
    if heads is None:
        return AttachedPrior(made, scale)
    spread = None if scale is None else cast(SSMax, ScaleOnHeads(total, scale, heads))
    return AttachedPrior(None if made is None else on_heads(total, made, heads), spread)


def _device_of(module: nn.Module) -> torch.device:
    """Where a module computes. accelerate may keep its weights elsewhere meanwhile."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _described(part: Any) -> Any:
    if isinstance(part, Prior | SSMax):
        return part.to_config()
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return dict(part)
    # What is no description at all is refused where a prior is to be made of it.
    return [dict(each) if isinstance(each, Mapping) else each for each in part] if isinstance(part, Sequence) else part


# ---- the model's own positions


def _unrotated(
    factor: float, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Rotary positions of angle 0; they keep the factor that some scalings, as YaRN's, put on cosines and sines."""
    given = kwargs.get("position_embeddings")
    if given is None and "position_embeddings" in kwargs:  # a layer without positions, beside ones that have them
        return args, kwargs
    if isinstance(given, Tensor) and given.is_complex():  # cosine and sine in one
        return args, kwargs | {"position_embeddings": torch.full_like(given, factor)}
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(
            f"drop_positions: {type(module).__name__} is handed rotary positions in a form that is not known here: "
            f"expected cosines and sines, got {type(given).__name__}"
        )
    cos, sin = given
    return args, kwargs | {"position_embeddings": (torch.full_like(cos, factor), torch.zeros_like(sin))}


def _rotary_factor(model: nn.Module) -> float:
    """Return the factor of cosines and sines, which is the same in all layers."""
    found = {
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        # transformers' name; where types of layers have rotary positions of their own, it ends so.
        if name.endswith("attention_scaling") and isinstance(value, int | float)
    }
    if len(found) > 1:
        raise ValueError(
            "drop_positions needs rotary positions with the same attention factor in all layers; "
            f"{type(model).__name__} has {', '.join(map(str, sorted(found)))}"
        )
    return found.pop() if found else 1.0


def _at_the_first(
    name: str, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A table of learned positions is asked for its first alone: a text may be longer than the table."""
    if kwargs.get(name) is not None:
        kwargs = kwargs | {name: torch.zeros_like(kwargs[name])}
    elif len(args) > place and args[place] is not None:
        args = (*args[:place], torch.zeros_like(args[place]), *args[place + 1 :])
    return args, kwargs


def _nowhere(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Learned positions that add nothing."""
    return torch.zeros_like(output)


def learned_positions(model: nn.Module) -> list[nn.Embedding]:
    """The model's tables of learned positions."""
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in LEARNED_POSITIONS and isinstance(module, nn.Embedding)
    ]


def _drop_positions(model: PreTrainedModel, layers: Mapping[int, nn.Module], state: _State) -> None:
    tables = learned_positions(model)
    rotary = {
        index: "position_embeddings" in inspect.signature(type(module).forward).parameters
        for index, module in layers.items()
    }
    if tables and not state.positions_dropped:
        raise ValueError(
            "drop_positions takes learned positions away from the whole model, as they are added before the first "
            "layer; layers must be all"
        )
    without = [index for index, has in rotary.items() if not has]
    if not tables and without:
        raise ValueError(
            f"drop_positions: {type(model).__name__} has neither learned positions nor, in layer {without[0]}, rotary "
            "ones that are handed to its attention"
        )
    unrotated = partial(_unrotated, _rotary_factor(model))
    for table in tables:
        names = [*inspect.signature(type(table).forward).parameters][1:]
        # transformers' own tables are told more than the positions; a plain one is told nothing else.
        name = "position_ids" if "position_ids" in names else names[0]
        first = partial(_at_the_first, name, names.index(name))
        state.handles.append(table.register_forward_pre_hook(first, with_kwargs=True))
        state.handles.append(table.register_forward_hook(_nowhere))
    for index, module in layers.items():
        if rotary[index]:
            state.handles.append(module.register_forward_pre_hook(unrotated, with_kwargs=True))
