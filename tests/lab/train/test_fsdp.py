"""FSDP2 with our parameter groups on two gloo processes matches one process, with priors in float32."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from sharded_training import train_sharded
from training_cases import tiny_settings

from attention_priors.lab.train.engine import check_machinery
from attention_priors.lab.train.recipe import RunningSettings
from processes import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each process."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(partial(train_sharded, folder), folder, processes=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


# Rounding to bfloat16 changes the losses slightly.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("ggd and ssmax", 1e-5),
        ("shared key sink", 1e-5),
        ("bfloat16 policy", 2e-2),
        ("accelerate", 2e-2),
        ("bfloat16 model", 2e-2),
    ],
)
def test_losses_match_one_process(found: list[dict[str, Any]], name: str, limit: float) -> None:
    for process in found:
        run = process[name]
        assert run["losses"] == pytest.approx(run["expected losses"], abs=limit)
        assert run["groups"] == run["expected groups"]
        assert run["weights"] < 3 * limit
        assert run["moved"] > 0.01  # priors and scales learn


@pytest.mark.parametrize("name", ["ggd and ssmax", "bfloat16 policy", "accelerate", "bfloat16 model"])
def test_priors_are_computed_and_optimised_in_float32(found: list[dict[str, Any]], name: str) -> None:
    for process in found:
        assert process[name]["computed in"] == ["torch.float32"]
        assert process[name]["parameters"] == ["torch.float32"]
        assert process[name]["moments"] == ["torch.float32"]


def test_without_their_own_group_priors_are_cast(found: list[dict[str, Any]]) -> None:
    """This cast is the reason for shard_priors()."""
    assert all(process["priors not apart"]["computed in"] == ["torch.bfloat16"] for process in found)
    assert all("uniform original parameter dtype" in process["refusals"]["two dtypes"] for process in found)


def test_priors_are_sharded_first_and_once(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert "model is sharded already" in process["refusals"]["root"]
        assert "GeneralizedGaussian is sharded already" in process["refusals"]["prior"]


@pytest.mark.parametrize(("name", "value"), [("version", 1), ("cpu_ram_efficient_loading", True)])
def test_recipes_that_shard_priors_with_layers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"running.fsdp: {name} must be"):
        check_machinery(tiny_settings(), RunningSettings(fsdp={name: value}))
