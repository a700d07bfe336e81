//! Multiplexing: whose turn it is when more groups want slots than there are.
//!
//! A [`MuxQueue`] holds the flexible groups of one context. At each turn one group that is on goes back to wait, and the
//! queue says which waiting group comes next and how long until the next turn. Two policies:
//!
//! - [`MuxPolicy::Rotate`]: first come, first served, turns of equal length. What Linux does.
//! - [`MuxPolicy::Adaptive`]: groups whose rate varies much have their turn more often. Turns are of random length, so that
//!   no rhythm of the guest keeps step with them, and of the mean length that gives the smallest error, as far as the counts
//!   show. Nobody starves: the longer a group waits, the more it is due.
//!
//! Every call does the same small work whether ten groups wait or a hundred thousand: groups are linked through their own
//! entries, by age and by weight class. Nothing is allocated after [`MuxQueue::insert`].
//!
//! # Use
//! ```
//! use perf_core::mux::{MuxPolicy, MuxQueue, Turn};
//!
//! let mut queue = MuxQueue::new(MuxPolicy::Adaptive, 4_000_000, 1);
//! (0..3).for_each(|group| queue.insert(group));
//! // One slot, and every group needs one.
//! let mut on = None;
//! queue.fill(|group| match on {
//!     None => {
//!         on = Some(group);
//!         Turn::Taken
//!     }
//!     Some(_) => Turn::NoRoom,
//! });
//! assert_eq!(on, Some(0));
//! // When the turn is over, the group that leaves says how its rate went, and the slots are filled anew.
//! let due = queue.next_turn_ns().unwrap();
//! assert_eq!(queue.turn(due), Some(0));
//! queue.slice_ended(0, Some(0.3));
//! ```

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
