"""Attaching priors to transformers models, and detaching them."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
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
from attention_priors.models.card import TRAINING_KEY, name_on_hub, write_card
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.models.layer_kinds import check_layer_kinds, kind_of_layer
from attention_priors.models.pretrained import check_can_be_loaded
from attention_priors.precision import is_traced
from attention_priors.priors import Prior, Structure, Sum, prior_from_config
from attention_priors.priors.base import check_over_line

CONFIG_KEY = "attached_priors"
"""Config attribute that describes the attached priors."""
STATE = "_attached_state"
LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""Names of modules that hold learned position tables."""

LAYER_PARTS = ("prior", "logit_scale", "drop_positions")
"""Parts that may differ between layer kinds."""
WITH_SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")
"""Model types with learned sinks and otherwise plain attention. Other such models select or compress keys."""

PriorLike = Prior | Mapping[str, Any] | Sequence[Mapping[str, Any] | str] | str
Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class _State:
    """State for restoring the model."""

    implementation: str
    handles: list[RemovableHandle] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    """Names of parameters that :func:`attach` froze: the model's, or those of dropped positions.

    Names, not parameters, so that the memory of removed layers, or of weights that FSDP shards, is freed.
    """
    positions_dropped: bool = False
    """Whether every layer's own positions are dropped."""


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
    """Attach a prior to the attention of a transformers decoder or encoder, in place.

    Logits become ``c_i · (<q_i, k_j> · scaling + K_ij)``, as in :func:`attend`. The model's own masks still apply:
    causal or bidirectional, padding, sliding windows, packed sequences. With ``K = 0`` and ``c = 1`` outputs do not
    change. Learned sinks (GPT-OSS, Granite-SWA, MiMo-V2) stay and train; beside sinks, a constant in ``K`` changes the
    result.

    ``generate``, caches, ``Trainer``, PEFT and ``save_pretrained`` keep working. :func:`load_attached` loads a saved
    model, and :func:`save_adapter` saves the attached part alone. The model gets a copy of its config, so that other
    models built from the config do not change.

    Args:
        model: a decoder or an encoder that uses transformers' attention interface. Most do, such as Llama, GPT-2 and
            BERT.
        prior: a description (``"generalized_gaussian"``, ``{"name": "laplace", "learn": True}``, a list for a sum), a
            prior, or None. Each layer gets a copy of a prior.
        logit_scale: a description, a logit scale, or None. ``"residual_ssmax"`` starts as the identity.
        layers: indices of the layers, negative ones from the end; None for all.
        heads: query heads of these layers; None for all. A prior given as an object must have this number of heads.
        share_prior: whether all layers share one prior, as in T5. Otherwise each layer has its own.
        drop_positions: whether to drop the layers' rotary positions, or the model's learned ones (DroPE), so that only
            the prior encodes positions. If a rotary scaling also multiplies the logits, as YaRN's attention factor
            does, the factor stays. Learned positions are frozen, and inputs may be longer than their table.
        freeze_model: whether to freeze all other parameters.
        layer_pattern: kind names, repeated over all layers of the model. None if all layers are alike.
        layer_kinds: description of each kind by name. A description may set ``prior``, ``logit_scale`` and
            ``drop_positions``, and inherits the rest from the arguments above. Layers of a kind without any of the
            three stay unchanged.

    Returns:
        The model.

    Raises:
        ValueError: an argument is invalid, or the model cannot have a prior. The message names the layer and the
            reason. After any error the model is unchanged.
    """
    _check_model(model)
    check_layer_kinds(layer_pattern, layer_kinds, LAYER_PARTS, share_prior)
    kinds = {} if layer_kinds is None else layer_kinds
    for_all: dict[str, Any] = {"prior": prior, "logit_scale": logit_scale, "drop_positions": drop_positions}
    if not any(_is_something(for_all | dict(kind)) for kind in (kinds.values() if kinds else ({},))):
        raise ValueError(
            "nothing to attach: prior, logit_scale and drop_positions are all missing; set one of them, such as "
            "prior='generalized_gaussian'"
        )
    if hasattr(model, STATE):
        raise ValueError(f"this {type(model).__name__} already has attached priors; call detach(model) first")
    for kind in (for_all, *kinds.values()):
        check_booleans(drop_positions=kind.get("drop_positions", False))
    check_booleans(share_prior=share_prior, freeze_model=freeze_model)
    there_are = attention_layers(model)
    chosen = _chosen(there_are, _numbers("layers", layers))
    given = {index: for_all | dict(kind_of_layer(layer_pattern, layer_kinds, index)) for index in chosen}
    chosen = {index: module for index, module in chosen.items() if _is_something(given[index])}
    for index, module in there_are.items():
        if index not in chosen and (problem := _not_computed(module)) is not None:
            raise ValueError(f"layer {index} ({type(module).__name__}), which is not in layers: {problem}")
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
            if (problem := _not_computed(module)) is not None:
                raise ValueError(problem)
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
        state.handles.append(model.register_forward_pre_hook(_check_length, with_kwargs=True))
        configs = take_own_configs(model)
        # A hook on every layer would take longer. Most models have one config.
        for module in {id(module.config): module for module in reversed(chosen.values())}.values():
            state.handles.append(module.register_forward_pre_hook(_check_in_use))
        register()
        model.set_attn_implementation(IMPLEMENTATION)
        setattr(model.config, CONFIG_KEY, description)
        setattr(model, STATE, state)
        try:
            check_attached_can_be_loaded(model)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
        model.save_pretrained = partial(_save_attached, model)
    except BaseException:
        _take_off(model, state)
        for module, config in configs:
            cast(Any, module).config = config
        raise
    return model


