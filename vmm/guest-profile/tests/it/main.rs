//! Integration tests of guest profiles, one module per subject.

mod export_formats;
mod export_perfdata;
mod export_views;
mod profile_linux;
