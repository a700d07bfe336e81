//! Integration tests of guest profiles, one module per subject.

mod export_formats;
mod export_perfdata;
mod profile_linux;
