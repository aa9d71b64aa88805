"""Graphs out of text, and node2vec walks over them against the published probabilities."""

import io
import itertools
from collections import Counter

import numpy as np
import pytest
import scipy

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec import Corpus, Settings
from speedtransfer.word2vec import walks as walks_module
from speedtransfer.word2vec.tokenise import LINE_END
from speedtransfer.word2vec.walks import read_graph, write_walks

# A triangle with a tail, a hub, and a node with an edge to itself; weights far apart.
WEIGHTED = "a b 1\nb c 2.5\na c 0.5\nc d 4\nd e 1e-1\nc f\nf f 3\nf g 2\n"
PLAIN = "\n".join(" ".join(line.split()[:2]) for line in WEIGHTED.splitlines())


def graph_of(text, **kwargs):
    return read_graph(io.BytesIO(text.encode()), **kwargs)


def edges_of(graph):
    """Return {(name, name): weight}, as the arrays have it."""
    names = graph.nodes.take(np.arange(len(graph)))
    weights = np.ones(len(graph.neighbours)) if graph.weights is None else graph.weights
    return {
        (names[node], names[graph.neighbours[entry]]): weights[entry]
        for node in range(len(graph))
        for entry in range(graph.begins[node], graph.begins[node + 1])
    }


def both(*edges):
    return {pair: weight for a, b, weight in edges for pair in ((a, b), (b, a))}


def test_graphs_out_of_text():
    graph = graph_of("# a comment\n\na b\n% another\n  東京\tb 2.5\r\nc c\n")
    assert edges_of(graph) == both(("a", "b", 1), ("東京", "b", 2.5), ("c", "c", 1))
    assert (len(graph), graph.begins[-1]) == (4, 5)
    added = graph_of("a b 2\nb a 3\na b\nb c 5\nc c 1\nc c 1")  # weights of an edge that is named twice
    assert edges_of(added) == both(("a", "b", 6), ("b", "c", 5), ("c", "c", 2))
    assert graph_of("a b 2\nb c 2").weights is None  # all are equal
    graph = graph_of("a b c\nb a\nd\nc a c\n", adjacency=True)
    assert edges_of(graph) == both(("a", "b", 1), ("a", "c", 1), ("c", "c", 1))
    assert (len(graph), graph.weights) == (4, None)


def test_lines_are_counted_in_each_file_and_over_blocks(tmp_path):
    edge = f"{'a' * 50} {'b' * 50}\n"
    (tmp_path / "a.txt").write_text(edge * 15_000)
    (tmp_path / "b.txt").write_text(edge * 14_998 + "c\n")
    with pytest.raises(InvalidValueError, match=r"line 14999 of .*b\.txt' has 1 fields"):
        read_graph(tmp_path)


def walks_of(graph, **settings):
    parts = []
    write_walks(graph, Settings(kind="graph", **settings), parts.append)
    ids = np.concatenate(parts)
    walks = [walk.tolist() for walk in np.split(ids, np.flatnonzero(ids == LINE_END) + 1)]
    return [[node for node in walk if node != LINE_END] for walk in walks if len(walk) > 1]


def published(edges, before, here, p, q):
    """Return the distribution of the next node as section 3.2.2 of the paper has it: alpha_pq(t, x) * w(v, x), normalised."""
    weights = {}
    for (node, to), weight in edges.items():
        if node == here:
            alpha = 1 / p if to == before else 1 if (before, to) in edges else 1 / q
            weights[to] = alpha * weight
    total = sum(weights.values())
    return {to: weight / total for to, weight in weights.items()}


@pytest.mark.parametrize("text", [PLAIN, WEIGHTED], ids=["plain", "weighted"])
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25)])
def test_steps_have_the_published_probabilities(text, p, q):
    graph = graph_of(text)
    edges = edges_of(graph)
    names = graph.nodes.take(np.arange(len(graph)))
    firsts, steps = Counter(), Counter()
    for walk in walks_of(graph, walks=1000, walk_length=25, p=p, q=q):
        walk = [names[node] for node in walk]
        firsts[walk[0], walk[1]] += 1
        steps.update(zip(walk, walk[1:], walk[2:], strict=False))
    chances = []
    for node in names:
        weights = {to: weight for (start, to), weight in edges.items() if start == node}
        expected = {to: weight / sum(weights.values()) for to, weight in weights.items()}
        chances.append(chance_of({to: firsts[node, to] for to in expected}, expected))
    for before, here in edges:
        expected = published(edges, before, here, p, q)
        seen = {to: steps[before, here, to] for to in names if steps[before, here, to]}
        assert set(seen) <= set(expected)
        chances.append(chance_of(seen, expected))
    assert min(chances) > 1e-4 / len(chances)


def chance_of(seen, expected):
    """Return the p-value of a chi-square test, 1 where there is one outcome or too little was seen."""
    total = sum(seen.values())
    groups = [[to] for to, share in expected.items() if share * total >= 5]
    groups.append(
        [to for to, share in expected.items() if share * total < 5]
    )  # what is rare is judged together, or not
    shares = np.array([sum(expected[to] for to in group) for group in groups])
    counts = np.array([sum(seen.get(to, 0) for to in group) for group in groups])
    enough = shares * total >= 5
    shares, counts = shares[enough], counts[enough]
    return scipy.stats.chisquare(counts, shares / shares.sum() * counts.sum()).pvalue if len(counts) > 1 else 1.0


def test_walks_begin_at_every_node_and_go_along_edges(monkeypatch):
    monkeypatch.setattr(walks_module, "_BLOCK_STEPS", 3 * 6)  # three walkers at a time
    graph = graph_of("a b\nb c\nc d\nlone\n", adjacency=True)
    walks = walks_of(graph, walks=7, walk_length=6, p=0.5, q=2.0)
    assert Counter(walk[0] for walk in walks) == dict.fromkeys(range(5), 7)
    assert {len(walk) for walk in walks if walk[0] != 4} == {6}
    assert {tuple(walk) for walk in walks if walk[0] == 4} == {(4,)}  # a node without edges walks nowhere
    assert all(abs(a - b) == 1 for walk in walks for a, b in itertools.pairwise(walk))


def test_corpus_of_walks():
    seen = []
    corpus = Corpus(io.BytesIO(WEIGHTED.encode()), 1, kind="graph", walks=20, walk_length=12, report=seen.append)
    assert sorted(corpus.vocabulary.words) == list("abcdefg")
    assert corpus.starts.tolist() == list(range(0, 7 * 20 * 12, 12))
    assert corpus.num_raw_words == len(corpus) == seen[-1] == 7 * 20 * 12
    for seed in (1, 2):
        other = Corpus(io.BytesIO(WEIGHTED.encode()), 1, kind="graph", walks=20, walk_length=12, seed=seed)
        assert (other.ids.tobytes() == corpus.ids.tobytes()) == (seed == 1)
