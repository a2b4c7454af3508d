"""Only an MLP whose forward is the formula of SwiGLU is fused; any other is left, and the report says why."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cases import normal
from torch import nn

from tritonfp8 import convert
from tritonfp8.layers.fused import formula, match
from tritonfp8.testing import assert_bitwise_equal

FLAG = True


def silu_of(x):
    return F.silu(x)


class Base(nn.Module):
    """The linears of a SwiGLU; the forward is up to the subclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(a, b, bias=False) for a, b in ((32, 48), (32, 48), (48, 32))
        )
        self.act, self.drop, self.factor, self.training = nn.SiLU(), nn.Dropout(0.5), None, False


class Training(Base):
    def forward(self, x):
        y = self.act(self.gate_proj(x)) * self.up_proj(x)
        if self.training:
            y = self.drop(y)
        return self.down_proj(y)


class Flag(Base):
    def forward(self, x):
        y = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y if self.factor is None else y * self.factor)


class Global(Base):
    def forward(self, x):
        y = FLAG and self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y)


class NoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            gate = self.gate_proj(x)
        return self.down_proj(self.act(gate) * self.up_proj(x))


class Autocast(Base):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Decorated(Base):
    @torch.no_grad()
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Dropout(Base):
    def forward(self, x):
        return self.down_proj(self.drop(self.act(self.gate_proj(x)) * self.up_proj(x)))


class Helper(Base):
    def forward(self, x):
        return self.down_proj(silu_of(self.gate_proj(x)) * self.up_proj(x))


class SideEffect(Base):
    def forward(self, x):
        print(x.shape)
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Detached(Base):
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x.detach())) * self.up_proj(x))


class TwoInputs(Base):
    def forward(self, x, scale=1.0):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Base):
    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x)) * self.gate_proj(x))


class Calls(Base):
    def __call__(self, *args):
        return 2 * super().__call__(*args)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Plain(Base):
    def forward(self, x):
        gate = self.act(self.gate_proj(x))
        return self.down_proj(torch.mul(gate, self.up_proj(x)))


NOT_THE_FORMULA = {
    Training: "it has 'if self.training:'",
    Flag: "it has 'y if self.factor is None else y \\* self.factor'",
    Global: "it has 'FLAG and ",
    NoGrad: r"it has 'with torch.no_grad\(\):'",
    Autocast: r"it has \"with torch.autocast",
    Decorated: "it is decorated",
    Dropout: "it calls F.dropout",
    Helper: "it calls silu_of",
    SideEffect: r"it has 'print\(x.shape\)'",
    Detached: r"it calls x.detach",
    TwoInputs: "it takes more than one input",
    Swapped: r"but down_proj\(mul\(gate_proj\(x\), silu\(up_proj\(x\)\)\)\)",
    Calls: "a forward of its own",
}


@pytest.mark.parametrize("cls", NOT_THE_FORMULA)
def test_what_is_not_the_formula_is_left_and_reported(cls):
    model, plain, x = nn.Sequential(cls()), nn.Sequential(cls()), normal(5, 32)
    report = convert(model, "rowwise", fuse=True)
    convert(plain, "rowwise")
    assert not report.fused
    pattern = NOT_THE_FORMULA[cls]
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(report.not_fused["0"])
    for training in (False, True):
        outs = []
        for each in (model, plain):
            torch.manual_seed(1)
            outs.append(each.train(training)(x))
        assert_bitwise_equal(*outs)


def test_what_is_the_formula():
    assert list(convert(nn.Sequential(Plain()), "rowwise", fuse=True).fused) == ["0"]


def test_a_forward_whose_source_is_not_its_own_is_left():
    names = {"torch": torch, "nn": nn, "F": F, "Base": Base}
    exec("class Written(Base):\n    def forward(self, x):\n        return x", names)
    assert "source is not available" in convert(nn.Sequential(names["Written"]()), "rowwise", fuse=True).not_fused["0"]

    def enclosing(act):
        class Closed(Base):
            def forward(self, x):
                return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

        return Closed()

    assert "closes over names" in convert(nn.Sequential(enclosing(F.silu)), "rowwise", fuse=True).not_fused["0"]

    class Edited(Base):
        def forward(self, x):
            return self.gate_proj(x)

    # As if the file had been edited since it was imported.
    Edited.forward.__code__ = Edited.forward.__code__.replace(co_firstlineno=Plain.forward.__code__.co_firstlineno)
    with pytest.raises(formula.NoFormulaError, match="not what was compiled"):
        formula.read_formula(Edited())


def test_a_function_that_was_given_the_names_of_transformers_is_not_theirs():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Norm(LlamaRMSNorm):
        @functools.wraps(LlamaRMSNorm.forward)
        def forward(self, x):
            return 2 * super().forward(x)

    assert match._norm_kind(LlamaRMSNorm) is match.TRANSFORMERS_NORM
    assert match._norm_kind(Norm) is None
