//! Guests that Perfvisor builds.
