"""Gemma 3n of transformers, served with the embeddings of its layers in a table: what it generates is the same."""

import copy

import pytest
import torch
from torch import nn

import speedtransfer as st

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make projects")
if not hasattr(transformers, "Gemma3nTextConfig"):
    pytest.skip("this version of transformers has no Gemma 3n", allow_module_level=True)

pytestmark = pytest.mark.slow

LAYERS, VOCABULARY = 4, 97


def gemma(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=16,
        hidden_size_per_layer_input=4,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        activation_sparsity_pattern=[0.0] * LAYERS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Gemma3nForCausalLM(config).eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", ["auto", "pageable"])
def test_the_embeddings_of_the_layers_in_a_table(dtype, memory):
    model = gemma(dtype)
    dense = copy.deepcopy(model)
    report = st.replace_embeddings(model, min_rows=0, names="*embed_tokens_per_layer", memory=memory)
    assert report == ["model.embed_tokens_per_layer"]
    assert not report.notes
    ids = torch.randint(3, VOCABULARY, (3, 5))
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, dense(input_ids=ids).logits)
        for batch in (ids[:1], ids):
            found, expected = (m.generate(batch, max_new_tokens=6, do_sample=False) for m in (model, dense))
            assert torch.equal(found, expected)


def test_with_the_tied_head():
    model = gemma(torch.float32)
    dense = copy.deepcopy(model)
    report = st.replace_embeddings(model, min_rows=0)
    assert sorted(report) == ["model.embed_tokens", "model.embed_tokens_per_layer"]
    assert "'lm_head'" in report.notes["model.embed_tokens"]
    ids = torch.randint(3, VOCABULARY, (2, 5))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, dense(input_ids=ids).logits)
