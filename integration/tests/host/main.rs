//! Tests without guests: command line, packages, documentation and source tree.

mod cli;
mod documented_tests;
mod kvm_calls;
mod layers;
mod licences;
mod links;
mod package;
mod size;

#[path = "../common/refusal.rs"]
mod refusal;
