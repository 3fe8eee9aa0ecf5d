"""Decoders whose tokens are distributed over two processes, beside equal decoders on one process.

``test_sharded_decoder.py`` runs this program. Each process writes its results to a file.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_decoders import KEY_SINK, tiny_decoder, tokens
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attention_priors import ShardedSequence, shard_index
from attention_priors.lab.train import shard_priors
from attention_priors.models import PriorDecoderForCausalLM

LENGTH, BATCH = 23, 2
GGD = {"name": "generalized_gaussian", "init": "spread"}

VARIANTS: dict[str, dict[str, Any]] = {
    "ggd and ssmax": {"prior": GGD, "logit_scale": {"name": "ssmax", "init": 0.7}},
    "spectral and key sink": {"prior": ["spectral", KEY_SINK]},
    "shared buckets and rotary": {"prior": "relative_buckets", "share_prior": True, "encoding": "rotary"},
    "learned positions": {"encoding": {"name": "learned", "max_length": 64}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"document_ids": (torch.arange(LENGTH) >= 14).long().expand(BATCH, -1)},
    "left padding": {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[0], [9]])).long()},
    "checkpointed": {"checkpointing": True},
}
CASES = [
    *((variant, "plain") for variant in VARIANTS),
    ("ggd and ssmax", "documents"),
    ("ggd and ssmax", "checkpointed"),
    ("ggd and ssmax", "left padding"),
    ("spectral and key sink", "left padding"),
]


def next_tokens(ids: Tensor, document_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    labels = ids.clone()
    if document_ids is not None:
        labels[:, 1:][document_ids[:, 1:] != document_ids[:, :-1]] = -100
    if attention_mask is not None:
        labels[attention_mask == 0] = -100
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).abs().max() / g.abs().max().clamp(min=1e-3)) for n, g in expected.items())


def compare(variant: str, setting: dict[str, Any]) -> dict[str, float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tiny_decoder(**VARIANTS[variant]).train()
    if setting.get("checkpointing"):
        model.activation_checkpointing_enable()
    ids = tokens(BATCH, LENGTH)
    masks = {name: setting.get(name) for name in ("document_ids", "attention_mask")}
    labels = next_tokens(ids, **masks)
    number = (labels != -100).sum()
    whole = model(ids, **masks, shift_labels=labels, num_items_in_batch=number)
    whole.loss.backward()
    expected, logits, loss = gradients(model), whole.logits.detach(), whole.loss.detach()

    index = shard_index(LENGTH, rank, size)
    options: dict[str, Any] = {}
    if masks["document_ids"] is not None:
        options["document_ids"] = masks["document_ids"][:, index]
    if masks["attention_mask"] is not None:
        first = masks["attention_mask"].argmax(-1, keepdim=True)
        options = {"key_padding_mask": masks["attention_mask"][:, index] == 0, "positions": index - first}
    sequence = ShardedSequence(index, **options)
    found: dict[str, float] = {}

    def one(name: str, model: torch.nn.Module, scale: float) -> None:
        model.zero_grad()
        outputs = model(ids[:, index], sequence=sequence, shift_labels=labels[:, index], num_items_in_batch=number)
        (outputs.loss * scale).backward()
        total = outputs.loss.detach().clone()
        dist.all_reduce(total)
        seen = torch.ones_like(ids[:, index]) if setting.get("attention_mask") is None else ~options["key_padding_mask"]
        found[f"{name}: logits"] = float(((outputs.logits - logits[:, index]).abs().amax(-1) * seen).max())
        found[f"{name}: loss"] = float((total - loss).abs())

    one("alone", model, 1.0)
    mine = gradients(model)
    for grad in mine.values():
        dist.all_reduce(grad)
    found["alone: gradients"] = largest_difference(mine, expected)

    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    one("ddp", wrapped, float(size))
    found["ddp: gradients"] = largest_difference(gradients(model), expected)

    if not setting.get("checkpointing"):
        shard_priors(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        one("fsdp2", model, float(size))
        full = {n: g.full_tensor() for n, g in gradients(model).items() if isinstance(g, DTensor)}
        found["fsdp2: gradients"] = largest_difference(full, expected)
    return found


def refusals() -> dict[str, str]:
    index = shard_index(LENGTH, dist.get_rank(), dist.get_world_size())
    sequence, ids = ShardedSequence(index), tokens(BATCH, LENGTH)[:, index]
    wrong: dict[str, tuple[PriorDecoderForCausalLM, dict[str, Any]]] = {
        "shaw": (tiny_decoder(encoding={"name": "shaw", "max_offset": 3}), {}),
        "labels": (tiny_decoder(), {"labels": ids}),
        "logits_to_keep": (tiny_decoder(), {"logits_to_keep": 1}),
        "cache": (tiny_decoder(), {"use_cache": True}),
        "mask": (tiny_decoder(), {"attention_mask": torch.ones_like(ids)}),
    }
    said = {}
    for name, (model, options) in wrong.items():
        try:
            model(ids, sequence=sequence, **options)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def compare_sharded(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.get_world_size() == 2
    found: dict[str, Any] = {"refusals": refusals()}
    for variant, name in CASES:
        found[f"{variant} / {name}"] = compare(variant, SETTINGS[name])
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
