"""Every function of torch that is replaced where there are tables, with what is put in its place: with the first table.

Two more are those of ``torch.cuda.CUDAGraph`` (`cuda.graphs`), which have captures counted for tables without a module, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from speedtransfer.cuda import count_graphs
from speedtransfer.nn import module_state
from speedtransfer.nn.fills import of_whole, truncating
from speedtransfer.nn.weight import knowing_weights, refusing_weights
from speedtransfer.once import once
from speedtransfer.optim import backward, graph, hooks, param_guards, replicas, sent, state_dicts
from speedtransfer.ranks import collectives

# Where torch has a function, its name there, and what makes of it the one that takes its place.
PATCHES: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (Optimizer, "__init__", replicas.refusing_zero),
    (Optimizer, "profile_hook_step", lambda function: staticmethod(hooks.guarding_steps(function))),
    (Optimizer, "state_dict", state_dicts.preparing(state_dicts.begin, hooks.take_loaded)),
    (Optimizer, "load_state_dict", state_dicts.preparing(state_dicts.begin)),
    (Optimizer, "__getstate__", state_dicts.preparing(hooks.take_loaded, state_dicts.show_planes)),
    (torch.autograd, "backward", backward.knowing_tables),
    (nn.Parameter, "__new__", param_guards.making_no_other),
    (nn.Module, "_save_to_state_dict", module_state.knowing_ties),
    (torch.utils, "swap_tensors", param_guards.swapping_none),
    (nn.DataParallel, "__init__", param_guards.taking_none),
    (nn.DataParallel, "replicate", param_guards.copying_none),
    (nn.parallel.DistributedDataParallel, "__init__", replicas.replicating_tables),
    (nn.parallel.DistributedDataParallel, "join", replicas.refusing_tables),
    (nn.parallel.DistributedDataParallel, "join_hook", replicas.refusing_tables),
    (nn.parallel.DistributedDataParallel, "_pre_forward", replicas.beginning),
    (nn.parallel.DistributedDataParallel, "_post_forward", replicas.ending),
    # By these torch.func wraps what it transforms.
    (torch._functorch.eager_transforms, "_wrap_for_grad", knowing_weights),
    (torch._functorch.eager_transforms, "_wrap_functional_tensor", refusing_weights),
    (torch._functorch.vmap, "_add_batch_dim", knowing_weights),
    # What ``torch.multiprocessing`` sends, and ``share_memory_()``.
    (torch.UntypedStorage, "_share_fd_cpu_", sent.refusing_rows),
    (torch.UntypedStorage, "_share_filename_cpu_", sent.refusing_rows),
    (nn.init, "sparse_", of_whole),
    # Others may have imported trunc_normal_ already, which looks this up.
    (nn.init, "_no_grad_trunc_normal_", truncating),
]

PATCHES += collectives.patches()
if not graph.TELLS_HOOKS:
    PATCHES += [
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", graph.entering),
        (torch.autograd.graph.saved_tensors_hooks, "__exit__", graph.leaving),
    ]


@once
def install() -> None:
    """Replace the functions, and register the hook that comes before the steps of all optimizers."""
    count_graphs()
    for owner, name, patch in PATCHES:
        setattr(owner, name, patch(getattr(owner, name)))
    hooks.guard_steps()
    sent.register()
    register_optimizer_step_pre_hook(hooks.before_hooks)