def detach(model: Model) -> Model:
    """Undo :func:`attach`. The model is as before, except for weights trained since.

    Layers and parameters that were removed from the model since :func:`attach` are ignored.

    Raises:
        ValueError: nothing is attached.
    """
    _check_model(model)
    state: _State | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError(f"this {type(model).__name__} has no attached priors")
    # This step may raise, the others cannot. It comes first, so that an error leaves the model unchanged.
    model.set_attn_implementation(state.implementation)
    _take_off(model, state)
    delattr(model, STATE)
    if hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    return model


def _is_something(parts: Mapping[str, Any]) -> bool:
    return parts["prior"] is not None or parts["logit_scale"] is not None or parts["drop_positions"]


def _check_model(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        return
    parts = model.modules() if isinstance(model, nn.Module) else ()
    inside = next((part for part in parts if isinstance(part, PreTrainedModel)), None)
    cure = ""
    if hasattr(model, "peft_config"):
        cure = ": pass model.get_base_model(), which PEFT continues to use"
    elif inside is not None:
        cure = f": pass the {type(inside).__name__} inside it, and wrap it afterwards"
    raise ValueError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}{cure}")


def check_attached_can_be_loaded(model: nn.Module) -> None:
    """Raise a ValueError if loading could not rebuild an attached prior or logit scale from its name."""
    for part in attached_priors(model).values():
        check_can_be_loaded(part, wrappers=(Sum, OnHeads))


def _save_attached(
    model: PreTrainedModel, save_directory: str | PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
) -> None:
    """Replace ``save_pretrained`` of a model with attached priors: check the priors, and write a model card."""
    check_attached_can_be_loaded(model)
    type(model).save_pretrained(model, save_directory, is_main_process, *args, **kwargs)
    folder, description = Path(save_directory), getattr(model.config, CONFIG_KEY)
    # transformers' own adapters are saved without the model's config.
    if is_main_process and (folder / "config.json").is_file():
        write_card(
            folder,
            f"{type(model).__name__} with positional priors",
            attached_parts(description),
            'from attention_priors.hf import load_attached\n\nmodel = load_attached("THIS_MODEL")',
            base=name_on_hub(model.config.name_or_path),
            notes=notes_on(description),
            training=getattr(model.config, TRAINING_KEY, None),
        )


