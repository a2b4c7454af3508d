"""Hypothesis strategies for all specs, GEMMs, recipes and shapes that users can build."""

import itertools

from hypothesis import strategies as st

from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import ACCUMULATIONS, BLOCKS, QuantSpec
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS, SCALE_FORMATS

ROUNDINGS = sorted({rounding for scale_format in SCALE_FORMATS.values() for rounding in scale_format.roundings})
COMBINATIONS = list(itertools.product(FORMATS, BLOCKS, SCALE_FORMATS, ROUNDINGS))
EVERY_SPEC = [
    QuantSpec(format, block, scale_format, rounding)
    for format, block, scale_format, rounding in COMBINATIONS
    if format in BLOCKS[block].formats
    and scale_format in BLOCKS[block].scale_formats
    and rounding in SCALE_FORMATS[scale_format].roundings
]
# Of 8 bits, which GEMMs multiply; and of two codes a byte.
VALID_SPECS = [spec for spec in EVERY_SPEC if spec.format in BYTE_FORMATS]
PACKED_SPECS = [spec for spec in EVERY_SPEC if spec.format not in BYTE_FORMATS]


def specs():
    return st.sampled_from(VALID_SPECS)


def gemms():
    def pair(lhs):
        partners = [rhs for rhs in VALID_SPECS if BLOCKS[rhs.block].family == BLOCKS[lhs.block].family]
        return st.builds(Gemm, st.just(lhs), st.sampled_from(partners), st.sampled_from(ACCUMULATIONS))

    return st.builds(Gemm, accumulation=st.sampled_from(ACCUMULATIONS)) | specs().flatmap(pair)


def recipes():
    return st.builds(Recipe, st.text(min_size=1), gemms(), gemms(), gemms())


def shapes(min_dims=1, max_dims=4, max_size=300):
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)
