"""The private names of Triton, by version, and the launch past it; tests/compile_only compares real launches."""

from types import SimpleNamespace

import pytest

from tritonfp8.compat import TRITON_OF_TORCH, triton_private
from tritonfp8.compat.triton_private import Address, DescribedAddress, RawCall, UnavailableError, raw_launches


def test_the_installed_triton_is_known_and_what_is_missing_is_named():
    assert triton_private.MISSING == ()
    assert set(TRITON_OF_TORCH.values()) == set(triton_private.KNOWN_VERSIONS)
    assert triton_private.find_missing("3.7.1") == ()
    [unknown] = triton_private.find_missing("3.10.0")
    assert unknown == "Triton 3.10.0 is none of 3.6, 3.7, 3.8, 3.9"
    names = {"triton:runtime.driver": "a use", "triton:no.such": "its use", "triton.no_such:x": "another"}
    assert triton_private.find_missing("3.7.1", names) == ("triton.no.such (its use)", "triton.no_such.x (another)")


class Descriptor:
    def __init__(self):
        self.base = SimpleNamespace(data_ptr=lambda: 4096)


def compiled(typed, launched, with_descriptor=False):
    """A compiled kernel as Triton 3.7 (``typed``) or 3.6 describes it, that notes its raw launches."""
    encoded = []

    def launcher(*args):
        launched.append(args)

    def make_tensordesc_arg(descriptor, metadata):
        encoded.append(descriptor.base.data_ptr())
        return [f"map of {descriptor.base.data_ptr()}", 64, 1]

    tensordesc_meta = ["metadata"]

    def wrapped(*args):
        return launcher, make_tensordesc_arg, tensordesc_meta

    run = SimpleNamespace(
        launch=wrapped if with_descriptor else launcher.__get__(launched),
        global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True,
    )  # fmt: skip
    if typed:
        run.arg_annotations, run.kernel_signature = "annotations", b"signature"
    return SimpleNamespace(run=run, function=77, packed_metadata="packed"), encoded


@pytest.mark.parametrize("typed", [True, False])
def test_arguments_are_in_the_order_of_the_launcher(typed):
    launched = []
    # Neither a bound method nor a function of C has variables to read.
    kernel, _ = compiled(typed, launched)
    launch = raw_launches(3, [RawCall(kernel, 5, [Address(0, 0), None, Address(2, 8)], (3, True, None))] * 2)
    launch(11, [1000, None, 3000])
    [(_, *args), again] = launched
    assert [*again[1:]] == args
    arguments = (1000, None, 3008, 3, True, None)
    if typed:
        expected = [5, 1, 1, 11, 77, False, True, "packed", *[None] * 5, "annotations", b"signature", arguments]
    else:
        expected = [5, 1, 1, 11, 77, False, True, None, None, "packed", None, None, None, *arguments]
    assert args == expected


@pytest.mark.parametrize("typed", [True, False])
def test_tensor_maps_are_made_once_an_address(typed, monkeypatch):
    monkeypatch.setattr(triton_private, "MAX_TENSOR_MAPS", 2)
    launched = []
    kernel, encoded = compiled(typed, launched, with_descriptor=True)
    launch = raw_launches(2, [RawCall(kernel, 5, [DescribedAddress(1, 0, Descriptor()), Address(0, 0)], (7,))])
    assert encoded == [4096], "the driver may refuse an invalid address"
    encoded.clear()
    for address in (64, 128, 64, 192, 64):
        launch(11, [1000, address])
    # The third address is one too many: the maps begin again.
    assert encoded == [64, 128, 192, 64]
    arguments = launched[-1][-1] if typed else launched[-1][13:]
    assert tuple(arguments) == ("map of 64", 64, 1, 1000, 7)


def missing_launch_pdl(run):
    del run.launch_pdl


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        (lambda run: setattr(run, "global_scratch_size", 8), Address(0, 0), "scratch memory"),
        (lambda run: setattr(run, "profile_scratch_size", 8), Address(0, 0), "scratch memory"),
        (lambda run: setattr(run, "gsan_enabled", True), Address(0, 0), "sanitizer"),
        (missing_launch_pdl, Address(0, 0), "has no launch_pdl"),
        (
            lambda run: setattr(run, "launch", lambda *args: None),
            Address(0, 0),
            "has no launcher, make_tensordesc_arg, tensordesc_meta",
        ),
        # Without metadata.
        (lambda run: None, DescribedAddress(0, 0, Descriptor()), "tensor map"),
    ],
)
def test_launches_that_only_triton_can_make(change, at, message):
    kernel, _ = compiled(True, [])
    change(kernel.run)
    with pytest.raises(UnavailableError, match=message):
        raw_launches(2, [RawCall(kernel, 5, [at, Address(1, 0)], ())])
