"""Operators with their own syntax in generated code keep their meaning."""

import re

import pytest
import torch
import torch.nn.functional as F

from nnx_nnscaler.codegen.spelling import CUSTOM, FUNCTIONS, INFIX, METHODS, PREFIX, spell
from nnx_nnscaler.codegen.writer import OpWriter
from nnx_nnscaler.ir.graph import Code, Ref

DRAWN = torch.Generator().manual_seed(3)


def drawn(*shape):
    return torch.rand(*shape, generator=DRAWN, dtype=torch.float64) + 0.1


VALUES = {
    "x": drawn(4, 6),
    "y": drawn(4, 6),
    "z": drawn(6, 3),
    "v": drawn(6),
    "s": drawn(4, 3),
    "b": drawn(2, 4, 6),
    "d": drawn(2, 6, 3),
    "img": drawn(2, 4, 6, 6),
    "seq": drawn(2, 4, 6),
    "vol": drawn(2, 4, 3, 3, 3),
    "heads": drawn(2, 2, 3, 4),
    "i": torch.tensor([[0, 2], [1, 1]]),
    "labels": torch.tensor([0, 2, 1, 0]),
    "mask": torch.tensor([True, False, True, True, False, True]),
    "n": torch.arange(24).view(4, 6),
    "k1": drawn(8, 4, 3),
    "k2": drawn(8, 4, 3, 3),
    "k3": drawn(8, 4, 2, 2, 2),
    "kt": drawn(4, 8, 3),
    "c4": drawn(4),
    "c3": drawn(3),
    "one": drawn(1, 6),
}
T = {name: Ref(name) for name in VALUES}
LETTERS = ("x", "y", "z", "v", "s", "b", "d", "img", "seq", "vol", "i", "n")
x, y, z, v, s, b, d, img, seq, vol, i, n = (T[name] for name in LETTERS)
mask, labels, heads, one = T["mask"], T["labels"], T["heads"], T["one"]
f32 = Code("torch.float32")
BIG = 2**63 - 1

