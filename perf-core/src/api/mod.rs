//! Public API of the core: core calls, handles and sessions.

mod builder;
mod control;
mod core;
mod guest;
mod handle;
mod hold;
mod knobs;
mod map;
mod open;
mod raise;
mod read;
mod reset;
mod session;
mod switch;
mod vcpu;
mod vcpus;

pub use builder::{PerfCoreBuilder, PerfCoreConfigError};
pub use control::EventOrGroup;
pub use guest::GuestMmapEvent;
pub use handle::EventHandle;
pub use hold::LockedContext;
pub use knobs::{PerfCoreSetting, PerfCoreSettingError};
pub use open::{EventOpenTarget, OpenFlags};
pub use read::{DetailedReading, GroupReading, Reading, VcpuReading};
pub use session::Session;
pub use switch::ContextPin;
