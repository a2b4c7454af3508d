"""Cases by pairs have all pairs, and few others."""

import itertools

import covering
import pytest

OPTIONS = [
    [["a", "b"]],
    [["a", "b"], [1, 2, 3]],
    [["a", "b", "c"], [1, 2, 3], [True, False]],
    [range(5), range(4), range(3), range(2)],
    [range(6), [None, [1]], ["x", "y"], [0.5]],
]


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_all_pairs_are_there(options):
    cases = covering.pairs(*options)
    for i, j in itertools.combinations(range(len(options)), 2):
        for pair in itertools.product(options[i], options[j]):
            assert any((case[i], case[j]) == pair for case in cases)
    assert cases == covering.pairs(*options)


def test_few_others_are():
    assert covering.pairs(*OPTIONS[1]) == list(itertools.product(*OPTIONS[1]))
    assert len(covering.pairs(*OPTIONS[2])) == 9 < 18
    # At least 20: the product of the two longest.
    assert len(covering.pairs(*OPTIONS[3])) < 24 < 120


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_value_is_there(options):
    cases = covering.each(*options)
    assert len(cases) == max(map(len, options))
    for i, values in enumerate(options):
        assert all(any(case[i] == value for case in cases) for value in values)
