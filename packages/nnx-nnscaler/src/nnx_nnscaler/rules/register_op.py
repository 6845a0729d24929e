"""`register_op`: make a user's function, or an existing operator, one operator with an annotation."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Optional, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from nnx_core._torch_compat import FakeTensor, pytree
from nnx_nnscaler._torch_compat import OpOverload, OpOverloadPacket
from nnx_nnscaler.rules.annotated_rule import AnnotatedRule, arguments_of
from nnx_nnscaler.rules.annotation_grammar import Annotation, AnnotationError
from nnx_nnscaler.rules.registry import register_rule
from nnx_nnscaler.rules.rule import operator_of

_NAMESPACE = "nnx_user"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_defined_names: set[str] = set()
_OPTIONAL_TENSOR = Optional[Tensor]  # noqa: UP045 # torch infers schemas from this spelling only
_Registered = TypeVar("_Registered")


def register_op(
    annotation: str, *, fake: Callable[..., Any] | None = None
) -> Callable[[_Registered], _Registered]:
    """Annotate how a function of yours, or an existing operator, can be split over ranks.

    A decorated function becomes one operator of traced models, so its body may be untraceable. Its gradient
    is its body's, and its attribute `operator` is the torch operator. Arguments that are no tensors need a
    type annotation or a default. The function must return new tensors and not change its operands. ::

        @register_op("n c h^ w^, c, c -> n c h^ w^")
        def scaled(x, scale, shift, eps: float = 1e-5): ...

    An existing operator is given by its name, or as `torch.ops` or `torch.library.custom_op` return it::

        register_op("b n, n -> b n")("mylib::gate")

    An annotation lists the operands, ``->``, and the results. Each is a list of dims, separated by blanks:

    ===========  ==========================================================================================
    ``name``     a dim. The same name has the same size everywhere. Each name that has no mark can be split:
                 ranks compute parts of the result from parts of the operands that have the name. Names of
                 operands are in every result, then.
    ``name^``    a dim that must not be split.
    ``name+``    a dim that is summed over, in no result: parts of it give summands of the results.
    ``(a b)``    one dim composed of several, of which the last one varies fastest. Their sizes follow from
                 other operands, or from the argument of the same name, which is given as its part where
                 the name is split.
    ``*``        any number of dims, the same number everywhere; also written ``...``. ``*^`` cannot be split.
    ``8``        a dim of that size, which is not split. ``1`` alone is also a tensor without dims.
    ``?``        an argument that is no tensor. What follows the last one listed need not be listed.
    ===========  ==========================================================================================

    A mark holds for its name everywhere. The annotation is tried on random data when the operator is planned
    for the first time. An annotation with other results or gradients than the unsharded operator is refused.

    Args:
        annotation: The annotation.
        fake: A function from meta tensors to results of the right shape, for a body that reads values.

    Raises:
        AnnotationError: The annotation cannot be read, or does not fit the function's arguments.

    Example:
        >>> @register_op("b k+, n k+ -> b n")
        ... def project(x, weight):
        ...     return x @ weight.T
        >>> project(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    parsed = Annotation.parse(annotation)

    def register(function: _Registered) -> _Registered:
        if inspect.isfunction(function):
            return cast(_Registered, _operator_from(function, parsed, fake))
        for target in _targets(function):
            _check_arguments(parsed, target)
            register_rule(target, AnnotatedRule(parsed))
        return function

    return register


def _operator_from(function: Any, annotation: Annotation, fake: Callable[..., Any] | None) -> Any:
    """Return the function as a new operator, which runs the function and differentiates through it."""
    schema = _schema(function, annotation)
    name = _new_name(function)

    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        if fake is not None and any(
            isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return fake(*args, **kwargs)
        return function(*args, **kwargs)

    _library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
    # A composite operator: a trace keeps it as one operator, and autograd differentiates its body.
    _library.impl(name, body, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    target = f"{_NAMESPACE}.{name}.default"
    register_rule(target, AnnotatedRule(annotation))
    operator = operator_of(target)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    call.operator = operator  # type: ignore[attr-defined]
    return call


def _new_name(function: Any) -> str:
    """Return a name that is the same on every rank; a second function of one name gets a number."""
    wish = re.sub(r"\W+", "_", f"{function.__module__}_{function.__qualname__}".replace("<locals>", ""))
    name, count = wish, 1
    while name in _defined_names:
        count += 1
        name = f"{wish}_{count}"
    _defined_names.add(name)
    return name


def _schema(function: Any, annotation: Annotation) -> str:
    """Return the operator's schema, from the function's signature and the annotated tensors."""
    signature = inspect.signature(function)
    hints = get_type_hints(function)
    parameters = []
    if len(annotation.operands) > len(signature.parameters):
        raise _arity(annotation, function.__qualname__, list(signature.parameters))
    listed = [*annotation.operands, *(None,) * (len(signature.parameters) - len(annotation.operands))]
    for dims, parameter in zip(listed, signature.parameters.values(), strict=True):
        kind = _kind(parameter, hints, annotation, function, is_tensor=dims is not None)
        parameters.append(parameter.replace(annotation=kind))
    results = len(annotation.results)
    made = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]

    def prototype() -> None:
        """Hold the signature."""

    prototype.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=made
    )
    try:
        return str(torch.library.infer_schema(prototype, mutates_args=()))
    except ValueError as error:
        raise AnnotationError(
            f"{function.__qualname__} cannot become an operator: {error}.",
            remedy="Give every argument a plain type: a tensor, int, float, bool, str, or a list of numbers.",
        ) from error


def _kind(
    parameter: inspect.Parameter,
    hints: dict[str, Any],
    annotation: Annotation,
    function: Any,
    *,
    is_tensor: bool,
) -> Any:
    """Return the type of one argument in the operator's schema."""
    if is_tensor:
        return _OPTIONAL_TENSOR if parameter.default is None else Tensor
    has_default = parameter.default not in (None, inspect.Parameter.empty)
    kind = hints.get(parameter.name, type(parameter.default) if has_default else None)
    if kind in (Tensor, _OPTIONAL_TENSOR):
        raise AnnotationError(
            f"annotation {annotation.text!r} has no dims for argument {parameter.name!r} of "
            f"{function.__qualname__}, a tensor.",
            remedy="List its dims.",
        )
    if kind is None:
        raise AnnotationError(
            f"argument {parameter.name!r} of {function.__qualname__} has no known type.",
            remedy=f"Annotate it in the function's signature, as in '{parameter.name}: int', or give it one.",
        )
    return kind


def _targets(given: Any) -> list[str]:
    """Return the names of the operators that a user named, one for each overload."""
    operator = given
    if isinstance(given, str):
        operator = torch.ops
        for part in given.replace("::", ".").split("."):
            operator = getattr(operator, part, None)
    operator = getattr(operator, "_opoverload", operator)  # the result of torch.library.custom_op
    if isinstance(operator, OpOverload):
        operators = [operator]
    elif isinstance(operator, OpOverloadPacket):
        operators = [getattr(operator, overload) for overload in _overloads(operator)]
    else:
        raise AnnotationError(
            f"{given!r} is neither a function nor a torch operator.",
            remedy="Give a function, a name such as 'mylib::gate', or what torch.ops or torch.library gives.",
        )
    return [f"{o.namespace}.{o._schema.name.partition('::')[2]}.{o._overloadname}" for o in operators]


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads())


def _check_arguments(annotation: Annotation, target: str) -> None:
    """Check that the annotation lists tensors where the operator's schema has them."""
    arguments = operator_of(target)._schema.arguments
    if len(annotation.operands) > len(arguments):
        raise _arity(annotation, target, arguments_of(target))
    for dims, argument in zip(annotation.operands, arguments, strict=False):
        if ("Tensor" in str(argument.type)) != (dims is not None):
            found = "a tensor" if dims is None else f"of type {argument.type}, no tensor"
            raise AnnotationError(
                f"annotation {annotation.text!r} does not fit {target}: argument {argument.name!r} "
                f"is {found}.",
                remedy="Write '?' for arguments that are no tensors, and dims for those that are.",
            )


def _arity(annotation: Annotation, what: str, names: list[str]) -> AnnotationError:
    return AnnotationError(
        f"annotation {annotation.text!r} lists {len(annotation.operands)} operands, but {what} takes "
        f"{len(names)}: {', '.join(names)}.",
        remedy="List one operand for each argument, in order; '?' for one that is no tensor.",
    )
