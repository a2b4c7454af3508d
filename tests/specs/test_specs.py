"""QuantSpec: what it takes, what it refuses and how it says so, and the shape of scales."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import COMBINATIONS, EVERY_SPEC, PACKED_SPECS, VALID_SPECS, shapes, specs

from tritonfp8.specs import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    BLOCKS,
    ROWWISE,
    SPECS,
    TENSORWISE,
    QuantSpec,
    empty_scale,
    full_block,
    matmul_family,
    scale_shape,
    spec_of,
    transposed,
)
from tritonfp8.specs.formats import BYTE_FORMATS, SCALE_FORMATS


class TestConstruction:
    def test_the_names_of_the_public_interface(self):
        spec = QuantSpec(format="e4m3", block=(1, 128), scale_format="fp32", scale_rounding="pow2")
        assert (spec.format, spec.block, spec.scale_format, spec.scale_rounding) == ("e4m3", (1, 128), "fp32", "pow2")
        assert QuantSpec() == QuantSpec("e4m3", (-1, -1), "fp32", "none")

    def test_what_is_served(self):
        """8 bits: fp32 scales unrounded or powers of two for four blocks; e8m0 for 1x32 only. MXFP4: 1x32 only."""
        fp32 = itertools.product(
            BYTE_FORMATS, [TENSORWISE, ROWWISE, BLOCK_1X128, BLOCK_128X128], ["fp32"], ["none", "pow2"]
        )
        e8m0 = itertools.product(BYTE_FORMATS, [BLOCK_1X32], ["e8m0"], ["pow2", "floor"])
        mxfp4 = itertools.product(["e2m1"], [BLOCK_1X32], ["e8m0"], ["pow2", "floor"])
        assert {(s.format, s.block, s.scale_format, s.scale_rounding) for s in EVERY_SPEC} == {*fp32, *e8m0, *mxfp4}

    @pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
    def test_every_other_combination_is_refused(self, combination):
        fields = ("format", "block", "scale_format", "scale_rounding")
        if any(tuple(getattr(spec, field) for field in fields) == combination for spec in EVERY_SPEC):
            assert QuantSpec(*combination).format == combination[0]
        else:
            with pytest.raises(ValueError, match="takes (block|scale_format|scale_rounding)"):
                QuantSpec(*combination)

    @pytest.mark.parametrize(
        ("fields", "required", "came"),
        [
            ({"format": "e3m4"}, "'e4m3', 'e5m2'", "'e3m4'"),
            ({"format": None}, "'e4m3', 'e5m2'", "None"),
            ({"format": torch.float8_e4m3fn}, "'e4m3', 'e5m2'", "float8_e4m3fn"),
            ({"block": (1, 64)}, "(1, 128)", "(1, 64)"),
            ({"block": (-1, 1)}, "(1, -1)", "(-1, 1)"),
            ({"block": (1, 128, 1)}, "(1, 128)", "(1, 128, 1)"),
            ({"scale_format": "bf16"}, "'fp32', 'e8m0'", "'bf16'"),
            ({"scale_rounding": "up"}, "'none' or 'pow2'", "'up'"),
            ({"scale_rounding": "floor"}, "'none' or 'pow2'", "'floor'"),
            ({"scale_format": "e8m0", "scale_rounding": "pow2"}, "(tensorwise) takes scale_format 'fp32'", "'e8m0'"),
            ({"format": "e2m1"}, "'e2m1' takes block 1x32", "(-1, -1) (tensorwise)"),
            ({"block": (1, 32)}, "(1x32) takes scale_format 'e8m0'", "'fp32'"),
            ({"block": (1, 32), "scale_format": "e8m0"}, "'pow2' or 'floor'", "'none'"),
        ],
    )
    def test_errors_say_what_was_required_and_what_came(self, fields, required, came):
        with pytest.raises(ValueError, match="got") as error:
            QuantSpec(**fields)
        before, _, after = str(error.value).rpartition("got")
        assert required in before
        assert came in after
        assert next(reversed(fields)) in before or "block" in before

    @pytest.mark.parametrize("block", [128, None, "1x128", (1.0, 128.0), (True, 128), ("1", "128"), np.array([1, 128])])
    def test_a_block_is_a_pair_of_ints(self, block):
        with pytest.raises(TypeError, match=r"block must be a pair of ints \(rows, cols\); got"):
            QuantSpec(block=block)

    def test_a_list_becomes_a_tuple(self):
        spec = QuantSpec(block=[1, 128])
        assert spec.block == (1, 128)
        assert spec == QuantSpec(block=(1, 128))
        assert hash(spec) == hash(QuantSpec(block=(1, 128)))


class TestValue:
    def test_specs_are_equal_only_to_themselves(self):
        assert len(set(VALID_SPECS)) == len(VALID_SPECS)
        for a, b in itertools.product(VALID_SPECS, repeat=2):
            assert (a == b) == (a is b)

    @given(specs())
    def test_round_trips_through_plain_data(self, spec):
        data = spec.to_dict()
        assert set(data) == {field.name for field in dataclasses.fields(QuantSpec)}
        assert all(isinstance(value, str | list) for value in data.values())
        twin = QuantSpec(**data)
        assert (twin, hash(twin)) == (spec, hash(spec))
        data["block"].append(1)
        assert QuantSpec(**spec.to_dict()) == spec

    @given(specs())
    def test_args_are_the_text_that_ops_read(self, spec):
        (text,) = spec.args
        assert type(text) is str
        assert spec_of(text) == spec
        assert pickle.loads(pickle.dumps(spec)).args == spec.args

    def test_texts_are_readable_and_tell_all_specs_apart(self):
        assert QuantSpec("e4m3", (1, 128), "fp32", "pow2").args == ("e4m3:1x128:fp32:pow2",)
        assert QuantSpec("e5m2").args == ("e5m2:tensorwise:fp32:none",)
        assert len({spec.args for spec in EVERY_SPEC}) == len(EVERY_SPEC)
        assert set(SPECS.values()) == set(EVERY_SPEC)

    @pytest.mark.parametrize("text", ["", "e4m3", "e4m3:1x128:fp32", "e4m3:1x128:e8m0:pow2", "E4M3:1x128:fp32:pow2"])
    def test_other_texts_are_errors(self, text):
        with pytest.raises(ValueError, match=f"e4m3:1x128:fp32:pow2.*got '{text}'"):
            spec_of(text)

    @pytest.mark.parametrize("spec", PACKED_SPECS, ids=str)
    def test_ops_take_packed_formats_only_where_they_say_so(self, spec):
        assert spec_of(*spec.args, packed=True) == spec
        with pytest.raises(ValueError, match=r"takes codes of 8 bits \(e4m3, e5m2\); got e2m1 1x32.*expand_codes"):
            spec_of(*spec.args)

    @given(specs())
    def test_copies_are_the_spec_itself(self, spec):
        assert copy.copy(spec) == spec
        assert copy.deepcopy(spec) is spec
        assert copy.deepcopy([spec, spec]) == [spec, spec]

    def test_replace_checks_the_combination(self):
        with pytest.raises(ValueError, match="takes scale_format 'e8m0'"):
            dataclasses.replace(QuantSpec(), block=BLOCK_1X32)

    def test_prints_distinctly(self):
        assert len({str(spec) for spec in VALID_SPECS}) == len(VALID_SPECS)
        assert str(QuantSpec("e5m2", ROWWISE, "fp32", "pow2")) == "e5m2 rowwise (fp32 pow2)"
        assert str(QuantSpec()) == "e4m3 tensorwise (fp32)"
        assert repr(QuantSpec()).startswith("QuantSpec(format='e4m3', block=(-1, -1)")


def blocks_along(size, block):
    """How many blocks the indices of a dim fall into, counted; a whole dim is one block, empty or not."""
    return 1 if block == -1 else len({i // block for i in range(size)})


class TestScaleShape:
    @given(shapes(min_dims=2), st.sampled_from(list(BLOCKS)))
    def test_is_the_number_of_blocks_along_each_dim(self, shape, block):
        got = scale_shape(shape, block)
        assert len(got) == len(shape)
        assert got[-2:] == tuple(map(blocks_along, shape[-2:], block))
        # Dims in front are rows too: of their own, or with all others.
        assert got[:-2] == tuple(blocks_along(size, -1 if block[0] == -1 else 1) for size in shape[:-2])

    @given(shapes(), specs())
    def test_is_the_invariant_on_the_written_out_block(self, shape, spec):
        if len(shape) == 1 and spec.block[0] > 1:
            with pytest.raises(ValueError, match="at least 2 dims; got 1"):
                spec.scale_shape(shape)
            return
        full = full_block(len(shape), spec.block)
        assert len(full) == len(shape)
        assert spec.scale_shape(shape) == tuple(
            1 if b == -1 else math.ceil(size / b) for size, b in zip(shape, full, strict=True)
        )

    @pytest.mark.parametrize(
        ("shape", "block", "expected"),
        [
            ((4096, 14336), TENSORWISE, (1, 1)), ((4096, 14336), ROWWISE, (4096, 1)),
            ((4096, 14336), BLOCK_1X128, (4096, 112)), ((4096, 14336), BLOCK_128X128, (32, 112)),
            ((4096, 14336), BLOCK_1X32, (4096, 448)), ((129, 129), BLOCK_128X128, (2, 2)),
            ((1, 1), BLOCK_128X128, (1, 1)), ((7, 33), BLOCK_1X32, (7, 2)),
            ((2, 3, 200), TENSORWISE, (1, 1, 1)), ((2, 3, 200), ROWWISE, (2, 3, 1)),
            ((2, 3, 200), BLOCK_1X128, (2, 3, 2)), ((2, 300, 200), BLOCK_128X128, (2, 3, 2)),
            ((200,), TENSORWISE, (1,)), ((200,), ROWWISE, (1,)), ((200,), BLOCK_1X32, (7,)),
            ((0, 64), TENSORWISE, (1, 1)), ((0, 64), ROWWISE, (0, 1)), ((64, 0), ROWWISE, (64, 1)),
            ((64, 0), BLOCK_1X128, (64, 0)), ((0, 0), BLOCK_128X128, (0, 0)), ((0, 5, 64), BLOCK_1X32, (0, 5, 2)),
        ],
    )  # fmt: skip
    def test_examples(self, shape, block, expected):
        assert scale_shape(shape, block) == expected
        assert scale_shape(torch.Size(shape), list(block)) == expected

    def test_a_number_has_no_rows(self):
        for block in BLOCKS:
            with pytest.raises(ValueError, match=r"needs a tensor of at least [12] dims; got 0"):
                scale_shape((), block)

    @given(shapes(min_dims=2, max_dims=2), st.sampled_from(list(BLOCKS)))
    def test_of_a_transpose_is_transposed(self, shape, block):
        assert scale_shape(shape[::-1], transposed(block)) == scale_shape(shape, block)[::-1]
        assert transposed(transposed(block)) == block

    @given(shapes(min_dims=2, max_dims=3, max_size=40), specs())
    def test_an_empty_scale_has_the_shape_whatever_its_order_in_memory(self, shape, spec):
        scale = empty_scale(shape, spec.block, spec.scale_format, torch.device("cpu"))
        assert tuple(scale.shape) == spec.scale_shape(shape)
        assert scale.dtype == SCALE_FORMATS[spec.scale_format].dtype
        if scale.numel():
            assert scale.untyped_storage().nbytes() == scale.nbytes

    def test_scales_of_consecutive_rows_lie_together_where_the_block_says_so(self):
        for block, row in BLOCKS.items():
            scale = empty_scale((300, 700), block, row.scale_formats[0], torch.device("cpu"))
            if row.rows_contiguous:
                assert scale.stride() == (1, scale.shape[0])
            else:
                assert scale.is_contiguous()


class TestShapeOfCodes:
    @given(shapes(), st.sampled_from(EVERY_SPEC))
    def test_it_has_an_inverse_where_codes_fill_bytes(self, shape, spec):
        if spec in PACKED_SPECS and shape[-1] % 2:
            with pytest.raises(ValueError, match=rf"e2m1 has 2 codes a byte.*multiple of 2; got shape .*{shape[-1]}"):
                spec.qdata_shape(shape)
            return
        codes = spec.qdata_shape(shape)
        assert codes == (*shape[:-1], shape[-1] // 2 if spec in PACKED_SPECS else shape[-1])
        assert spec.shape_of(codes) == shape


class TestMatmulFamily:
    def test_who_multiplies_whom(self):
        families = {}
        for (a, row), (b, col) in itertools.product(BLOCKS.items(), repeat=2):
            if row.family == col.family:
                families[row.name, col.name] = matmul_family(a, b)
            else:
                with pytest.raises(ValueError, match=f"no kernel multiplies {row.name} by {col.name}: "):
                    matmul_family(a, b)
        epilogue = dict.fromkeys(itertools.product(["tensorwise", "rowwise"], repeat=2), "epilogue")
        blockwise = dict.fromkeys(itertools.product(["1x128", "128x128"], repeat=2), "blockwise")
        assert families == epilogue | blockwise | {("1x32", "1x32"): "mx"}

    def test_the_error_names_what_goes_with_the_operand(self):
        with pytest.raises(ValueError, match="scaled 1x128 goes with one scaled 1x128 or 128x128"):
            matmul_family(BLOCK_1X128, TENSORWISE)


def test_the_table_of_blocks_cannot_be_changed():
    with pytest.raises(TypeError):
        BLOCKS[1, 64] = BLOCKS[BLOCK_1X32]
