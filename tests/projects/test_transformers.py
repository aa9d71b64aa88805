"""Models of transformers as they are: tied and untied heads, resizing, saving, checkpointed activations."""

import copy

import pytest
import torch
from torch import nn

import speedtransfer as st
from projects.data import sequences
from projects.pairs import DENSE, WAYS, Outcome, assert_same, classes, compare, hand_over, in_both_ways

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make projects")

pytestmark = pytest.mark.slow

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}


def tokens():
    return torch.tensor(sequences(12)[0])


def made(way, kind, config):
    torch.manual_seed(0)
    with classes(way, "transformers"):
        model = kind(config)
    return hand_over(model, way)


def gpt2(way, tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    return made(way, GPT2LMHeadModel, GPT2Config(**SMALL, tie_word_embeddings=tied))


def bert(way):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=24, **sizes)
    return made(way, BertForSequenceClassification, config)


def train(model, steps=6):
    """Train as the course of transformers does; return the losses."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    ids, losses = tokens(), []
    torch.manual_seed(1)
    model.train()
    for step in range(steps):
        batch = ids[step % 3 :: 3]
        labels = batch if hasattr(model, "lm_head") else batch[:, -1] % 2
        loss = model(input_ids=batch, attention_mask=(batch != 0).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()[:8]).logits


def outcome(model, losses=None, **more):
    """Train the model, where it has no losses yet, and return what comes of it."""
    return Outcome({"losses": losses or train(model)}, {"logits": logits(model), **more}, model)


def gpt2_tied(way):
    model = gpt2(way, tied=True)
    losses = train(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.get_input_embeddings() is model.transformer.wte
    words = model.generate(tokens()[:4], max_new_tokens=6, do_sample=False, pad_token_id=0)
    return outcome(model, losses, words=words, count=[model.num_parameters()])


def gpt2_untied(way):
    model = gpt2(way, tied=False)
    return outcome(model, count=[model.num_parameters(exclude_embeddings=True)])


def bert_classifier(way):
    return outcome(bert(way))


def checkpointed(way):
    model = gpt2(way, tied=True)
    model.gradient_checkpointing_enable()
    return outcome(model)


def frozen(way):
    model = bert(way)
    model.get_input_embeddings().requires_grad_(False)
    return outcome(model)


def resized(way, tied, size):
    """Trained, resized (rows stay, new ones as transformers starts them), trained on."""
    model = gpt2(way, tied)
    losses = train(model, 3)
    before = model.get_input_embeddings().weight.detach().clone()
    torch.manual_seed(2)
    model.resize_token_embeddings(size)
    kept = min(size, VOCABULARY)
    assert model.get_input_embeddings().num_embeddings == size
    assert torch.equal(model.get_input_embeddings().weight[:kept].detach(), before[:kept])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    start = model.get_input_embeddings().weight.detach().clone()
    return outcome(model, losses + train(model, 3), start=start)


RUNS = {run.__name__: (run,) for run in (gpt2_tied, gpt2_untied, bert_classifier, checkpointed, frozen)}
RUNS |= {f"resized {size}, tied: {tied}": (resized, tied, size) for tied in (True, False) for size in (120, 91)}


@in_both_ways
@pytest.mark.parametrize("run", RUNS)
def test_transformers(run, way, double):
    compare(RUNS[run][0], way, double, *RUNS[run][1:])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("way", WAYS)
def test_saved_and_loaded(way, tied, tmp_path):
    from transformers import GPT2LMHeadModel

    models = {which: gpt2(which, tied) for which in (way, DENSE)}
    losses = {which: train(model) for which, model in models.items()}
    for which, model in models.items():
        model.save_pretrained(tmp_path / which)
    assert {path.name for path in (tmp_path / way).iterdir()} == {path.name for path in (tmp_path / DENSE).iterdir()}
    expected = Outcome({"losses": losses[DENSE]}, {"logits": logits(models[DENSE])}, models[DENSE])
    for loaded_as in (DENSE, way):
        with classes(loaded_as, "transformers"):
            model = GPT2LMHeadModel.from_pretrained(tmp_path / way)
        hand_over(model, loaded_as)
        assert (model.lm_head.weight is model.transformer.wte.weight) == tied
        ours = Outcome({"losses": losses[way]}, {"logits": logits(model)}, model)
        assert_same(ours, expected, None)
        if tied:
            assert "lm_head.weight" in model.state_dict()
        more = train(model, 2)
        fresh = GPT2LMHeadModel.from_pretrained(tmp_path / DENSE)
        assert_same(Outcome({"losses": more}, {}, model), Outcome({"losses": train(fresh, 2)}, {}, fresh), None)


# --- Gemma 3n, served with the embeddings of its layers in a table -------------------------------------------------------

LAYERS = 4
needs_gemma = pytest.mark.skipif(
    not hasattr(transformers, "Gemma3nTextConfig"), reason="this transformers has no Gemma 3n"
)


def gemma(dtype):
    torch.manual_seed(0)
    about = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    about |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, "sliding_window": 8}
    about |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_kv_shared_layers": 2}
    about |= {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * LAYERS}
    about |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    config = transformers.Gemma3nTextConfig(**about, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.Gemma3nForCausalLM(config).eval().to(dtype)
    # Zero in a new model, which looks up the embeddings of the layers for nothing.
    for layer in model.model.layers:
        nn.init.ones_(layer.altup.correct_output_scale)
    return model


@needs_gemma
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


@needs_gemma
def test_gemma_with_the_tied_head():
    model = gemma(torch.float32)
    dense = copy.deepcopy(model)
    report = st.replace_embeddings(model, min_rows=0)
    assert sorted(report) == ["model.embed_tokens", "model.embed_tokens_per_layer"]
    assert "'lm_head'" in report.notes["model.embed_tokens"]
    ids = torch.randint(3, VOCABULARY, (2, 5))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, dense(input_ids=ids).logits)
