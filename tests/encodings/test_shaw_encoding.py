import pytest
import torch

from attention_priors.encodings import ShawVectors


def test_index_is_the_clipped_offset_from_query_to_key():
    encoding = ShawVectors(4, max_offset=2)
    distances = torch.tensor([-1000, -3, -2, -1, 0, 1, 2, 3, 1000])  # i - j
    assert encoding.index(distances).tolist() == [4, 4, 4, 3, 2, 1, 0, 0, 0]


def test_vectors_and_indices_correspond():
    encoding = ShawVectors(4, max_offset=7)
    index = encoding.index(torch.arange(-20, 21))
    assert sorted(set(index.tolist())) == list(range(15))
    assert encoding.key_vectors.shape == (15, 4)
    assert encoding.value_vectors is not None
    assert encoding.value_vectors.shape == (15, 4)


def test_vectors_of_values_are_optional():
    encoding = ShawVectors(4, values=False)
    assert encoding.value_vectors is None
    assert [key for key, _ in encoding.named_parameters()] == ["key_vectors"]
    encoding.reset_parameters()


def test_initial_vectors_are_small():
    torch.manual_seed(0)
    encoding = ShawVectors(64, max_offset=200)
    assert encoding.value_vectors is not None
    for vectors in (encoding.key_vectors, encoding.value_vectors):
        assert vectors.std().item() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_sizes_must_be_positive_integers(size: int):
    with pytest.raises(ValueError, match=f"head_dim must be a positive integer, got {size}"):
        ShawVectors(size)
    with pytest.raises(ValueError, match=f"max_offset must be a positive integer, got {size}"):
        ShawVectors(4, size)
