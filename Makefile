# make venv   .venv/bin/kvstore, ready to use       make run     measure, kill, restart (5 min)
# make test   every check and every test            make clean   remove what was built
# make docs   docs/cli.md and docs/json.md, from the commands
# make fuzz   clients that misbehave (FRAMES=1000000 SEED=)
# make faults   power losses, kills and failing calls (FAULT_POINTS=1000 SEED=)
# make soak   mixed load with faults (SECONDS=3600 SEED=)
# make vectors    the published counts of replays (TRACES=DIR)
# make matrix     what fsck makes of every kind of damage, for each engine
# make e2e-vllm   a real vLLM against a real daemon (e2e-vllm-short: restart, damage, other weights)
# make promises   of data plane and engines, at their full size (1 h)
# make boot       the service under a real systemd, every command with its answer (root)
#
# make install    program and units, as root (PREFIX=/usr/local DESTDIR= EXTRAS=rocksdb); then see
#                 docs/operations.md. make uninstall leaves configuration and stores alone
#
# Needs Python 3.11 or later with venv and pip; everything else is fetched into .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := venv
.PHONY: venv lint test docs fuzz faults soak promises matrix vectors e2e-vllm e2e-vllm-short boot run install uninstall clean

# Settings of the caller's Python must not leak into .venv, nor our own settings into the tests.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
unexport VIRTUAL_ENV KVSTORE_STORE KVSTORE_SOCKET KVSTORE_CONFIG

# The first that works: $PYTHON, Debian's own, then whatever the path offers (shims may be dead).
PYTHON ?= python3.11
FIND_PYTHON = for candidate in "$(PYTHON)" /usr/bin/python3.11 python3.11 python3.12 python3.13 \
	python3.14 /usr/bin/python3 python3; do \
	"$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && { echo "$$candidate"; exit; }; done

# Scripts in .venv name its folder, so the stamp does too: a moved checkout is set up again.
STAMP := .venv/.ready-$(shell pwd | cksum | cut -d' ' -f1)
BIN := .venv/bin
RUN := $(BIN)/python -m
ALONE := $(addprefix kvstore/,errors.py answers.py keys.py credentials.py tls.py protocol.py regions.py \
	exchange.py waiting.py requests.py session.py questions.py transfer.py operations.py client.py \
	aclient.py tokens.py integrations/tiering.py integrations/weights.py \
	integrations/vllm_namespace.py integrations/vllm_versions.py)

venv: $(STAMP)

$(STAMP): pyproject.toml
	@python="$$($(FIND_PYTHON))"; \
	test -n "$$python" || { echo "make: no Python 3.11 or later with venv and pip found." \
		"Install one (Debian: python3 python3-venv python3-pip) or set PYTHON." >&2; exit 1; }; \
	echo "make: installing kvstore and its tools into .venv with $$python; this takes a minute"; \
	compgen -G '.venv/.ready-*' >/dev/null && ! test -e $(STAMP) && rm -rf .venv; \
	$(RUN) pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv
	@$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)
	@echo "make: ready: .venv/bin/kvstore --help; make run shows it at work"

lint: venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) ruff check --target-version py310 $(ALONE)
	$(RUN) mypy --python-version 3.10 --cache-dir .mypy_cache/alone $(ALONE)
	$(BIN)/lint-imports --no-logo
	$(RUN) codespell_lib kvstore tests docs README.md Makefile

# Tests with deadlines of their own run one after the other; all others two at a time.
TIMED_TESTS := $(patsubst %,tests/test_%.py,capacity client data_plane fault_laboratory fuzz_socket \
	kill notify private_namespaces promises reload role_table roles server settle soak \
	superblock_daemon systemd systemd_stores tiering tls writer_late)
test: lint
	$(RUN) pytest -n 2 $(addprefix --ignore=,$(TIMED_TESTS))
	$(RUN) pytest $(TIMED_TESTS)

docs: venv
	$(RUN) kvstore.commands.reference

# They print the seed that they choose; SEED=... repeats one.
FRAMES ?= 1000000
FAULT_POINTS ?= 1000
SECONDS ?= 3600
fuzz: venv
	$(RUN) tests.fuzz_socket --frames $(FRAMES) $(if $(SEED),--seed $(SEED))

faults: venv
	$(RUN) tests.faults --points $(FAULT_POINTS) $(if $(SEED),--seed $(SEED))

