"""The command that runs torch's own tests with our modules, on a small file of such tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch_suite
from torch import nn

CASES = """
import unittest
import torch
from torch import nn

class Cases(unittest.TestCase):
    def test_alike(self):
        emb = nn.Embedding(4, 2, padding_idx=1)
        self.assertTrue(bool((emb.weight[1] == 0).all()))
        bag = torch.nn.modules.sparse.EmbeddingBag.from_pretrained(torch.ones(3, 2))
        self.assertEqual(bag(torch.tensor([[0, 1]])).tolist(), [[1.0, 1.0]])

    def test_differs(self):
        self.assertIs(type(nn.EmbeddingBag(4, 2)).__module__.startswith("torch."), True, "its class\\n  is another")

    def test_raises(self):
        with self.assertRaises(AssertionError):
            nn.Embedding(4, 2, padding_idx=9)

    def test_function(self):
        nn.functional.embedding(torch.tensor([0]), torch.ones(2, 2))

    def test_skipped(self):
        nn.Embedding(2, 2)
        self.skipTest("why")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small_torch_suite.py"
    path.write_text(textwrap.dedent(CASES))
    return path


def test_what_makes_a_module_runs_with_ours(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = nn.Embedding, nn.Embedding.__init__, nn.modules.sparse.EmbeddingBag
    theirs, ours, names = torch_suite.compare(path)
    assert names == ["Cases.test_alike", "Cases.test_differs", "Cases.test_raises"]
    assert theirs.outcomes["Cases.test_skipped"] == "skipped: why"
    assert "Cases.test_function" not in theirs.made
    assert [theirs.outcomes[name] for name in names] == ["passed"] * 3
    assert [ours.outcomes[name] == "passed" for name in names] == [True, False, True]
    assert "its class is another" in ours.outcomes["Cases.test_differs"]
    assert before == (nn.Embedding, nn.Embedding.__init__, nn.modules.sparse.EmbeddingBag)
    assert torch_suite.main([str(path)]) == 1
    assert "3 tests make a module: 3 pass with torch.nn, 2 with speedtransfer" in capsys.readouterr().out
    assert torch_suite.main([str(path), "--at-least", "2"]) == 0
    assert torch_suite.main([str(path), "--match", "alike"]) == 0
    assert torch_suite.main([str(path), "--match", "nothing of that name"]) == 1


def test_a_path_without_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="test_embedding"):
        torch_suite.load(tmp_path / "none.py")
