//! Guests that Perfvisor builds.

pub mod bare_metal;
