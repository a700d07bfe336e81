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

pub use builder::{ConfigError, PerfCoreBuilder};
pub use control::ControlScope;
pub use guest::GuestMapping;
pub use handle::EventHandle;
pub use hold::LockedContext;
pub use knobs::{RuntimeSetting, TunableError};
pub use open::{OpenFlags, OpenTarget};
pub use read::{GroupReading, Reading, VcpuReading};
pub use session::Session;
pub use switch::ContextPin;
