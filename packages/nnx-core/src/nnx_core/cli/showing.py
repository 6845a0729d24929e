"""``nnx show NAME``: everything that is declared about one strategy, without importing its engine."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import formatannotation
from typing import Any

from nnx_checkpoint.cli.output import print_error, print_json, print_pairs, print_table, print_text
from nnx_core.catalog import historical, known
from nnx_core.cli.entries import catalogued, past, usable
from nnx_core.errors import PluginError
from nnx_core.options import CommonOptions
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import LIGHTNING_NAMES, Capabilities, StrategySpec, import_reference, name_remarks

__all__ = ["options_of", "run"]


def run(name: str, *, as_json: bool) -> int:
    """Print one strategy; 1 where its plugin is broken, 2 where nothing is known of the name."""
    if name in StrategyRegistry:
        return _show_installed(StrategyRegistry.get(name), as_json=as_json)
    if name in LIGHTNING_NAMES and name not in historical():
        return _show_facts({"name": name, "status": "installed", "provided_by": "Lightning itself"}, as_json)
    error = StrategyRegistry.explain(name)
    if name not in historical() and name not in known():
        print_error(error)
        return 2
    facts = past(name) if name in historical() else catalogued(name)
    _show_facts({**facts, "explanation": error.message, "remedy": error.remedy}, as_json)
    return 1 if facts["status"] in ("broken", "missing") else 0


def options_of(spec: StrategySpec) -> list[dict[str, str]]:
    """The options of a strategy, from dataclasses whose modules do not import torch.

    Raises:
        PluginError: The options are declared, but cannot be imported or are no dataclass.
    """
    if not spec.options:
        return []
    schema = import_reference(spec.options, what=f"the options of strategy {spec.name!r}")
    if not is_dataclass(schema):
        raise PluginError(
            f"strategy {spec.name!r} declares options={spec.options!r}, which is not a dataclass.",
            remedy="Report this to the authors of the plugin.",
        )
    own = [_option(item, spec) for item in fields(schema)]
    names = {option["name"] for option in own}
    return own + [_option(item, spec) for item in fields(CommonOptions) if item.name not in names]


def _show_installed(spec: StrategySpec, *, as_json: bool) -> int:
    options, remarks = options_of(spec), name_remarks(spec.name)
    if as_json:
        print_json({**usable(spec.name), "options": options, "remarks": remarks})
        return 0
    print_pairs(
        [
            ("name", spec.name),
            ("description", spec.description),
            ("use when", spec.use_when),
            ("provided by", StrategyRegistry.owner(spec.name)),
            ("target", spec.reference),
            ("docs", spec.docs_url),
            *(("remark", remark) for remark in remarks),
            ("check it", f"nnx conformance {spec.name}"),
        ]
    )
    print_text("")
    capabilities = spec.capabilities.as_dict()
    rows = [[item.name, _words(capabilities[item.name]), _help(item)] for item in fields(Capabilities)]
    print_table(("capability", "value", "meaning"), rows)
    if options:
        print_text("")
        print_table(("option", "type", "default", "meaning"), [list(option.values()) for option in options])
    return 0


def _show_facts(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print_json(facts)
        return 0
    # The explanation and the remedy say these in sentences.
    repeated = ("install", "how", "was", "successor") if "remedy" in facts else ()
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    print_pairs([(name.replace("_", " "), value) for name, value in shown.items() if name not in repeated])
    return 0


def _option(item: Field[Any], spec: StrategySpec) -> dict[str, str]:
    choices = item.metadata.get("choices", ())
    return {
        "name": item.name,
        "type": " | ".join(map(repr, choices)) if choices else _type(item),
        "default": _default(item, spec),
        "help": _help(item),
    }


def _type(item: Field[Any]) -> str:
    return item.type if isinstance(item.type, str) else formatannotation(item.type)


def _default(item: Field[Any], spec: StrategySpec) -> str:
    if item.name in spec.init_params:
        return repr(spec.init_params[item.name])
    if item.default is not MISSING:
        return repr(item.default)
    return repr(item.default_factory()) if item.default_factory is not MISSING else "required"


def _help(item: Field[Any]) -> str:
    return str(item.metadata.get("help", ""))


def _words(value: bool | list[str]) -> str:
    return ", ".join(value) if isinstance(value, list) else "yes" if value else "no"
