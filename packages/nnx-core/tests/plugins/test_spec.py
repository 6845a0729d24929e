import json
import pickle

import pytest

from nnx_core.errors import PluginError
from nnx_core.names.spec import (
    Capabilities,
    CheckpointFormatSpec,
    StrategySpec,
    import_reference,
    name_remarks,
)


@pytest.mark.parametrize("name", ["a", "fsdp_auto", "nnscaler_deduped", "x2"])
def test_lower_snake_case_names_are_accepted(name):
    assert StrategySpec(name, "a:B").name == name


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("MyStrategy", ", for example 'mystrategy'"),
        ("my-strategy", ", for example 'my_strategy'"),
        ("FSDP auto", ", for example 'fsdp_auto'"),
        ("2x", ""),
        ("_x", ", for example 'x'"),
        ("", ""),
        ("a\n", ", for example 'a'"),
        (None, ""),
    ],
)
def test_a_name_that_lightning_could_not_find_is_refused_with_a_better_one(name, example):
    with pytest.raises(PluginError) as caught:
        StrategySpec(name, "a:B")
    assert caught.value.message == (
        f"{name!r} is not a valid name: expected lower case letters, digits and underscores, "
        "beginning with a letter."
    )
    assert caught.value.remedy == f"Choose another name{example}."


@pytest.mark.parametrize("target", ["a.b", "a:", ":B", "a:B:C", "a b:C", "", 3, None])
def test_a_target_that_is_no_reference_is_refused(target):
    with pytest.raises(PluginError, match=r"'x' declares target=.*: expected 'pkg.module:Name'"):
        StrategySpec("x", target)


def test_options_that_are_no_reference_are_refused():
    with pytest.raises(PluginError, match="declares options='Options'"):
        StrategySpec("x", "a:B", options="Options")


@pytest.mark.parametrize("version", [(1,), (1, 0, 0), "1.0", 1, (1, "0"), [1, 0]])
def test_an_api_version_that_is_no_pair_is_refused(version):
    with pytest.raises(PluginError, match="expected two numbers"):
        StrategySpec("x", "a:B", api_version=version)
    with pytest.raises(PluginError, match="expected two numbers"):
        CheckpointFormatSpec("x", "a:B", api_version=version)


def test_capabilities_must_be_capabilities():
    with pytest.raises(PluginError, match=r"declares capabilities=\{'offload': True\}.*nnx.Capabilities"):
        StrategySpec("x", "a:B", capabilities={"offload": True})


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"accelerators": "cpu"}, "a tuple of strings"),
        ({"accelerators": ["cpu"]}, "a tuple of strings"),
        ({"precisions": (32,)}, "a tuple of strings"),
        ({"offload": "yes"}, "True or False"),
        ({"offload": 1}, "True or False"),
    ],
)
def test_a_capability_of_the_wrong_type_is_refused(values, wanted):
    with pytest.raises(PluginError, match=f"is not valid: expected {wanted}"):
        Capabilities(**values)


def test_a_spec_survives_json_and_pickle_and_keeps_its_own_parameters():
    parameters = {"size": 3, "callable": len}
    spec = StrategySpec("x", "a.b:C.D", init_params=parameters, capabilities=Capabilities(offload=True))
    parameters["size"] = 4
    assert spec.init_params["size"] == 3
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    plain = json.loads(json.dumps(spec.as_dict()))
    assert plain["capabilities"]["offload"] is True
    assert plain["init_params"] == {"size": 3, "callable": "<built-in function len>"}


def test_resolving_imports_the_target_and_nested_names():
    assert StrategySpec("x", "nnx_core.names.spec:StrategySpec.as_dict").resolve() is StrategySpec.as_dict
    assert StrategySpec("x", dict).resolve() is dict
    assert StrategySpec("x", dict).reference == "builtins:dict"


@pytest.mark.parametrize(
    ("reference", "detail"),
    [("not_there:X", "No module named 'not_there'"), ("nnx_core.names.spec:Nope", "has no attribute 'Nope'")],
)
def test_a_target_that_cannot_be_imported_is_named_with_its_reason(reference, detail):
    with pytest.raises(PluginError) as caught:
        StrategySpec("x", reference).resolve()
    assert f"strategy 'x' is declared as {reference!r}, which cannot be loaded" in caught.value.message
    assert detail in caught.value.message
    assert caught.value.remedy.startswith("Install the missing package")


def test_a_target_that_exits_is_named_too(site):
    site.module("exits_at_import", "raise SystemExit(4)")
    with pytest.raises(PluginError, match="SystemExit: 4"):
        import_reference("exits_at_import:X", what="it")


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("nnscaler", []),
        ("colossalai_cpu", []),
        ("nnx_deepspeed_1", ["refuses names that contain 'deepspeed'"]),
        ("my_ddp", ["refuses names that contain 'ddp'"]),
        ("fsdp_auto", ["Fabric refuses names that contain 'dp'"]),
        ("fsdp_offload", ["`fabric run` does not offer names that contain 'offload'", "contain 'dp'"]),
    ],
)
def test_what_lightnings_rules_on_names_will_do_is_described(name, fragments):
    remarks = name_remarks(name)
    assert len(remarks) == len(fragments)
    assert all(fragment in remark for fragment, remark in zip(fragments, remarks, strict=True))
