SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

DEMO_SECONDS ?= 20
# More flags for `make run`, such as ARGS="--listen 0.0.0.0:9468".
ARGS ?=
# The object for each of these is checked to build, whatever this machine is.
EBPF_ARCHITECTURES := x86_64 aarch64
BPF_TARGET := bpfel-unknown-none
# Where Debian's rustc-web has the `core` for BPF, if it has.
BPF_CORE := /usr/bin/rustc --print target-libdir --target $(BPF_TARGET) 2>/dev/null
DRIVER := /proc/driver/nvidia/version
# Of `make soak`: so many processes in so long a time.
SOAK_PROCESSES ?= 100000
SOAK_SECONDS ?= 600
# What setup.sh brings beside the system's own: helm, cargo-deb.
TOOLS := $(CURDIR)/target/tools/bin
# Of what `make packages` and `make image` take: release or dev.
PROFILE ?= release
AGENT = target/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))/cotenant

.PHONY: help setup setup-packages build sim ebpf-objects demo run test test-exports test-receivers test-deploy test-kernels test-packages test-runtimes soak bench chart papers packages image lint gpu-bundle

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Bring what building and testing need (Debian 12 as root, or rustup)
	@bash tests/setup.sh

setup-packages: ## Bring what making and trying packages and the image needs as well
	@bash tests/setup.sh packages

build: ## Build the agent, its eBPF programs with it
	cargo build --locked -p cotenant

sim: ## Build the simulated GPU node: driver and NVML in target/sim, tenants, demo
	cargo build --locked -p cotenant-sim-cuda -p cotenant-sim-nvml -p cotenant-sim-tenant -p cotenant-node
	@install -D -m 755 target/debug/libcotenant_sim_cuda.so target/sim/libcuda.so.1
	@install -D -m 755 target/debug/libcotenant_sim_nvml.so target/sim/libnvidia-ml.so.1

# The same toolchain choice as agent/kernel/build.rs.
ebpf-objects: ## Check that the eBPF object builds for every architecture
	@if [ -d "$$($(BPF_CORE))" ]; then \
		export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=aya_ebpf,cotenant_ebpf; cargo=(cargo); std=(); \
	else \
		cargo=(rustup run nightly cargo); std=(-Z build-std=core); \
	fi; \
	for architecture in $(EBPF_ARCHITECTURES); do \
		directory=$(CURDIR)/target/ebpf-$$architecture; \
		(cd ebpf/programs && RUSTFLAGS="--cfg bpf_target_arch=\"$$architecture\" -Clink-arg=--btf" \
			"$${cargo[@]}" build --release --locked --target $(BPF_TARGET) --target-dir "$$directory" "$${std[@]}"); \
		ls -l "$$directory/$(BPF_TARGET)/release/cotenant-ebpf" | awk -v a=$$architecture '{ print "eBPF object for " a ": " $$5 " bytes" }'; \
	done

demo: ## Run the agent on a simulated node for DEMO_SECONDS and compare with the truth (root)
	@if [ -e $(DRIVER) ]; then \
		echo "this host has an NVIDIA driver: use \`make run\`; the demo is for hosts without one" >&2; exit 1; \
	fi
	@$(MAKE) --no-print-directory build sim
	@mkdir -p target/demo
	DEMO_SECONDS=$(DEMO_SECONDS) target/debug/cotenant-demo

run: ## Build the agent optimised and run it on this host (root)
	cargo build --locked --release -p cotenant
	target/release/cotenant run $(ARGS)

test: build sim ebpf-objects test-exports test-deploy ## Run every test (root)
	@if cargo nextest --version >/dev/null 2>&1; then \
		set -x; cargo nextest run --locked --workspace; \
	else \
		set -x; cargo test --locked --workspace; \
	fi

# Grafana's types come from npm, where there is one; without them that one check is skipped and says so.
test-exports: build sim ## Test boards, rules and alerts with a real Prometheus and Alertmanager (root)
	@! command -v npm >/dev/null || npm ci --silent --no-audit --no-fund --prefix tests/boards/schema
	@# A recorded run is real time on a busy host: it may be taken once more, and says so.
	python3 -m unittest discover --start-directory tests/boards --verbose || { echo "ONCE MORE: the boards' tests failed"; \
		python3 -m unittest discover --start-directory tests/boards --verbose; }

# Not part of `make test`: it fetches 350 MB (VictoriaMetrics, and what a Collector is built of).
test-receivers: build sim ## Send by OTLP to a real VictoriaMetrics and a real Collector (root)
	python3 tests/receivers/test_receivers.py --verbose

# Not part of `make test`: it fetches kernels; on two quiet processors a machine takes up to half an hour (KERNELS_JOBS at a time).
test-kernels: build sim ## Run the agent end to end in virtual machines of other kernels (root; `tests/setup.sh kernels`)
	python3 tests/kernels/matrix.py

