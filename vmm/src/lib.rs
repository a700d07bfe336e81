//! The Perfvisor VMM.
