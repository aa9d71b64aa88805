"""The example that trains a knowledge graph by PyKEEN: beside nn.Embedding, resumed, and its ranks beside PyKEEN's."""

import argparse
import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch

import speedtransfer as st
from projects.pairs import in_float64

pytestmark = pytest.mark.slow
pytest.importorskip("pykeen", reason="PyKEEN is not installed: make projects")
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
knowledge_graph = pytest.importorskip("knowledge_graph", reason="psutil is not installed: make projects")

ENTITIES = 1000


def settings(**given):
    options = {"entities": ENTITIES, "facts": 3000, "epochs": 4, "batch": 512, "optimizer": "Adam", "resume": False}
    return argparse.Namespace(**(options | given))


def trained(path, idle="lazy", **given):
    """The loss of each step, and the model; its checkpoint is beside the file."""
    options = settings(**given)
    facts, _ = knowledge_graph.make_facts(options.entities, options.facts)
    model, entities = knowledge_graph.make(facts, path, idle)
    assert (entities is None) is (path is None)
    assert entities is None or (entities.table.memory == "mmap" and entities.idle == idle)
    watch = knowledge_graph.train(model, facts, options, path and path.with_suffix(".checkpoint"))
    return torch.tensor(watch.losses), model


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(("optimizer", "idle"), [("Adam", "exact"), ("Adagrad", "lazy"), ("Adam", "lazy")])
def test_losses_are_those_of_a_dense_embedding(optimizer, idle, double, tmp_path):
    with in_float64() if double else contextlib.nullcontext():
        ours, model = trained(tmp_path / "entities.npy", idle, optimizer=optimizer)
        dense, other = trained(None, optimizer=optimizer)
    # Lazy Adam leaves rows that dense Adam goes on to move.
    tolerance = 2e-2 if (optimizer, idle) == ("Adam", "lazy") else 1e-12 if double else 1e-5
    torch.testing.assert_close(ours, dense, rtol=tolerance, atol=0)
    assert dense[-1] < dense[0]
    if tolerance < 1e-2:
        states = model.state_dict(), other.state_dict()
        for name, value in states[1].items():
            torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-9 if double else 1e-3)


def test_a_resumed_run_has_the_losses_of_a_whole_one(tmp_path):
    whole, model = trained(tmp_path / "whole.npy")
    first, _ = trained(tmp_path / "parts.npy", epochs=2)
    (tmp_path / "parts.npy").unlink()
    rest, other = trained(tmp_path / "parts.npy", resume=True)
    assert torch.equal(torch.cat([first, rest]), whole)
    states = model.state_dict(), other.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_ranks_are_those_of_pykeen(tmp_path):
    from pykeen.evaluation import RankBasedEvaluator

    facts, held_out = knowledge_graph.make_facts(ENTITIES, 3000)
    _, model = trained(tmp_path / "entities.npy", epochs=6)
    found = knowledge_graph.ranks(model, held_out, torch.cat([facts.mapped_triples, held_out]), width=77)
    given = {"additional_filter_triples": facts.mapped_triples, "batch_size": 16, "use_tqdm": False}
    results = RankBasedEvaluator().evaluate(model, held_out, **given)
    assert found.shape == (2 * len(held_out),)
    assert found.reciprocal().mean().item() == pytest.approx(results.get_metric("mrr"), rel=1e-5)
    assert (found <= 10).double().mean().item() == pytest.approx(results.get_metric("hits@10"))
    assert found.reciprocal().mean() > 0.02, "it has learned something"


def test_the_program(tmp_path, monkeypatch, capsys):
    def printed(*arguments):
        sizes = ["--entities", str(ENTITIES), "--facts", "2000", "--output", str(tmp_path / "graph")]
        monkeypatch.setattr(sys, "argv", ["knowledge_graph.py", *sizes, *arguments])
        knowledge_graph.main()
        return capsys.readouterr().out

    runs = printed("--compare")
    assert re.findall(r"^\w.*$", runs, re.MULTILINE) == [
        "nn.Embedding",
        "a table, idle='exact': 0 MB with the state of Adam",
        "a table, idle='lazy': 0 MB with the state of Adam",
    ]
    exact, _ = re.findall(r"a loss differs from that with nn.Embedding by (\S+) of it at most", runs)
    assert float(exact) < 1e-5
    losses = r"loss of each epoch (.*)"
    first = re.search(losses, printed())[1]
    with pytest.raises(st.errors.SpeedtransferError, match="exists and would be overwritten"):
        printed()
    rest = re.search(losses, printed("--resume", "--epochs", "2"))[1]
    assert first != rest
    assert re.search(r"MRR 0\.\d+, hits@10 [01]\.\d+, filtered: 200 questions with 1,000 answers", printed("--resume"))
