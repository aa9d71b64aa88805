"""Functions of torch that are replaced while there are tables: all in one list, and put back as they were."""

from __future__ import annotations

import ast

from forked import run_script
from test_layers import FILES, PACKAGE

PUT_BACK = """
import gc
import torch
import speedtransfer as st
from speedtransfer.nn import patches
from torch.optim.optimizer import _global_optimizer_pre_hooks

torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
def now():
    places = [(owner, name) for owner, name, _ in patches.PATCHES] + [(torch.optim.Adam, "step"), (torch.optim.SGD, "step")]
    return [vars(owner)[name] for owner, name in places]
def steps():
    emb = st.Embedding(5, 2, _weight=torch.ones(5, 2))
    opt = torch.optim.Adam(emb.parameters(), lr=0.5)
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    return [round(value, 5) for value in emb(torch.arange(5))[:, 0].tolist()]

own, hooks = now(), len(_global_optimizer_pre_hooks)
# An import replaces nothing.
functions = [getattr(each, "__func__", each) for each in own]
assert all(each.__module__.startswith("torch.") for each in functions), functions
assert steps() == [1, 0.5, 1, 1, 1]
try:
    kept = st.Embedding(2, 2)
    patches.uninstall()
except st.errors.InvalidValueError as error:
    assert "while there are tables" in str(error), error
else:
    raise AssertionError
ours = now()
assert not any(a is b for a, b in zip(own[:-1], ours, strict=False)), "something is not replaced"
del kept
gc.collect()
theirs = torch.autograd.backward = lambda *args: None
try:
    patches.uninstall()
except st.errors.InvalidValueError as error:
    assert "torch.autograd.backward has been replaced by" in str(error), error
torch.autograd.backward = ours[5]
assert now() == ours
patches.uninstall()
assert now() == own and len(_global_optimizer_pre_hooks) == hooks
assert steps() == [1, 0.5, 1, 1, 1]
"""


def test_all_are_put_back():
    ran = run_script(PUT_BACK)
    assert ran.returncode == 0, ran.stderr


def test_nothing_of_torch_is_replaced_elsewhere():
    """What another file assigns to a name of torch, or sets there by `setattr`, is in no list and never put back."""
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        torch_names = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0] == "torch"
        }
        for node in ast.walk(tree):
            targets = [*node.targets] if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = [ast.Attribute(node.args[0], "", ast.Store())]
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in torch_names:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {place.split(":")[0] for place in found} == {"cuda/graphs.py"}, found