soak: venv
	$(RUN) tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

promises: venv
	PROMISES=long $(RUN) pytest -v -rP --timeout 1500 -o faulthandler_timeout=1400 tests/test_promises.py \
		tests/test_superblock_store.py tests/test_superblock_daemon.py \
		tests/test_engine_promises.py tests/test_keyvalue.py

vectors: venv
	@test -n "$(TRACES)" || { echo "make: say where the traces are: make vectors TRACES=DIR" >&2; exit 2; }
	TRACES=$(TRACES) $(RUN) pytest -v -k published tests/test_replay.py
# vLLM for the CPU takes 3 GB and some minutes to install: one environment for all checkouts.
VLLM_ENVIRONMENTS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvstore/vllm
E2E := $(RUN) pytest -v -rP tests/e2e_vllm/scenarios.py --timeout 1800 -o faulthandler_timeout=1700
e2e-vllm e2e-vllm-short: venv
	folder="$$(tests/e2e_vllm/install.sh $(VLLM_ENVIRONMENTS))" && \
		VLLM_PYTHON="$$folder/bin/python" $(E2E) $(if $(findstring short,$@),-k short)

matrix:
	@cat tests/damage_matrix.md

boot: venv
	$(RUN) pytest -v -s tests/test_systemd.py tests/test_systemd_stores.py

run: venv
	$(BIN)/kvstore bench demo --model q3b --model q7b

# The program gets an environment of its own, with a link where the units look for commands. The
# scripts in it and its compiled files name the place where they will be, without DESTDIR.
PREFIX ?= /usr/local
PROGRAM := $(DESTDIR)$(PREFIX)/lib/kvstore
UNITS := $(notdir $(wildcard systemd/*.service systemd/*.socket))
DROP_INS := $(notdir $(wildcard systemd/*.conf))
IN_PREFIX := $(UNITS:%=lib/systemd/system/%) $(DROP_INS:%=share/kvstore/%) \
	lib/sysusers.d/kvstore.conf lib/tmpfiles.d/kvstore.conf

install: PYTHON = /usr/bin/python3
install:
	@case "$(PREFIX)" in /usr | /usr/local) ;; *) echo "make: PREFIX is $(PREFIX), but systemd looks" \
		"for units and commands below /usr and /usr/local only. Choose one of them." >&2; exit 1; esac
	@python="$$(command -v "$$($(FIND_PYTHON))")"; case "$$(readlink -f "$$python")" in \
		"" | /root/* | /home/*) echo "make: no Python 3.11 or later that a service may use (found:" \
		"$${python:-none}). Set PYTHON to one outside of /root and /home." >&2; exit 1; esac; \
	"$$python" -m venv "$(PROGRAM)"
	"$(PROGRAM)/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --upgrade \
		'.$(EXTRAS:%=[%])'
	"$(PROGRAM)/bin/python" -m compileall -q -s "$(DESTDIR)" "$(PROGRAM)/lib"
	sed -i '1s|^#!.*|#!$(PREFIX)/lib/kvstore/bin/python|' "$(PROGRAM)/bin/kvstore"
	install -d "$(DESTDIR)$(PREFIX)/bin"
	ln -sfn ../lib/kvstore/bin/kvstore "$(DESTDIR)$(PREFIX)/bin/kvstore"
	install -D -m 644 -t "$(DESTDIR)$(PREFIX)/lib/systemd/system" $(UNITS:%=systemd/%)
	install -D -m 644 -t "$(DESTDIR)$(PREFIX)/share/kvstore" $(DROP_INS:%=systemd/%)
	install -D -m 644 systemd/kvstore.sysusers "$(DESTDIR)$(PREFIX)/lib/sysusers.d/kvstore.conf"
	install -D -m 644 systemd/kvstore.tmpfiles "$(DESTDIR)$(PREFIX)/lib/tmpfiles.d/kvstore.conf"
	test -e "$(DESTDIR)/etc/kvstore/kvstore.toml" || \
		install -D -m 644 systemd/kvstore.toml "$(DESTDIR)/etc/kvstore/kvstore.toml"

uninstall:
	cd "$(DESTDIR)$(PREFIX)" && rm -f bin/kvstore $(IN_PREFIX)
	rm -rf "$(PROGRAM)"

clean:
	rm -rf .venv .demo dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find kvstore tests -name __pycache__ -prune -exec rm -rf {} +
