"""Trainings with parameters sharded over two processes by FSDP2, beside equal trainings on one process.

``test_fsdp.py`` runs this program. Each process writes its results to a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from training_cases import Rows, tiny_decoder, tiny_settings

from attention_priors import GeneralizedGaussian
from attention_priors.lab.data.packing import collate_rows
from attention_priors.lab.train import make_optimizer, shard_priors
from attention_priors.lab.train.trainer import weighted_loss
from attention_priors.models import PriorDecoderForCausalLM

STEPS, ROWS = 6, 4
SETTINGS = tiny_settings(steps=STEPS, batch_size=ROWS, learning_rate=0.02, prior_learning_rate_multiplier=5.0)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
VARIANTS: dict[str, dict[str, Any]] = {
    "ggd and ssmax": {},
    "shared key sink": {"prior": {"name": "key_sink", "train_length": 12}, "share_prior": True, "logit_scale": None},
}

Wrap = Callable[[nn.Module], Any]


def sharded(policy: MixedPrecisionPolicy, priors_apart: bool = True) -> Wrap:
    def wrap(model: Any) -> None:
        if priors_apart:
            shard_priors(model)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    return wrap


def by_accelerate(model: Any) -> None:
    """Shard as the Trainer does when accelerate runs FSDP2, which it does not on CPUs."""
    shard_priors(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["DecoderLayer"]
    )
    plugin.set_mixed_precision("bf16")
    device = torch.device("cpu")
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator: Any = SimpleNamespace(state=state, mixed_precision="bf16", is_main_process=True, device=device)
    assert fsdp2_prepare_model(accelerator, model) is model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(variant: str, wrap: Wrap | None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return losses, final weights, and the dtypes in which a prior is computed and optimised."""
    model: PriorDecoderForCausalLM = tiny_decoder(**VARIANTS[variant])
    model.to(dtype)  # pyright: ignore[reportArgumentType]
    names = [name for name, _ in model.named_parameters() if "prior." in name or "logit_scale." in name]
    start = {name: model.get_parameter(name).detach().clone() for name in names}
    seen: set[str] = set()
    prior_at = GeneralizedGaussian.log_prior_at

    def spy(self: GeneralizedGaussian, *args: Any, **kwargs: Any) -> Tensor:
        seen.add(str(self.theta_beta.dtype))
        return prior_at(self, *args, **kwargs)

    GeneralizedGaussian.log_prior_at = spy
    processes, here = 1, slice(None)
    if wrap is not None:
        wrap(model)
        processes = dist.get_world_size()
        here = slice(dist.get_rank(), None, processes)
    optimizer = make_optimizer(model, SETTINGS)
    rows, losses = Rows(STEPS * ROWS), []
    for step in range(STEPS):
        batch = collate_rows([rows[step * ROWS + row] for row in range(ROWS)])
        total = (batch["loss_weights"][:, 1:] * (batch["labels"][:, 1:] != -100)).sum()
        batch = {name: tensor[here] for name, tensor in batch.items()}
        with torch.no_grad():  # an evaluation between steps must not leave old priors behind
            model(batch["input_ids"], document_ids=batch["document_ids"], use_cache=False)
        logits = model(batch["input_ids"], document_ids=batch["document_ids"], use_cache=False).logits
        loss = weighted_loss(logits, batch["labels"], batch["loss_weights"], total)
        (loss * processes).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.gradient_clip)
        assert bool(torch.isfinite(whole(norm)))
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if wrap is not None:
            dist.all_reduce(loss)
        losses.append(float(loss))
    GeneralizedGaussian.log_prior_at = prior_at
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    moments = {
        str(state["exp_avg"].dtype)
        for parameter, state in optimizer.state.items()
        if any(parameter is model.get_parameter(name) for name in names)
    }
    groups = {group["name"]: len(group["params"]) for group in optimizer.param_groups}
    return {
        "losses": losses,
        "weights": weights,
        "moved": max(float((weights[name] - old).abs().max()) for name, old in start.items()),
        "computed in": sorted(seen),
        "parameters": sorted({str(model.get_parameter(name).dtype) for name in names}),
        "moments": sorted(moments),
        "groups": groups,
    }


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    weights = found.pop("weights")
    difference = max(float((weights[n].float() - w.float()).abs().max()) for n, w in expected["weights"].items())
    return found | {"expected losses": expected["losses"], "weights": difference, "expected groups": expected["groups"]}


def refusals() -> dict[str, str]:
    said = {}
    for name, prepare in {"root": fully_shard, "prior": shard_priors}.items():
        model = tiny_decoder()
        prepare(model)
        try:
            shard_priors(model)
        except ValueError as error:
            said[name] = str(error)
    model = tiny_decoder().bfloat16()
    fully_shard(model)
    try:
        model(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    except AssertionError as error:
        said["two dtypes"] = str(error)
    return said


def train_sharded(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.get_world_size() == 2
    as_it_is = MixedPrecisionPolicy()
    sink, ggd = train("shared key sink", None), train("ggd and ssmax", None)
    found: dict[str, Any] = {
        "shared key sink": compare(train("shared key sink", sharded(as_it_is)), sink),
        "ggd and ssmax": compare(train("ggd and ssmax", sharded(as_it_is)), ggd),
        "bfloat16 policy": compare(train("ggd and ssmax", sharded(HALF)), ggd),
        "priors not apart": compare(train("ggd and ssmax", sharded(HALF, priors_apart=False)), ggd),
        "accelerate": compare(train("ggd and ssmax", by_accelerate), ggd),
    }
    half = train("ggd and ssmax", None, torch.bfloat16)
    found["bfloat16 model"] = compare(train("ggd and ssmax", sharded(as_it_is), torch.bfloat16), half)
    found["refusals"] = refusals()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
