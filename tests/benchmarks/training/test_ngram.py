"""Kneser–Ney probabilities are compared with values computed by hand."""

import numpy as np
import pytest

from benchmarks.training.ngram import KneserNey

# In 0 1 0 1 0 2 (ids below 4), the bigrams are 01 twice, 10 twice and 02 once.
TOKENS = np.array([0, 1, 0, 1, 0, 2])


def test_bigrams_by_hand() -> None:
    """Bigrams: one occurs once, two twice, three or more never (which counts as one).

    Order 2: share = 1/(1 + 2·2) = 0.2; D₁ = 1 − 2·0.2·2/1 = 0.2; D₂ = 2 − 3·0.2·1/2 = 1.7.
    Order 1, how many different tokens stand before each: 0 after {1}, 1 after {0}, 2 after {0}:
    each once, so share = 3/(3 + 2·1) = 0.6 and D₁ = 1 − 2·0.6·1/3 = 0.6.
    """
    model = KneserNey(TOKENS, vocabulary=4, order=2)
    # Order 1: (1 − 0.6)/3, plus the 3·0.6 held back of 3, spread over the vocabulary of 4.
    known, unknown = 0.4 / 3 + 0.6 / 4, 0.6 / 4
    # Of the three bigrams that start with 0, D₂ + D₁ are held back.
    back = (1.7 + 0.2) / 3
    expected = {
        (0, 1): (2 - 1.7) / 3 + back * known,
        (0, 2): (1 - 0.2) / 3 + back * known,
        (0, 0): back * known,
        (0, 3): back * unknown,
        (1, 0): (2 - 1.7) / 2 + 1.7 / 2 * known,
        (3, 1): known,  # no token follows 3
    }
    for gram, probability in expected.items():
        assert model.probabilities(np.array(gram)) == pytest.approx([probability]), gram


def test_perplexity_is_the_geometric_mean_of_one_over_probability() -> None:
    model = KneserNey(TOKENS, vocabulary=4, order=2)
    first, second = (float(model.probabilities(np.array(gram))[0]) for gram in ((0, 1), (1, 0)))
    assert model.perplexity(np.array([0, 1, 0])) == pytest.approx((first * second) ** -0.5)
