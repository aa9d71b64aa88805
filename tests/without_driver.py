"""Run what the package offers in a process whose torch is built for CUDA and finds no driver: without_driver.py FOLDER."""

import sys
import warnings
from pathlib import Path

import pytest
import torch


def claim_cuda():
    """Make a torch for the CPU say that it is built for CUDA; whatever asks a device raises, as in such a build."""

    def asked(*args, **kwargs):
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.cuda._lazy_init = asked
    modules = [module for name, module in sys.modules.items() if name.startswith(("torch.cuda", "torch._C"))]
    for name in [name for name in dir(torch._C) if name.startswith("_cuda_")]:
        for module in modules:
            if name in vars(module):
                setattr(module, name, asked)


def train(make, optimizer, **options):
    """Take steps, of our own modules with prefetched rows; return the module and the optimizer."""
    torch.manual_seed(0)
    module = make(50, 4, **options)
    opt = optimizer(module.parameters(), lr=0.1)
    batches = [torch.randint(50, (3, 5)) for _ in range(3)]
    ours = make.__module__.startswith("speedtransfer")
    for batch in st.prefetch(batches, lambda batch: {module: batch}) if ours else batches:
        opt.zero_grad()
        module(batch).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
    return module, opt


def in_python(folder):
    """Train, save and look up, on the CPU."""
    (found, _), (expected, _) = train(st.Embedding, torch.optim.Adam), train(torch.nn.Embedding, torch.optim.Adam)
    torch.testing.assert_close(found.weight.detach(), expected.weight.detach())
    for options in ({"idle": "lazy"}, {"memory": "mmap", "path": folder / "rows.npy"}, {"storage_dtype": torch.int8}):
        train(st.Embedding, torch.optim.AdamW, **options)
    module, opt = train(st.Embedding, torch.optim.Adam, vocabulary=st.Vocabulary())
    st.save_checkpoint(folder / "checkpoint", module, opt)
    st.load_checkpoint(folder / "checkpoint", module, opt)
    table = st.Table(9, 2)
    table[torch.tensor([1])] = table[torch.tensor([2])]
    table.wait()
    for do in (
        lambda: st.Table(9, 2, memory="pinned"),
        lambda: st.Embedding(9, 2, device="cuda"),
        lambda: table.cupy(),
    ):
        with pytest.raises(st.errors.DeviceError, match="needs CUDA, but "):
            do()


def in_commands(folder):
    (folder / "text").write_text("the cat sat on the mat and the dog sat on the log\n" * 50)
    for command in (
        "info",
        "plan --rows 1e4 --dim 8 --lookups 64",
        "bench lookup --quick",
        f"word2vec train {folder}/text -o {folder}/vectors --dim 8 --epochs 1 --min-count 1",
        f"word2vec nearest {folder}/vectors cat",
    ):
        print(f"$ speedtransfer {command}", flush=True)
        sys.argv = ["speedtransfer", *command.split()]
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, command


if __name__ == "__main__":
    warnings.simplefilter("error")
    if torch.version.cuda is None:
        claim_cuda()
    import speedtransfer as st
    from speedtransfer.__main__ import main

    in_python(Path(sys.argv[1]))
    in_commands(Path(sys.argv[1]))
    assert not torch.cuda.is_initialized()
