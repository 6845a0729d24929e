"""Models of transformers with random weights: labels, padding masks, caches, other batch sizes."""

import pytest
import torch

from jobs.nnscaler_interpreter import check_graph, run_graph
from nnx_nnscaler.ir.graph import Make
from nnx_nnscaler.trace import trace_forward

transformers = pytest.importorskip("transformers")

LENGTH, WORDS = 8, 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def gpt2(layers=1):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=layers, n_head=2, n_positions=LENGTH)
    )


def llama(layers=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, num_attention_heads=4, num_key_value_heads=2, **sizes)
    )


def bert(layers=1):
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def t5(layers=1):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": layers, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


def vit(layers=1):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=5, **sizes))


def words(size):
    mask = torch.ones(size, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    ids = torch.randint(1, WORDS, (size, LENGTH))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def images(size):
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, 5, (size,))}


CASES = {
    "gpt2": (gpt2, words),
    "llama": (llama, words),
    "bert": (bert, words),
    "t5": (t5, words),
    "vit": (vit, images),
}


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_equals_its_model(name, mode):
    make, sample = CASES[name]
    module = make().train(mode == "train")
    extra = {"use_cache": False} if name in ("gpt2", "llama", "t5") else {}
    graph = trace_forward(module, (), {**sample(4), **extra})
    assert (graph.kept, graph.guards, graph.notes) == ({}, (), ())
    assert isinstance(graph.outputs, Make)
    for size in (4, 3):
        check_graph(graph, module, (), {**sample(size), **extra})


@pytest.mark.full
def test_a_cache_that_training_does_not_read_is_left_out_and_one_in_eval_is_made():
    module = gpt2()
    graph = trace_forward(module, (), words(4))
    assert graph.outputs.fields["past_key_values"] is None
    assert graph.notes == (
        "the forward returns a DynamicCache, which training does not read: left out (pass use_cache=False)",
    )
    module.eval()
    graph = trace_forward(module, (), words(4))
    sample = words(3)
    result, expected = run_graph(graph, module, (), sample), module(**sample)
    assert type(result.past_key_values) is type(expected.past_key_values)
    for mine, its in zip(result.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, its.keys)
        torch.testing.assert_close(mine.values, its.values)


@pytest.mark.full
def test_hidden_states_that_hooks_of_transformers_collect_are_traced():
    module = llama()
    sample = {**words(4), "use_cache": False, "output_hidden_states": True}
    module(**sample)  # its hooks are there from the first call on
    graph = trace_forward(module, (), sample)
    assert graph.kept == {}
    check_graph(graph, module, (), sample)


def test_checkpointed_layers_of_transformers_stay_whole():
    module = llama(layers=2)
    module.gradient_checkpointing_enable()
    sample = {**words(4), "use_cache": False}
    graph = trace_forward(module, (), sample)
    # The hook on the embedding lets gradients into the layers where it is frozen.
    assert list(graph.kept) == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    check_graph(graph, module, (), sample)
