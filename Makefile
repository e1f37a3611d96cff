# Two commands do everything on a fresh machine: `make demo` and `make test`. Both install into .venv. `make help` lists
# the others from the comments after `##`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment of the trainers that treepack works inside; verl needs an older transformers than .venv has.
TRAINERS := .venv-integrations
# The environment of a vLLM server on the CPU, which tests of the samplers ask for tokens.
SERVER := .venv-vllm
# The environment of verifiers, whose tasks and rewards the samplers use: 80 packages, and no torch.
TASKS := .venv-verifiers
# The environment of a Ray cluster on this machine, and of an S3 server: 80 packages, and no torch.
CLUSTER := .venv-ray
# The environment of an older transformers, which reads saved models.
SERVED := .venv-served
# The environment of flash-linear-attention, whose kernels run in Triton's interpreter there.
RECURRENT := .venv-fla
# The data half without torch; these rooms run in it. Their tests that import torch are skipped there. Of trl, which needs
# torch, they read the chat templates.
DATA := .venv-data
DATA_ROOMS := analysis calls cluster costs files formats ingest memory native pack report research rl tokenise trie
# The environment of the documentation site, and the one in which `make constraints` resolves all versions again.
PAGES := .venv-site
RESOLVED := .venv-resolved
# Pinned, so that an index or wheel folder with the CPU build of this version serves it; a looser range takes the newest,
# with gigabytes of CUDA libraries. Any torch from 2.11 on works: make TORCH='torch --index-url URL' ...
TORCH ?= torch==2.13.0
DEMO := demo_out
# The other packages of .venv have exact versions too; torch is only in TORCH, because a file cannot name its build.
LOCKED := --constraint constraints.txt
# Rooms are the folders of tests/: `make trie` runs tests/trie.
ROOMS := $(sort $(foreach path,$(wildcard tests/*/test_*.py tests/*/*/test_*.py),$(word 2,$(subst /, ,$(path)))))
# The core from files to gradients, in about 80 seconds of processor time; other files of tests would import too much.
QUICK := $(addprefix tests/,files/test_lock.py files/test_manifest_values.py tokenise/test_tokenization.py trie/test_build.py \
	trie/test_directory.py pack/test_packing.py pack/test_rows.py attention/test_reference.py model/test_collation.py \
	model/test_loss.py data/test_dataset.py fit/test_climb.py train/test_loop.py cli/test_prepare.py cli/test_choices.py \
	examples/test_nanotree.py project)
# Python files with changes that are not committed, also new ones; a deleted file is none.
CHANGED = { git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard; } | grep '\.pyi\?$$' | sort -u
# An editable install finds treepack after all folders of sys.path. A script in the folder that holds a clone named
# treepack would import the clone, which is no package. A line with the clone's path makes Python see the package first.
define CHECKOUT_PTH
import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "treepack-checkout.pth").write_text("$(CURDIR)\n")
endef
export CHECKOUT_PTH

# Images for containers often set it. Each process that imports transformers would then compile it again, for 12 seconds.
unexport PYTHONDONTWRITEBYTECODE

# Packages come from uv, six times faster than pip. Without uv, or if uv finds no index, pip installs them. torch comes
# from pip, because uv reads no pip.conf, which may name the folder or index of the CPU build. Compiling 30,000 files that
# no test imports would take a minute. Used as $(call install,ENVIRONMENT) ARGUMENTS.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
install = install() { $(1)/bin/uv pip install --quiet --python $(1)/bin/python "$$@" || $(1)/bin/python $(PIP) "$$@"; }; install

.PHONY: help demo quick test suite test-slow test-data test-s3 test-integrations test-verifiers test-vllm test-ray test-fla test-served lint types imports \
	schemas docs site dist constraints clean $(ROOMS)
.DEFAULT_GOAL := help

