//! Writes each sample as text in the format of `perf script`, for tools that parse it.

use std::io::{self, Write};

use super::symbolize::{Symbolizer, task_label};
use super::{Profile, ProfileSample, frames};

/// Writes all samples in chronological order.
pub fn write(profile: &Profile, symbols: &mut Symbolizer<'_>, mut out: impl Write) -> io::Result<()> {
    let mut order: Vec<ProfileSample<'_>> = profile.samples().collect();
    order.sort_by_key(|s| s.time_ns);
    for s in order {
        let event = profile.event(s.event_id).map_or("unknown", |e| e.name.as_str());
        let (secs, micros) = (s.time_ns / 1_000_000_000, s.time_ns / 1000 % 1_000_000);
        let comm = task_label(profile, s.tid, s.cr3, s.time_ns);
        write!(
            out,
            "{comm:>16} {}/{} [{:03}] {secs:>5}.{micros:06}: {:>10} {event}: ",
            s.pid.cast_signed(),
            s.tid.cast_signed(),
            s.vcpu,
            s.period
        )?;
        // A single frame is printed on the same line, a call chain below it.
        let chain = s.chain.len() > 2;
        if chain {
            match s.ends.cut_short() {
                Some(bound) => writeln!(out, "[cut short: {bound}]")?,
                None => writeln!(out)?,
            }
        }
        for f in frames(&s) {
            let n = symbols.name(f, s.pid);
            let lead = if chain { "\t" } else { "" };
            if n.known {
                writeln!(
                    out,
                    "{lead}{:>16x} {}+{:#x} ({})",
                    f.address, n.name, n.offset, n.object
                )?;
            } else {
                writeln!(out, "{lead}{:>16x} [unknown] ({})", f.address, n.object)?;
            }
        }
        if chain {
            writeln!(out)?;
        }
    }
    Ok(())
}
