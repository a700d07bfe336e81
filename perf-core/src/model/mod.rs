//! Data model of the core: events and their states, times, totals and lists. Plain data and
//! arithmetic, independent of contexts, lock order and handles.

pub(crate) mod children;
pub(crate) mod event;
pub(crate) mod failure;
pub(crate) mod keys;
pub(crate) mod lists;
pub(crate) mod output;
pub(crate) mod regs;
pub(crate) mod slices;
pub(crate) mod software;
pub(crate) mod state;
pub(crate) mod times;
pub(crate) mod totals;
pub(crate) mod wanted;
