"""Cases that cover options by pairs: each value of an option with each value of every other option, at least once.

A fault of a feature shows with one value of an option, or with two that do not go together. A product of three options
tests each pair several times, and takes that much longer.
"""

import itertools


def pairs(*options):
    """A list of cases, a tuple of one value of each option: the fewest that a greedy choice finds, always the same.

    Args:
        options: the values of each option. Two options give their product.
    """
    places = list(itertools.combinations(range(len(options)), 2))

    def found_in(case):
        return {(i, j, case[i], case[j]) for i, j in places}

    every = list(itertools.product(*(range(len(values)) for values in options)))
    missing = set().union(*map(found_in, every))
    chosen = []
    while missing:
        # The first of those with the most pairs that are missing.
        best = max(every, key=lambda case: len(found_in(case) & missing))
        chosen.append(best)
        missing -= found_in(best)
    return [tuple(values[i] for values, i in zip(options, case, strict=True)) for case in chosen]


def each(*options):
    """A list of cases in which each value of each option occurs, as many as the longest option has values.

    For options that do not meet in the code: shorter ones begin again.
    """
    longest = max(map(len, options))
    return [tuple(values[i % len(values)] for values in options) for i in range(longest)]
