//! Tests without guests: command line, packages, documentation and source tree.

mod cli;
mod layers;
mod licences;
mod links;
mod package;
mod rooms;
mod shown;
mod size;

#[path = "../common/refusal.rs"]
mod refusal;
