"""The container: its invariants, its immutability, and that it crosses what a pytree crosses."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from strategies import VALID_SPECS, shapes, specs
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, ROWWISE, QuantSpec
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs.quantized import Quantized
from tritonfp8.specs.testing import assert_bitwise_equal


def make(shape=(5, 300), spec=VALID_SPECS[0], scale_shape=None, device="cpu", **dtypes):
    generator = torch.Generator().manual_seed(0)
    qdata = torch.randn(shape, generator=generator).to(dtypes.get("qdata", FORMATS[spec.format].dtype))
    scale = torch.rand(spec.scale_shape(shape) if scale_shape is None else scale_shape, generator=generator)
    scale = torch.exp2(scale.mul(8).round()).to(dtypes.get("scale", SCALE_FORMATS[spec.scale_format].dtype))
    return Quantized(qdata.to(device), scale.to(device), spec)


class TestInvariants:
    @given(shapes(min_dims=2, max_size=40), specs())
    def test_data_and_scale_of_the_spec_are_taken(self, shape, spec):
        q = make(shape, spec)
        assert q.shape == torch.Size(shape)
        assert q.ndim == len(shape)
        assert q.scale.ndim == q.qdata.ndim
        assert q.nbytes == q.qdata.numel() + q.scale.numel() * q.scale.element_size()
        assert q.device == torch.device("cpu")

    @given(shapes(min_dims=2, max_size=40), specs())
    def test_any_other_scale_shape_is_refused(self, shape, spec):
        right = spec.scale_shape(shape)
        for scale_shape in [(*right[:-1], right[-1] + 1), (right[0] + 1, *right[1:]), (1, *right), right[:-1]]:
            with pytest.raises(ValueError) as error:  # noqa: PT011
                make(shape, spec, scale_shape)
            assert f"of shape {tuple(shape)} must have shape {right}; got {scale_shape}" in str(error.value)

    @pytest.mark.parametrize("spec", VALID_SPECS, ids=str)
    def test_the_dtypes_are_those_of_the_formats(self, spec):
        for wrong in {torch.uint8, torch.float32, *(f.dtype for f in FORMATS.values())} - {FORMATS[spec.format].dtype}:
            with pytest.raises(ValueError, match=f"qdata of a .* must be {FORMATS[spec.format].dtype}; got {wrong}"):
                make(spec=spec, qdata=wrong)
        right = SCALE_FORMATS[spec.scale_format].dtype
        for wrong in {torch.uint8, torch.bfloat16, *(f.dtype for f in SCALE_FORMATS.values())} - {right}:
            with pytest.raises(ValueError, match=f"scale of a .* must be {right}; got {wrong}"):
                make(spec=spec, scale=wrong)

    def test_any_strides_are_taken(self):
        spec = QuantSpec(block=BLOCK_1X128, scale_rounding="pow2")
        q = make((6, 300), spec)
        strided = Quantized(q.qdata.T.contiguous().T, q.scale.T.contiguous().T, spec)
        assert strided.scale.stride() == (1, 6)
        assert_bitwise_equal(strided, q)

    def test_empty_dims(self):
        assert make((0, 64), QuantSpec(block=ROWWISE)).scale.shape == (0, 1)
        assert make((64, 0), QuantSpec(block=ROWWISE)).scale.shape == (64, 1)
        assert make((0, 0), QuantSpec()).scale.shape == (1, 1)
        assert make((3, 0), QuantSpec(block=BLOCK_1X32, scale_format="e8m0", scale_rounding="pow2")).nbytes == 0

    def test_meta_tensors(self):
        q = make((4, 256), device="meta")
        assert q.device.type == "meta"
        assert repr(q) == "Quantized(e4m3 tensorwise (fp32), shape=(4, 256), device='meta')"


class TestImmutability:
    def test_replace_checks_the_invariants(self):
        q = make()
        assert dataclasses.replace(q, qdata=q.qdata.clone()).spec is q.spec
        with pytest.raises(ValueError, match="must have shape"):
            dataclasses.replace(q, spec=QuantSpec(block=ROWWISE))

    def test_compares_and_hashes_by_identity(self):
        """Comparing tensors elementwise would have no truth value."""
        q, twin = make(), make()
        assert q != twin
        assert len({q, twin, q}) == 2

    def test_deepcopy_copies_the_tensors_and_keeps_the_spec(self):
        q = make()
        twin = copy.deepcopy(q)
        assert twin.spec is q.spec
        assert twin.qdata.data_ptr() != q.qdata.data_ptr()
        assert_bitwise_equal(twin, q)
        assert copy.copy(q).qdata is q.qdata


class TestPytree:
    @pytest.mark.parametrize("spec", VALID_SPECS, ids=str)
    def test_flattens_into_its_two_tensors(self, spec):
        q = make(spec=spec)
        leaves, structure = pytree.tree_flatten({"a": [q]})
        assert leaves[0] is q.qdata
        assert leaves[1] is q.scale
        twin = pytree.tree_unflatten(leaves, structure)["a"][0]
        assert type(twin) is Quantized
        assert twin.qdata is q.qdata
        assert twin.scale is q.scale
        assert twin.spec == spec

    def test_paths_name_the_fields(self):
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path([make()])[0]]
        assert paths == ["[0].qdata", "[0].scale"]

    def test_structures_are_equal_when_the_specs_are(self):
        a, b = QuantSpec(), QuantSpec(scale_rounding="pow2")
        assert pytree.tree_structure(make(spec=a)) == pytree.tree_structure(make((7, 9), spec=QuantSpec()))
        assert pytree.tree_structure(make(spec=a)) != pytree.tree_structure(make(spec=b))

    def test_tree_map_may_put_anything_in_the_leaves(self):
        assert pytree.tree_map(lambda x: tuple(x.shape), make((2, 3))).scale == (1, 1)
        assert pytree.tree_map(lambda x: None, make()).qdata is None
        moved = pytree.tree_map(lambda x: x.to("meta"), make())
        assert moved.device.type == "meta"

    @pytest.mark.parametrize("spec", VALID_SPECS, ids=str)
    def test_the_structure_round_trips_through_text(self, spec):
        structure = pytree.tree_structure({"q": make(spec=spec)})
        assert pytree.treespec_loads(pytree.treespec_dumps(structure)) == structure

    def test_crosses_torch_compile_as_an_argument_and_as_a_result(self):
        def halve(q, also):
            scale = q.scale * 0.5
            return Quantized(q.qdata, scale, q.spec), also + scale.sum()

        q = make()
        counts = CompileCounter()
        compiled = torch.compile(halve, fullgraph=True, backend=counts)
        got, total = compiled(q, torch.ones(()))
        assert_bitwise_equal(got, halve(q, torch.ones(()))[0])
        assert total == 1 + got.scale.sum()
        compiled(make(), torch.zeros(()))
        assert counts.frame_count == 1

    def test_crosses_activation_checkpointing(self):
        q, x = make(), torch.ones(5, 300, requires_grad=True)

        def scaled(q, x):
            return q.qdata.float() * q.scale * x

        checkpoint(scaled, q, x, use_reentrant=False).sum().backward()
        assert_bitwise_equal(x.grad, q.qdata.float() * q.scale)