SAMPLES = {
    "aten.add.Scalar": [(x, 2)],
    "aten.sub.Scalar": [(x, 2)],
    "aten.mul.Scalar": [(x, 2.5)],
    "aten.div.Scalar": [(x, -2)],
    "aten.mul.Tensor": [(x, y), (x, -0.5), (n, 3)],
    "aten.div.Tensor": [(x, y), (n, 2)],
    "aten.pow.Tensor_Scalar": [(x, 2), (x, -0.5)],
    "aten.pow.Scalar": [(2, x), (-2.0, n)],
    "aten.matmul.default": [(x, z), (b, z)],
    **{f"aten.{name}.Scalar": [(x, 0.5)] for name in ["eq", "ne", "lt", "le", "gt", "ge"]},
    **{f"aten.{name}.Tensor": [(n, n)] for name in ["bitwise_and", "bitwise_or", "__and__", "__or__"]},
    "aten.bitwise_not.default": [(n,), (mask,)],
    "aten.view.default": [(x, [2, 12]), (x, [-1])],
    "aten.reshape.default": [(x, [3, 8])],
    "aten.transpose.int": [(x, 0, 1)],
    "aten.permute.default": [(b, [2, 0, 1])],
    "aten.expand.default": [(one, [5, 6]), (one, [5, -1])],
    "aten.unsqueeze.default": [(x, 1)],
    "aten.squeeze.default": [(one,)],
    "aten.squeeze.dim": [(one, 0)],
    "aten.squeeze.dims": [(one, [0])],
    "aten.flatten.using_ints": [(b, 0, 1), (b, 1), (b,)],
    "aten.unflatten.int": [(x, 1, [2, 3])],
    "aten.t.default": [(x,)],
    "aten.masked_fill.Scalar": [(x, mask, float("-inf"))],
    "aten.masked_fill.Tensor": [(x, mask, Code("torch.tensor(2.0, dtype=torch.float64)"))],
    "aten.split.Tensor": [(x, 2, 1), (x, 3)],
    "aten.split.sizes": [(x, [1, 5], 1)],
    "aten.split_with_sizes.default": [(x, [1, 5], 1)],
    "aten.chunk.default": [(x, 2), (x, 3, 1)],
    "aten.narrow.default": [(x, 1, 2, 3)],
    "aten.repeat.default": [(x, [2, 1])],
    "aten.unbind.int": [(x, 1), (x,)],
    "aten.sum.default": [(x,), ((x,), {"dtype": f32})],
    "aten.sum.dim_IntList": [(x, [1], True), ((x, [0]), {"dtype": f32})],
    "aten.mean.dim": [(x, [1], True), ((x, [-1]), {})],
    "aten.amax.default": [(x, [1], True)],
    "aten.amin.default": [(x, [1])],
    "aten.cumsum.default": [(x, 1)],
    "aten.var.correction": [((x, [1]), {"correction": 0, "keepdim": True})],
    "aten.std.correction": [((x, [1]), {"correction": 1})],
    "aten.argmax.default": [(x, 1), (x,)],
    "aten.argmin.default": [(x, 1, True)],
    "aten.all.dim": [(mask, 0)],
    "aten.any.dim": [(mask, 0, True)],
    "aten.all.default": [(mask,)],
    "aten.any.default": [(mask,)],
    "aten.tril.default": [(x, 1)],
    "aten.triu.default": [(x,)],
    "aten.gather.default": [(x, 1, i)],
    "aten.index_select.default": [(x, 1, Code("i[0]"))],
    "aten.type_as.default": [(x, n)],
    "aten.expand_as.default": [(one, x)],
    "aten.clamp.default": [(x, 0.2, 0.8), ((x,), {"max": 0.5})],
    "aten.clamp_min.default": [(x, 0.5)],
    "aten.roll.default": [(x, [1], [0])],
    "aten.flip.default": [(x, [0, 1])],
    "aten.add_.Tensor": [(x, y), (n, 1)],
    "aten.mul_.Tensor": [(x, y)],
    "aten.copy_.default": [(x, y)],
    "aten.max.dim": [(x, 1, True)],
    "aten.min.dim": [(x, 1)],
    "aten.topk.default": [(x, 2), (x, 2, 0)],
    "aten.sort.default": [(x, 1, True)],
    "aten.to.dtype": [(x, f32), (n, Code("torch.float64"))],
    "aten.to.dtype_layout": [
        ((x,), {"dtype": f32, "layout": Code("torch.strided"), "device": Code('"cpu"')})
    ],
    "aten.movedim.int": [(b, 0, 2)],
    "aten.new_zeros.default": [((x, [2, 3]), {"dtype": f32, "pin_memory": False}), (x, [2])],
    "aten.new_ones.default": [(x, [2, 3])],
    "aten.logical_not.default": [(mask,)],
    "aten.logical_and.default": [(mask, mask)],
    "aten.logical_or.default": [(mask, mask)],
    "aten.softmax.int": [(x, 1), (x, -1, f32)],
    "aten.log_softmax.int": [(x, 1), (x, 0, f32)],
    "aten.logsumexp.default": [(x, [1], True)],
    "aten.cat.default": [([x, y],), ([x, y], 1)],
    "aten.stack.default": [([x, y], 1)],
    "aten.where.self": [(mask, x, y)],
    "aten.where.ScalarOther": [(mask, x, 0.0)],
    "aten.where.ScalarSelf": [(mask, 0.0, x)],
    "aten.where.Scalar": [(mask, 1.0, 0.0)],
    "aten.bmm.default": [(b, d)],
    "aten.mm.default": [(x, z)],
    "aten.addmm.default": [(T["c3"], x, z), ((T["c3"], x, z), {"beta": 2, "alpha": 3})],
    "aten.baddbmm.default": [((Code("torch.ones(2, 4, 3, dtype=torch.float64)"), b, d), {"alpha": 2})],
    "aten.outer.default": [(v, v)],
    "aten.einsum.default": [("ij,jk->ik", [x, z])],
    "aten.arange.default": [((7,), {"device": Code('torch.device("cpu")'), "pin_memory": False})],
    "aten.arange.start": [(2, 7), ((2, 7), {"dtype": f32})],
    "aten.arange.start_step": [(2, 9, 3)],
    "aten.full.default": [([2, 3], 1.5), (([2, 3], float("inf")), {"dtype": f32})],
    "aten.zeros.default": [([2, 3],)],
    "aten.ones.default": [([2, 3],)],
    "aten.empty.memory_format": [([0, 3],)],
    "aten.full_like.default": [(x, 3)],
    "aten.rand.default": [([2, 3],)],
    "aten.randn.default": [([2, 3],)],
    "aten.eye.default": [(3,)],
    "aten.linspace.default": [(0, 1, 5)],
    "aten.bernoulli.default": [(Code("x.clamp(max=1)"),)],
    "aten.group_norm.default": [(img, 2, T["c4"], T["c4"], 1e-5, False)],
    "aten.batch_norm.default": [
        (img, T["c4"], T["c4"], T["c4"], T["c4"], False, 0.1, 1e-5, False),
        (img, None, None, None, None, True, 0.1, 1e-5, False),
    ],
    "aten.nan_to_num.default": [(x, 0.0)],
    "aten.polar.default": [(x, y)],
    "aten.rsub.Scalar": [(x, 1)],
    "aten.lerp.Scalar": [(x, y, 0.3)],
    "aten.lerp.Tensor": [(x, y, y)],
    "aten.dot.default": [(v, v)],
    "aten.mv.default": [(x, v)],
    "aten.conv1d.default": [(seq, T["k1"], None, [1], [1]), (seq, T["k1"])],
    "aten.conv2d.default": [(img, T["k2"], None, [2, 2], [1, 1], [1, 1], 1)],
    "aten.conv3d.default": [(vol, T["k3"])],
    "aten.conv_transpose1d.default": [(seq, T["kt"], None, [2], [1], [1])],
    "aten.linear.default": [(x, Code("z.t()"), T["c3"]), (x, Code("z.t()"))],
    "aten.gelu.default": [(x,), ((x,), {"approximate": "tanh"})],
    "aten.elu.default": [(Code("x - 0.5"), 2.0)],
    "aten.leaky_relu.default": [(Code("x - 0.5"), 0.2)],
    "aten.softplus.default": [(x, 2)],
    "aten.hardtanh.default": [(x, -0.5, 0.5)],
    "aten.glu.default": [(x, 1)],
    "aten.dropout.default": [(x, 0.5, True), (x, 0.5, False)],
    "aten.scaled_dot_product_attention.default": [
        (heads, heads, heads, None, 0.0, True),
        ((heads, heads, heads), {"scale": 0.3}),
        (heads, heads, heads, None, 0.25),
    ],
    "aten.rms_norm.default": [(x, [6], v, 1e-6), (x, [6])],
    "aten.avg_pool2d.default": [(img, [2, 2]), (img, [3, 3], [2, 2], [1, 1], False, False)],
    "aten.max_pool2d.default": [(img, [3, 3], [2, 2], [1, 1])],
    "aten.max_pool1d.default": [(seq, [2], [2])],
    "aten.avg_pool1d.default": [(seq, [2], [2])],
    "aten.adaptive_avg_pool2d.default": [(img, [2, 3])],
    "aten.adaptive_avg_pool1d.default": [(seq, [2])],
    "aten.one_hot.default": [(i, 3)],
    "aten.prelu.default": [(Code("img - 0.5"), T["c4"])],
    "aten.pixel_shuffle.default": [(img, 2)],
    "aten.cosine_similarity.default": [(x, y, 1, 1e-6)],
    "aten.diagonal.default": [(x, 1), (b, 0, 1, 2)],
    "aten.embedding.default": [(x, i), (x, i, 1), (x, i, -1, False, False), (x, i, 1, True)],
    "aten.layer_norm.default": [(x, [6], v, v, 1e-5, False), (x, [6])],
    "aten.cross_entropy_loss.default": [
        (s, labels),
        (s, labels, None, 2),
        (s, labels, T["c3"], 0, 0),
        (s, labels, None, 1, -100, 0.1),
    ],
    "aten.mse_loss.default": [(x, y), (x, y, 2), (x, y, 0)],
    "aten.l1_loss.default": [(x, y), (x, y, 2)],
    "aten.slice.Tensor": [
        (x, 1, 2, 5),
        (x, 0, 1, BIG),
        (x, 1, 0, BIG, 2),
        (b, 2, -3, None),
        (x, -1, 1, 3),
        (x,),
        (x, 1, 0, 3),
    ],
    "aten.select.int": [(x, 0, 2), (b, 2, -1), (b, -1, 0)],
    "aten.index.Tensor": [(x, [labels]), (x, [None, labels]), (x, [labels, labels])],
}
BINARY = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "pow", "maximum", "minimum")
BINARY += ("atan2", "view_as", "rsub")
ALL = sorted({*INFIX, *PREFIX, *METHODS, *FUNCTIONS, *CUSTOM})