def attached_parts(description: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the description of each layer's parts, by the index of the layer and the name of the part.

    Args:
        description: description of the attached priors, from a model's config.
    """
    pattern, kinds = description["layer_pattern"], description["layer_kinds"]
    names = {"prior": "prior", "logit_scale": "logit scale", "drop_positions": "own positions dropped"}
    layers = {index: {**description, **kind_of_layer(pattern, kinds, index)} for index in description["layers"]}
    return {index: {name: parts[key] for key, name in names.items()} for index, parts in layers.items()}


def notes_on(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences for the model card about heads and shared priors."""
    heads = description["heads"]
    return (
        *(() if heads is None else (f"Only the heads {', '.join(map(str, heads))} of these layers have priors.",)),
        *(("These layers share one prior.",) if description["share_prior"] else ()),
    )


def positions_are_dropped(model: nn.Module) -> bool:
    """Return whether :func:`attach` dropped the model's own positions, so that a position table limits no length."""
    state: _State | None = getattr(model, STATE, None)
    return state is not None and state.positions_dropped


def number_of_rotary_positions(model: nn.Module) -> int | None:
    """Return ``max_position_embeddings`` of a model with rotary positions; None if :func:`attach` dropped them."""
    config: Any = cast(Any, model).config.get_text_config(decoder=True)
    if positions_are_dropped(model) or getattr(config, "rope_parameters", None) is None:
        return None
    return getattr(config, "max_position_embeddings", None)


def _check_length(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the length of an input before the layers compute.

    Raise a ValueError beyond a table of learned positions. Outside of training, warn beyond the config's number of
    rotary positions.
    """
    if is_traced():  # a comparison would fix the length of the program
        return
    found = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((each for each in found if isinstance(each, Tensor)), None)
    most = getattr(cast(Any, model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    if tokens is None or tokens.is_meta or most is None or tokens.shape[1] <= most or positions_are_dropped(model):
        return
    # Positions of packed sequences start anew.
    given = kwargs.get("position_ids")
    length = tokens.shape[1] if given is None else int(given.max()) + 1
    if length <= most:
        return
    if learned_positions(model):
        raise ValueError(
            f"the input has {length} positions, but {type(model).__name__} has a table of {most} learned positions: "
            "shorten the input, or drop the model's positions by attach(..., drop_positions=True)"
        )
    in_training = model.training and torch.is_grad_enabled()
    if not in_training and number_of_rotary_positions(model) is not None:
        warnings.warn(
            f"the input has {length} positions, but the config of {type(model).__name__} states {most}: a model with "
            "rotary positions is rarely usable beyond its training length. Shorten the input, scale the rotary "
            "positions (rope_parameters in the config), or train with attach(..., drop_positions=True)",
            stacklevel=2,
        )


def _freeze(model: PreTrainedModel, whole: bool, positions: bool, state: _State) -> None:
    # DistributedDataParallel waits for the gradient of every trainable parameter.
    still = {*model.parameters()} if whole else set[nn.Parameter]()
    if positions:
        still |= {parameter for table in learned_positions(model) for parameter in table.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter in still:
            state.frozen.append(name)
            parameter.requires_grad_(False)


def _take_off(model: PreTrainedModel, state: _State) -> None:
    """Undo the changes of :func:`attach` to modules and parameters, also after a partial :func:`attach`."""
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
    """Return the attached modules by layer, for inspecting, training or freezing their parameters.

    Args:
        model: a model returned by :func:`attach`, or a wrapper of it (PEFT, DDP).
    """
    return {
        cast(int, module.layer_idx): cast(AttachedPrior, getattr(module, ATTRIBUTE))
        for module in model.modules()
        if isinstance(getattr(module, ATTRIBUTE, None), AttachedPrior)
    }


def train_attached(model: nn.Module) -> list[nn.Parameter]:
    """Make attached priors and logit scales trainable again after the whole model was frozen.

    ``peft.get_peft_model`` freezes the model. Call this function afterwards to train priors together with LoRA
    matrices.

    Args:
        model: a model returned by :func:`attach`, or a wrapper of it (PEFT).

    Returns:
        The attached parameters that train. Parameters that were frozen when attached stay frozen.
    """
    for part in attached_priors(model).values():
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name in part.learns)
    return [p for part in attached_priors(model).values() for p in part.parameters() if p.requires_grad]


def take_own_configs(model: nn.Module) -> list[tuple[nn.Module, PreTrainedConfig]]:
    """Give a model and its modules copies of their configs, which other models may share.

    Returns:
        Each module with its previous config.
    """
    found = ((module, vars(module).get("config")) for module in model.modules())
    before = [(module, config) for module, config in found if isinstance(config, PreTrainedConfig)]
    copies: dict[int, Any] = {}
    own = [copy.deepcopy(config, copies) for _, config in before]
    for (module, _), config in zip(before, own, strict=True):
        cast(Any, module).config = config
    return before


def _check_in_use(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise a RuntimeError if attention would ignore the attached priors."""
    implementation = cast(Any, module.config)._attn_implementation
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"the attention implementation {implementation!r} would ignore the prior attached to layer "
            f"{module.layer_idx}: call model.set_attn_implementation({IMPLEMENTATION!r}) to use the prior, or "
            "detach(model) to remove it"
        )


# ---- attention modules


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the self-attention modules that use transformers' attention interface, by layer.

    Raises:
        ValueError: there are none. The message names attention modules that bypass the interface.
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
                    f"{type(model).__name__} is not one stack of layers: it has several self-attention modules in a "
                    f"layer, or one without an index (layer {index!r}, {type(module).__name__}){_other_way(model)}"
                )
            found[index] = module
    if not found:
        bypassing = ", ".join(sorted(set(others))) or "none"
        raise ValueError(
            f"{type(model).__name__} has no attention module that uses transformers' attention interface "
            f"(attention modules: {bypassing}){_other_way(model)}"
        )
    return found


