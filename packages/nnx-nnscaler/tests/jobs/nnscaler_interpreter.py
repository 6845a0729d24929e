"""An interpreter that runs a traced graph operator by operator on unsharded tensors, without plan or code."""

import contextlib
import sys
from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree

from nnx_nnscaler.ir.graph import Code, Make, Ref, Size


def run_graph(graph, module, args=(), kwargs=None):
    """The outputs of a graph for these arguments, with the parameters and buffers of a module."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs or {})), is_leaf=lambda leaf: leaf is None)
    values = dict(zip((leaf.name for leaf in graph.inputs), leaves, strict=True))
    symbols = {name: values[source].shape[dim] for name, (source, dim) in graph.symbols.items()}
    for guard in graph.guards:
        assert eval(guard, {}, symbols), guard
    check_inputs(graph, values, symbols)
    values |= {name: module.get_parameter(fqn) for name, fqn in graph.parameters.items()}
    values |= {name: module.get_buffer(fqn) for name, fqn in graph.buffers.items()}
    values |= graph.constants
    scope = {"torch": torch, "rt": SimpleNamespace(device=torch.device("cpu"))}

    def value(argument):
        if isinstance(argument, Ref):
            return values[argument.name]
        if isinstance(argument, Size):
            return eval(argument.expr, {"__builtins__": {}}, symbols)
        if isinstance(argument, Code):
            return eval(argument.text, scope)
        if isinstance(argument, Make):
            where, _, name = argument.type.partition(":")
            return getattr(sys.modules[where], name)(**value(argument.fields))
        if isinstance(argument, (list, tuple)):
            return type(argument)(value(item) for item in argument)
        if isinstance(argument, dict):
            return {key: value(item) for key, item in argument.items()}
        return argument

    for op in graph.ops:
        given, named = value(op.args), value(op.kwargs)
        with eval(op.context, scope) if op.context else contextlib.nullcontext():
            values[op.name] = call(op, module, given, named)
        check_output(op, values[op.name], symbols)
    return value(graph.outputs)


def call(op, module, args, kwargs):
    if op.target == "getitem":
        return args[0][args[1]]
    if op.target == "module":
        return module.get_submodule(op.module)(*args, **kwargs)
    namespace, name, overload = op.target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)


def check_inputs(graph, values, symbols):
    for leaf in graph.inputs:
        if leaf.meta is None:
            assert values[leaf.name] == leaf.constant
        else:
            assert shape_of(leaf.meta, symbols) == tuple(values[leaf.name].shape), leaf.name


def check_output(op, made, symbols):
    """Check a result's shape and dtype against the graph."""
    metas = op.output if isinstance(op.output, tuple) else (op.output,)
    results = list(made.values()) if isinstance(made, dict) else made
    results = [results] if isinstance(results, torch.Tensor) else results
    for meta, result in zip(metas, results or (), strict=False):
        if meta is not None:
            assert shape_of(meta, symbols) == tuple(result.shape), op
            assert f"torch.{meta.dtype}" == str(result.dtype) or torch.is_autocast_enabled("cpu"), op
            if result.requires_grad:
                assert meta.differentiable, op


def shape_of(meta, symbols):
    return tuple(eval(str(dim.expr), {}, symbols) if isinstance(dim, Size) else dim for dim in meta.shape)


def check_graph(graph, module, args=(), kwargs=None, *, exact=False):
    """The graph equals the module: outputs, gradients, buffers and the random state after it."""
    kwargs = kwargs or {}
    before = [buffer.clone() for buffer in module.buffers()]
    runs = []
    for run in (lambda: module(*args, **kwargs), lambda: run_graph(graph, module, args, kwargs)):
        for buffer, content in zip(module.buffers(), before, strict=True):
            buffer.copy_(content)
        module.zero_grad()
        torch.manual_seed(7)
        result = run()
        tensors = tensors_in(result)
        losses = [t.double().square().sum() for t in tensors if t.requires_grad]
        if losses:
            sum(losses).backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        buffers = [buffer.clone() for buffer in module.buffers()]
        runs.append((result, tensors, gradients, buffers, torch.get_rng_state()))
    (first, tensors, gradients, buffers, state), (other, others, its, its_buffers, its_state) = runs
    assert type(first) is type(other)
    assert pytree.tree_structure(first) == pytree.tree_structure(other)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(others, tensors, **close)
    assert [t.requires_grad for t in tensors] == [t.requires_grad for t in others]
    assert gradients.keys() == its.keys()
    torch.testing.assert_close(its, gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(its_buffers, buffers)
    assert torch.equal(state, its_state)
    return other


def tensors_in(value):
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += tensors_in(vars(leaf))
    return found