$(VENV)/run.stamp: pyproject.toml constraints.txt $(wildcard treepack/native/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(TORCH)
	-$(BIN)/python $(PIP) uv
	$(call install,$(VENV)) $(LOCKED) -e '.[train,report]'
	$(BIN)/python -c "$$CHECKOUT_PTH"
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(call install,$(VENV)) $(LOCKED) -e '.[train,report,dev]'
	touch $@

$(VENV)/s3.stamp: $(VENV)/dev.stamp
	$(call install,$(VENV)) $(LOCKED) -e '.[test-s3]'
	touch $@

$(DATA)/stamp: pyproject.toml constraints.txt $(wildcard treepack/native/*.c)
	$(PYTHON) -m venv $(DATA)
	-$(DATA)/bin/python $(PIP) uv
	$(call install,$(DATA)) $(LOCKED) -e '.[report,stats]' pytest pytest-xdist hypothesis selenium
	$(call install,$(DATA)) $(LOCKED) --no-deps trl
	$(DATA)/bin/python -c "$$CHECKOUT_PTH"
	touch $@

# All pinned, so there is nothing to resolve.
$(TRAINERS)/stamp: tests/integrations/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python $(PIP) --no-deps $(TORCH)
	-$(TRAINERS)/bin/python $(PIP) uv
	$(call install,$(TRAINERS)) --no-deps -r tests/integrations/requirements.txt
	$(call install,$(TRAINERS)) --no-deps -e .
	$(TRAINERS)/bin/python -c "$$CHECKOUT_PTH"
	touch $@

$(SERVER)/stamp: tests/rollout/vllm_requirements.txt
	$(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/python $(PIP) --no-deps $(TORCH)
	-$(SERVER)/bin/python $(PIP) uv
	$(call install,$(SERVER)) --no-deps -r tests/rollout/vllm_requirements.txt
	touch $@

$(TASKS)/stamp: tests/integrations/verifiers_requirements.txt
	$(PYTHON) -m venv $(TASKS)
	-$(TASKS)/bin/python $(PIP) uv
	$(call install,$(TASKS)) --no-deps -r tests/integrations/verifiers_requirements.txt
	$(TASKS)/bin/python -c "$$CHECKOUT_PTH"
	touch $@

$(CLUSTER)/stamp: tests/cluster/ray_requirements.txt pyproject.toml
	$(PYTHON) -m venv $(CLUSTER)
	-$(CLUSTER)/bin/python $(PIP) uv
	$(call install,$(CLUSTER)) --no-deps -r tests/cluster/ray_requirements.txt
	$(call install,$(CLUSTER)) --no-deps -e .
	$(CLUSTER)/bin/python -c "$$CHECKOUT_PTH"
	touch $@

$(PAGES)/stamp: docs/site_requirements.txt
	$(PYTHON) -m venv $(PAGES)
	-$(PAGES)/bin/python $(PIP) uv
	$(call install,$(PAGES)) --requirement docs/site_requirements.txt
	touch $@

$(RECURRENT)/stamp: tests/recurrent/fla_requirements.txt pyproject.toml
	$(PYTHON) -m venv $(RECURRENT)
	$(RECURRENT)/bin/python $(PIP) --no-deps $(TORCH)
	-$(RECURRENT)/bin/python $(PIP) uv
	$(call install,$(RECURRENT)) --no-deps -r tests/recurrent/fla_requirements.txt
	$(call install,$(RECURRENT)) --no-deps -e .
	$(RECURRENT)/bin/python -c "$$CHECKOUT_PTH"
	touch $@

$(SERVED)/stamp: tests/train/served_requirements.txt
	$(PYTHON) -m venv $(SERVED)
	$(SERVED)/bin/python $(PIP) --no-deps $(TORCH)
	-$(SERVED)/bin/python $(PIP) uv
	$(call install,$(SERVED)) --no-deps -r tests/train/served_requirements.txt
	touch $@

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf 'make %-18s %s\n' ROOM "the tests of one room: $(ROOMS)" | fold -s -w 120

demo: $(VENV)/run.stamp  ## the five commands of the README on sample_data, into demo_out
	rm -rf $(DEMO)
	$(BIN)/treepack build-trie sample_data/chat.jsonl --tokenizer sample_data/tokenizer --expand turns --out $(DEMO)/trie
	$(BIN)/treepack pack $(DEMO)/trie --capacity 4096 --out $(DEMO)/packed
	$(BIN)/treepack stats $(DEMO)/packed --check
	$(BIN)/treepack train $(DEMO)/packed --model sample_data/tiny-qwen3.json --steps 20 --rows-per-step 2 --lr 3e-3 --out $(DEMO)/model
	$(BIN)/treepack report $(DEMO)/packed --out $(DEMO)/report.html
	@echo "open $(DEMO)/report.html in a browser"

quick: $(VENV)/dev.stamp  ## lint of changed files and the core tests, in about a minute
	@$(CHANGED) | xargs -r $(BIN)/ruff check --force-exclude
	@$(CHANGED) | xargs -r $(BIN)/ruff format --check --force-exclude
	$(BIN)/python -m pytest -n 2 $(QUICK)

$(ROOMS): $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n auto tests/$@

# With --jobs 2, types are checked beside the tests. Two processors have no room for workers of mypy then: it gives up if
# one of them does not start within 3 seconds.
test: export MYPY_NUM_WORKERS := 0
test: lint imports suite types  ## lint, types, import contracts and all tests that need no further packages

# One worker runs all tests of a file, so that models, directories and imports that they share are made once.
suite: $(VENV)/dev.stamp  ## the tests of `make test` alone
	$(BIN)/python -m pytest -n auto --dist loadfile

# Marks of tests that need further packages; a property may have such a mark.
OTHER_GROUPS := integrations or verifiers or vllm or ray or fla or served or s3

test-slow: $(VENV)/dev.stamp  ## the tests marked slow, and every property with more examples
	$(BIN)/python -m pytest -n auto -m "(slow or hypothesis) and not ($(OTHER_GROUPS))" --hypothesis-profile thorough

test-data: $(DATA)/stamp  ## the data half, without torch
	$(DATA)/bin/python -m pytest -n auto $(addprefix tests/,$(DATA_ROOMS))

# Against a real S3 server on this machine; without its packages these tests fail. Each worker would import all files of
# tests to find the marked ones in seven of them.
test-s3: $(VENV)/s3.stamp  ## against a real S3 server on this machine
	$(BIN)/python -m pytest -n auto -m s3 $$(grep -rl --include='test_*.py' 'mark\.s3\b' tests)

# The wheel of verl installs a package `tests`, and spawned processes look for the module of this test there.
NOT_BESIDE_VERL := tests/model/test_first_batch.py::test_sharded_models_are_exact_or_refused_on_all_ranks

# Their code needs torch alone, which is the same in both environments.
NOT_OF_TRANSFORMERS := --ignore tests/model/test_loss.py --ignore tests/model/test_token_statistics.py

# Inside the trainers themselves, and treepack's own model tests with the transformers that verl needs.
test-integrations: $(TRAINERS)/stamp  ## inside TRL and verl themselves
	$(TRAINERS)/bin/python -m pytest -n auto --dist loadfile -m "not slow and not s3" tests/integrations tests/model \
		tests/attention/test_generation.py tests/attention/test_reference.py \
		--deselect $(NOT_BESIDE_VERL) $(NOT_OF_TRANSFORMERS)

test-verifiers: $(TASKS)/stamp  ## prompts and rewards of verifiers' tasksets
	$(TASKS)/bin/python -m pytest -m verifiers tests/integrations/test_verifiers_tasks.py

# On a real Ray cluster of two workers, against a real S3 server; both run on this machine.
test-ray: $(CLUSTER)/stamp  ## build-trie and pack on a real Ray cluster of two workers
	$(CLUSTER)/bin/python -m pytest -m ray tests/cluster

# Recurrent layers with flash-linear-attention and kernels installed.
test-fla: $(RECURRENT)/stamp  ## recurrent layers with flash-linear-attention installed
	$(RECURRENT)/bin/python -m pytest -n 0 -m fla tests/recurrent/test_with_packages.py

# Starts two real servers of a tiny model; the tests themselves run in the usual environment.
test-vllm: $(VENV)/dev.stamp $(SERVER)/stamp  ## rollouts from a real vLLM server on the CPU, and saved models read by vLLM
	$(BIN)/python -m pytest -n 0 -m vllm tests/rollout tests/train/test_vllm_copies.py

# The tests run in the usual environment, and ask the older transformers for the log-probabilities of saved models.
test-served: $(VENV)/dev.stamp $(SERVED)/stamp  ## saved models of all families, read by an older transformers
	$(BIN)/python -m pytest -n 0 -m served tests/train/test_served_copies.py

lint: $(VENV)/dev.stamp  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp  ## mypy, strict
	$(BIN)/mypy

imports: $(VENV)/dev.stamp  ## the import contracts
	$(BIN)/lint-imports

schemas: $(VENV)/dev.stamp  ## write schemas/ again
	$(BIN)/python -m treepack.files.schema schemas

docs: $(VENV)/dev.stamp  ## write the generated parts of docs/ again
	$(BIN)/python docs/generate.py

site: $(VENV)/dev.stamp $(PAGES)/stamp  ## the docs as a site, into site/; a link to nothing is an error
	$(BIN)/python docs/generate.py --site build/pages
	NO_MKDOCS_2_WARNING=1 $(PAGES)/bin/mkdocs build --strict --quiet
	cp build/pages/*.md build/agents/* site/

# A wheel for every Python from 3.11 on, and the sources, installed and run without a compiler.
dist: $(VENV)/dev.stamp  ## build the wheel and the sdist, and run the demo from them in fresh environments
	rm -rf dist build
	$(BIN)/python tools/check_dist.py --torch '$(TORCH)'

constraints:  ## choose the versions of constraints.txt again, the newest that fit pyproject.toml
	rm -rf $(RESOLVED)
	$(PYTHON) -m venv $(RESOLVED)
	$(RESOLVED)/bin/python $(PIP) $(TORCH)
	$(RESOLVED)/bin/python $(PIP) '.[train,report,dev,test-s3]'
	{ sed '/^[^#]/,$$d' constraints.txt; \
	  $(RESOLVED)/bin/python -m pip freeze | grep -v -i -E '^(torch|treepack|nvidia-[a-z0-9-]+)( @|==)'; } > $(RESOLVED)/constraints.txt
	mv $(RESOLVED)/constraints.txt constraints.txt
	rm -rf $(RESOLVED)

clean:  ## remove environments, caches and outputs
	rm -rf $(VENV) $(TRAINERS) $(TASKS) $(SERVER) $(CLUSTER) $(RECURRENT) $(SERVED) $(DATA) $(PAGES) $(RESOLVED) $(DEMO) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