def _other_way(model: PreTrainedModel) -> str:
    """Return advice on how such a model gets a prior, for error messages."""
    kind = model.config.model_type
    if kind == PriorDecoderConfig.model_type:
        return "; set its prior in its config instead, PriorDecoderConfig(prior=...)"
    if kind in ("bloom", "mpt") or any(map(has_buckets, model.modules())):
        return "; use_priors(model) computes its own bias as a prior"
    return ""


def has_buckets(module: nn.Module) -> bool:
    """Return whether a module is an attention layer that passes T5's relative bias to the attention interface."""
    return hasattr(type(module), "compute_bias") and _goes_through_interface(module)


def _goes_through_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _numbers(name: str, given: Iterable[int] | None) -> list[int] | None:
    if given is None:
        return None
    numbers: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [None]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ValueError(f"{name} must be a list of integers such as [0, 1], or None for all; got {given!r}")
    return numbers


def _chosen(found: Mapping[int, nn.Module], layers: list[int] | None) -> dict[int, nn.Module]:
    if layers is None:
        return dict(sorted(found.items()))
    number = max(found) + 1
    chosen: dict[int, nn.Module] = {}
    for layer in layers:
        index = layer + number if layer < 0 else layer
        if index not in found:
            raise ValueError(f"layers contains {layer!r}, expected indices of layers with attention: {sorted(found)}")
        chosen[index] = found[index]
    if not chosen:
        raise ValueError("layers must hold at least one layer, or be None for all; got []")
    return dict(sorted(chosen.items()))


def _not_computed(module: nn.Module) -> str | None:
    """Return why attend() and SDPA cannot compute a layer, or None. SDPA would give wrong results silently."""
    cap = getattr(module.config, "attn_logit_softcapping", None)
    if cap is not None:
        return f"attend() does not support capped logits (attn_logit_softcapping={cap!r})"
    if _has_sinks(module) and cast(Any, module).config.model_type not in WITH_SINKS:
        return f"sinks are supported for model types {', '.join(WITH_SINKS)} only"
    return None


def _has_sinks(module: nn.Module) -> bool:
    """Return whether attention has learned sink logits beside the keys, as in GPT-OSS."""
    return isinstance(getattr(module, "sinks", None), Tensor)


