//! Multiplexing: whose turn it is when more groups want slots than there are.
//!
//! A [`MuxQueue`] holds the flexible groups of one context. At each turn one group that is on goes back to wait, and the
//! queue says which waiting group comes next and how long until the next turn. Two policies:
//!
//! - [`MuxPolicy::Rotate`]: first come, first served, turns of equal length. What Linux does.
//! - [`MuxPolicy::Adaptive`]: every other turn goes to whoever waits longest, so nobody starves. The turns between go
//!   more often to groups whose rate varies much. Turns are of random length, so that no rhythm of the guest keeps
//!   step with them, and shorter while rates vary, longer while they do not.
//!
//! Every call does the same small work whether ten groups wait or a hundred thousand: groups are linked through their own
//! entries, by age and by weight class. Nothing is allocated after [`MuxQueue::insert`].

mod list;
mod queue;

pub use queue::{MuxQueue, Turn};

/// How slots are shared out over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuxPolicy {
    /// Everyone in turn, for the same time.
    #[default]
    Rotate,
    /// More to those whose rate varies, at irregular times.
    Adaptive,
}
