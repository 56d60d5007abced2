# Two commands do everything on a fresh machine with Python 3.10 or later, g++ and make:
#   make demo    install, train the demonstration, name the picture to look at
#   make test    install every backend, build Horovod (Python <= 3.11), run every test that is not marked long
# and: test-all (every combination, each night), test-avx2 (tests that train, as on a smaller CPU), lint, bench
# (speed), gpu (all about a machine with a GPU, in ten minutes), parity (the backends' numbers side by side; the same bits
# of the full model on your images: parity IMAGES=photos/), torture MINUTES=10 (runs killed at random), fuzz MINUTES=10
# (damaged files for every tool), faults (whether the tests find each of some sixty seeded faults: 20 minutes; a second
# start goes on where the first one ended), lab (several machines, made of Linux namespaces), record (the rows of
# docs/record.md, 20 minutes each; on your images: record IMAGES=photos/)

# Horovod needs Python <= 3.11; without one everything but its tests works.
PYTHON ?= $(shell for p in python3 python3.11 python3.10; do \
    $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null && echo $$p && exit; \
    done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# $(call needs_3_10,what to do): a line of Python that ends with one line where it runs in an older one.
needs_3_10 = 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or later is needed, %s is %d.%d: $(1)" % ((sys.executable,) + sys.version_info[:2]))'

.PHONY: venv demo test test-avx2 test-all lint bench gpu parity torture fuzz faults lab record docs clean

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python train_vae.py --config configs/vae/demo.yaml
	@echo "look at $$(ls runs/vae-demo/samples/*.png | tail -n 1): originals, soft and hard reconstructions"

# The page of report.py is tested where there is a browser: apt-get install chromium chromium-driver
# Groups of tests side by side (tests/conftest.py): most of a launch is waiting for imports and for other processes.
JOBS ?= 3
test: $(VENV)/.complete
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

# The tests that train, and those that compare processes, once more, as on a CPU that can do less: what passes only with
# one order of sums fails here. torch.compile keeps its kernels in a folder of their own: PyTorch 2.15 finds a kernel by
# its graph, not by ATEN_CPU_CAPABILITY, and one generated for AVX-512 gives NaN when it is compiled for AVX2.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
    TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/compiled-for-avx2
test-avx2: $(VENV)/.complete
	$(AVX2) $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder tests/models tests/weights tests/training \
	    tests/launch/test_scripts.py tests/distributed/engines tests/test_every_script.py tests/test_references.py \
	    tests/test_train_*.py tests/test_compile.py tests/test_recipes.py tests/test_sample.py tests/test_embed.py

# Every variant of every script on every launcher, and what `make test` leaves out as repeating a promise (the marker
# `long`); hours. .github/workflows/nightly.yml runs it.
test-all: $(VENV)/.complete
	WHOLE_MATRIX=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder \
	    -m "long or not long" --ignore tests/lab

lint: $(VENV)/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin

bench: $(VENV)/.complete
	$(BIN)/python -m benchmarks

# With the virtual environment if there is one; else with PYTHON, if it has the packages already (a machine without a
# network: make gpu PYTHON=python3); else the virtual environment is made. make gpu GPU="--only speed --minutes 30"
GPU_NEEDS := torch torchvision numpy PIL yaml safetensors tqdm einops braceexpand psutil pytest
gpu:
	@has() { $$1 -c 'import importlib.util as u; assert all(map(u.find_spec, "$(GPU_NEEDS)".split()))' 2>/dev/null; }; \
	if has $(BIN)/python; then python=$(BIN)/python; elif has $(PYTHON); then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(VENV)/.complete && python=$(BIN)/python || exit; fi; \
	$$python -m benchmarks.gpu $(GPU)

parity: $(VENV)/.complete
	$(BIN)/python scripts/parity.py --processes 2 4
	for script in vqgan mulan tokenizer decoder; do \
	    $(BIN)/python scripts/parity.py --processes 2 4 --script train_$$script.py || exit; done
	$(BIN)/python scripts/parity.py --processes 2 4 --batch_parts 8 $(if $(IMAGES),-- --image_folder $(IMAGES))
	for script in tokenizer decoder; do \
	    $(BIN)/python scripts/parity.py --processes 2 4 --batch_parts 8 --script train_$$script.py || exit; done

MINUTES ?= 10
torture: $(VENV)/.complete
	$(BIN)/python tests/torture/torture.py --minutes $(MINUTES)

SEED ?= 0
fuzz: $(VENV)/.complete
	$(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES) --seed $(SEED)

# Fails if a fault is missed; .github/workflows/nightly.yml runs it. One part, or one fault by words of its sentence:
# make faults FAULTS="--only data"; what they change in the code: make faults FAULTS=--diff
faults: $(VENV)/.complete
	nice -n 10 $(BIN)/python tests/faults/faults.py $(FAULTS)

# Root, and: apt-get install iproute2 openssh-server pdsh openmpi-bin slurmctld slurmd slurm-client munge gcc
# A test whose programs are not there is skipped and names them.
lab: $(VENV)/.complete
	$(BIN)/python -m pytest tests/lab -m "long or not long" -rs

# make record ROWS=two_stages,one_stage IMAGES=photos/ INCEPTION=published MINUTES=1 FRESH=1, each as you like. MINUTES is
# of this target only if it is given: torture and fuzz have a default for it.
GIVEN_MINUTES := $(if $(filter command environment,$(firstword $(origin MINUTES))),$(MINUTES))
record: $(VENV)/.complete
	$(BIN)/python -m benchmarks.record $(if $(ROWS),--rows $(ROWS)) $(if $(IMAGES),--images "$(IMAGES)") \
	    $(if $(INCEPTION),--inception "$(INCEPTION)") $(if $(GIVEN_MINUTES),--minutes $(GIVEN_MINUTES)) $(if $(FRESH),--fresh)

# build/site/index.html; a dead link, or a page that mkdocs.yml does not list, fails. `$(BIN)/mkdocs serve` shows changes.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "look at build/site/index.html"

# The plain installation: enough for one process and for torchrun.
$(VENV)/.installed: setup.py pyproject.toml
	@if test -x $(BIN)/python; then $(BIN)/python -c $(call needs_3_10,remove $(VENV) and run make again); \
	else $(PYTHON) -c $(call needs_3_10,name another with make PYTHON=...); fi
	@echo "installing PyTorch and a few small packages into $(VENV): some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

# Every backend and every test dependency.
$(VENV)/.complete: $(VENV)/.installed scripts/install_horovod.sh
	@echo "installing DeepSpeed, the trackers, the tests' tools and Horovod: some minutes more"
	@$(PIP) --editable ".[all,test]"
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then scripts/install_horovod.sh $(BIN)/python; \
	else echo "Python 3.12 or later: no Horovod, and none of its tests"; fi
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@$(PIP) --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs/vae-demo
