# Perfvisor's entry points, the same for people and for CI. "make help" lists them.

SHELL := /bin/bash
CARGO ?= cargo
# Which Debian kernel the guest gets: cloud, generic, newest, or a package name.
KERNEL ?= cloud
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
# The release build: one static binary (.cargo/config.toml) for the host, the lab, the packages and the benchmarks.
TRIPLE := x86_64-unknown-linux-gnu
RELEASE_DIR := $(TARGET_DIR)/$(TRIPLE)/release
DEV_DIR := $(TARGET_DIR)/$(TRIPLE)/debug
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The binary that is shipped: without symbols, which are in perfvisor.debug beside it.
BUILT := $(TARGET_DIR)/release/perfvisor
# The guest agent that the packages contain.
AGENT ?= $(RELEASE_DIR)/perfvisor-agent

.DEFAULT_GOAL := help

## help: this list
.PHONY: help
help:
	@echo "Perfvisor: a VMM with a virtual PMU. Targets:"
	@sed -n 's/^## \([a-z-]*\): /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

## demo: a Linux guest whose perf counts and samples, in the lab where KVM cannot run Linux (PMU=intel|amd)
.PHONY: demo
demo: lab-files
	$(CARGO) run --release --bin demo -- $(PMU)

# The test program that boots guests in the lab. Its tests in QUICK_MODULES are part of "make test", the tests in MATRIX_TESTS of "make
# test-matrix", the others of "make test-guests". The matrix repeats what the others test with more kernels and models, single-stepped or in
# nested guests, and takes longer than all others together. Most of its threads wait for one of PERFVISOR_LABS labs (2), so that the longest modules can begin first and those that measure time come last.
QUICK_MODULES := bare_metal:: cli:: machine::linux_boots_by_pvh_entry
MATRIX_TESTS := bolt:: snapshots:: nested:: kexec:: kernels:: models:: exact::user_mode_ exact::perf_stat_ exact::kernel_counts_ devices::stepped_
LAB_TESTS = $(CARGO) test --workspace $(ALL_FAILURES) --test lab
IN_LABS = --test-threads 32
# CI shows all failures of a run, a developer the first program that fails.
ALL_FAILURES = $(if $(CI),--no-fail-fast)
# "make test" runs the development build in the lab, too: nothing is compiled twice.
WITH_DEV_BUILD = PERFVISOR_STATIC_DIR=$${PERFVISOR_STATIC_DIR:-$(abspath $(DEV_DIR))}
# All other test programs, new ones too.
QUICK_TESTS := $(filter-out lab,$(sort $(notdir $(basename $(wildcard */tests/*.rs vmm/*/tests/*.rs)) \
	$(patsubst %/main.rs,%,$(wildcard */tests/*/main.rs vmm/*/tests/*/main.rs)))))
# Binaries with unit tests. `--bins` would link test programs of the others, too ("test = false").
MANIFESTS := $(wildcard */Cargo.toml vmm/*/Cargo.toml)
BINARIES := $(shell awk -F'"' '/^\[/ {section = $$1} section == "[[bin]]" && /^name = / {print $$2}' $(MANIFESTS)) \
	$(notdir $(basename $(wildcard */src/bin/*.rs)) $(patsubst %/main.rs,%,$(wildcard */src/bin/*/main.rs)))
TESTED_BINARIES := $(filter-out \
	$(shell awk -F'"' '/^name = / {name = $$2} /^test = false/ {print name}' $(MANIFESTS)),$(sort $(BINARIES)))

## test: unit tests, bare-metal guests, a Linux guest: minutes; the rest is in test-all
# Development dependencies enable more features of libraries. The first build therefore names a test, too:
# without one, the libraries above them would be compiled a second time for the tests.
.PHONY: test
test: setup
	$(CARGO) build --workspace $(addprefix --bin ,perfvisor lab lab-agent perfvisor-agent) --test lab
	$(WITH_DEV_BUILD) $(DEV_DIR)/lab --build-only
	$(WITH_DEV_BUILD) $(CARGO) test --workspace $(ALL_FAILURES) --lib $(TESTED_BINARIES:%=--bin %) $(QUICK_TESTS:%=--test %)
	$(WITH_DEV_BUILD) $(LAB_TESTS) -- $(IN_LABS) $(QUICK_MODULES)
	$(CARGO) test --workspace --doc

## test-guests: devices, network, hotplug, profiling and exact counting with guests in the lab
.PHONY: test-guests
test-guests: lab-files
	$(LAB_TESTS) -- $(IN_LABS) $(QUICK_MODULES:%=--skip %) $(MATRIX_TESTS:%=--skip %)

## test-matrix: snapshots of Linux guests, more kernels and models, single-stepped guests, kexec, nested guests (over an hour)
.PHONY: test-matrix
test-matrix: lab-files
	$(LAB_TESTS) -- $(IN_LABS) $(MATRIX_TESTS)

## test-all: every test (longer matrices by hand: kernels, validate-lab)
.PHONY: test-all
test-all: test test-guests test-matrix

## kernels: the whole matrix of guest kernels, images, KASLR and vCPUs; a table in target/integration/kernels.md
.PHONY: kernels
kernels: lab-files
	PERFVISOR_KERNELS=all $(LAB_TESTS) kernels:: -- --nocapture

## exact: hand-counted code on every PMU model in the lab, Linux guests of both vendors, stepped (minutes)
.PHONY: exact
exact: lab-files
	PERFVISOR_EXACT=all $(LAB_TESTS) exact:: -- --include-ignored --nocapture --test-threads 1

## rr: records and replays programs with rr in Linux guests of three processors, stepped (minutes)
.PHONY: rr
rr: lab-files
	$(LAB_TESTS) rr:: -- --ignored --nocapture --test-threads 1

## late-ack: an Intel guest that acknowledges late, two events sampled beside the watchdog (SECONDS=600, of the guest's time)
.PHONY: late-ack
late-ack: lab-files
	PERFVISOR_LATE_ACK_SECONDS=$(or $(SECONDS),600) $(LAB_TESTS) late_ack:: -- --ignored --nocapture

## validate-lab: perfvisor validate with a Linux guest in the lab, Intel and AMD models (minutes, and a quiet machine)
.PHONY: validate-lab
validate-lab: lab-files
	$(LAB_TESTS) validate:: -- --ignored --nocapture --test-threads 1

## validate-nested: perfvisor validate with KVM's own vPMU, in a guest of a guest in the lab (9 minutes, and a quiet machine)
.PHONY: validate-nested
validate-nested: lab-files
	$(LAB_TESTS) nested:: -- --ignored --nocapture --test-threads 1

## snapshots: a thousand snapshots at random exits, restored with equal outputs, counts and PMIs (NUMBER=1000 SEED=...)
.PHONY: snapshots
snapshots:
	PERFVISOR_SNAPSHOTS=$(or $(NUMBER),1000) $(if $(SEED),PERFVISOR_SNAPSHOT_SEED=$(SEED)) \
		$(CARGO) test --workspace --test it random_cuts:: -- --nocapture

## graph: print the dependencies between the crates, as a Mermaid graph
.PHONY: graph
graph:
	@CARGO="$(CARGO)" integration/crate-graph.sh

## check: format, clippy, docs, licences and links, without a warning
.PHONY: check
check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	@for features in "" host clock kvm sim; do \
		echo "check: perf-core with features '$$features' alone"; \
		$(CARGO) clippy -q -p perf-core --lib --no-default-features --features "$$features" -- -D warnings || exit 1; \
	done
	$(CARGO) clippy -q -p operator --lib --no-default-features -- -D warnings
	$(CARGO) test -q --workspace --test host -- layers:: licences:: links::
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check; \
	else echo "check: cargo-deny is not installed; licences were checked without it, advisories were not"; fi

## loom: the ring's protocol and the fold of exited children, in every order threads can take
.PHONY: loom
loom:
	CARGO_TARGET_DIR=$(TARGET_DIR)/loom RUSTFLAGS="--cfg loom" \
		CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false \
		$(CARGO) test -p perf-core --release --lib ::model::

# Where the sanitizers' own builds go, and what both run: rings and their control pages, in threads, signals, processes.
SANITIZE = CARGO_TARGET_DIR=$(TARGET_DIR)/sanitize-$(1) \
	RUSTFLAGS="-Zsanitizer=$(1) -Cunsafe-allow-abi-mismatch=sanitizer" \
	$(CARGO) +nightly test --target x86_64-unknown-linux-gnu -p perf-core --test it --test ring -- ring_threads:: ring_signals::

## sanitize: rings and control pages under the thread and address sanitizers (needs a nightly toolchain; says so without)
.PHONY: sanitize
sanitize:
	@if $(CARGO) +nightly --version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory sanitize-thread sanitize-address; \
	else \
		echo "sanitize: SKIPPED, nothing was checked: it needs a nightly toolchain (rustup toolchain install nightly)"; \
	fi

.PHONY: sanitize-thread sanitize-address
sanitize-thread:
	TSAN_OPTIONS=suppressions=$(CURDIR)/perf-core/tests/tsan.supp $(call SANITIZE,thread)
sanitize-address:
	$(call SANITIZE,address) ring_process::

# Files of perf-core, and the tests that are to notice. Line counts of what is generated for Debug and Display say nothing.
MUTANTS ?= src/ring/mod.rs src/ring/protocol.rs src/schedule/mod.rs src/schedule/counter_assignments.rs src/schedule/group.rs src/time.rs src/context/overflow.rs
MUTANT_TESTS := --lib --test=it
# Modules of the program "it" that take long or measure time: they are left out.
MUTANT_SKIP := clock_driver clock_kvm examples host_cpu kernel_parity kvm_driver mux_quality ring_kernel ring_threads stress
## mutants: perf-core changed in hundreds of ways; each must make a test fail (hours; MUTANTS=src/time.rs: one file)
.PHONY: mutants
mutants:
	@if ! $(CARGO) mutants --version >/dev/null 2>&1; then \
		echo "mutants: skipped: no cargo-mutants; type: $(CARGO) install cargo-mutants"; exit 0; fi; \
	CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 PERF_CORE_ORACLE_CASES=1000 PROPTEST_CASES=64 \
		$(CARGO) mutants -p perf-core -j1 --no-shuffle --exclude-re 'impl (fmt::)?(Debug|Display)' \
		$(MUTANTS:%=-f perf-core/%) $(MUTANT_TESTS:%=-C=%) -o $(TARGET_DIR) \
		-- -- $(MUTANT_SKIP:%=--skip %::)

## bench-check: instructions of each hot path beside the committed baseline; more than 3 % more fails (a minute)
.PHONY: bench-check
bench-check:
	$(CARGO) bench -q -p vpmu --bench instructions

## bench-baseline: makes this tree's instructions the baseline of bench-check; commit it with the reason
.PHONY: bench-baseline
bench-baseline:
	$(CARGO) bench -q -p vpmu --bench instructions -- --keep

## deb: a Debian package of the release build, with manual pages, completions and a systemd unit (BINARY=FILE: of that one)
.PHONY: deb
deb: $(if $(BINARY),,build)
	packaging/deb.sh $(or $(BINARY),$(BUILT)) $(AGENT) $(VERSION) $(TARGET_DIR)/perfvisor_$(VERSION)_amd64.deb
	@echo "deb: $(TARGET_DIR)/perfvisor_$(VERSION)_amd64.deb; install it with dpkg -i"

## tarball: the same as a compressed archive to be unpacked at / (BINARY=FILE: of that one)
.PHONY: tarball
tarball: $(if $(BINARY),,build)
	rm -rf $(TARGET_DIR)/tarball
	packaging/stage.sh $(or $(BINARY),$(BUILT)) $(AGENT) $(TARGET_DIR)/tarball
	tar -C $(TARGET_DIR)/tarball --owner=0 --group=0 --sort=name -caf $(TARGET_DIR)/perfvisor-$(VERSION)-x86_64.tar.xz usr etc
	@echo "tarball: $(TARGET_DIR)/perfvisor-$(VERSION)-x86_64.tar.xz"

## source: the source archive with the bare-metal guests compiled: building it needs no C compiler
.PHONY: source
source:
	packaging/source.sh $(VERSION) $(TARGET_DIR)/perfvisor-$(VERSION)-source.tar.xz
	@echo "source: $(TARGET_DIR)/perfvisor-$(VERSION)-source.tar.xz"

## source-check: the source archive built where no C compiler, assembler and linker but Rust's are (minutes; needs root)
.PHONY: source-check
source-check: source
	packaging/without-gcc.sh $(TARGET_DIR)/perfvisor-$(VERSION)-source.tar.xz $(TARGET_DIR)/without-gcc

## package-check: package and archive, installed and tried in a copy of this machine (BINARY=FILE: of that one; needs root)
.PHONY: package-check
package-check: deb tarball
	packaging/try.sh $(or $(BINARY),$(BUILT)) $(TARGET_DIR)/perfvisor_$(VERSION)_amd64.deb \
		$(TARGET_DIR)/perfvisor-$(VERSION)-x86_64.tar.xz

## tools-check: perf annotate, samply and a program of Go with recordings of guests; says which of them is missing (minutes)
.PHONY: tools-check
tools-check: lab-files
	@for tool in perf objdump samply go; do \
		command -v $$tool >/dev/null || echo "tools-check: no $$tool here: its part is skipped"; \
	done
	$(LAB_TESTS) -- --nocapture profile_guest::the_host_sees profile_unwound::a_program_of_go

## unit-check: what systemd says of the units, where there is a systemd
.PHONY: unit-check
unit-check:
	@if ! command -v systemd-analyze >/dev/null; then echo "unit-check: skipped: no systemd-analyze"; exit 0; fi; \
	directory=$$(mktemp -d); trap 'rm -rf $$directory' EXIT; \
	for unit in perfvisor@.service perfvisor-exporter.service; do \
		sed 's,^ExecStart=[^ ]*,ExecStart=/bin/true,' "packaging/$$unit" >"$$directory/$$unit" || exit 1; \
	done; \
	systemd-analyze verify --man=no "$$directory/perfvisor@.service" "$$directory/perfvisor-exporter.service" && \
	echo "unit-check: the units are right"

## bench: criterion benchmarks, and their medians as JSON in target/bench/criterion.json
.PHONY: bench
bench:
	$(CARGO) bench --workspace --bench '*'
	mkdir -p $(TARGET_DIR)/bench
	$(CARGO) run --release --bin bench-summary -- $(TARGET_DIR)/criterion $(TARGET_DIR)/bench/criterion.json

## overhead: what ways of sampling cost a guest, side by side (ROUNDS=24 HZ=1000 WAYS=bcde; LAB=1: in the lab)
OVERHEAD_OPTIONS = $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(HZ),--hz $(HZ)) $(if $(WAYS),--ways $(WAYS))
.PHONY: overhead
overhead: $(if $(LAB),overhead-in-lab,build)
ifndef LAB
	$(CARGO) build --release -p comparisons --bin overhead
	mkdir -p $(TARGET_DIR)/bench
	$(RELEASE_DIR)/overhead $(OVERHEAD_OPTIONS) --json $(TARGET_DIR)/bench/overhead.json
endif

# The lab has nothing but static programs, and its commands end after ten minutes unless told.
.PHONY: overhead-in-lab
overhead-in-lab: lab-files
	$(CARGO) build --release -p comparisons --bin overhead
	$(CARGO) run --release --bin lab -- --file bin/overhead=$(RELEASE_DIR)/overhead \
		env PATH=/bin:/sbin:/usr/bin overhead $(OVERHEAD_OPTIONS)

## many-vms: what a guest costs among 1, 2, 10 and 50 with four counters each, under the exporter and record --all (ROUNDS=3)
.PHONY: many-vms
many-vms: build
	$(CARGO) build --release -p comparisons --bin many-vms
	mkdir -p $(TARGET_DIR)/bench
	$(RELEASE_DIR)/many-vms $(if $(ROUNDS),--rounds $(ROUNDS)) --json $(TARGET_DIR)/bench/many-vms.json

## compare: Perfvisor's vPMU beside KVM's own, by turns, in a guest's guest in the lab (ROUNDS=1; a quarter of an hour and more)
.PHONY: compare
compare: lab-files
	$(CARGO) run --release --bin compare -- $(if $(ROUNDS),--rounds $(ROUNDS))

## compare-disk: the Debian image under Perfvisor and under QEMU, by turns: login, disk, network, memory (ROUNDS=3 LOADS=deep,receive ALSO="--halt-poll-ns host")
.PHONY: compare-disk
compare-disk: lab-files debian
	$(CARGO) run --release --bin compare-disk -- $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(LOADS),--loads $(LOADS)) \
		$(if $(ALSO),--also "$(ALSO)")

## compare-start: a small Linux guest to its init, Perfvisor and QEMU by turns, in the lab (ROUNDS=7)
.PHONY: compare-start
compare-start: lab-files
	PERFVISOR_PLACE=lab $(CARGO) run --release --bin compare-start -- $(if $(ROUNDS),--rounds $(ROUNDS))

## fuzz: every fuzz target for a while (FUZZ_SECONDS each, needs nightly and cargo-fuzz)
FUZZ_SECONDS ?= 60
# The memory that an input may take, MiB: readers of what strangers made have bounds.
FUZZ_RSS_MIB ?= 1024
# address finds more and is slower; the code is safe Rust but for system calls and rings.
FUZZ_SANITIZER ?= none
.PHONY: fuzz
fuzz:
	@if ! $(CARGO) +nightly --version >/dev/null 2>&1; then \
		echo "fuzz: skipped: no nightly toolchain; type: rustup toolchain install nightly"; exit 0; fi; \
	if ! $(CARGO) +nightly fuzz --version >/dev/null 2>&1; then \
		echo "fuzz: skipped: no cargo-fuzz; type: $(CARGO) install cargo-fuzz"; exit 0; fi; \
	for crate in vpmu vmm; do \
		for target in $$($(CARGO) +nightly fuzz list --fuzz-dir $$crate/fuzz); do \
			echo "fuzz: $$crate $$target, $(FUZZ_SECONDS) s"; \
			corpora=; \
			[ -d $$crate/fuzz/seeds/$$target ] && { mkdir -p $$crate/fuzz/corpus/$$target; \
				corpora="$$crate/fuzz/corpus/$$target $$crate/fuzz/seeds/$$target"; }; \
			$(CARGO) +nightly fuzz run --fuzz-dir $$crate/fuzz -s $(FUZZ_SANITIZER) $$target $$corpora -- \
				-max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=$(FUZZ_RSS_MIB) -print_final_stats=1 || exit 1; \
		done; \
	done

## fuzz-check: that every fuzz target compiles; needs neither nightly nor cargo-fuzz
# With the workspace's profile, so that the dependencies that "make check" has checked are not checked once more.
FUZZ_PROFILE = --config 'profile.dev.package."*".debug = false'
.PHONY: fuzz-check
fuzz-check:
	@for crate in vpmu vmm; do \
		CUSTOM_LIBFUZZER_PATH=/dev/null CARGO_TARGET_DIR=$(TARGET_DIR) \
			$(CARGO) check --locked $(FUZZ_PROFILE) --manifest-path $$crate/fuzz/Cargo.toml || exit 1; \
	done

## build: target/release/perfvisor, a static binary; its symbols are in perfvisor.debug beside it
.PHONY: build
build: setup
	$(CARGO) build --release -p perfvisor -p guest-agent
	@mkdir -p $(dir $(BUILT)); if [ $(RELEASE_DIR)/perfvisor -nt $(BUILT) ]; then \
		objcopy --only-keep-debug $(RELEASE_DIR)/perfvisor $(BUILT).debug && \
		strip -o $(BUILT) $(RELEASE_DIR)/perfvisor && \
		objcopy --add-gnu-debuglink=$(BUILT).debug $(BUILT); \
	fi
	@echo "build: $(BUILT), $$(stat -c %s $(BUILT)) bytes"

## guest: the Linux guest and the lab host from Debian packages (KERNEL=cloud|generic|newest|PACKAGE, REFRESH=1)
.PHONY: guest
guest: setup
	$(CARGO) run --release --features guest-images/builder --bin guest-images -- \
		--target-dir $(TARGET_DIR) $(if $(REFRESH),--refresh) $(KERNEL)

## debian: a Debian disk image with perf, sshd and the agent, in target/debian (REFRESH=1: newer packages)
.PHONY: debian
debian: build
	guest-images/debian/build $(RELEASE_DIR)/perfvisor-agent $(TARGET_DIR)/debian

## demo-disk: the Debian image boots to a login, its perf counts and samples, and perf.data comes out over vsock
.PHONY: demo-disk
demo-disk: lab-files debian
	$(CARGO) run --release --bin demo-disk

## debian-test: the Debian image boots with every PMU model, and is reached by ssh, exec and cp (minutes; MODELS=intel,amd)
.PHONY: debian-test
debian-test: lab-files debian
	PERFVISOR_DEBIAN_MODELS=$(MODELS) $(LAB_TESTS) debian:: -- --ignored --nocapture --test-threads 1

## soak: a VM with two disks and four vCPUs under load, perf in it and recordings of it (SECONDS=1800)
.PHONY: soak
soak: lab-files debian
	PERFVISOR_SOAK_SECONDS=$(or $(SECONDS),1800) $(LAB_TESTS) soak:: -- --ignored --nocapture

## soak-hostile: guests and clients that mean no good: storms, guesses, loops, commands that die; a table (SECONDS=600)
.PHONY: soak-hostile
soak-hostile:
	PERFVISOR_HOSTILE_SECONDS=$(or $(SECONDS),600) \
		$(CARGO) test --workspace --test it hostile:: -- --nocapture --test-threads 1

## lab: a shell in the lab host, a Linux with a real KVM on any machine
.PHONY: lab
lab: lab-files
	$(CARGO) run --release --bin lab

# Guest images and static binaries. Tests would build them too, but silently.
.PHONY: lab-files
lab-files: setup
	$(CARGO) run --release --bin lab -- --build-only

## setup: install what is missing from Debian; does nothing when all is there
.PHONY: setup
setup:
	@CARGO=$(CARGO) packaging/setup.sh

## clean: remove everything built, images and consoles included
.PHONY: clean
clean:
	$(CARGO) clean
