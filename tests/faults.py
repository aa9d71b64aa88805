"""Put faults into the package, one at a time, and see that the fast tests catch each: ``python tests/faults.py [PLACES]``.

Each fault runs the few test files that its module names, up to the first failure, on a copy of the tree. PLACES are beginnings
of paths in the package (``optim nn/weight.py``): the faults in these alone. Exits with 1 if one is missed or cannot be put in.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from forked import run_script

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
HANGS = "a test hangs"
RUN = """
import os, sys
import pytest

root, tree, *arguments = sys.argv[1:]
os.chdir(tree)
os.environ["PYTHONPATH"] = tree
sys.path[:] = [tree, *(path for path in sys.path if not path.startswith(root) or ".venv" in path)]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *arguments]))
"""
# A module of the package and the test files (without "test_") that are to catch what is wrong in it, most likely first; then
# faults: "-" what stands once in the module, "+" what takes its place.
FAULTS = r"""
planning/hosts.py: planning
- "bytes": self.busiest * self.cost.sent / self.link.bytes_per_s,
+ "bytes": self.cost.sent / self.link.bytes_per_s,
- link.strip(), bits / 8,
+ link.strip(), bits,
optim/graph.py: optim_graph
- return values if use[4] else values.detach()
+ return values.detach()
optim/leaves.py: optim
- _collect(value.items() if isinstance(value, dict) else enumerate(value),
+ _collect(enumerate(value),
optim/merge.py: weight
- if more_ids is ids or (full and more_full):
+ if more_ids is ids or full or more_full:
optim/param_guards.py: optim_param_guards
- _refuse_copies(module, device_ids)
+ pass
optim/pending.py: weight
- hooked=not handle.late_hooks)
+ hooked=handle.late_hooks)
optim/probe/initial_values.py: optim_probe
- if value and _zero_does_as_well(
+ if value or _zero_does_as_well(
optim/probe/verdicts.py: optim_sparse
- if difference(whole, training.whole(found, gradient_of_lookups), rtol) is not None:
+ if difference(whole, training.whole(found, gradient_of_lookups), rtol) is None:
optim/row_gradient.py: nn_in_place
- _check_no_graph(func, args)
+ pass
optim/shard_gradient.py: ranks/test_uses.py
- if func in _ADDED:
+ if func not in _ADDED:
optim/replicas.py: ranks/test_wrappers.py
- self._whole |= whole
+ pass
optim/state.py: optim_sparse
- self.sparse = sparse
+ self.sparse = False
optim/pending.py: nn_module
- self._warned = False
+ self._warned = True
idle/history.py: optim_loaded_state
- self.rule.bound(rows, self._first)
+ pass
idle/lag.py: optim_idle
- return length >= _MAX_STEPS or length >= _MAX_OPEN <= history.horizon
+ return length >= _MAX_STEPS
idle/lag.py: training_loops
- found_inf is not None and float(found_inf) != 0:
+ found_inf is not None and float(found_inf) == 0:
idle/missed.py: idle_history
- weight.mul_(a).add_(partner * b)
+ weight.mul_(a).add_(partner * a)
- rows[name].mul_(factor)
+ pass
idle/numba_sums.py: idle_history
- divisor = (size if size > eps else eps) if floor else root * size + eps
+ divisor = root * size + eps
- np.float32(work[0, i] * decay)
+ np.float32(work[0, i])
idle/quadrature.py: idle_history
- divides, counts = slope > SMALLEST_SLOPE, weight != 0
+ divides, counts = slope > SMALLEST_SLOPE, weight == 0
- spread = 1 if node == 0 else 1 + NODES + node
+ spread = 1 + NODES + node
idle/replay.py: idle_kernels
- if "max_exp_avg_sq" in rows:
+ if False:
idle/rule.py: idle_history
- self.changes_of_count = 1
+ self.changes_of_count = 2
idle/rules.py: optim_idle
- IdleStep(mix=(1 - lr * (decay + momentum * added), -lr
+ IdleStep(mix=(1 - lr * decay, -lr
idle/rules.py: rows
- mix = (1.0, -lr * momentum, 0.0, momentum) if momentum else IDENTITY
+ mix = IDENTITY
idle/rules.py: optim_loaded_state
- torch.maximum(largest, rows["exp_avg_sq"] * first.factors[1], out=largest)
+ pass
idle/rules.py: optim_idle
- if idle == "exact" or type(optimizer) in RULES:
+ if type(optimizer) in RULES:
idle/rules.py: idle_history
- rounded(lr / (1 + lambd * lr * t) ** alpha, dtype)
+ rounded(lr, dtype)
nn/jagged.py: nn_multi_bag
- index[at:end], rows, own, **given
+ index[at:end], rows, offsets[bag:stop], **given
- if falls.any():
+ if falls.all():
- (exact and array[-1] != count)
+ False
- or not _rises(offsets):
+ or False:
- values[used], lengths
+ values, lengths
nn/bag_modules.py: nn_multi_bag
- if self.modes[name] != "sum":
+ if False:
nn/bag_sums.py: nn_multi_bag
- total[groups.inverse[padding]] = 0
+ pass
- sizes if padding is None else sizes - sizes
+ sizes if True else sizes - sizes
nn/multi_bag.py: nn_multi_bag ranks/test_refusals.py cells
- UsedFeatures(self._every() if whole else 0)
+ UsedFeatures(self._every())
- super()._bits(self.features[name] for name in names)
+ [1 for name in names]
- columns if names == order else
+ columns if True else
- if given.weights is None else found._replace
+ if True else found._replace
nn/bag.py: tables_opened_float8
- requires_grad_(trainable and not freeze)
+ requires_grad_(trainable or not freeze)
nn/feature.py: nn_multi nn_multi_vocabulary
- bad = first_beyond(flat, self.num_embeddings)
+ bad = None
- bad = self._keys.first_beyond(flat)
+ bad = None
- if self.padding_idx is not None:
+ if False:
nn/loader.py: loader
- if any(ticket.is_changed() for ticket in tickets) or any(
+ if any(
nn/lookup.py: nn
- if offsets is not None and takes_last and
+ if offsets is None and takes_last and
nn/lookup_ops.py: nn_compile
- one.arrive(grad)
+ pass
- if function is _lookup:
+ if name == "lookup":
- node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
+ pass
nn/multi.py: nn_multi
- feature.load(module.weight.detach())
+ pass
nn/new_rows.py: planning_estimate
- return self.dtype if storage_dtype is None else storage_dtype
+ return self.dtype
nn/sizing.py: planning_estimate
- self.total_bytes - self.weight_bytes - self.scale_bytes
+ self.total_bytes - self.weight_bytes + self.scale_bytes
nn/subclasses.py: nn_replace
- return ours if cls is _DENSE[ours] else subclass_of(
+ return subclass_of(
nn/vocabulary_module.py: vocabulary
- find_rows(id_space, ids, training and self.training,
+ find_rows(id_space, ids, training or self.training,
nn/weight_rows.py: growing
- self.handle.rows.put("weight", self.ids, values.detach())
+ pass
tables/files.py: tables_files
- key = names[0] if len(names) == 1 else "weight"
+ key = "weight"
tables/growing.py: tables
- if options.counts is not None:
+ if options.counts is None:
tables/longer_files.py: growing
- stored.offset + num_rows * row_bytes
+ stored.offset + num_rows * row_bytes + 8
tables/memories.py: tables
- if num_bytes == 0:
+ if num_bytes < 0:
tables/opening.py: tables_files
- check_not_shared(only.path, writable)
+ pass
tables/opening.py: tables_opened
- table._unchanged = table.version
+ pass
tables/parts.py: tables_opened
- check_host_index(index if check is True else check.cpu(), planes)
+ pass
tables/planes.py: tables
- self._writes -= plane._version
+ pass
tables/row_values.py: tables
- return start_a < stop_b and start_b < stop_a
+ return start_a < stop_b
tables/saving.py: tables_opened_float8
- tensors.append((SCALES, scales.dtype, tuple(scales.shape), chunks))
+ pass
tables/sources.py: tables_opened_float8
- return None if found is None else int(found[1]) if number else 0
+ return None if found is None else 0
tables/unfinished.py: tables_unfinished
- if changes or table in refused:
+ if changes:
rows.py: rows
- if mark is None or mark == self.lag.mark:
+ if mark is None:
encoded_planes.py: optim_precision
- return self._codecs[name].viewable and not self.table.stored(name).is_meta
+ return True
buffers.py: buffers
- while self._free_bytes > min(self._peak_bytes, _KEEP_BYTES):
+ while self._free_bytes > _KEEP_BYTES:
vocabulary/id_rows.py: vocabulary_index
- compiled_module(COMPILED).touch(rows, now, self.last_use, counts, float(decay), uses)
+ pass
vocabulary/changes.py: vocabulary_changes
- self.begins = at + 1
+ self.begins = at
vocabulary/contents.py: vocabulary
- live.last_use[at[old]] = vocabulary.clock
+ pass
vocabulary/loaded_state.py: vocabulary_state
- if len(ids) != len(last_use) or (counts
+ if (counts
vocabulary/room.py: vocabulary_deferred
- noted.rows = self.find(noted.ids)
+ pass
- self._admit(noted.ids, rows)
+ pass
vocabulary/numba_initial.py: vocabulary_initial
- math.copysign(size, q) * scale + first, highest)
+ math.copysign(size, q) * scale, highest)
- 1.48753612908506148525e-2,
+ 1.48753612908506148525e-3,
vocabulary/owned.py: vocabulary
- self._changed_at[rows] = self.generation
+ pass
vocabulary/vocabulary_stats.py: vocabulary_state
- return self.unseen / self.lookups if self.lookups else 0.0
+ return 0.0
engines/auto.py: engines_auto
- name = wanted if wanted in names else names[0]
+ name = names[0]
optim/fused_step.py: fused_step
- taken = lag.now + (made is not None) if
+ taken = lag.now if
- lag.record(made)
+ pass
- rows.mark_steps()
+ pass
- [given[name] for name in plan.planes] if given.keys() >= {*plan.planes} else []
+ []
- read, written = () if held else plan.planes,
+ read, written = plan.planes,
optim/state.py: fused_step
- optimizer.state, False, self._numbers_of(state))
+ optimizer.state, False, {})
kernels/step.cu: fused_step
- write_lane<4>(step.last_step + row * step.last_stride,
+ write_lane<4>(step.last_step + row * 4,
kernels/cache.cu: engines_cached
- if (!kGather) plane.dirty[
+ if (kGather) plane.dirty[
- found |= static_cast<long long>(given.planes[p].valid[slot]) << p;
+ found |= 1ll << p;
- given.places == nullptr ? j : given.places[j]
+ j
engines/cache_kernels.py: engines_cached
- part.used, part.written = True, part.written or direction == "scatter"
+ part.used = True
engines/cache_moves.py: engines_cached
- if slots.epoch == self._epoch and out.dtype
+ if out.dtype
engines/cache_policy.py: engines_cached
- self._counts * self.decay
+ self._counts
engines/cache_slots.py: tables_cached
- return any(part.written and part.plane._version != part.version
+ return any(part.written and part.plane._version == part.version
engines/cache_slots.py: engines_cached
- self.write_back(free)
+ pass
engines/cached.py: tables_cached
- self.slots.release(plane)
+ pass
engines/calibration.py: engines_auto
- for d, name in zip(DIRECTIONS, pair, strict=True)) + switch
+ for d, name in zip(DIRECTIONS, pair, strict=True))
engines/host.py: tables
- torch.autograd.graph.increment_version(tensor)
+ pass
encoding/codecs.py: encoding
- codes += (scale < 0).to(torch.int32).mul_(256)
+ codes += (scale <= 0).to(torch.int32).mul_(256)
- added = (self.split(bits) >> 12).bitwise_and_((1 << 20) - 1)
+ added = (self.split(bits) >> 12).bitwise_and_((1 << 19) - 1)
encoding/numba_codecs.py: encoding
- scales[i, 0] = np.nan
+ pass
- if with_sign <= _SIGN:
+ if with_sign < _SIGN:
encoding/rounding.py: encoding
- words *= _MIX_FIRST
+ pass
checkpoint/load.py: checkpoint_fuzz
- reader.check(bar.advance)
+ pass
checkpoint/model.py: checkpoint_resume
- counters[key] = handle.rows.state_dict()
+ pass
checkpoint/optimizer.py: growing
- planes = own.stored(entries) if own is not None and isinstance(entries, dict) else {}
+ planes = {}
checkpoint/save.py: checkpoint_fuzz checkpoint_resume
- content["rng"] = encode(rng_states(), "rng", keep)
+ pass
ngrams/gate.py: ngram_embedding
- self.hidden_norm(hidden)).sum(-1, keepdim=True) / math.sqrt(self.width)
+ self.hidden_norm(hidden)).sum(-1, keepdim=True)
ngrams/per_layer.py: ngram_embedding
- return cls(rows, layers, width // layers,
+ return cls(rows, layers, width,
ngrams/statistics.py: ngrams
- (counts[inverse] > 1).double()
+ (counts[inverse] > 2).double()
word2vec/evaluation.py: word2vec_evaluation
- correct[known] = answer_analogies(matrix, norms, name, rows[known])
+ pass
word2vec/gradients.py: word2vec_gradients
- num_pairs = places.num_predicted if model == "cbow" else places.num_pairs
+ num_pairs = places.num_pairs
word2vec/lane_rows.py: word2vec_gradients
- store(scores, k + 2, 0, s2)
+ store(scores, k + 2, 0, s1)
word2vec/lookup.py: word2vec_vectors
- count += int(nearer.sum())
+ count += 1
word2vec/places.py: word2vec_gradients
- return (window + 1 - distance).double() / window if window else
+ return (window - distance).double() / window if window else
word2vec/sampler.py: word2vec_sampler
- start = int(self._order_of(epoch)[number]) * self.stretch
+ start = number * self.stretch
word2vec/spans.py: word2vec_gradients
- counts.sum(1, keepdim=True) * (negative / len(drawn))
+ counts.sum(1, keepdim=True) * negative
word2vec/subwords.py: word2vec_model
- if length >= min_n and not
+ if length > min_n and not
word2vec/tokenise.py: word2vec_tokenise
- return 3 if data[at + 1] == 0x9A and data[at + 2] == 0x80 else 0
+ return 0
word2vec/vocabulary.py: word2vec_corpus
- return numbers[numbers >= 0]
+ return numbers[numbers > 0]
ngrams/constants.py: ngrams
- (self.eos[0] if self.eos else 0)
+ 0
- -(-least // unit) * unit
+ least
- + (self.pad is not None)
+ + 0
- if max(numbers) * (self._distinct - 1) >= _MAX:
+ if max(numbers) * (self._distinct - 1) > _MAX * 4:
- (max(self.sizes) - 1) >= _MAX // count:
+ (max(self.sizes) - 1) >= _MAX:
- else int(self.token_map.max()) + 1
+ else self.vocab_size
engines/auto.py: engines_auto
- self._row_bytes = max(self._row_bytes, row_bytes)
+ self._row_bytes = row_bytes
- self._busy.discard(other)
+ pass
- self.engines[other].wait(writes_only=direction == "gather")
+ self.engines[other].wait()
- return self._busy <= {"mapped"}
+ return True
tables/padded.py: tables_padded
- (groups[-1] - (ordered[-1] == num_rows).long()).view(1)
+ groups[-1].view(1)
- (groups.ids >= num_rows) | (groups.ids == excluded)
+ (groups.ids >= num_rows)
tables/unique.py: tables
- if few or largest >> (63 - bits):
+ if few:
- at < len(ids) and ids[at] == wanted else -1
+ at < len(ids) else -1
tables/chunks.py: tables
- elif not dtype.is_floating_point and not float(fill).is_integer():
+ elif dtype.is_floating_point and not float(fill).is_integer():
tables/page_advice.py: tables_page_advice
- compiled_module(_CALLS).ask_for(start, begins, ends, _PIECE_BYTES, mmap.MADV_WILLNEED)
+ pass
tables/reserved.py: growing
- os.ftruncate(self.number, after)
+ pass
tables/row_cache.py: tables_cached
- if counts is None:
+ if counts is not None:
nn/lookup.py: nn_in_place
- if ctx.padding >= 0:
+ if ctx.padding > 0:
nn/weight.py: weight_functions
- if tensor._version != version or _writes_to(values, func, args, kwargs):
+ if _writes_to(values, func, args, kwargs):
vocabulary/capacity.py: vocabulary vocabulary_state
- max(bytes_of(limit) // row_bytes - reserved, capacity)
+ max(bytes_of(limit) // row_bytes, capacity)
- return max(limit + reserved, num_rows)
+ return max(limit, num_rows)
vocabulary/policies.py: vocabulary_index
- self.sightings.halve()
+ pass
- np.where(now - last_use > self.lifetime,
+ np.where(now - last_use >= self.lifetime,
vocabulary/room.py: vocabulary_deferred vocabulary
- self.capacity >= most and not self.deferred
+ self.capacity >= most
- self.max_capacity = self.capacity
+ pass
checkpoint/manifest.py: checkpoint_fuzz
- if len(used) != len(set(used)) or set(used)
+ if set(used)
- or not name.startswith(f"{role}-"):
+ or False:
checkpoint/tensors.py: checkpoint
- -item[1].dtype.itemsize)
+ item[1].dtype.itemsize)
- while name in self.tensors or name == METADATA:
+ while name in self.tensors:
checkpoint/model.py: checkpoint
- elif first.setdefault(id(handle), key) != key:
+ elif False:
word2vec/tokenise.py: word2vec_tokenise word2vec_corpus
- if lines and piece.last:
+ if lines:
- (int(np.count_nonzero(ids == LINE_END)) if lines else 0)
+ 0
safetensors_io.py: tables_files
- room + -(8 + len(text) + room) % _ALIGN)
+ room)
system.py: system
- os.replace(name, path)
+ pass
"""


class Fault(NamedTuple):
    """One fault: `old` in a module gives way to `new`, and one of the test files fails."""

    module: str
    tests: list[str]
    old: str
    new: str


def faults(places: tuple[str, ...] = ("",)) -> list[Fault]:
    """Return the faults in modules whose path begins with one of `places`."""
    found, module, tests, old = [], "", [], ""
    for line in FAULTS.strip().splitlines():
        if line.startswith("- "):
            old = line[2:]
        elif line.startswith("+ "):
            found.append(Fault(module, tests, old, line[2:]))
        else:
            module, names = line.split(": ")
            tests = [name if "/" in name else f"test_{name}.py" for name in names.split()]
    return [fault for fault in found if fault.module.startswith(places)]


def copy_tree(folder: str) -> Path:
    """Copy what git knows here, as it stands in the working tree, and return where it is."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_bytes((ROOT / name).read_bytes())
    return Path(folder)


def outcome(fault: Fault, tree: Path) -> str:
    """Return "caught" and by which test, or "MISSED"."""
    module = tree / "speedtransfer" / fault.module
    whole = module.read_text(encoding="utf-8")
    if whole.count(fault.old) != 1:
        return f"MISSED: {whole.count(fault.old)} times in the module"
    module.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
    try:
        failed = failure(tree, *(f"tests/{name}" for name in fault.tests))
    finally:
        module.write_text(whole, encoding="utf-8")
    if not failed:
        return "MISSED"
    if failed != HANGS and failure(tree, failed):
        return f"MISSED: {failed} fails without the fault as well"
    return f"caught: {failed}"


def failure(tree: Path, *tests: str) -> str:
    """Return the first of these tests that fails in a tree; "" if none does."""
    try:
        run = run_script(RUN, str(ROOT), str(tree), *tests, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return HANGS
    # Of a test that has failed, or could not be collected.
    found = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found[0].partition(" ")[2].partition(" - ")[0] if found else ""


def main() -> int:
    """Try the faults, and return how many are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=[""], help="beginnings of paths in the package")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="copies of the tree that are tried at once")
    options = parser.parse_args()
    trees: queue.Queue[Path] = queue.Queue()
    chosen, missed = faults(tuple(options.places)), 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.workers) as threads:
        for number in range(options.workers):
            trees.put(copy_tree(f"{folder}/{number}"))

        def attempt(fault: Fault) -> str:
            tree, began = trees.get(), time.monotonic()
            try:
                return f"{outcome(fault, tree)}, {time.monotonic() - began:.0f} s"
            finally:
                trees.put(tree)

        for fault, result in zip(chosen, threads.map(attempt, chosen), strict=True):
            missed += result.startswith("MISSED")
            print(f"{fault.module}: {fault.old!r} -> {fault.new!r}: {result}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