def samples(target):
    if target in SAMPLES:
        return SAMPLES[target]
    return [(x, y)] if target.split(".")[1] in BINARY else [(x,)]


def parts(sample):
    return sample if len(sample) == 2 and isinstance(sample[1], dict) else (sample, {})


def run(code):
    torch.manual_seed(5)
    space = {"torch": torch, "F": F} | {name: tensor.clone() for name, tensor in VALUES.items()}
    return eval(code, space)


def flat(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize("target", ALL)
def test_a_spelling_computes_what_the_operator_computes(target):
    writer = OpWriter(2, {name: name for name in VALUES}, {})
    for sample in samples(target):
        args, kwargs = parts(sample)
        code = spell(target, args, kwargs, writer.value)
        listed = [*map(writer.value, args), *(f"{key}={writer.value(item)}" for key, item in kwargs.items())]
        expected, found = run(f"torch.ops.{target}({', '.join(listed)})"), run(code)
        for one_result, other in zip(flat(expected), flat(found), strict=True):
            assert other.dtype == one_result.dtype and other.shape == one_result.shape, code
            assert torch.equal(other, one_result), code


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "code"),
    [
        ("aten.add.Tensor", (x, y), {}, "x + y"),
        ("aten.add.Tensor", (x, y), {"alpha": 1}, "x + y"),
        ("aten.add.Tensor", (x, y), {"alpha": 2}, "torch.ops.aten.add.Tensor(x, y, alpha=2)"),
        ("aten.mul.Tensor", (x, -1), {}, "x * (-1)"),
        ("aten.linear.default", (x, z, v), {}, "F.linear(x, z, v)"),
        ("aten.embedding.default", (z, i), {}, "F.embedding(i, z)"),
        ("aten.slice.Tensor", (b, 1, 2, BIG), {}, "b[:, 2:]"),
        ("aten.split.Tensor", (x, 2, 1), {}, "x.split(2, 1)"),
        ("aten.softmax.int", (x, -1), {}, "torch.softmax(x, -1)"),
        ("aten.masked_fill.Scalar", (x, mask, float("-inf")), {}, 'x.masked_fill(mask, float("-inf"))'),
        ("aten.cumprod.default", (x, 1), {}, "torch.ops.aten.cumprod.default(x, 1)"),
        ("mylib.twist.default", (x,), {"by": 2}, "torch.ops.mylib.twist.default(x, by=2)"),
    ],
)
def test_operators_look_as_a_person_would_write_them(target, args, kwargs, code):
    assert spell(target, args, kwargs, OpWriter(2, {name: name for name in VALUES}, {}).value) == code


def test_most_operators_of_a_model_need_no_full_name():
    spelled = [spell(target, *parts(samples(target)[0]), OpWriter(2, {n: n for n in VALUES}, {}).value)
               for target in ALL if samples(target)]  # fmt: skip
    assert not [code for code in spelled if re.match(r"torch\.ops\.", code)]