test-deploy: build ## Test the chart, the plain manifest, the unit and the packages' papers
	python3 -m unittest discover --start-directory tests/deploy --verbose

# One after the other: probes reach every process of the host.
test-runtimes: build sim ## Name tenants under real Docker, Podman, containerd and Slurm (root; `tests/setup.sh runtimes`)
	cargo test --locked -p cotenant-node --test runtimes -- --ignored --test-threads=1

soak: build sim ## SOAK_PROCESSES short-lived processes in SOAK_SECONDS against a real agent, to the byte (root)
	@mkdir -p target/soak
	COTENANT_SOAK_PROCESSES=$(SOAK_PROCESSES) COTENANT_SOAK_SECONDS=$(SOAK_SECONDS) COTENANT_SOAK_RESULT=$(CURDIR)/target/soak/result.txt \
		cargo test --locked -p cotenant-node --test soak -- --nocapture

# Prints; judges nothing that other work on the machine could change.
bench: ## Measure a forecast's tick and a ten-hour replay (minutes)
	cargo test --locked -p cotenant-risk-runs --test cost -- --include-ignored --nocapture

# Builds what it tests from the debug binary.
test-packages: build sim ## Install, run, upgrade and purge the .deb, run the image on the simulated node (root)
	$(MAKE) --no-print-directory packages image PROFILE=dev
	python3 -m unittest discover --start-directory tests/packages --verbose

chart: ## Write the chart's schema and the plain manifest, and pack the chart into target/packages
	python3 deploy/helm/generate.py
	@mkdir -p target/packages
	PATH=$(TOOLS):$$PATH helm package deploy/helm/cotenant --destination target/packages 2>/dev/null

papers: ## Completions and manual pages, into target/papers
	cargo build --locked --profile $(PROFILE) -p cotenant
	@rm -rf target/papers
	@mkdir -p target/papers/completions
	$(AGENT) man target/papers/man
	$(AGENT) completions bash > target/papers/completions/cotenant.bash
	$(AGENT) completions zsh > target/papers/completions/_cotenant
	$(AGENT) completions fish > target/papers/completions/cotenant.fish

packages: papers chart ## The .deb, the tarball and the chart, into target/packages (PROFILE=dev: the debug binary)
	PATH=$(TOOLS):$$PATH cargo deb --quiet --no-build --locked -p cotenant --profile $(PROFILE) --output target/packages/
	@deploy/tarball.sh $(AGENT) target/packages
	@ls -l target/packages | awk 'NR > 1 { print $$5 " bytes: " $$9 }'

image: ## The container image as an OCI archive in target/image, with its bill of materials (root)
	cargo build --locked --profile $(PROFILE) -p cotenant
	deploy/image/build.sh $(AGENT) target/image

# rustup's stable clippy cannot read the `core` for BPF; Debian's rust-web-clippy or a nightly with rust-src can.
lint: ## Format and clippy, warnings denied, the eBPF programs too
	cargo fmt --all --check
	cd ebpf/programs && cargo fmt --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	@if [ -x /usr/bin/clippy-driver ] && [ -d "$$($(BPF_CORE))" ]; then \
		export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=aya_ebpf,cotenant_ebpf; \
		export RUSTC_WORKSPACE_WRAPPER=/usr/bin/clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__; \
		check=(cargo check); end=(); \
	elif [ -d "$$(rustup run nightly rustc --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library/core" ]; then \
		check=(rustup run nightly cargo clippy -Z build-std=core); end=(-- -D warnings); \
	else \
		echo "clippy for the eBPF programs: apt-get install rust-web-clippy (Debian), or" \
			"rustup toolchain install nightly --component rust-src,clippy" >&2; exit 1; \
	fi; \
	set -x; cd ebpf/programs; RUSTFLAGS='--cfg bpf_target_arch="x86_64"' "$${check[@]}" --release --locked \
		--target $(BPF_TARGET) --target-dir $(CURDIR)/target/ebpf-lint "$${end[@]}"

gpu-bundle: ## Put the agent and the GPU tests into target/gpu-bundle, to copy to a GPU host
	@[ -d tests/gpu ] || { echo "tests/gpu is not there" >&2; exit 1; }
	cargo build --locked --release -p cotenant
	@rm -rf target/gpu-bundle
	@mkdir -p target/gpu-bundle
	@cp -r tests/gpu/*.sh tests/gpu/*.py tests/gpu/workloads target/gpu-bundle/
	@strip -o target/gpu-bundle/cotenant target/release/cotenant
	@du -sh target/gpu-bundle
	@echo "on a GPU host, as root: OUT=/tmp/out target/gpu-bundle/run.sh"
