//! Counts, samples and controls running VMs over their control sockets: the library behind the
//! commands of `perfvisor`, for profilers and other programs.
//!
//! | module | contents |
//! |---|---|
//! | [`session`] | counting and sampling a VM, without output: start here |
//! | [`vendor`] | vendor-specific event names from perf's tables |
//! | `commands` | the commands `stat`, `record`, `report`, `top`, … with their arguments |
//! | `exporter` | `perfvisor exporter`: metrics and profiles of all VMs over HTTP |
//! | `values` | value parsers of options, and their error messages |
//! | `input` | sequential reading of user-supplied files |
//! | `snapshot_files` | the files of snapshots, and the snapshots on which a diff is based |
//! | `signals` | signals as file descriptors |
//! | `exit` | exit statuses |
//!
//! A program finds a VM by its name ([`session::connect`]), counts its events
//! ([`session::CountingSession`]) or samples them ([`session::SamplingSession`]), and writes the
//! resulting [`Profile`](guest_profile::export::Profile) as perf.data, pprof, folded stacks or a
//! table with the modules of [`guest_profile::export`]. Every other request of the control socket
//! is a type in [`control_api::request`] for [`control_api::client::Client::call`].
//!
//! # Examples
//!
//! Records cycles of the VM `web` for a second, and writes a profile for pprof:
//!
//! ```no_run
//! use guest_profile::export::{EventSamplingRate, pprof, symbolize::Symbolizer};
//! use operator::session::{SamplingSession, connect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut session =
//!     SamplingSession::start(connect(Some("web"))?, "cycles", EventSamplingRate::FrequencyHz(99))?;
//! for _ in 0..10 {
//!     std::thread::sleep(std::time::Duration::from_millis(100));
//!     session.receive()?;
//! }
//! let profile = session.finish()?;
//! let mut symbols = Symbolizer::new(&profile, None, None);
//! let file = std::fs::File::create("web.pb.gz")?;
//! pprof::write(&profile, &mut symbols, &pprof::SampleLabel::ALL, file)?;
//! # Ok(())
//! # }
//! ```
//!
//! The feature `commands`, on by default, adds the modules of the command line and their
//! dependencies. A profiler needs none of them (`default-features = false`).
//!
//! **Dependencies.** `control-api` for the control sockets, `guest-profile` and `kernel-images` for
//! samples and symbols, `perf-core` for rings. This crate does not depend on KVM or the machine.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// Use `commands::print` and `say` instead of the standard macros, which panic if the reader has
// closed the pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

#[cfg(feature = "commands")]
#[allow(
    missing_docs,
    reason = "messages of errors and help texts of arguments describe them"
)]
pub mod commands;
#[cfg(feature = "commands")]
pub mod exit;
#[cfg(feature = "commands")]
#[allow(
    missing_docs,
    reason = "messages of errors and help texts of arguments describe them"
)]
pub mod exporter;
#[cfg(feature = "commands")]
pub mod input;
mod kernel_map;
mod sampling;
pub mod session;
#[cfg(feature = "commands")]
pub mod signals;
#[cfg(feature = "commands")]
pub mod snapshot_files;
#[cfg(feature = "commands")]
#[allow(missing_docs, reason = "messages of errors describe them")]
pub mod values;
#[allow(missing_docs, reason = "messages of errors describe them")]
pub mod vendor;
