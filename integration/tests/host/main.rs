//! Tests that boot no guest: of the command line, of packages, of the documents and of the tree itself.

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
