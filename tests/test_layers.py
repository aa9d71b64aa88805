"""Imports go one way, and only `cuda` knows CuPy."""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import speedtransfer
from speedtransfer.optim import Handle

PACKAGE = Path(speedtransfer.__file__).parent
# Lowest first; modules of one entry may import each other.
LAYERS = [
    {"errors", "version", "dtypes", "interrupts", "lazy", "once", "units", "workers"},
    {"system", "jit", "progress", "eager", "untrusted", "page_cache", "page_calls", "drawing", "text_table"},
    {"buffers", "safetensors_io", "cuda", "kernels"},
    {"engines", "encoding", "idle"},
    {"tables"},
    {"rows", "stored_planes", "encoded_planes"},
    {"ranks"},
    {"vocabulary"},
    {"optim"},
    {"nn"},
    {"ngrams", "memory_layers"},
    {"checkpoint", "word2vec", "speedtorch"},
    {"planning"},
    {"benchmark"},
    {"cli"},
    {"__init__", "__main__"},
]
# Parts that must not see more of the package.
KNOWS_ONLY = {"idle": {"errors", "jit", "cuda", "once"}, "encoding": {"errors", "dtypes", "buffers", "jit", "cuda"}}
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports_of(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer_of(part):
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def part_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def importing(*names):
    return {path for path in FILES if any(name.startswith(names) for name in imports_of(path))}


def test_imports_go_down():
    wrong = []
    for path in FILES:
        own = layer_of(part_of(path))
        for name in imports_of(path):
            package, *rest = name.split(".")
            if package != "speedtransfer" or not rest:
                continue
            part = rest[0] if (PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").exists() else "__init__"
            if part != part_of(path) and not (layer_of(part) < own or part in LAYERS[own]):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name} from a layer above")
    assert not wrong


def test_nothing_needs_the_benchmarks():
    assert {part_of(path) for path in importing("speedtransfer.benchmark")} == {"benchmark"}


def test_no_modules_import_each_other_in_a_circle():
    """Neither in functions nor for types."""
    modules = {".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)}
        graph[module] = found & modules.keys() - {module}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_file_name_twice_in_the_core():
    outer = {"word2vec", "speedtorch", "benchmark", "cli", "__init__", "__main__"}
    names = [path.name for path in FILES if part_of(path) not in outer and path.name != "__init__.py"]
    assert sorted(set(names)) == sorted(names)


def test_cupy_is_imported_in_one_folder():
    assert {part_of(path) for path in importing("cupy")} == {"cuda"}


def test_torch_distributed_is_imported_in_few_places():
    """The others call these, and know of one process."""
    found = importing("torch.distributed", "torch.nn.parallel")
    assert {part_of(path) for path in found} <= {"ranks", "checkpoint", "optim"}
    assert {path.name for path in found if part_of(path) == "optim"} == {"replicas.py"}


# What a handle is made of, and what it asks (`owners`, `id_space`) for all else.
TOWER = """
    handle pending stepping views assignment whole_gradient graph state state_planes row_gradient row_functions
    row_parts fused_step anchor
"""
# Rooms of those two, whose kinds others seldom ask for: the number of lines that do may only fall.
ROOMS = "owners sharded shared shards replicas id_space id_owners vocabulary_ids gradient_exchange"
KIND_TESTS = 9
CORE = ["tables", "rows", "vocabulary", "optim", "nn", "checkpoint", "ngrams", "memory_layers"]


def test_a_handle_has_no_kinds():
    words = re.compile(r"vocabular(y|ies)|shards?|sharded|replicas?", re.IGNORECASE)
    for name in TOWER.split():
        # Without its first docstring.
        text = (PACKAGE / "optim" / f"{name}.py").read_text("utf-8").split('"""', 2)[2]
        assert [word for word in re.findall(r"\w+", text) if words.fullmatch(word)] == [], name
    assert Handle.__subclasses__() == []
    tests = re.compile(r"isinstance\(.*(Sharded|SharedOwners|Replicas|VocabularyIds)\b")
    others = [path for path in FILES if not (path.parent.name == "optim" and path.stem in ROOMS.split())]
    assert 0 < sum(len(tests.findall(path.read_text("utf-8"))) for path in others) <= KIND_TESTS


def test_nothing_is_set_on_tensors():
    """A copy, a view or a tensor that autograd saves would lose it. Mypy refuses it, and what is lost is asked for by name."""
    silenced, given, asked = [], set(), set()
    for path in [path for path in FILES if part_of(path) in CORE and part_of(path) != "checkpoint"]:
        text = path.read_text("utf-8")
        silenced += re.findall(r"^.*\._[a-z]\w* = .*type: ignore\[attr-defined\]$", text, re.MULTILINE)
        given |= set(re.findall(r"\.(_[a-z]\w*)(?:, [\w.]+)* = ", text))
        asked |= set(re.findall(r"getattr\([^()]*?, \"(_[a-z]\w*)\"", text))
    assert silenced == []
    assert asked & given == set()


def test_tensors_are_made_where_it_is_said():
    """Not where those of the model are (``torch.set_default_device``): ids, rows in chunks and files stay on the host."""
    makers = {f"torch.{function.__name__}" for function in _device_constructors()}
    for path in [path for path in FILES if part_of(path) != "benchmark"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in makers:
                assert {"device", "out", None} & {each.arg for each in node.keywords}, f"{path}:{node.lineno}"


def test_lower_layers_have_never_heard_of_training():
    found = {part_of(path) for path in importing("torch.nn", "torch.optim", "torch.autograd")}
    assert not found & {"engines", "tables"}


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} == set().union(*LAYERS)


def test_imports_are_light_and_start_no_cuda():
    """Names are imported when they are used, and no others are shown; in a Python of its own."""
    heavy = ["cupy", "numba", "rich", "typer", "safetensors", "torch._dynamo", "torch.testing", "yaml"]
    heavy += [f"speedtransfer.{part}" for part in ("benchmark", "cli", "speedtorch", "word2vec")]
    code = f"""
import sys, speedtransfer as st
st.errors.SpeedtransferError, dir(st), hasattr(st, "Embeding")
print("torch" in sys.modules)
import torch
had = {{*sys.modules}}
print(st.Embedding is st.nn.Embedding, "Embedding" in vars(st))
print({{*{heavy}}} & ({{*sys.modules}} - had))
import speedtransfer.speedtorch
print("cupy" in sys.modules, torch.cuda.is_initialized())
assert dir(st.word2vec) and st.word2vec.train and st.speedtorch.COM
for name in ("device", "Handle", "Tensor"):
    assert not hasattr(st, name), name
print(dir(st) == st.__all__ == sorted(st.__all__) and all(hasattr(st, name) for name in st.__all__))
"""
    argv = [sys.executable, "-W", "error", "-c", code]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["False", "True", "True", "set()", "False", "False", "True"]


def test_parts_that_stand_alone():
    for path in (path for path in FILES if part_of(path) in KNOWS_ONLY):
        known = {part_of(path), *KNOWS_ONLY[part_of(path)]}
        ours = [name.split(".")[1] for name in imports_of(path) if name.startswith("speedtransfer.")]
        assert {*ours} <= known, path


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "gpu").glob("*.py")), ids=lambda path: path.stem)
def test_tests_of_a_device_can_be_imported(path):
    """Where there is no device nothing else would notice that a name they use is gone."""
    # First what has others rewritten, which is too late once they are imported.
    importlib.import_module("gpu.conftest")
    importlib.import_module(f"gpu.{path.stem}")
