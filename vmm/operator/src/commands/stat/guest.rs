//! `--guest-view`: the counters that the guest has programmed.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::args::StatArgs;
use crate::commands::{CommandOutputError, DONE, OperatorCommandError, print};
use crate::exit::ExitStatus;
use control_api::client::Client;
use control_api::events::format::thousands;
use control_api::protocol::{SnapshotId, VcpuView, VmGuestCounters};
use control_api::request;

/// Timeout for the vCPUs to report their guest counters.
const VIEW_PATIENCE: Duration = Duration::from_secs(2);

/// Prints the counters that the guest has programmed.
pub(super) fn view(client: &mut Client, args: &StatArgs) -> Result<ExitStatus, OperatorCommandError> {
    let asked: SnapshotId = client.call(request::GuestView)?;
    let until = Instant::now() + VIEW_PATIENCE;
    let views = loop {
        let call = request::GuestViewResult {
            generation: asked.generation,
        };
        let views: VmGuestCounters = client.call(call)?;
        if views.complete || Instant::now() > until {
            break views;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    if !views.complete {
        let (got, all) = (views.vcpus.len(), client.info().vcpus);
        log::warn!("only {got} of {all} vCPUs responded");
    }
    let wanted = |v: &&VcpuView| args.vcpu.as_ref().is_none_or(|list| list.0.contains(&v.vcpu));
    let mut out = String::new();
    for view in views.vcpus.iter().filter(wanted) {
        if args.json {
            let line = serde_json::to_string(view).map_err(CommandOutputError::from)?;
            let _ = writeln!(out, "{line}");
        } else {
            out.push_str(&view_table(view));
        }
    }
    print(&out)?;
    Ok(DONE)
}

/// Text for fields that KVM's own vPMU does not report.
const NOT_KNOWN: &str = "unknown";

fn known(count: Option<u64>) -> String {
    count.map_or_else(|| NOT_KNOWN.to_owned(), thousands)
}

fn view_table(view: &VcpuView) -> String {
    let mut out = String::new();
    let pmis = match view.pmis {
        Some(pmis) => format!("{} PMIs delivered", thousands(pmis)),
        None => "KVM's own vPMU".to_owned(),
    };
    let _ = write!(out, "vCPU {}: {pmis}", view.vcpu);
    if let (Some(ns), Some(places)) = (view.uncounted_ns.filter(|ns| *ns > 0), view.places_lost) {
        let _ = write!(
            out,
            "; for {:.3} s some enabled counter was not counted ({} times a place was lost or not found)",
            ns as f64 / 1e9,
            thousands(places)
        );
    }
    out.push('\n');
    let _ = writeln!(
        out,
        "  {:<8} {:<24} {:<9} {:<16} {:>24} {:>8} {:>10} {:>10}",
        "counter", "event", "state", "backing", "value", "running", "overflows", "PMIs asked"
    );
    for c in &view.counters {
        let state = match (c.enabled, c.allowed) {
            (_, false) => "filtered",
            (true, true) if c.counting == Some(false) => "uncounted",
            (true, true) => "on",
            (false, true) => "off",
        };
        let backing = match c.backing.as_deref() {
            None => "-".to_owned(),
            Some(backing) if c.fallback => format!("{backing} (fallback)"),
            Some(backing) => backing.to_owned(),
        };
        let running = match (c.enabled_ns, c.running_ns) {
            (Some(0), _) => "-".to_owned(),
            (Some(enabled), Some(running)) => format!("{:.1}%", 100.0 * running as f64 / enabled as f64),
            _ => NOT_KNOWN.to_owned(),
        };
        // The value of an unbacked counter is the value written by the guest, not a count.
        let value = if backing == "none" {
            "<not supported>".to_owned()
        } else {
            thousands(c.value)
        };
        let _ = writeln!(
            out,
            "  {:<8} {:<24} {state:<9} {backing:<16} {value:>24} {running:>8} {:>10} {:>10}",
            c.counter,
            c.event.as_deref().unwrap_or("-"),
            known(c.overflows),
            known(c.pmi_requests)
        );
    }
    out
}
