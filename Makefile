# Two commands for a newcomer: `make demo` and `make test`. The rest is for whoever changes the code.
PYTHON ?= python3
V := .venv/bin
TORCH ?= 2.13.0
N ?= 5
# What tests run for real: network namespaces, a systemd of their own, ibstat to hold our reading against, C libraries.
PROGRAMS := ip tc nft ibstat systemctl gcc
PACKAGES := iproute2 nftables infiniband-diags systemd gcc libc6-dev

.PHONY: demo test check pytest bed soak bench clean

demo: .venv/analysis
	@echo; echo '$$ diagnosd replay recordings/throttled_port       # a recording of real congestion'; echo
	@$(V)/diagnosd replay recordings/throttled_port
	@echo; echo '$$ diagnosd run -- python -m diagnosd.demo         # a live job of two ranks, about 20 s'; echo
	@$(V)/diagnosd run -- $(V)/python -m diagnosd.demo
	@echo; echo 'Next, a training script of your own, unchanged, in its own Python:'; echo
	@echo '    export PATH="$$PATH:$(CURDIR)/$(V)"'
	@echo '    diagnosd run --record slow.lp.zst -- torchrun --nproc-per-node 2 train.py'
	@echo '    diagnosd replay slow.lp.zst'

test: .venv/test check pytest

check: .venv/test
	$(V)/ruff check
	$(V)/ruff format --check
	$(V)/mypy
	$(V)/lint-imports

pytest: .venv/test
	$(V)/python -Im pytest

bed: .venv/test
	$(V)/python -m tests.bed --all

soak: .venv/test
	$(V)/python -m tests.bed --all --repeat $(N) --log soak.jsonl

bench: .venv/test
	$(V)/python -m tests.benchmarks

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Stamps: what stands in .venv, made again when pyproject.toml changes.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(f"diagnosd needs Python 3.11 or later, $$(command -v $(PYTHON)) is {sys.version.split()[0]}: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else 0'
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; rm -rf .venv; exit 1; }
	@touch $@

.venv/analysis: .venv/made pyproject.toml
	@echo "installing diagnosd into .venv ..."
	@$(V)/pip install --quiet --disable-pip-version-check -e '.[analysis]'
	@touch $@

# The CPU build of PyTorch: from a local wheel where pip is told of one, else from PyTorch's own index.
.venv/test: .venv/made pyproject.toml
	@if [ "$$(id -u)" = 0 ] && ! (for each in $(PROGRAMS); do command -v $$each || exit 1; done) >/dev/null; then \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; } \
	  || echo "$(PACKAGES) are not to be had here: tests that need them are skipped" >&2; fi
	@$(V)/python -c 'import torch' 2>/dev/null || $(V)/pip install --quiet --disable-pip-version-check 'torch==$(TORCH)+cpu' 2>/dev/null \
	  || $(V)/pip install --quiet --disable-pip-version-check 'torch==$(TORCH)' --index-url https://download.pytorch.org/whl/cpu \
	  || echo "torch is not to be had here: tests that need it are skipped" >&2
	@$(V)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