@torch.no_grad()
def _warn_of_constants(priors: Mapping[int, Prior | None], device: torch.device) -> None:
    """Warn if a prior's maximum is not 0 beside sinks.

    A constant cancels in a softmax over keys alone, but moves weight between keys and sinks.
    """
    for index, prior in priors.items() if device.type != "meta" else ():
        if prior is None or Structure.STATIONARY not in prior.structure:
            continue
        best = copy.deepcopy(prior).to(device).log_prior_at(torch.arange(1024, device=device)).amax(-1)
        if float(best.abs().max()) > 0.01:
            warnings.warn(
                f"layer {index} has sinks beside its keys, and the prior's maximum is {float(best.min()):.2g} nats, "
                "which moves weight between the keys and the sinks. A prior with maximum 0, such as 'laplace' or "
                "'relative_buckets', leaves their shares unchanged",
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
        raise ValueError(f"heads must be distinct integers from 0 to {total - 1}, got {heads}")
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
            raise ValueError(f"{name} has num_heads={part.num_heads}, expected {number}")
    check_over_line(made)
    if made is not None:
        made.check(causal=getattr(module, "is_causal", True))
    if heads is None:
        return AttachedPrior(made, scale)
    spread = None if scale is None else cast(SSMax, ScaleOnHeads(total, scale, heads))
    return AttachedPrior(None if made is None else on_heads(total, made, heads), spread)


def _device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; accelerate may keep its weights elsewhere."""
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
    # Building the prior rejects invalid descriptions.
    return [dict(each) if isinstance(each, Mapping) else each for each in part] if isinstance(part, Sequence) else part


# ---- the model's own positions


def _unrotated(
    factor: float, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Replace rotary positions by angle 0. Cosines keep the factor of some scalings, such as YaRN's."""
    given = kwargs.get("position_embeddings")
    if given is None and "position_embeddings" in kwargs:  # a layer without positions in a model with positions
        return args, kwargs
    if isinstance(given, Tensor) and given.is_complex():  # cosines and sines as complex numbers
        return args, kwargs | {"position_embeddings": torch.full_like(given, factor)}
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(
            f"drop_positions supports rotary positions as a pair of cosines and sines; {type(module).__name__} gets a "
            f"{type(given).__name__}"
        )
    cos, sin = given
    return args, kwargs | {"position_embeddings": (torch.full_like(cos, factor), torch.zeros_like(sin))}


def _rotary_factor(model: nn.Module) -> float:
    """Return the factor on cosines and sines, which must be equal in all layers."""
    found = {
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        # transformers' name, with a prefix if layer types have their own rotary positions.
        if name.endswith("attention_scaling") and isinstance(value, int | float)
    }
    if len(found) > 1:
        raise ValueError(
            "drop_positions needs rotary positions with an equal attention factor in all layers; "
            f"{type(model).__name__} has {', '.join(map(str, sorted(found)))}"
        )
    return found.pop() if found else 1.0


def _at_the_first(
    name: str, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Look up position 0 only, so that inputs may be longer than a table of learned positions."""
    if kwargs.get(name) is not None:
        kwargs = kwargs | {name: torch.zeros_like(kwargs[name])}
    elif len(args) > place and args[place] is not None:
        args = (*args[:place], torch.zeros_like(args[place]), *args[place + 1 :])
    return args, kwargs


def _nowhere(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Return zeros: dropped learned positions add nothing."""
    return torch.zeros_like(output)


def learned_positions(model: nn.Module) -> list[nn.Embedding]:
    """Return the model's tables of learned positions."""
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
            "drop_positions drops learned positions from the whole model, because they are added before the first "
            "layer; apply it to all layers"
        )
    without = [index for index, has in rotary.items() if not has]
    if not tables and without:
        raise ValueError(
            f"drop_positions: {type(model).__name__} has no learned positions, and layer {without[0]} gets no rotary "
            "positions as an argument"
        )
    unrotated = partial(_unrotated, _rotary_factor(model))
    for table in tables:
        names = [*inspect.signature(type(table).forward).parameters][1:]
        # Tables of transformers take more arguments than the positions; a plain nn.Embedding takes one.
        name = "position_ids" if "position_ids" in names else names[0]
        first = partial(_at_the_first, name, names.index(name))
        state.handles.append(table.register_forward_pre_hook(first, with_kwargs=True))
        state.handles.append(table.register_forward_hook(_nowhere))
    for index, module in layers.items():
        if rotary[index]:
            state.handles.append(module.register_forward_pre_hook(unrotated, with_kwargs=True))
