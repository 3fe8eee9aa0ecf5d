import math

import pytest
import torch

from attention_priors.lab.data import IGNORED_LABEL
from attention_priors.lab.train import weighted_loss


def test_the_loss_is_the_weighted_mean_over_the_next_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 4, IGNORED_LABEL, 2], [IGNORED_LABEL, 0, 3, 3]])
    weights = torch.tensor([[7.0, 1.0, 9.0, 10.0], [7.0, 2.0, 0.5, 0.0]])
    total = weight = 0.0
    for row in range(2):
        for place in range(1, 4):
            label = int(labels[row, place])
            if label != IGNORED_LABEL:
                scores = [float(x) for x in logits[row, place - 1]]
                nll = math.log(sum(map(math.exp, scores))) - scores[label]
                total += float(weights[row, place]) * nll
                weight += float(weights[row, place])
    assert float(weighted_loss(logits, labels, weights)) == pytest.approx(total / weight, rel=1e-5)


def test_weights_of_one_give_the_models_own_loss():
    logits = torch.randn(3, 6, 11, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(2))
    labels[:, 2] = IGNORED_LABEL
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(weighted_loss(logits, labels, torch.ones(3, 6)), expected)


def test_ignored_tokens_get_no_gradient():
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(3), requires_grad=True)
    labels = torch.tensor([[1, 2, IGNORED_LABEL, 3]])
    weighted_loss(logits, labels, torch.tensor([[1.0, 1.0, 5.0, 2.0]])).backward()
    assert logits.grad is not None
    moved = logits.grad.abs().sum(-1)[0]
    # Place p predicts the label at p + 1; the last place predicts nothing.
    assert (moved > 0).tolist() == [True, False, True, False]


def test_a_batch_without_labels_has_no_loss():
    labels = torch.full((1, 4), IGNORED_LABEL)
    assert float(weighted_loss(torch.randn(1, 4, 5), labels, torch.ones(1, 4))) == 0.0


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    labels = torch.randint(40, (1, 50), generator=torch.Generator().manual_seed(5))
    weights = torch.rand(1, 50, generator=torch.Generator().manual_seed(6))
    loss = weighted_loss(logits, labels, weights)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, weighted_loss(logits.float(), labels, weights))
