//! Multiplexing of groups that need more slots than are available.
//!
//! A [`MuxQueue`] holds the flexible groups of one context. At the end of each multiplexing
//! interval, the queue moves one active group to the waiting list, and selects the next group and
//! the length of the next interval. There are two policies:
//!
//! - [`MuxPolicy::Rotate`]: round-robin with equal intervals, as in Linux.
//! - [`MuxPolicy::Adaptive`]: shorter intervals, more slots for groups with varying rates, and
//!   detection and avoidance of guest patterns that alias with the intervals. No group starves,
//!   because a group with a steady rate yields its turn at most every other time.
//!
//! The intervals are regular by design. Irregular intervals measure every periodic pattern with a
//! similar, moderate error. Regular intervals measure all but a few patterns exactly. These few
//! patterns are detectable, because the rate of an affected group appears constant until the phase
//! of the intervals is shifted.
//!
//! Every call takes constant time, regardless of the number of waiting groups, because the groups
//! are linked through their own entries in order of age. Only [`MuxQueue::insert`] allocates
//! memory.
//!
//! # Examples
//!
//! ```
//! use perf_core::mux::{MuxGroupKey, MuxPolicy, MuxQueue, SlotOfferOutcome};
//!
//! let mut queue = MuxQueue::new(MuxPolicy::Adaptive, 4_000_000);
//! let groups = [0, 1, 2_usize].map(MuxGroupKey::from);
//! groups.into_iter().for_each(|group| queue.insert(group));
//! // One slot, and every group needs one.
//! let mut on = None;
//! queue.fill(|group| match on {
//!     None => {
//!         on = Some(group);
//!         SlotOfferOutcome::Taken
//!     }
//!     Some(_) => SlotOfferOutcome::NoRoom,
//! });
//! assert_eq!(on, Some(groups[0]));
//! // When the turn is over a group leaves, the slots are filled anew, and the queue is told how
//! // the group's rate went.
//! assert_eq!(queue.rotate_if_due(0), None, "turns begin now");
//! let due = queue.next_turn_ns().unwrap();
//! assert_eq!(queue.rotate_if_due(due), Some(groups[0]));
//! queue.slice_ended(groups[0], Some(0.3));
//! ```

mod list;
mod queue;

pub(crate) use queue::base_interval_ns;
pub use queue::{MuxQueue, SlotOfferOutcome};

/// Key of a group in a [`MuxQueue`]: a small number chosen by the caller, such as a slab key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MuxGroupKey(usize);

impl From<usize> for MuxGroupKey {
    fn from(number: usize) -> Self {
        Self(number)
    }
}

impl From<MuxGroupKey> for usize {
    fn from(key: MuxGroupKey) -> Self {
        key.0
    }
}

/// Policy by which the groups of a context share slots over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuxPolicy {
    /// Round-robin with intervals of equal length, as in Linux.
    #[default]
    Rotate,
    /// Shorter intervals, more slots for groups with varying rates, and detection of guest patterns
    /// that alias with the multiplexing interval.
    Adaptive,
}

/// Error of parsing the name of a multiplexing policy: the name is unknown.
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
