//! Multiplexing: whose turn it is when more groups want slots than there are.
//!
//! A [`MuxQueue`] holds the flexible groups of one context. At each turn one group that is on goes back to
//! wait, and the queue says which waiting group comes next and how long until the next turn. Two policies:
//!
//! - [`MuxPolicy::Rotate`]: first come, first served, turns of equal length. What Linux does.
//! - [`MuxPolicy::Adaptive`]: turns are shorter, groups whose rate varies have their turn more often, and a
//!   rhythm of the guest that keeps step with the turns is found out and avoided. Nobody starves: a steady
//!   group is passed over every other time.
//!
//! Turns stay regular on purpose. Irregular ones see every rhythm about equally badly; regular ones see all
//! but a few exactly, and those few can be told: to them a group looks calm until the turns shift.
//!
//! Every call does the same small work whether ten groups wait or a hundred thousand: groups are linked
//! through their own entries, by age. Nothing is allocated after [`MuxQueue::insert`].
//!
//! # Use
//! ```
//! use perf_core::mux::{GroupKey, MuxPolicy, MuxQueue, Turn};
//!
//! let mut queue = MuxQueue::new(MuxPolicy::Adaptive, 4_000_000);
//! let groups = [0, 1, 2_usize].map(GroupKey::from);
//! groups.into_iter().for_each(|group| queue.insert(group));
//! // One slot, and every group needs one.
//! let mut on = None;
//! queue.fill(|group| match on {
//!     None => {
//!         on = Some(group);
//!         Turn::Taken
//!     }
//!     Some(_) => Turn::NoRoom,
//! });
//! assert_eq!(on, Some(groups[0]));
//! // When the turn is over a group leaves, the slots are filled anew, and the queue is told how
//! // the group's rate went.
//! assert_eq!(queue.turn(0), None, "turns begin now");
//! let due = queue.next_turn_ns().unwrap();
//! assert_eq!(queue.turn(due), Some(groups[0]));
//! queue.slice_ended(groups[0], Some(0.3));
//! ```

mod list;
mod queue;

pub(crate) use queue::measure_of;
pub use queue::{MuxQueue, Turn};

/// A group of a [`MuxQueue`], by a small number of the caller's choosing (a slab's key).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey(usize);

impl From<usize> for GroupKey {
    fn from(number: usize) -> Self {
        Self(number)
    }
}

impl From<GroupKey> for usize {
    fn from(key: GroupKey) -> Self {
        key.0
    }
}

/// How slots are shared out over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuxPolicy {
    /// Everyone in turn, for the same time.
    #[default]
    Rotate,
    /// Shorter turns, more to those whose rate varies, and no turns in step with a rhythm of the guest.
    Adaptive,
}

/// No such policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be rotate or adaptive")]
pub struct UnknownMuxPolicy;

impl std::str::FromStr for MuxPolicy {
    type Err = UnknownMuxPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownMuxPolicy> {
        match name {
            "rotate" => Ok(Self::Rotate),
            "adaptive" => Ok(Self::Adaptive),
            _ => Err(UnknownMuxPolicy),
        }
    }
}
