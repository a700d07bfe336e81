# Perfvisor's entry points, the same for people and for CI. "make help" lists them.

SHELL := /bin/bash
CARGO ?= cargo
# Which Debian kernel the guest gets: cloud, generic, newest, or a package name.
KERNEL ?= cloud
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)

# What building, the lab and the tests need beyond a Rust toolchain.
PACKAGES := gcc libc6-dev make qemu-system-x86 apt-utils dpkg
APT_INSTALL := apt-get install -y --no-install-recommends $(PACKAGES)

.DEFAULT_GOAL := help

## help: this list
.PHONY: help
help:
	@echo "Perfvisor: a VMM with a virtual PMU. Targets:"
	@sed -n 's/^## \([a-z-]*\): /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

## setup: install what is missing (Debian packages; asks for nothing when all is there)
.PHONY: setup
setup:
	@missing=; \
	command -v gcc >/dev/null || missing="$$missing gcc"; \
	[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing="$$missing libc6-dev"; \
	command -v qemu-system-x86_64 >/dev/null || missing="$$missing qemu-system-x86"; \
	command -v $(CARGO) >/dev/null || { echo "setup: no cargo: install Rust 1.95 or newer (https://rustup.rs)"; exit 1; }; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "setup: missing:$$missing. Type: sudo apt-get update && sudo $(APT_INSTALL)"; exit 1; \
	fi; \
	echo "setup: installing$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && $(APT_INSTALL) </dev/null

## build: the perfvisor binary, in target/release
.PHONY: build
build:
	$(CARGO) build --release -p vmm

## guest: the Linux guest and the lab host, from Debian packages (KERNEL=cloud|generic|newest|PACKAGE, REFRESH=1 for newer packages)
.PHONY: guest
guest: setup
	$(CARGO) run -q -p guest-images --features builder -- \
		--target-dir $(TARGET_DIR) $(if $(REFRESH),--refresh) $(KERNEL)

## lab: a shell in the lab host, a Linux with a real KVM on any machine
.PHONY: lab
lab: setup
	$(CARGO) run -q -p integration --bin lab
