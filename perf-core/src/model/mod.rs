//! What there is: events, their states, times, totals and lists. Plain data with its arithmetic; nothing here
//! knows a context, a lock's order or a handle.

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
