//! The guest-visible performance monitoring unit.
