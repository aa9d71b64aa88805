# Two commands are all a fresh machine needs: `make demo` and `make test`. Each target puts what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
# The interpreter that runs everything; set PY=python3 to use one that already has the packages (a shared GPU machine).
PY ?= $(VENV)/bin/python
# What a target needs: $(call with,EXTRA). Most need what the development does.
with = $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.ready-$(1))
ENV := $(call with,dev)
# Without a driver that CuPy supports there is no CUDA extra, and everything runs on the CPU. Else it follows the CUDA that torch
# is built for: the torch that is there, or the one that will be installed. torch's own package is built for CUDA 13, which a
# CUDA 12 driver cannot run: TORCH_INDEX=URL then names an index with a build for CUDA 12 (cu12 is in its name).
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
TORCH_INDEX ?=
TORCH_VERSION = import runpy, importlib.util as u; print(runpy.run_path(u.find_spec('torch').origin.replace('__init__', 'version'))['cuda'])
TORCH_MAJOR := $(if $(CUDA_MAJOR),$(or $(shell $(PY) -c "$(TORCH_VERSION)" 2>/dev/null | cut -d. -f1),$(if $(findstring cu12,$(TORCH_INDEX)),12,13)))
CUDA_EXTRA := $(if $(filter-out 10 11,$(CUDA_MAJOR)),$(addprefix cuda,$(filter 12 13,$(TORCH_MAJOR))))
$(if $(filter 12-13,$(CUDA_MAJOR)-$(TORCH_MAJOR)),$(warning this driver runs CUDA 12 at most, and the usual build of torch is \
	for CUDA 13: pass TORCH_INDEX=https://download.pytorch.org/whl/cu126))
comma := ,

.PHONY: help demo test test-slow lint docs notebooks bench idle word2vec plan-accuracy ngram-lm parallel optimizers projects peers gpu gpu-status launches matrix release-check set-version clean

help:
	@echo "Each target first installs torch and what it needs itself into .venv (VENV=FOLDER), from the package index of pip:"
	@echo "matplotlib and scikit-learn for the demo and the examples, Sphinx for docs, Jupyter for notebooks, and for the rest the tools of"
	@echo "development, gensim among them (make test). With an NVIDIA driver: CuPy too, and CUDA's compiler. On Linux the default"
	@echo "torch brings gigabytes of CUDA; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the build for CPUs."
	@echo "PY=python3 runs everything with that interpreter as it is, and installs nothing."
	@echo
	@echo "make demo        train word2vec on the shipped corpus with AdamW, tables in host memory (a few minutes)"
	@echo "make test        the test suite, on all cores; no GPU needed"
	@echo "make test-slow   the long sweeps as well"
	@echo "make lint        ruff, mypy, and words that the field would not write"
	@echo "make docs        the documentation site, into docs/_build"
	@echo "make release-check  all that can be checked of a release before it is one; set-version VERSION=X.Y.Z begins it"
	@echo "make notebooks   run every notebook again and write its outputs into it"
	@echo "make bench       benchmarks on this machine, results into bench/results/<device>/"
	@echo "make idle DATA=FOLDER  loss curves with dense, exact and lazy idle rows; see bench/experiments/idle.py for the data"
	@echo "make word2vec DATA=FOLDER  speed and quality beside gensim; see bench/experiments/word2vec.py for the data"
	@echo "make plan-accuracy  ten plans beside what training at full size takes (minutes; 8 GB of memory and disk)"
	@echo "make ngram-lm    a small GPT with hashed n-gram tables: dense, SparseAdam, ours lazy and exact (a few minutes)"
	@echo "make parallel    one device, DataParallel and DistributedDataParallel: the same losses (under a minute)"
	@echo "make optimizers  train a small table by every optimizer of four packages, beside an oracle (minutes)"
	@echo "make projects    public projects and frameworks as they are, with tables and with nn.Embedding (an environment of its own)"
	@echo "make peers       training steps beside FBGEMM, TorchRec, DeepSpeed and others (an environment of its own, some minutes)"
	@echo "make matrix      the fast tests with the lowest and newest Python, torch and NumPy, into docs/versions.md (environments in .nox)"
	@echo "make gpu         GPU tests and benchmarks, results into bench/results/<device>/; thirty minutes, in three commands:"
	@echo "  make gpu PY=python3 ARGS='--part 1 --archive part1.tgz'  9 min: all GPU tests, experiments"
	@echo "  make gpu PY=python3 ARGS='--part 2 --archive part2.tgz'  9 min: step, transfer, cache, prefetch"
	@echo "  make gpu PY=python3 ARGS='--part 3 --archive part3.tgz'  9 min: sanitizer, precision, mixed, memory"
	@echo "make launches    launches, waits and host time of a training step on an emulated GPU, which is not part of the repository"
	@echo "make gpu-status  which results exist, from which commit, and which tests no GPU has run"

$(VENV)/.ready-%: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --config-settings editable_mode=compat -e ".[$*$(addprefix $(comma),$(CUDA_EXTRA))]"
	@touch $(if $(filter dev,$*),$(addprefix $(VENV)/.ready-,docs notebooks plot)) $@

demo: $(call with,plot)
	$(PY) -m speedtransfer word2vec demo -o demo --overwrite

# Tests run in WORKERS processes, as many as tests/conftest.py says by default. WORKERS=0: in one process, for -s and --pdb.
WORKERS ?= auto
# Bytecode is kept whatever the environment says: without it each process takes ten seconds to compile the tests anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "$(1)" $(ARGS)
# Those of a device have one worker, which is replaced after a fault of the device or a kernel that never ends. `make gpu` runs
# them in several, some minutes faster.
GPU_TESTS = $(if $(CUDA_MAJOR),$(PY) -m pytest -n $(if $(filter 0,$(WORKERS)),0,1) --timeout 60 --timeout-method thread tests/gpu -m "$(1)" $(ARGS))

test: $(ENV)
	$(call PYTEST,not slow and not gpu)
	$(call GPU_TESTS,not slow and gpu)

# Again with numba's check of indices, those of hostile input; in a cache of its own, as another has functions without.
FUZZERS = $(addprefix tests/test_,checkpoint_fuzz.py forged_files.py vocabulary_index.py engines_host.py *_state_machine.py)
test-slow: $(ENV)
	$(call PYTEST,not gpu)
	$(if $(ARGS),,NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$(mktemp -d) $(call PYTEST,not gpu) $(FUZZERS))
	$(call GPU_TESTS,gpu)

lint: $(ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) release/prose.py

docs: $(call with,docs)
	$(PY) -m sphinx -W --keep-going -n docs docs/_build

# ARGS=notebooks/transfer.ipynb: that one alone. SPEEDTRANSFER_DATA=FOLDER: with data that are not shipped, where a notebook can
# use them. SPEEDTRANSFER_SMALL=1: at the sizes of the tests.
notebooks: $(call with,notebooks)
	$(PY) -m nbconvert --config notebooks/nbconvert_config.py $(or $(ARGS),notebooks/*.ipynb)

# ARGS="--only transfer,step --quick": some parts, small sizes. A machine that allows ten minutes a command takes `make gpu` in
# parts, ARGS="--part 1 --archive part1.tgz" and so on; see bench/record.py --help. COMMIT=... names the commit where there is no
# git. README.md shows what is there also where something has failed; a part leaves it alone, whose time is short.
RECORD = $(PY) bench/record.py $(1) $(ARGS)$(if $(findstring --part,$(ARGS)),,; status=$$?; $(PY) bench/readme.py && exit $$status)

bench: $(ENV)
	$(call RECORD,here)

idle: $(ENV)
	$(PY) bench/record.py here --only idle --limit 3600 --set "data=$(DATA)" $(ARGS) && $(PY) bench/readme.py

# ARGS=--quick: one seed, three million words. ARGS=--resume goes on with a run that was stopped.
word2vec: $(ENV)
	$(PY) bench/record.py here --only word2vec --limit 86400 --set "data=$(DATA)" $(ARGS) && $(PY) bench/readme.py

# ARGS=--quick: small tables.
plan-accuracy: $(ENV)
	$(PY) bench/record.py here --only plan_accuracy --limit 1800 $(ARGS) && $(PY) bench/readme.py

# ARGS="--data TEXT --dtype float64": on a text of your own, in double precision. ARGS="--only lazy dense": these ways alone.
ngram-lm: $(call with,plot)
	PYTHONPATH=. $(PY) examples/ngram_lm.py $(ARGS)

# ARGS="--processes 4": others than two.
parallel: $(call with,plot)
	PYTHONPATH=. $(PY) examples/parallel.py $(ARGS)

# ARGS="AdamP Lion": those classes alone. A sweep of all writes docs/optimizer_sweep.json.
optimizers: $(call with,optimizers)
	$(PY) tests/sweep_optimizers.py $(ARGS)

# Public projects pin packages that no others should have to take, so they have an environment of their own.
PROJECTS ?= .venv-projects
$(PROJECTS)/.ready: pyproject.toml setup.py constraints.txt tests/projects/requirements.txt
	$(PYTHON) -m venv $(PROJECTS)
	$(PROJECTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e ".[dev]"
	$(PROJECTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/projects/requirements.txt
	@touch $@

# ARGS="-k recbole": those alone.
projects: $(PROJECTS)/.ready
	OMP_NUM_THREADS=1 $(PROJECTS)/bin/python -m pytest tests/projects $(ARGS)

# Others' libraries pin what nothing else should have to take, and TFRA wants TensorFlow; what does not install is named.
PEERS ?= .venv-peers
INSTALL = -m pip install --quiet --disable-pip-version-check
$(PEERS)/.ready: pyproject.toml setup.py constraints.txt bench/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(INSTALL) -c constraints.txt --config-settings editable_mode=compat -e ".[plot]" pytest
	for package in $$(grep -v '^#' bench/peers.txt); do \
		DS_BUILD_OPS=0 $(PEERS)/bin/python $(INSTALL) --no-deps $$package || echo "$$package does not install here"; done
	$(PYTHON) -m venv $(PEERS)/tensorflow
	$(PEERS)/tensorflow/bin/python $(INSTALL) tensorflow-cpu==2.16.2 tf-keras==2.16.0 && $(PEERS)/tensorflow/bin/python \
		$(INSTALL) --no-deps tensorflow-recommenders-addons==0.8.1 typeguard==2.13.3 || echo "TFRA does not install here"
	@touch $@

# DeepSpeed compiles its optimizer when it is first used, by the ninja of this environment.
peers: $(PEERS)/.ready
	PATH="$(abspath $(PEERS))/bin:$$PATH" $(PEERS)/bin/python bench/record.py here --only peers --limit 3600 $(ARGS) \
		&& $(PEERS)/bin/python bench/readme.py

# Of the Pythons that are found. ARGS="-s 'matrix(3.13-newest)'": that one alone; ARGS="-- tests/test_nn.py": those tests alone.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu: without the gigabytes of CUDA that torch brings on Linux.
matrix: $(ENV)
	$(PY) -m pip install --quiet --disable-pip-version-check nox
	TORCH_INDEX=$(TORCH_INDEX) $(PY) -m nox $(ARGS)

gpu: $(ENV)
	$(call RECORD,gpu)

launches:
	python bench/launches.py $(ARGS)

gpu-status: $(ENV)
	$(PY) bench/record.py status

# The tools that check a release pin what the tests need in other versions, so they have an environment of their own.
RELEASE ?= .venv-release
$(RELEASE)/.ready: release/requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check -r release/requirements.txt
	@touch $@

# The last commit. ARGS="--skip install tests": without the steps that take minutes.
release-check: $(RELEASE)/.ready
	$(RELEASE)/bin/python release/check.py $(ARGS)

# In version.py, CITATION.cff and the headings of CHANGELOG.md.
set-version:
	$(PYTHON) release/set_version.py "$(VERSION)"

clean:
	rm -rf $(VENV) $(PROJECTS) $(PEERS) $(RELEASE) .nox docs/_build docs/jupyter_execute build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
